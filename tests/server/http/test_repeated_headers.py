"""A header that comes again is not parsed again: nobody can tell, whatever comes in whatever pieces."""

import asyncio
import json
import socket

import pytest
import uvloop
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient, request

from charonia.server.http.connection import HttpConnection
from charonia.server.http.exchange import Exchange
from charonia.server.http.frontend import HttpFrontend, HttpLimits
from charonia.server.http.repeated import REMEMBERED_BYTES_MAX, HeadMemory

INFER = "/v2/models/identity/infer"


class ParsingConnection(HttpConnection):
    remembers = False


class ParsingFrontend(HttpFrontend):
    def connect(self) -> HttpConnection:
        return ParsingConnection(self)


def infer(filling: bytes = bytes(16), headers: dict[str, str] | None = None) -> bytes:
    size = len(filling)
    inputs = [{"name": "INPUT0", "shape": [1, size], "datatype": "INT8", "parameters": {"binary_data_size": size}}]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return request(
        INFER, body=text + filling, headers={"Inference-Header-Content-Length": str(len(text))} | (headers or {})
    )


USUAL = infer()
PIECES = [
    USUAL,
    infer(b"\r\n\r\n" + bytes(12)),
    infer(b"POST / HTTP/1.1\r"),
    infer(bytes(15)),
    infer(bytes(range(17))),
    infer(headers={"X": "y"}),
    infer(headers={"Connection": "close"}),
    infer(headers={"Expect": "100-continue"}),
    infer(headers={"Inference-Header-Content-Length": "9999"}),
    infer(headers={"Upgrade": "h2c", "Connection": "Upgrade"}),
    request("/v2/health/live", method="GET"),
    request(INFER, body=b"{}"),
    request(INFER, body=b"\r\n\r\n", headers={"Content-Length": "2"}),
    b"POST " + INFER.encode() + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"\r\n",
    b"\r\n\r\n" + USUAL,
    USUAL + b"\r\n",
    USUAL + USUAL,
    USUAL[:-1],
    USUAL[:40],
    USUAL[40:],
    USUAL.replace(b"\r\n", b"\n"),
    b"\0",
]


def answers(frontend: HttpFrontend, pieces: list[bytes]) -> tuple[bytes, bool, bool]:
    client = MemoryClient(frontend)
    for piece in pieces:
        client.send(piece)
    return client.received, client.transport.is_closed, client.transport.is_half_closed


@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8))
@example([USUAL, USUAL, USUAL])
@example([USUAL, USUAL[:40], USUAL[40:], USUAL])
@example([USUAL + b"\r\n", USUAL, infer(b"\r\n\r\n" + bytes(12))])
@example([request(INFER, body=b"\r\n{}", headers={"Content-Length": "2"}), request(INFER, body=b"{}")])
def test_answers_are_those_of_a_server_that_parses_everything(pieces: list[bytes]) -> None:
    assert answers(HttpFrontend(FakeEngine(), HttpLimits()), pieces) == answers(
        ParsingFrontend(FakeEngine(), HttpLimits()), pieces
    )


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_each_request_has_its_own_body(first: bytes, second: bytes) -> None:
    engine = FakeEngine()

    MemoryClient(HttpFrontend(engine, HttpLimits())).send(infer(first))
    client = MemoryClient(HttpFrontend(engine, HttpLimits()))
    for filling in (first, second):
        client.send(infer(filling))

    assert [t.request.inputs["INPUT0"].array.tobytes() for t in engine.tickets] == [first, first, second]


class Recorder:
    """What an exchange is answered to."""

    def answered(self, exchange: Exchange) -> None: ...

    def progressed(self, exchange: Exchange) -> None: ...

    def unsent_bytes(self) -> int:
        return 0


def learned(message: bytes, body_size: int, headers: dict[bytes, bytes] | None = None) -> HeadMemory:
    memory, outlet = HeadMemory(), Recorder()
    assert memory.recall(outlet, memoryview(message)) is None
    memory.learn(Exchange(outlet, b"POST", b"/x", headers or {}), body_size)
    return memory


def test_a_header_is_known_again() -> None:
    memory = learned(b"POST /x HTTP/1.1\r\nA: b\r\n\r\nbody", 4, {b"a": b"b"})

    again = memory.recall(Recorder(), memoryview(b"POST /x HTTP/1.1\r\nA: b\r\n\r\nelse"))

    assert again is not None
    assert (again.method, again.url, again.headers, again.body) == (b"POST", b"/x", {b"a": b"b"}, b"else")


@pytest.mark.parametrize(
    ("message", "body_size", "headers"),
    [
        (b"POST /x HTTP/1.1\r\n\r\n", 0, {}),
        (b"\r\nPOST /x HTTP/1.1\r\n\r\nbody"[2:] + b"\r\n", 4, {}),
        (b"\r\n\r\nPOST /x HTTP/1.1\r\n\r\nbody", 4, {}),
        (b"POST /x HTTP/1.1\r\n\r\n\r\ndy\r\n", 4, {}),
        (b"POST /x HTTP/1.1\r\nExpect: 100-continue\r\n\r\nbody", 4, {b"expect": b"100-continue"}),
        (b"POST /x HTTP/1.1\r\nA: " + bytes(REMEMBERED_BYTES_MAX) + b"\r\n\r\nbody", 4, {}),
    ],
    ids=[
        "no body",
        "more behind it",
        "more before it",
        "more behind it, which looks like its end",
        "a wish",
        "too long",
    ],
)
def test_a_header_is_not_taken_note_of(message: bytes, body_size: int, headers: dict[bytes, bytes]) -> None:
    memory = learned(message, body_size, headers)

    assert memory.recall(Recorder(), memoryview(message)) is None


def test_a_response_is_sent_before_the_loop_goes_on() -> None:
    """The client computes while the server still counts, and while it answers others that it has read together."""

    async def run() -> bytes:
        engine = FakeEngine()
        engine.hold = True
        frontend = HttpFrontend(engine, HttpLimits())
        await frontend.start("127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", frontend.port)) as client:
            client.sendall(infer())
            while not engine.tickets:
                await asyncio.sleep(0.001)
            engine.release(0)
            client.settimeout(30)
            received = client.recv(65536)  # the loop stands still meanwhile
        await frontend.close()
        return received

    assert uvloop.run(run()).startswith(b"HTTP/1.1 200 OK\r\n")
