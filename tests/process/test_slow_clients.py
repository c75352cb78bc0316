"""A server that stops while it sends to clients that read slowly, or not at all.

Each pause of a slow client is a small part of the time that a client may read nothing; the sum of its pauses is more
than that time. On a slow machine the tests take longer, with the same outcome.
"""

import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import ngh2
import pytest
from tests.support.grpc_memory import frame, request_headers
from tests.support.models import identity_pbtxt, write_model
from tests.support.process import SHAPES, ServeProcess, Shape
from tritonclient.grpc import service_pb2

from charonia.core.dtypes import DataType
from charonia.server.listening import GRACE_S

ELEMENTS = 24 * 2**20
PIECE_BYTES = 64 * 1024
PAUSE_S = 0.01
"""At most 6 MB/s: the last bytes are taken long after `GRACE_S`."""

RECEIVE_BUFFER_BYTES = 128 * 1024
PATIENCE_S = 120
INITIAL_WINDOW_SIZE = 4


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    config = identity_pbtxt(datatype=DataType.UINT8, dims=(-1,), max_batch_size=0)
    write_model(tmp_path, "echo", "", config=config)
    return tmp_path


def connect(address: str) -> socket.socket:
    """Return a connection that takes little at a time."""
    host, port = address.split(":")
    connection = socket.socket()
    connection.settimeout(PATIENCE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    connection.connect((host, int(port)))
    return connection


class HttpReader:
    """A large request over HTTP and its answer, `PIECE_BYTES` at a time."""

    def __init__(self, server: ServeProcess) -> None:
        self._connection = connect(server.http)
        tensor = {"name": "INPUT0", "datatype": "UINT8", "shape": [ELEMENTS]}
        document = {
            "inputs": [{**tensor, "parameters": {"binary_data_size": ELEMENTS}}],
            "parameters": {"binary_data_output": True},
        }
        text = json.dumps(document).encode()
        head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n"
        head += b"Content-Length: %d\r\n\r\n"
        self._connection.sendall(head % (len(text), len(text) + ELEMENTS) + text + bytes(ELEMENTS))
        self.received = 0

    def read(self) -> bool:
        """Take a piece; whether there may be more."""
        piece = self._connection.recv(PIECE_BYTES)
        self.received += len(piece)
        return bool(piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


class GrpcReader:
    """The same over gRPC: the whole connection is read, and its windows are opened by a piece at a time."""

    def __init__(self, server: ServeProcess) -> None:
        self._connection = connect(server.grpc)
        self._http2 = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(auto_window_update=False))
        self._http2.initiate_connection({INITIAL_WINDOW_SIZE: 2 * PIECE_BYTES})
        message = service_pb2.ModelInferRequest(model_name="echo")
        message.inputs.add(name="INPUT0", datatype="UINT8", shape=[ELEMENTS])
        message.raw_input_contents.append(bytes(ELEMENTS))
        self._stream_id = self._http2.send_request(request_headers("ModelInfer"))
        self._http2.send_data(self._stream_id, frame(message.SerializeToString()), end_stream=True)
        self.received = 0
        self.status = b""

    def read(self) -> bool:
        """Take a piece; whether there may be more."""
        if not self.status:  # with it, and the last GOAWAY, there is nothing more to say
            self._connection.sendall(self._http2.data_to_send())
        data = self._connection.recv(2 * PIECE_BYTES)
        if not data or self.status:
            return bool(data)
        self._http2.receive_data(data)
        taken = 0
        for event in self._http2.events():
            if isinstance(event, ngh2.DataReceived):
                taken += len(event.data)
            elif isinstance(event, ngh2.TrailersReceived):
                self.status = dict(event.headers)[b"grpc-status"]
        self.received += taken
        if taken and not self.status:
            self._http2.acknowledge_received_data(taken, self._stream_id)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


Reader = HttpReader | GrpcReader
READERS = pytest.mark.parametrize("ask", [HttpReader, GrpcReader], ids=["http", "grpc"])
IN_BOTH_SHAPES = pytest.mark.parametrize("shape", SHAPES)


@READERS
@IN_BOTH_SHAPES
def test_a_slow_client_gets_its_whole_answer_though_the_server_is_told_to_stop(
    repository: Path, ask: Callable[[ServeProcess], Reader], shape: Shape
) -> None:
    with ServeProcess(repository, f"--exit-timeout-secs={PATIENCE_S}", *shape) as server, ask(server) as reader:
        while not reader.received:
            assert reader.read()
        begin_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        while reader.read():
            time.sleep(PAUSE_S)
            # As long as bytes are on their way, they may end with the server and its container.
            if reader.received < ELEMENTS - 4 * RECEIVE_BUFFER_BYTES:
                assert server.process.poll() is None

        assert time.monotonic() - begin_s > GRACE_S
        assert reader.received > ELEMENTS
        assert server.wait() == 0


@READERS
@IN_BOTH_SHAPES
def test_a_client_that_takes_nothing_does_not_keep_a_server_that_is_told_to_stop(
    repository: Path, ask: Callable[[ServeProcess], Reader], shape: Shape
) -> None:
    with ServeProcess(repository, "--exit-timeout-secs=3600", *shape) as server, ask(server) as reader:
        while not reader.received:
            assert reader.read()

        assert server.stop() == 0
    assert "closing connections whose clients have not read all answers: 1" in server.log
