"""Any JSON in and out: MLServer's custom JSON example."""

import charonia


@charonia.model
def greeting(request: dict) -> dict:
    return {"request": request, "server_response": "Got your request. Hello from the server."}
