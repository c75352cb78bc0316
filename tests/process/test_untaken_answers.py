"""A gRPC client that sends requests but reads no answers, over a socket to a real server."""

import json
import socket
import time
import urllib.request
from pathlib import Path
from typing import Self

import ngh2
import pytest
from tests.support.grpc_memory import frame, request_headers
from tests.support.process import SHAPES, ServeProcess, Shape
from tritonclient.grpc import service_pb2

from charonia.server.grpc.limits import GrpcLimits

ECHO = """
backend: "identity"
max_batch_size: 0
input { name: "INPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_UINT8 dims: [ -1 ] }
"""
LARGE_BYTES = 24 * 2**20
LARGE_CALLS = GrpcLimits().unary_unsent_bytes_max // LARGE_BYTES + 1
SMALL_CALLS = 5
PATIENCE_S = 60
INITIAL_WINDOW_SIZE = 4
WINDOW_MAX = 2**31 - 1


class Client:
    """Speaks HTTP/2; its windows are closed until `take`."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self._http2 = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(auto_window_update=False))
        self._http2.initiate_connection({INITIAL_WINDOW_SIZE: 0})
        self.statuses: list[bytes] = []
        self._pongs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, size: int) -> None:
        """Send a request, and wait until the server has read it."""
        message = service_pb2.ModelInferRequest(model_name="echo")
        message.inputs.add(name="INPUT0", datatype="UINT8", shape=[size])
        message.raw_input_contents.append(bytes(size))
        stream_id = self._http2.send_request(request_headers("ModelInfer"))
        self._http2.send_data(stream_id, frame(message.SerializeToString()), end_stream=True)
        while self._http2.queued_body_size(stream_id):
            self._send()
            if self._http2.queued_body_size(stream_id):
                self._receive()
        before = self._pongs
        self._http2.ping()
        while self._pongs == before:
            self._send()
            self._receive()

    def take(self, answers: int) -> None:
        """Open all windows, and read until there are so many answers."""
        self._http2.update_settings({INITIAL_WINDOW_SIZE: WINDOW_MAX})
        self._http2.set_local_window_size(WINDOW_MAX)
        while len(self.statuses) < answers:
            self._send()
            self._receive()

    def _send(self) -> None:
        self._socket.sendall(self._http2.data_to_send())

    def _receive(self) -> None:
        data = self._socket.recv(2**20)
        assert data, "the server closed the connection"
        self._http2.receive_data(data)
        for event in self._http2.events():
            if isinstance(event, ngh2.TrailersReceived):
                self.statuses.append(dict(event.headers)[b"grpc-status"])
            elif isinstance(event, ngh2.PingAcknowledged):
                self._pongs += 1


def executed(server: ServeProcess) -> int:
    """Return how many requests the model has answered."""
    with urllib.request.urlopen(f"http://{server.http}/v2/models/echo/stats", timeout=PATIENCE_S) as answer:
        count: int = json.load(answer)["model_stats"][0]["inference_count"]
    return count


def wait_until_executed(server: ServeProcess, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while executed(server) < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("shape", SHAPES)
def test_calls_of_a_client_that_takes_no_answers_wait_until_it_does(tmp_path: Path, shape: Shape) -> None:
    (tmp_path / "echo" / "1").mkdir(parents=True)
    (tmp_path / "echo" / "config.pbtxt").write_text(ECHO)
    with ServeProcess(tmp_path, "--grpc-http2-max-ping-strikes=0", *shape) as server, Client(server.grpc) as client:
        for number in range(LARGE_CALLS):
            client.ask(LARGE_BYTES)
            wait_until_executed(server, number + 1)
        for _ in range(SMALL_CALLS):
            client.ask(1000)
        assert executed(server) == LARGE_CALLS

        client.take(LARGE_CALLS + SMALL_CALLS)

        assert client.statuses == [b"0"] * (LARGE_CALLS + SMALL_CALLS)
        assert executed(server) == LARGE_CALLS + SMALL_CALLS
