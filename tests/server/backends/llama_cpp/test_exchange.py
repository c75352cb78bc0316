"""Requests over a Unix socket to a server that answers what a test tells it to."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from charonia.server.backends.llama_cpp.worker.exchange import ExchangeError, ask

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b'data: {"a": 1}\n\n', b": keeps alive\n\n", b"event: x\ndata: {}\n\n", b"data: [DONE]\n\n"]


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def asked(
    folder: Path, pieces: list[bytes], on_event: Callable[[bytes], None] | None = None, *, keeps_open: bool = False
) -> tuple[tuple[int, bytes], bytes, bool]:
    """Return the answer to a request, the request, and whether the client has closed the connection."""

    async def scenario() -> tuple[tuple[int, bytes], bytes, bool]:
        requests: list[bytes] = []
        left = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            assert length is not None
            requests.append(head + await reader.readexactly(int(length[1])))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if keeps_open:
                await reader.read()
            writer.close()
            left.set()

        path = str(folder / "s.sock")
        server = await asyncio.start_unix_server(serve, path)
        try:
            answer = await asyncio.wait_for(ask(path, "/route", b"{}", on_event), 20)
            if keeps_open:
                await asyncio.wait_for(left.wait(), 20)
            return answer, requests[0], left.is_set()
        finally:
            server.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_arrive_whole_however_the_stream_is_cut(tmp_path: Path, size: int) -> None:
    events: list[bytes] = []
    sent = CHUNKED + chunked(EVENTS[0] + EVENTS[1][:5], EVENTS[1][5:] + EVENTS[2][:3], EVENTS[2][3:], EVENTS[3])
    pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
    answer, request, _ = asked(tmp_path, pieces, events.append, keeps_open=True)
    assert answer == (200, b"")
    assert events == [b'data: {"a": 1}', b"event: x\ndata: {}", b"data: [DONE]"]
    assert request.startswith(b"POST /route HTTP/1.1\r\n")
    assert request.endswith(b"\r\n\r\n{}")


@pytest.mark.parametrize("status", [200, 400])
def test_a_document_is_returned_with_its_status_and_the_connection_closed(tmp_path: Path, status: int) -> None:
    events: list[bytes] = []
    head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n" % status
    answer, _, has_left = asked(tmp_path, [head, b'{"a":', b'"b"', b"}"], events.append, keeps_open=True)
    assert answer == (status, b'{"a":"b"}')
    assert has_left
    assert events == []


@pytest.mark.parametrize("pieces", [[], [CHUNKED], [CHUNKED + b"5\r\nda"], [b"HTTP/1.1 200 OK\r\n"]])
def test_an_answer_without_an_end_is_an_error(tmp_path: Path, pieces: list[bytes]) -> None:
    with pytest.raises(ExchangeError, match=r"llama\.cpp closed the connection"):
        asked(tmp_path, pieces, lambda _: None)


def test_an_exception_about_an_event_ends_the_exchange(tmp_path: Path) -> None:
    def refuse(event: bytes) -> None:
        raise LookupError(event)

    with pytest.raises(LookupError, match="a"):
        asked(tmp_path, [CHUNKED + chunked(EVENTS[0], EVENTS[3])], refuse)


async def test_a_cancelled_exchange_closes_its_connection(tmp_path: Path) -> None:
    has_come, has_left = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        has_come.set()
        await reader.read()
        writer.close()
        has_left.set()

    server = await asyncio.start_unix_server(serve, str(tmp_path / "s.sock"))
    task = asyncio.ensure_future(ask(str(tmp_path / "s.sock"), "/route", b"{}"))
    await asyncio.wait_for(has_come.wait(), 20)
    task.cancel()
    await asyncio.wait_for(has_left.wait(), 20)
    server.close()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nobody_who_listens_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await ask(str(tmp_path / "nobody.sock"), "/route", b"{}")
