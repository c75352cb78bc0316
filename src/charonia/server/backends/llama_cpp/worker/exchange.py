"""Requests to llama.cpp's server, which listens on a Unix socket of this process, and answers of several choices.

llama.cpp counts the tokens of one choice only. So several choices are requested as a stream, whose last chunk of each
choice has its counts, and these are added up.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from ...language.worker.text_stream import shown_usage

_STREAMED = ("stream", "stream_options")
_SAID_ONCE = ("role", "id", "type", "name")


def choices_count(body: Mapping[str, Any]) -> int:
    """Return how many choices a request of chats or completions asks for."""
    prompt = body.get("prompt")
    has_several = isinstance(prompt, list) and any(isinstance(each, str | list) for each in prompt)
    return _each(body) * (len(body["prompt"]) if has_several else 1)


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
        return {**self._head, "choices": [], "usage": shown_usage(self.usage)}

    def document(self) -> dict[str, Any]:
        """Return the answer as one document."""
        choices = []
        for _, choice in sorted(self._choices.items()):
            message = choice.pop("delta", None)
            for call in (message or {}).get("tool_calls", ()):
                del call["index"]
            choices.append({**choice, "message": message} if message is not None else choice)
        kind = self._head["object"].removesuffix(".chunk")
        return {**self._head, "object": kind, "choices": choices, "usage": shown_usage(self.usage)}

    def _count(self, index: int, timings: Mapping[str, int]) -> None:
        self.usage["completion_tokens"] += timings.get("predicted_n", 0)
        if index % self._each == 0:  # the first choice of a prompt
            cached = timings.get("cache_n", 0)
            self.usage["prompt_tokens"] += timings.get("prompt_n", 0) + cached
            self.usage["cached_tokens"] += cached


def _each(body: Mapping[str, Any]) -> int:
    return body.get("n") or 1


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
    head = f"{'POST' if body else 'GET'} {route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\n"
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        first, *lines = (await reader.readuntil(_HEAD_END)).decode("latin-1").lower().split("\r\n")
        status = int(first.split()[1])
        fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if fields.get("transfer-encoding") != "chunked":
            return status, await reader.readexactly(int(fields.get("content-length", 0)))
        is_stream = status == OK and fields.get("content-type", "").startswith("text/event-stream")
        received, size = b"", 1
        while size:
            size = int(await reader.readuntil(b"\r\n"), 16)
            received += (await reader.readexactly(size + 2))[:-2]
            if on_event is not None and is_stream:
                *events, received = received.split(_EVENT_END)
                for event in events:
                    if event.strip() and not event.startswith(b":"):  # a comment keeps the connection alive
                        on_event(event.lstrip(b"\n"))
        return status, received
    except (asyncio.IncompleteReadError, ConnectionResetError) as error:
        raise ExchangeError("llama.cpp closed the connection") from error
    finally:
        writer.transport.abort()
