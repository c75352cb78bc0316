"""Functions, classes and objects as models: the names that a file for `charonia serve FILE` imports.

    import charonia

    @charonia.model
    def greet(name: str) -> str:
        return f"Hello, {name}!"

It has no other imports than numpy, and works in the environments of models too, where the rest of this package is not.
"""

from charonia.server.backends.python.worker.service import (
    BadRequest,
    Request,
    Response,
    Shape,
    call,
    call_async,
    method,
    model,
    serve,
)

__all__ = ["BadRequest", "Request", "Response", "Shape", "call", "call_async", "method", "model", "serve"]
