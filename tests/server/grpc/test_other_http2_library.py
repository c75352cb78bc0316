"""The gRPC side works with another HTTP/2 library, hyper-h2, once it has a `ServerConnection`."""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import numpy as np
import pytest
from tests.server.grpc.conftest import Bench
from tests.server.grpc.test_grpc_unary import infer_message, infer_response
from tests.support.grpc_memory import frame
from tests.support.linked_engine import ServedFake

from charonia.server.grpc import connection, http2
from charonia.wire.grpc_status import Status

Headers = Sequence[tuple[bytes, bytes]]


class HyperConnection:
    """`http2.ServerConnection` on hyper-h2, which leaves flow control of bodies to its caller."""

    def __init__(self, settings: http2.Http2Settings) -> None:
        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self._h2 = h2.connection.H2Connection(config)
        self._h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: settings.concurrent_streams_max,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: settings.stream_window_bytes,
                h2.settings.SettingCodes.MAX_FRAME_SIZE: settings.frame_bytes_max,
                h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: settings.header_list_bytes_max,
            },
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(settings.connection_window_bytes - 65_535)
        self._bodies: dict[int, deque[memoryview]] = defaultdict(deque)
        self._trailers: dict[int, Headers] = {}
        self._closed: list[http2.Event] = []
        self.last_stream_id = 0
        self.waiting_bytes: Callable[[], int] = lambda: sum(map(self.unsent_bytes, self._bodies))

    def receive(self, data: bytes) -> list[http2.Event]:
        """Take bytes of the client."""
        try:
            found = self._h2.receive_data(data)
        except h2.exceptions.ProtocolError as error:
            raise http2.Http2Error(str(error), self._h2.data_to_send()) from error
        events = [event for each in found for event in self._translated(each)]
        for stream_id in list(self._bodies):
            self._send_on(stream_id)
        return events + self.events()

    def _translated(self, event: h2.events.Event) -> list[http2.Event]:
        match event:
            case h2.events.RequestReceived():
                ended = event.stream_ended is not None
                return [http2.RequestReceived(event.stream_id, tuple(event.headers), ended)]
            case h2.events.DataReceived():
                return [http2.DataReceived(event.stream_id, event.data, event.stream_ended is not None)]
            case h2.events.TrailersReceived():
                return [http2.TrailersReceived(event.stream_id, tuple(event.headers))]
            case h2.events.StreamReset():
                self._bodies.pop(event.stream_id, None)
                return [
                    http2.StreamReset(event.stream_id, event.error_code),
                    http2.StreamClosed(event.stream_id, event.error_code, None),
                ]
        return []

    def events(self) -> list[http2.Event]:
        """Return the streams that sending has closed."""
        closed, self._closed = self._closed, []
        return closed

    def output(self) -> bytes:
        """Return what is to be sent."""
        return self._h2.data_to_send()

    def has_output(self) -> bool:
        return True  # only `output` knows

    def respond(self, stream_id: int, head: Headers, body: Sequence[bytes | memoryview], trailers: Headers) -> None:
        """Send a whole response."""
        self.send_head(stream_id, head)
        self.send_data(stream_id, body)
        self.send_trailers(stream_id, trailers)

    def send_head(self, stream_id: int, head: Headers, *, end: bool = False) -> None:
        """Begin a response."""
        self._h2.send_headers(stream_id, head, end_stream=end)
        if end:
            self._closed.append(http2.StreamClosed(stream_id, 0, None))

    def send_data(self, stream_id: int, body: Sequence[bytes | memoryview]) -> None:
        """Send parts of a body as far as the windows reach, the rest later."""
        self._bodies[stream_id].extend(memoryview(part).cast("B") for part in body if len(part))
        self._send_on(stream_id)

    def send_trailers(self, stream_id: int, trailers: Headers) -> None:
        """End a response once its body is sent."""
        self._trailers[stream_id] = trailers
        self._send_on(stream_id)

    def _send_on(self, stream_id: int) -> None:
        body = self._bodies[stream_id]
        while body:
            room = min(self._h2.local_flow_control_window(stream_id), self._h2.max_outbound_frame_size)
            if room <= 0:
                return
            self._h2.send_data(stream_id, bytes(body[0][:room]))
            body[0] = body[0][room:]
            if not body[0]:
                body.popleft()
        if stream_id in self._trailers:
            self._h2.send_headers(stream_id, self._trailers.pop(stream_id), end_stream=True)
            del self._bodies[stream_id]
            self._closed.append(http2.StreamClosed(stream_id, 0, None))

    def reset(self, stream_id: int, code: int) -> None:
        """Close a stream."""
        self._bodies.pop(stream_id, None)
        self._h2.reset_stream(stream_id, code)

    def consume(self, stream_id: int, amount: int) -> None:
        """Make room for more of a request."""
        if amount:
            self._h2.acknowledge_received_data(amount, stream_id)

    def unsent_bytes(self, stream_id: int) -> int:
        """Return the bytes of a body that wait for the client."""
        return sum(map(len, self._bodies.get(stream_id, ())))

    def ping(self) -> None:
        """Ask whether the client is there."""
        self._h2.ping(b"charonia")

    def announce_shutdown(self) -> None:
        """Tell the client to open no more streams."""
        self._h2.ping(http2.SHUTDOWN_PING)

    def refuse_streams(self) -> None:
        """Refuse further streams."""

    def terminate(self, code: int, reason: bytes = b"") -> None:
        """End the connection."""
        self._h2.close_connection(code, reason or None, self.last_stream_id)


