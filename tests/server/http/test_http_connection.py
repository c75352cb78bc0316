"""Connections in memory: framing, order, limits, time, and clients that go."""

import asyncio
import contextlib
import json
import socket
import tracemalloc
from collections.abc import Callable
from io import StringIO

import numpy as np
import pytest
import uvloop
from tests.support.fake_engine import FakeEngine, identity_config
from tests.support.http_memory import MemoryClient, Response, request
from tests.support.process import until

from charonia.core.errors import unavailable
from charonia.core.response import InferResponse
from charonia.server.access_log import AccessLog
from charonia.server.http.connection import LINGER_S, READ_BYTES
from charonia.server.http.frontend import HttpFrontend, HttpLimits
from charonia.server.http.limits import CHUNKED_PIECE_BYTES, DIRECT_BODY_BYTES
from charonia.server.http.parser import RequestParser

INFER = "/v2/models/identity/infer"
LIVE = request("/v2/health/live", method="GET")


def infer(id: str = "", *, size: int = 16, headers: dict[str, str] | None = None) -> bytes:
    """A request with one binary input; its response is JSON."""
    document = {
        "id": id,
        "inputs": [
            {"name": "INPUT0", "shape": [1, size], "datatype": "INT8", "parameters": {"binary_data_size": size}},
        ],
    }
    text = json.dumps(document).encode()
    fields = {"Inference-Header-Content-Length": str(len(text))} | (headers or {})
    return request(INFER, body=text + bytes(range(256)) * (size // 256) + bytes(size % 256), headers=fields)


def ids(responses: list[Response]) -> list[str]:
    return [json.loads(response.body)["id"] for response in responses]


def error(response: Response) -> str:
    message: str = json.loads(response.body)["error"]
    return message


class Bench:
    """A front end on a fake engine, and a client."""

    def __init__(self, limits: HttpLimits | None = None, log: StringIO | None = None) -> None:
        self.engine = FakeEngine()
        access_log = AccessLog(log, wall_clock=lambda: 0.0) if log is not None else None
        self.frontend = HttpFrontend(self.engine, limits or HttpLimits(), access_log=access_log)
        self.frontend.shared.now_s = 0.0
        self.client = self.connect()

    def connect(self) -> MemoryClient:
        return MemoryClient(self.frontend)

    def wait(self, seconds: float) -> None:
        self.frontend.shared.now_s += seconds
        self.client.connection.check_time(self.frontend.shared.now_s)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("piece", [0, 1, 7, 100])
def test_requests_are_understood_however_they_are_cut(piece: int, bench: Bench) -> None:
    responses = bench.client.send(infer("a") + LIVE + infer("b"), piece)

    assert [r.status for r in responses] == [200, 200, 200]
    assert ids([responses[0], responses[2]]) == ["a", "b"]
    assert responses[1].body == b""


def test_a_chunked_body_is_put_together() -> None:
    body = b'{"id": "c", "inputs": []}'
    chunks = b"5;x=y\r\n" + body[:5] + b"\r\n" + b"%x\r\n" % (len(body) - 5) + body[5:] + b"\r\n0\r\n\r\n"
    head = b"POST " + INFER.encode() + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"

    assert ids(Bench().client.send(head + chunks, 1)) == ["c"]


@pytest.mark.parametrize(("chunks", "statuses"), [(4, [200]), (5, [400])])
def test_as_many_chunks_pass_as_the_limit_says(chunks: int, statuses: list[int]) -> None:
    body = b'{"inputs": []}'
    pieces = [body[i : i + 1] for i in range(chunks - 1)] + [body[chunks - 1 :]]
    head = b"POST " + INFER.encode() + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)

    responses = Bench(HttpLimits(chunk_count_max=4)).client.send(head + sent + b"0\r\n\r\n")

    assert [r.status for r in responses] == statuses


def test_fields_after_a_chunked_body_change_nothing() -> None:
    head = b"POST " + INFER.encode() + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"

    responses = Bench().client.send(head + b'e\r\n{"inputs": []}\r\n0\r\nContent-Encoding: br\r\n\r\n')

    assert [r.status for r in responses] == [200]


@pytest.mark.parametrize("piece", [0, 1000, READ_BYTES])
@pytest.mark.parametrize("size", [DIRECT_BODY_BYTES - 1, DIRECT_BODY_BYTES, 3 * READ_BYTES + 5])
def test_a_large_body_arrives_whole_and_the_connection_goes_on(piece: int, size: int, bench: Bench) -> None:
    responses = bench.client.send(infer("a", size=size) + infer("b"), piece)

    assert ids(responses) == ["a", "b"]
    array = bench.engine.tickets[0].request.inputs["INPUT0"].array
    assert array.nbytes == size
    assert array.ravel()[: size // 256 * 256].astype("u1").reshape(-1, 256).std(axis=0).sum() == 0


def test_the_first_tensor_of_a_large_body_is_aligned(bench: Bench) -> None:
    bench.client.send(infer(size=3 * READ_BYTES))

    assert bench.engine.tickets[0].request.inputs["INPUT0"].array.ctypes.data % 64 == 0


@pytest.mark.parametrize("json_size", ["x", "9" * 5000, ""])
def test_a_large_body_with_a_senseless_json_size_is_refused(json_size: str, bench: Bench) -> None:
    responses = bench.client.send(infer(size=3 * READ_BYTES, headers={"Inference-Header-Content-Length": json_size}))

    assert [r.status for r in responses] == [400]
    assert "Inference-Header-Content-Length" in error(responses[0])


def test_responses_keep_the_order_of_the_requests(bench: Bench) -> None:
    bench.engine.hold = True

    bench.client.send(infer("a") + infer("b") + LIVE + infer("c"))
    bench.engine.release(2)
    bench.engine.release(1)
    assert bench.client.responses == []
    bench.engine.release(0)

    assert [not r.body for r in bench.client.responses] == [False, False, True, False]
    assert ids([bench.client.responses[i] for i in (0, 1, 3)]) == ["a", "b", "c"]


@pytest.mark.parametrize("hold", [False, True])
def test_a_request_that_was_answered_is_not_cancelled(hold: bool, bench: Bench) -> None:
    bench.engine.hold = hold

    bench.client.send(infer("a"))
    if hold:
        bench.engine.release(0)
    bench.client.leave()

    ticket = bench.engine.tickets[0]
    assert (ticket.finished, ticket.cancelled, ticket.late_cancels) == (True, False, 0)


def test_reading_pauses_while_too_many_requests_of_a_connection_are_in_flight() -> None:
    bench = Bench(HttpLimits(pipeline_max=2))
    bench.engine.hold = True

    bench.client.send(infer("a"))
    bench.client.send(infer("b"))
    assert bench.client.transport.is_paused
    bench.client.send(infer("c"))
    assert len(bench.engine.tickets) == 2
    bench.engine.release(0)

    assert len(bench.engine.tickets) == 3
    bench.engine.release(1)
    bench.engine.release(2)
    assert ids(bench.client.responses) == ["a", "b", "c"]
    assert not bench.client.transport.is_paused


def test_reading_pauses_while_the_client_does_not_read(bench: Bench) -> None:
    bench.client.transport.is_blocked = True

    bench.client.send(infer("a"))
    bench.client.send(infer("b"))
    assert len(bench.engine.tickets) == 1
    bench.client.transport.unblock()

    assert ids(bench.client.responses) == ["a", "b"]


@pytest.mark.parametrize(
    ("version", "connection", "expected"),
    [
        ("1.1", "", None),
        ("1.1", "keep-alive", None),
        ("1.1", "close", "close"),
        ("1.0", "", "close"),
        ("1.0", "keep-alive", "keep-alive"),
    ],
)
def test_a_connection_lives_as_long_as_the_client_says(
    version: str, connection: str, expected: str | None, bench: Bench
) -> None:
    headers = {"Connection": connection} if connection else {}

    response = bench.client.send(request("/v2", method="GET", version=version, headers=headers))[0]

    assert response.headers.get("connection") == expected
    assert bench.client.transport.is_closed == (expected == "close")


def test_what_follows_the_last_request_is_not_answered(bench: Bench) -> None:
    responses = bench.client.send(request("/v2", method="GET", headers={"Connection": "close"}) + LIVE)

    assert [r.status for r in responses] == [200]
    assert bench.client.transport.is_closed


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_offer_to_change_the_protocol_is_declined(method: str, bench: Bench) -> None:
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAAP__"}
    body = b'{"inputs": []}' if method == "POST" else b""

    responses = bench.client.send(
        request(INFER if body else "/v2", method=method, body=body, headers=upgrade) + LIVE + infer("a")
    )

    assert [r.status for r in responses] == [200, 200, 200]


def test_a_reading_full_of_offers_to_change_the_protocol_is_answered(bench: Bench) -> None:
    offer = request("/v2/health/live", method="GET", headers={"Connection": "Upgrade", "Upgrade": "h2c"})

    responses = bench.client.send(offer * (READ_BYTES // len(offer)))

    assert [r.status for r in responses] == [200] * (READ_BYTES // len(offer))


@pytest.mark.parametrize("cut", [1000, DIRECT_BODY_BYTES, 2 * DIRECT_BODY_BYTES - 1000])
def test_a_large_body_after_an_offer_to_change_the_protocol_arrives_whole(cut: int, bench: Bench) -> None:
    sent = infer("a", size=2 * DIRECT_BODY_BYTES, headers={"Connection": "Upgrade", "Upgrade": "h2c"})

    bench.client.send(sent[:cut])
    bench.client.send(sent[cut:] + LIVE)

    assert [r.status for r in bench.client.responses] == [200, 200]
    (ticket,) = bench.engine.tickets
    assert ticket.request.inputs["INPUT0"].array.tobytes() == bytes(range(256)) * (2 * DIRECT_BODY_BYTES // 256)


def test_a_large_body_that_arrives_while_its_connection_closes_is_dropped(bench: Bench) -> None:
    bench.engine.hold = True
    sent = infer("b", size=2 * DIRECT_BODY_BYTES)
    bench.client.send(infer("a") + sent[: DIRECT_BODY_BYTES // 2])

    bench.frontend.stop_accepting()
    bench.engine.release(0)
    assert bench.client.transport.is_half_closed
    bench.client.send(sent[DIRECT_BODY_BYTES // 2 :])

    assert ids(bench.client.responses) == ["a"]
    assert len(bench.engine.tickets) == 1


def test_leave_to_send_the_body_is_given(bench: Bench) -> None:
    head, _, body = infer("a", headers={"Expect": "100-continue"}).partition(b"\r\n\r\n")

    bench.client.send(head + b"\r\n\r\n")
    assert bench.client.received == b"HTTP/1.1 100 Continue\r\n\r\n"
    bench.client.send(body)

    assert ids(bench.client.responses) == ["a"]


def test_white_space_behind_the_value_of_a_header_field_is_not_part_of_it(bench: Bench) -> None:
    head, _, body = infer("a").partition(b"\r\n\r\n")
    size = head.lower().partition(b"inference-header-content-length: ")[2].partition(b"\r\n")[0]

    bench.client.send(head.replace(size, size + b" \t") + b"\r\nExpect: 100-continue \r\n\r\n")
    bench.client.send(body)
    bench.client.send(b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: chunked \r\n\r\n0\r\n\r\n")

    assert [response.status for response in bench.client.responses] == [200, 405]


def test_no_leave_is_given_before_earlier_responses(bench: Bench) -> None:
    bench.engine.hold = True

    bench.client.send(infer("a") + infer("b", headers={"Expect": "100-continue"}))

    assert bench.client.received == b""


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"junk\r\n\r\n", 400),
        (b"GET /v2\r\n\r\n", 505),
        (b"GET /v2 HTTP/1.1\nHost: a\n\n", 400),
        (b"GET /v2 HTTP/1.1\r\nA : b\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nA: b\r\n c\r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nA: \0\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (b"POST /v2 HTTP/1.1\r\nContent-Length: -3\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n", 501),
        (b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nExpect: much\r\nContent-Length: 3\r\n\r\n", 417),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ],
)
@pytest.mark.parametrize("piece", [0, 1])
def test_a_violation_is_answered_and_ends_the_connection(data: bytes, status: int, piece: int, bench: Bench) -> None:
    responses = bench.client.send(LIVE + data + LIVE, piece)

    assert [r.status for r in responses] == [200, status]
    assert responses[1].headers["connection"] == "close"
    assert error(responses[1])
    assert bench.client.transport.is_closed or bench.client.transport.is_half_closed


def test_a_violation_waits_for_earlier_responses(bench: Bench) -> None:
    bench.engine.hold = True

    bench.client.send(infer("a") + b"junk\r\n\r\n")
    assert bench.client.responses == []
    bench.engine.release(0)

    assert [r.status for r in bench.client.responses] == [200, 400]


@pytest.mark.parametrize(
    ("limits", "data", "status", "message"),
    [
        (
            HttpLimits(url_bytes_max=20),
            request("/v2/" + "x" * 20, method="GET"),
            414,
            "the URL is longer than 20 bytes",
        ),
        (
            HttpLimits(header_count_max=3, header_bytes_max=100),
            request("/v2", method="GET", headers={"A": "1", "B": "2"}),
            431,
            "the request header is larger than 3 fields or 100 bytes",
        ),
        (
            HttpLimits(header_count_max=3, header_bytes_max=100),
            request("/v2", method="GET", headers={"A": "x" * 100}),
            431,
            "the request header is larger than 3 fields or 100 bytes",
        ),
        (
            HttpLimits(header_count_max=3, header_bytes_max=100, url_bytes_max=10),
            b"GET /v2 HTTP/1.1\r\nA: " + b"x" * 1000,
            431,
            "the request header is larger than 3 fields or 100 bytes",
        ),
        (
            HttpLimits(chunk_count_max=2),
            b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n1\r\na\r\n1\r\na\r\n",
            400,
            "Chunked request body exceeds maximum of 2 non-empty chunks. Send fewer or larger HTTP chunks.",
        ),
    ],
)
@pytest.mark.parametrize("piece", [0, 1])
def test_a_request_beyond_a_limit_is_answered_and_ends_the_connection(
    limits: HttpLimits, data: bytes, status: int, message: str, piece: int
) -> None:
    bench = Bench(limits)

    responses = bench.client.send(data, piece)

    assert [(r.status, error(r)) for r in responses] == [(status, message)]
    assert bench.client.transport.is_closed or bench.client.transport.is_half_closed


@pytest.mark.parametrize("piece", [0, 50])
def test_a_body_beyond_the_limit_is_refused_and_the_connection_goes_on(piece: int) -> None:
    bench = Bench(HttpLimits(body_bytes_max=1000))

    responses = bench.client.send(infer(size=2000) + LIVE, piece)

    assert [r.status for r in responses] == [400, 200]
    assert "--http-max-input-size" in error(responses[0])


def test_a_chunked_body_beyond_the_limit_is_refused_and_the_connection_goes_on() -> None:
    bench = Bench(HttpLimits(body_bytes_max=5))
    chunks = b"4\r\nabcd\r\n4\r\nabcd\r\n4\r\nabcd\r\n0\r\n\r\n"

    responses = bench.client.send(b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + LIVE)

    assert [r.status for r in responses] == [400, 200]


@pytest.mark.parametrize(
    "data",
    [
        request("/v2", body=bytes(21)),
        request("/v2", body=bytes(11), headers={"Expect": "100-continue"}),
        b"POST /v2 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"a\r\n0123456789\r\n" * 3,
    ],
)
def test_a_body_too_large_to_drop_ends_the_connection(data: bytes) -> None:
    bench = Bench(HttpLimits(body_bytes_max=10, discard_bytes_max=20))

    responses = bench.client.send(data)

    assert [r.status for r in responses] == [400]
    assert bench.client.transport.is_half_closed


def test_a_refused_client_has_time_to_read_the_answer(bench: Bench) -> None:
    bench.client.send(b"POST /v2 HTTP/1.1\r\nExpect: much\r\nContent-Length: 3\r\n\r\n")

    bench.client.send(b"abc more")
    bench.wait(LINGER_S)
    assert not bench.client.transport.is_closed
    bench.wait(0.1)

    assert bench.client.transport.is_closed
    assert len(bench.client.responses) == 1


def test_one_connection_too_many_is_told_so() -> None:
    bench = Bench(HttpLimits(connections_max=1))

    other = bench.connect()

    assert [r.status for r in other.responses] == [503]
    assert other.transport.is_closed
    other.leave()
    bench.client.leave()
    assert bench.connect().responses == []


@pytest.mark.parametrize("sent", [b"P", b"POST /v2 HT", b"POST /v2 HTTP/1.1\r\nA: b"])
def test_a_header_that_does_not_arrive_times_out(sent: bytes) -> None:
    bench = Bench(HttpLimits(header_timeout_s=30))
    bench.client.send(LIVE + sent)

    bench.wait(30)
    bench.client.send(b"")
    assert len(bench.client.responses) == 1
    bench.wait(0.1)

    assert [r.status for r in bench.client.responses] == [200, 408]
    assert bench.client.transport.is_half_closed


@pytest.mark.parametrize("size", [16, 10 * DIRECT_BODY_BYTES])
def test_a_body_that_arrives_too_slowly_times_out(size: int) -> None:
    bench = Bench(HttpLimits(body_timeout_s=10, body_bytes_per_s_min=100))
    data = infer(size=size)
    head = data.index(b"\r\n\r\n") + 4
    bench.client.send(data[: head + 100])

    bench.wait(10.9)
    bench.client.send(data[head + 100 : head + 110])
    bench.wait(0.15)
    assert bench.client.responses == []
    bench.wait(0.1)

    assert [r.status for r in bench.client.responses] == [408]


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    bench = Bench(HttpLimits(write_timeout_s=60))
    bench.client.transport.is_blocked = True
    bench.client.send(infer("a"))

    bench.wait(60)
    bench.wait(60)
    assert not bench.client.transport.is_closed
    bench.wait(0.1)

    assert bench.client.transport.is_closed


def test_a_body_is_let_go_when_its_client_leaves(bench: Bench) -> None:
    size = 32 * 1024 * 1024
    tracemalloc.start()
    try:
        bench.client.send(infer("a", size=size)[: 3 * READ_BYTES])
        held, _ = tracemalloc.get_traced_memory()
        bench.client.leave()
        left, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held > size
    assert left < size // 2


def test_a_client_that_does_not_take_its_last_response_is_given_up(
    monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    monkeypatch.setattr(bench.client.transport, "close", lambda: None)  # it waits until everything is written

    bench.client.send(infer("a", headers={"Connection": "close"}))
    assert not bench.client.transport.is_closed
    bench.wait(601)

    assert bench.client.transport.is_closed


def test_an_idle_connection_is_closed() -> None:
    bench = Bench(HttpLimits(idle_timeout_s=600))
    bench.frontend.shared.now_s = 500
    bench.client.send(LIVE)

    bench.wait(600)
    assert not bench.client.transport.is_closed
    bench.wait(0.1)

    assert bench.client.transport.is_closed
    assert len(bench.client.responses) == 1


def test_a_request_may_take_as_long_as_it_takes(bench: Bench) -> None:
    bench.engine.hold = True
    bench.client.send(infer("a"))

    bench.wait(100_000)
    bench.engine.release(0)

    assert ids(bench.client.responses) == ["a"]


def test_time_that_reading_was_paused_does_not_count() -> None:
    bench = Bench(HttpLimits(pipeline_max=1, header_timeout_s=30))
    bench.engine.hold = True
    bench.client.send(infer("a") + b"GET /v2/health")

    bench.wait(1000)
    bench.engine.release(0)
    bench.wait(1)
    bench.client.send(b"/live HTTP/1.1\r\n\r\n")

    assert [r.status for r in bench.client.responses] == [200, 200]


@pytest.mark.parametrize("sent", range(0, len(infer("a")), 9))
def test_a_client_may_go_at_any_point_of_its_request(sent: int, bench: Bench) -> None:
    bench.client.send(infer("a")[:sent])
    bench.client.leave()
    bench.wait(1000)

    assert bench.engine.tickets == []
    assert bench.connect().send(LIVE)[0].status == 200


def test_the_requests_of_a_client_that_has_gone_are_cancelled(bench: Bench) -> None:
    bench.engine.hold = True
    other = bench.connect()
    bench.client.send(infer("a") + infer("b"))
    other.send(infer("c"))
    bench.engine.release(1)

    bench.client.leave()
    bench.engine.release(2)

    assert [ticket.cancelled for ticket in bench.engine.tickets] == [True, False, False]
    assert ids(other.responses) == ["c"]
    assert bench.client.responses == []


def test_a_response_that_is_written_after_a_close_goes_nowhere(bench: Bench) -> None:
    bench.engine.hold = True
    bench.client.send(infer("a"))

    bench.client.connection.abort()
    bench.engine.release(0)
    bench.client.leave()
    bench.client.connection.abort()
    bench.client.connection.wind_down()

    assert bench.client.responses == []


def test_closing_finishes_connections_and_one_more_request_on_idle_ones(bench: Bench) -> None:
    bench.engine.hold = True
    busy, receiving = bench.connect(), bench.connect()
    busy.send(infer("a"))
    receiving.send(infer("b")[:50])

    bench.frontend.stop_accepting()
    [last] = bench.client.send(LIVE)
    assert (last.status, last.headers["connection"]) == (200, "close")
    assert bench.client.transport.is_closed
    bench.engine.release(0)
    receiving.send(infer("b")[50:])
    bench.engine.release(1)

    assert ids(busy.responses + receiving.responses) == ["a", "b"]
    assert [c.responses[0].headers["connection"] for c in (busy, receiving)] == ["close", "close"]
    assert busy.transport.is_closed
    assert receiving.transport.is_closed


def test_a_server_that_exits_refuses_requests(bench: Bench) -> None:
    bench.engine.exiting = True

    responses = bench.client.send(infer("a") + LIVE)

    assert [r.status for r in responses] == [503, 503]
    assert error(responses[0]) == "the server is shutting down"


def test_a_broken_handler_fails_its_request_only(caplog: pytest.LogCaptureFixture, bench: Bench) -> None:
    def broken() -> bool:
        raise KeyError("secret")

    bench.engine.is_live = broken  # type: ignore[method-assign]
    responses = bench.client.send(LIVE + infer("a"))

    assert [r.status for r in responses] == [500, 200]
    assert "secret" not in error(responses[0])
    assert "KeyError" in caplog.text


def lines(limits: HttpLimits | None, act: Callable[[Bench], object]) -> list[str]:
    log = StringIO()
    act(Bench(limits, log))
    return log.getvalue().splitlines()


def test_the_access_log_has_a_line_for_each_request() -> None:
    (line,) = lines(None, lambda bench: bench.client.send(infer("r 1")))

    assert line.startswith(
        'time=1970-01-01T00:00:00.000Z protocol=http method="POST /v2/models/identity/infer" model=identity version=1 '
        'id="r 1" status=200 bytes_in='
    )
    assert line.endswith("queue_ms=0.001 compute_ms=0.002 batch_size=1 instance=identity_0")


def test_the_access_log_tells_of_errors_refusals_and_clients_that_went() -> None:
    def act(bench: Bench) -> None:
        bench.engine.errors["identity"] = unavailable("queue is full")
        bench.client.send(infer("a"))
        bench.engine.errors.clear()
        bench.engine.hold = True
        bench.client.send(infer("b") + b"junk\r\n\r\n")
        bench.client.leave()

    assert [[part for part in line.split() if part[:3] in ("id=", "sta")] for line in lines(None, act)] == [
        ["id=a", "status=503"],
        ["id=b", "status=499"],
        ["status=400"],
    ]


def test_a_response_that_cannot_be_encoded_fails_its_request_only(
    caplog: pytest.LogCaptureFixture, bench: Bench
) -> None:
    broken = InferResponse("identity", "1", "", [None])  # type: ignore[list-item]
    bench.engine.outcomes = [[(broken, True)]]

    responses = bench.client.send(infer("a") + infer("b"))

    assert [r.status for r in responses] == [500, 200]
    assert "cannot be encoded" in caplog.text


def test_a_model_that_says_nothing_or_too_much_fails_its_request_only(bench: Bench) -> None:
    answer = InferResponse("identity", "1", "x", [])
    bench.engine.outcomes = [[(None, True)], [(answer, False), (answer, False), (None, True)]]

    responses = bench.client.send(infer("a") + infer("b"))

    assert [r.status for r in responses] == [501, 501]


def test_a_large_binary_response_is_written_in_parts(bench: Bench) -> None:
    bench.engine.models["identity"] = identity_config(dims=(-1,))
    array = np.arange(30_000, dtype="<f4")
    text = json.dumps(
        {
            "inputs": [
                {
                    "name": "INPUT0",
                    "shape": [1, 30_000],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": 120_000},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()

    response = bench.client.send(
        request(INFER, body=text + array.tobytes(), headers={"Inference-Header-Content-Length": str(len(text))})
    )[0]

    json_size = int(response.headers["inference-header-content-length"])
    assert response.body[json_size:] == array.tobytes()


def test_a_binary_output_without_elements_leaves_a_response_of_json_alone(bench: Bench) -> None:
    bench.engine.models["identity"] = identity_config(dims=(-1,))
    tensor = {"name": "INPUT0", "shape": [1, 0], "datatype": "FP32", "data": []}
    document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}

    response = bench.client.send(request(INFER, body=json.dumps(document).encode()))[0]

    assert response.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in response.headers
    assert json.loads(response.body)["outputs"][0]["parameters"] == {"binary_data_size": 0}


def test_the_second_response_of_a_request_is_refused_and_cancels_it(bench: Bench) -> None:
    bench.engine.hold = True
    bench.client.send(infer("a"))
    (ticket,) = bench.engine.tickets
    response = InferResponse("identity", "1", "a", [])

    ticket.answer(response, False)
    assert bench.client.responses == []
    ticket.answer(response, False)

    assert ticket.cancelled
    assert [r.status for r in bench.client.responses] == [501]


def test_a_response_is_sent_before_the_loop_goes_on() -> None:
    """The client computes while the server still counts, and while it answers others that it has read together."""

    async def run() -> bytes:
        engine = FakeEngine()
        engine.hold = True
        frontend = HttpFrontend(engine, HttpLimits())
        await frontend.start("127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", frontend.port)) as client:
            client.sendall(infer("a"))
            await until(lambda: engine.tickets)
            engine.release(0)
            client.settimeout(30)
            received = client.recv(65536)  # the loop stands still meanwhile
        await frontend.close()
        return received

    assert uvloop.run(run()).startswith(b"HTTP/1.1 200 OK\r\n")


def test_requests_with_a_header_that_comes_again_are_answered_like_those_that_are_parsed() -> None:
    usual, other = infer("a"), infer("b", headers={"X": "y"})
    sent = [usual, usual, other, usual, usual + other, b"\r\n" + usual, usual[:50], usual[50:], usual]
    whole, cut = Bench(), Bench()

    for data in sent:
        whole.client.send(data)
        cut.client.send(data, 1)

    assert whole.client.received == cut.client.received
    assert len(whole.client.responses) == 9


def test_a_connection_says_its_state() -> None:
    bench = Bench(HttpLimits(pipeline_max=3))
    bench.engine.hold = True
    client, large = bench.client, infer("b", size=10 * 2**20)
    assert repr(client.connection) == "<HttpConnection [idle]>"
    client.transport.peername = ("127.0.0.1", 5123)
    assert repr(client.connection) == "<HttpConnection 127.0.0.1:5123 [idle]>"

    client.send(infer("a") + infer("b") + large[: 3 * 2**20])
    shown = "receiving body directly 2/10 MiB | 2 exchanges in flight"
    assert repr(client.connection) == f"<HttpConnection 127.0.0.1:5123 [{shown}]>"

    client.transport.is_blocked = True
    bench.frontend.stop_accepting()
    bench.engine.release(0)
    shown = "cut off | 1 exchange in flight | ending | reading paused | writing paused"
    assert repr(client.connection) == f"<HttpConnection 127.0.0.1:5123 [{shown}]>"

    client.leave()
    assert repr(client.connection) == "<HttpConnection [closed | ending | reading paused | writing paused]>"


def fault(*arguments: object) -> None:
    raise KeyError("secret")


def test_a_fault_while_reading_is_logged_and_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RequestParser, "on_url", fault)
    bench = Bench()

    bench.client.send(LIVE)

    assert bench.client.transport.is_closed
    assert "<HttpConnection [receiving header]> is closed after a fault" in caplog.text
    assert "KeyError" in caplog.text


@pytest.mark.parametrize("held", [False, True], ids=["answered at once", "answered later"])
def test_a_fault_while_writing_is_logged_and_closes_the_connection(
    held: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bench: Bench
) -> None:
    bench.engine.hold = held
    monkeypatch.setattr(bench.client.transport, "write", fault)

    bench.client.send(infer("a"))
    if held:
        bench.engine.release(0)

    assert bench.client.transport.is_closed
    assert "is closed after a fault" in caplog.text


@pytest.mark.pure_form
def test_a_client_does_not_wait_for_what_a_fault_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestParser, "receive", fault)

    async def run() -> bytes:
        frontend = HttpFrontend(FakeEngine(), HttpLimits())
        await frontend.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.port)
        writer.write(LIVE)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            received = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        await frontend.close()
        return received

    assert uvloop.run(run()) == b""


@pytest.mark.parametrize("sent", [infer(), LIVE, infer(size=5000), b"GET /v2/health/live HTTP/1.1\r\n\r\n"])
def test_connections_on_which_much_has_arrived_have_one_request_handled_in_a_round_of_the_loop(
    sent: bytes, bench: Bench
) -> None:
    greedy, modest = bench.client, bench.connect()
    greedy.waits_for_rounds = modest.waits_for_rounds = True

    greedy.send(sent * (READ_BYTES // len(sent)))
    modest.send(sent * 3)

    for turns in range(30):
        of_modest = min(turns // 2, 2)
        assert (len(greedy.responses), len(modest.responses)) == (1 + turns - of_modest, 1 + of_modest)
        bench.client.run_round()
    assert greedy.transport.is_paused
    assert not modest.transport.is_paused


def test_a_body_of_tiny_chunks_is_parsed_in_many_rounds(bench: Bench) -> None:
    bench.client.waits_for_rounds = True
    head = b"POST " + INFER.encode() + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    count = 60_000
    bench.client.send(head + b"1\r\n \r\n" * count + b'e\r\n{"inputs": []}\r\n0\r\n\r\n')

    rounds = 0
    while not bench.client.responses:
        bench.client.run_round()
        rounds += 1

    assert bench.client.responses[0].status == 200
    assert rounds >= count * len(b"1\r\n \r\n") // CHUNKED_PIECE_BYTES - 5  # as each read begins with one


def test_requests_beyond_the_limit_of_those_in_flight_wait() -> None:
    bench = Bench(HttpLimits(pipeline_max=4))
    bench.engine.hold = True

    bench.client.send(infer() * 20)
    assert len(bench.engine.tickets) == 4
    for number in range(16):
        bench.engine.release(number)
        bench.client.run_round()
        assert len(bench.engine.tickets) == min(number + 5, 20)


def test_requests_that_wait_are_not_begun_for_a_client_that_does_not_read(bench: Bench) -> None:
    bench.client.transport.is_blocked = True

    bench.client.send(infer() * 20)

    assert len(bench.engine.tickets) == 1
    bench.client.transport.unblock()
    bench.client.feed()
    bench.client.run_round()
    assert len(bench.engine.tickets) > 1


def test_connections_and_requests_are_counted(bench: Bench) -> None:
    other = bench.connect()

    bench.client.send(LIVE + infer("a") + b"nonsense\r\n\r\n")
    other.send(LIVE)
    frontend = bench.frontend
    assert (frontend.open_count, frontend.accepted_count, frontend.request_count) == (2, 2, 4)

    other.connection.connection_lost(None)
    assert (frontend.open_count, frontend.accepted_count, frontend.request_count) == (1, 2, 4)
