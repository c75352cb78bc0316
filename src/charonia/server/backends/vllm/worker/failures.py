"""vLLM's exceptions, as errors of a request. Pure.

vLLM moves its exceptions between modules from version to version, so they are told by their names.
"""

import re

INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE = 1, 2, 3, 4
"""Codes of `TritonError`."""

ENGINE_DEAD = "EngineDeadError"

_NOT_FOUND = {"VLLMNotFoundError"}
_UNAVAILABLE = {"GracefulHTTPError", "QueueOverflowError", "MaxQueuedTokensError"}
_INVALID = {"VLLMClientError", "VLLMValidationError", "ValueError", "TypeError", "OverflowError"}

_STATUS = {400: INVALID_ARG, 404: NOT_FOUND, 413: INVALID_ARG, 422: INVALID_ARG, 429: UNAVAILABLE, 503: UNAVAILABLE}

_MEMBER = re.compile(r"[a-z][a-z0-9_]*(?:\[\d+\]|\.[a-z][a-z0-9_]*)*")


# What vLLM adds to a message that names its member already.
_REPEATED = re.compile(r" \(parameter=.*\)$", re.DOTALL)


def failure_of(error: BaseException) -> tuple[str, int]:
    """Return message and code for an exception; the message begins with the member of the request that is at fault."""
    names = {each.__name__ for each in type(error).__mro__}
    if ENGINE_DEAD in names:
        return "the engine of the model has ended; it is started again", UNAVAILABLE
    text = str(error.args[0]) if error.args else str(error)
    message = named(text, getattr(error, "parameter", None))
    if names & _NOT_FOUND:
        return message, NOT_FOUND
    if names & _UNAVAILABLE:
        return text or type(error).__name__, UNAVAILABLE
    if names & _INVALID:
        return message, INVALID_ARG
    return f"{type(error).__name__}: {text}", INTERNAL


def failure_of_document(status: int, document: object, route: str = "") -> tuple[str, int]:
    """Return message and code for an error response of vLLM's own routes.

    Args:
        status: Its HTTP status.
        document: Its JSON document, None for none.
        route: The route, for a model that does not have it.
    """
    found = document.get("error", document) if isinstance(document, dict) else {}
    text = str(found.get("message", "")) if isinstance(found, dict) else str(found)
    member = found.get("param") if isinstance(found, dict) else None
    code = _STATUS.get(status, INVALID_ARG if status < 500 else INTERNAL)
    if not text and status == 404:
        text = f"vLLM has no route {route} for this model"
    return named(text or f"vLLM answered with status {status}", member), code


def named(text: str, member: object) -> str:
    """Return a message that begins with the member it is about, None for none."""
    name = str(member or "").removeprefix("body.")
    text = _REPEATED.sub("", text)
    return f"{name}: {text}" if _MEMBER.fullmatch(name) and not text.startswith(f"{name}:") else text
