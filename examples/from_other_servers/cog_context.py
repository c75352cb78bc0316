"""Header fields and parameters of a request: Cog's context."""

import charonia


@charonia.model
def context(text: str, request: charonia.Request) -> dict:
    return {"inputs": {"text": text}, "context": {"agent": request.headers["user-agent"], **request.parameters}}
