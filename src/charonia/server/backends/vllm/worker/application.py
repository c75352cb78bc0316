"""vLLM's own application: its routes answer in this process, without a network. And vLLM's exceptions as errors.

vLLM moves its exceptions between modules from version to version, so they are recognised by their names.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING

from ...language.worker.text_stream import usage_of

if TYPE_CHECKING:
    from typing import Any

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


_DONE = b"data: [DONE]"
_EVENT_END = b"\n\n"
_AT_ROOT = ("tokenize", "detokenize")


class Application:
    """An ASGI application that answers OpenAI's requests."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def answer(self, request: Any, body: bytes, error: Any) -> None:
        """Have a request answered.

        Args:
            error: Makes the exception that refuses it, of message and code.
        """
        path = f"/{request.route}" if request.route in _AT_ROOT else f"/v1/{request.route}"
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1", "method": "POST", "scheme": "http", "path": path, "raw_path": path.encode(),
            "root_path": "", "query_string": b"", "client": None, "server": None, "state": {},
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        }  # fmt: skip
        exchange = _Exchange(request, body)
        await self._app(scope, exchange.receive, exchange.send)
        document = exchange.document
        if exchange.status >= 400:
            raise error(*failure_of_document(exchange.status, _parsed(document), path))
        usage = _usage(scope["state"].get("request_metadata"), document if not exchange.is_stream else b"")
        if exchange.is_stream:
            failed = exchange.failure
            if failed is not None:
                raise error(*failed)
            request.send({"text_output": exchange.held} if exchange.held else {}, usage, final=True)
        else:
            request.send({"text_output": document}, usage, final=True)


class _Exchange:
    """The server's side of one exchange with an ASGI application."""

    def __init__(self, request: Any, body: bytes) -> None:
        self.status = 500
        self.is_stream = False
        self.document = b""
        self.held = b""
        self.failure: tuple[str, int] | None = None
        self._request = request
        self._body: bytes | None = body
        self._rest = b""
        self._leaving = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        """Return the body; then nothing more, since a caller that leaves cancels the task."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._leaving.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kinds = [value for key, value in message.get("headers", ()) if key.lower() == b"content-type"]
            self.is_stream = self.status < 400 and any(kind.startswith(b"text/event-stream") for kind in kinds)
        elif message["type"] == "http.response.body":
            data = message.get("body", b"")
            if not self.is_stream:
                self.document += data
                return
            *events, self._rest = (self._rest + data).split(_EVENT_END)
            for event in events:
                self._take(event)

    def _take(self, event: bytes) -> None:
        if not event or event == _DONE or event.startswith(b":"):
            return
        if event.startswith(b'data: {"error"'):
            document = _parsed(event[6:])
            found = document["error"] if isinstance(document, dict) else {}
            status = found.get("code") if isinstance(found, dict) else None
            self.failure = failure_of_document(status if isinstance(status, int) else 500, document)
            return
        if self.held:
            self._request.send({"text_output": self.held})
        self.held = event if event.startswith(b"event: ") else event.removeprefix(b"data: ")


def _usage(metadata: Any, document: bytes) -> dict[str, int] | None:
    """Return the tokens of a request: vLLM notes them beside it, or its document says them."""
    usage = getattr(metadata, "final_usage_info", None)
    found = usage.model_dump() if usage is not None else None
    if found is None and document:
        parsed = _parsed(document)
        found = parsed.get("usage") if isinstance(parsed, dict) else None
    if not isinstance(found, dict):
        return None
    details = found.get("prompt_tokens_details") or found.get("input_tokens_details") or {}
    prompt = int(found.get("prompt_tokens") or found.get("input_tokens") or 0)
    completion = int(found.get("completion_tokens") or found.get("output_tokens") or 0)
    return usage_of(prompt, completion, int(details.get("cached_tokens") or 0))


def _parsed(document: bytes) -> Any:
    try:
        return json.loads(document)
    except ValueError:
        return None
