"""Requests to llama.cpp's server, which listens on a Unix socket of this process, and answers of several choices.

llama.cpp counts the tokens of one choice only. So several choices are requested as a stream, whose last chunk of each
choice has its counts, and these are added up.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

_STREAMED = ("stream", "stream_options")
_SAID_ONCE = ("role", "id", "type", "name")


def choices_count(body: Mapping[str, Any]) -> int:
    """Return how many choices a request of chats or completions asks for."""
    return _each(body) * (len(body["prompt"]) if _has_several_prompts(body.get("prompt")) else 1)


def streamed_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request that asks for the same choices as a stream, with the counts of each."""
    return {**{name: value for name, value in body.items() if name not in _STREAMED}, "stream": True}


class SeveralChoices:
    """The choices of one answer.

    Args:
        body: The request; it asks for `n` choices for each of its prompts.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._each = _each(body)
        self._model = body.get("model")
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self.usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}

    def take(self, chunk: dict[str, Any]) -> dict[str, Any]:
        """Take a chunk, and return it for the client: with its name of the model, without the usage of one choice."""
        chunk.pop("usage", None)
        if isinstance(self._model, str):
            chunk["model"] = self._model
        self._head = {name: value for name, value in chunk.items() if name not in ("choices", "timings")}
        for choice in chunk["choices"]:
            self._count(choice["index"], chunk.get("timings", {}))
            _add(self._choices.setdefault(choice["index"], {}), choice)
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": self._usage()}

    def document(self) -> dict[str, Any]:
        """Return the answer as one document."""
        choices = []
        for _, choice in sorted(self._choices.items()):
            message = choice.pop("delta", None)
            for call in (message or {}).get("tool_calls", ()):
                del call["index"]
            choices.append({**choice, "message": message} if message is not None else choice)
        kind = self._head["object"].removesuffix(".chunk")
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        prompt, completion, cached = self.usage.values()
        total = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {**total, "prompt_tokens_details": {"cached_tokens": cached}}

    def _count(self, index: int, timings: Mapping[str, int]) -> None:
        self.usage["completion_tokens"] += timings.get("predicted_n", 0)
        if index % self._each == 0:  # the first choice of a prompt
            cached = timings.get("cache_n", 0)
            self.usage["prompt_tokens"] += timings.get("prompt_n", 0) + cached
            self.usage["cached_tokens"] += cached


def _each(body: Mapping[str, Any]) -> int:
    return body.get("n") or 1


def _has_several_prompts(prompt: object) -> bool:
    return isinstance(prompt, list) and any(isinstance(each, str | list) for each in prompt)


def _add(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Add a piece of a choice, or of a part of one: texts and lists grow."""
    for name, value in piece.items():
        before = whole.get(name)
        if before is None:
            whole[name] = value
        elif isinstance(value, dict):
            _add(before, value)
        elif name == "tool_calls":
            for call in value:
                known = next((each for each in before if each["index"] == call["index"]), None)
                before.append(call) if known is None else _add(known, call)
        elif isinstance(value, list) or (isinstance(value, str) and name not in _SAID_ONCE):
            whole[name] = before + value
        elif value is not None:
            whole[name] = value


OK = 200

_HEAD_END = b"\r\n\r\n"
_EVENT_END = b"\n\n"


class ExchangeError(Exception):
    """The server has closed the connection before the end of its answer."""


async def ask(path: str, route: str, body: bytes, on_event: Callable[[bytes], None] | None = None) -> tuple[int, bytes]:
    """Send a request and return the status and the body of its answer. When cancelled, the server ends its work on it.

    Args:
        body: JSON; b"" to get the route.
        on_event: Called with each server-sent event of a good answer, without its end; the body is then empty.

    Raises:
        OSError: Nobody listens there.
        ExchangeError: There is no whole answer.
    """
    loop = asyncio.get_running_loop()
    head = f"{'POST' if body else 'GET'} {route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\n"
    transport, answer = await loop.create_unix_connection(lambda: _Answer(on_event), path)
    try:
        transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return await answer.done
    finally:
        transport.abort()


class _Answer(asyncio.Protocol):
    """Receives an answer."""

    def __init__(self, on_event: Callable[[bytes], None] | None) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._on_event = on_event
        self._received = b""
        self._body = b""
        self._status = 0
        self._length = -1  # of the body, -1 while the head is missing or the body comes in chunks
        self._is_chunked = False

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        self._received += data
        try:
            if self._status or self._take_head():
                self._take_body()
        except Exception as error:
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(ExchangeError(f"llama.cpp closed the connection{f': {error}' if error is not None else ''}"))

    def _take_head(self) -> bool:
        head, end, rest = self._received.partition(_HEAD_END)
        if not end:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        fields: dict[str, Any] = {}
        for line in lines:
            name, _, value = line.partition(":")
            fields[name.lower()] = value.strip()
        self._is_chunked = fields.get("transfer-encoding") == "chunked"
        self._length = int(fields.get("content-length", 0))
        self._status = int(first.split()[1])
        if self._status != OK or not fields.get("content-type", "").startswith("text/event-stream"):
            self._on_event = None
        self._received = rest
        return True

    def _take_body(self) -> None:
        is_last = False
        if self._is_chunked:
            received, start = self._received, 0
            while not is_last:
                line_end = received.find(b"\r\n", start)
                if line_end < 0:
                    break
                size = int(received[start:line_end], 16)
                end = line_end + 2 + size
                if len(received) < end + 2:
                    break
                self._body += received[line_end + 2 : end]
                start = end + 2
                is_last = size == 0
            self._received = received[start:]
        else:
            self._body += self._received
            self._received = b""
            is_last = len(self._body) >= self._length
        if self._on_event is not None:
            *events, self._body = self._body.split(_EVENT_END)
            for event in events:
                if event.strip() and not event.startswith(b":"):  # a comment keeps the connection alive
                    self._on_event(event.lstrip(b"\n"))
        if is_last and not self.done.done():
            self.done.set_result((self._status, self._body))

    def _end(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