@pytest.fixture(autouse=True)
def hyper(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(connection, "ServerConnection", HyperConnection)
    yield
    assert not caplog.records


async def test_an_inference_is_answered(bench: Bench) -> None:
    response = await bench.client().call("ModelInfer", infer_message(id="a"))

    assert (response.headers[b":status"], response.status, response.is_closed) == (b"200", Status.OK, True)
    answer = infer_response(response.messages[0])
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == list(range(16))


async def test_a_large_body_waits_for_the_windows_of_the_client(bench: Bench) -> None:
    response = await bench.client().call("ModelInfer", infer_message(values=100_000))

    answer = infer_response(response.messages[0])
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == list(range(100_000))


async def test_a_stream_has_an_answer_for_each_request(bench: Bench) -> None:
    client = bench.client()
    stream_id = client.start("ModelStreamInfer")
    for number in range(3):
        client.http2.send_data(stream_id, frame(infer_message(id=str(number))))
        client.exchange()
        await client.settle()
    client.http2.end_stream(stream_id)
    client.exchange()
    await client.settle()

    assert len(client.responses[stream_id].messages) == 3
    assert client.responses[stream_id].status == Status.OK


async def test_a_request_is_cancelled_with_its_stream(bench: Bench) -> None:
    bench.engine.hold = True
    client = bench.client()
    stream_id = client.start("ModelInfer", infer_message())
    client.http2.reset_stream(stream_id)
    client.exchange()
    await client.settle()

    assert bench.engine.tickets[0].cancelled


async def test_errors_are_trailers(bench: Bench) -> None:
    response = await bench.client().call("/no/method")

    assert response.status == Status.UNIMPLEMENTED


async def _measure(library: Callable[[http2.Http2Settings], Any], calls: int = 1000) -> float:
    """Return the CPU time of a call in microseconds, client and engine included."""
    vars(connection)["ServerConnection"] = library
    engine = ServedFake()
    bench = Bench(engine, engine, None, None)
    client, message = bench.client(), infer_message(id="a")
    began_s = time.process_time()
    for _ in range(calls):
        await client.call("ModelInfer", message)
        client.responses.clear()
    await bench.frontend.close()
    return (time.process_time() - began_s) / calls * 1e6


if __name__ == "__main__":
    for _ in range(4):
        for made in (http2.ServerConnection, HyperConnection):
            print(f"{made.__module__}: {asyncio.run(_measure(made)):.0f} us")
