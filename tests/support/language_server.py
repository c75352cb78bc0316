"""A server of OpenAI's API with responses of given times, for tests and rough measurements.

Run as a program, it serves until it is ended: `python -m tests.support.language_server --port 9000`.
"""

import argparse
import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httptools

WORD = " word"


@dataclass
class FakeLanguageModel:
    """How responses look.

    Attributes:
        gap_s: Time between two pieces; 0 to send all at once.
        tokens: Pieces of a response without `max_tokens`.
        fails_after: Pieces after which an error comes, None for no error.
        bodies: The requests so far, as (path, document).
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    tokens: int = 8
    counts: bool = True
    fails_after: int | None = None
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    connections: set[asyncio.Transport] = field(default_factory=set)


class _Connection(asyncio.Protocol):
    def __init__(self, model: FakeLanguageModel) -> None:
        self._model = model
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._model.connections.add(self._transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._path, self._body = "", b""

    def on_url(self, url: bytes) -> None:
        self._path += url.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(self._path, self._body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def connection_lost(self, error: Exception | None) -> None:
        self._model.connections.discard(self._transport)
        for task in self._tasks:
            task.cancel()

    async def _answer(self, path: str, body: bytes) -> None:
        if not path.startswith("/v1/") or not body:
            self._whole(404, {"error": "no such path"})
            return
        document = json.loads(body)
        self._model.bodies.append((path, document))
        if path == "/v1/embeddings":
            self._whole(200, {"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 3}})
        elif document.get("model") == "unknown":
            error = {"message": "the model 'unknown' does not exist", "type": "invalid_request_error"}
            self._whole(404, {"error": error})
        elif document.get("stream"):
            await self._stream(path, document)
        else:
            await asyncio.sleep(self._model.first_s)
            count = document.get("max_tokens", self._model.tokens)
            message = {"message": {"role": "assistant", "content": WORD * count}}
            self._whole(200, {"choices": [message], "usage": usage(document, count)})

    async def _stream(self, path: str, document: dict[str, Any]) -> None:
        model, count = self._model, document.get("max_tokens", self._model.tokens)
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        piece = event(
            {"choices": [{"index": 0, "text": WORD}]}
            if path == "/v1/completions"
            else {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": WORD}}]}
        )
        if path == "/v1/chat/completions":  # the first chunk tells the role only
            role = {"role": "assistant", "content": ""}
            self._transport.write(event({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": role}]}))
        loop = asyncio.get_running_loop()
        due = loop.time() + model.first_s
        for number in range(count):
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            if number == model.fails_after:
                self._transport.write(event({"error": {"message": "the engine has stopped", "code": 500}}))
                break
            self._transport.write(piece)
            due += model.gap_s
        if model.counts and document.get("stream_options", {}).get("include_usage"):
            self._transport.write(event({"choices": [], "usage": usage(document, count)}))
        self._transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _whole(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


def usage(document: dict[str, Any], count: int) -> dict[str, int]:
    """The server's counts: a token for each word of the prompt."""
    prompt = document.get("prompt") or " ".join(message["content"] for message in document["messages"])
    return {"prompt_tokens": len(prompt.split()), "completion_tokens": count}


def event(document: dict[str, Any]) -> bytes:
    return chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextmanager
def language_server(model: FakeLanguageModel) -> Iterator[str]:
    """Serve a model on a thread; yield the URL."""
    started, ended = threading.Event(), threading.Event()
    url = ""
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        nonlocal url
        server = await asyncio.get_running_loop().create_server(lambda: _Connection(model), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        while not ended.is_set():
            await asyncio.sleep(0.02)
        server.close()
        await asyncio.sleep(0)  # what was accepted becomes a connection
        for connection in list(model.connections):
            connection.abort()
        await asyncio.sleep(0)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(200)
    try:
        yield url
    finally:
        ended.set()
        thread.join()
        loop.close()


async def _serve(model: FakeLanguageModel, port: int) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(model), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--first-ms", type=float, default=0.0)
    parser.add_argument("--gap-ms", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    import uvloop

    model = FakeLanguageModel(given.first_ms / 1e3, given.gap_ms / 1e3, given.tokens)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(model, given.port))


if __name__ == "__main__":
    main()
