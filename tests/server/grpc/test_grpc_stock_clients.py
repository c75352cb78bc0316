"""The stock clients over real sockets: tritonclient (sync, aio, stream), grpcio's health and reflection."""

import asyncio
import gc
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import trustme
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.support.fake_engine import FakeEngine, identity_config
from tests.support.process import until
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, unavailable
from charonia.core.statistics import ModelStatistics
from charonia.server.grpc.connection import RETIRE_NOTICE_S, GrpcConnection
from charonia.server.grpc.frontend import GrpcFrontend, GrpcLimits
from charonia.server.grpc.http2 import PREFACE

WAIT_S = 200.0


class Running:
    """A front end on a loop in a thread of its own."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limits: GrpcLimits | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.engine = FakeEngine()
        self.loop = loop
        self.frontend: GrpcFrontend
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.do(self._start(limits, tls))
        self.address = f"127.0.0.1:{self.frontend.port}"

    async def _start(self, limits: GrpcLimits | None, tls: ssl.SSLContext | None) -> None:
        self.frontend = GrpcFrontend(self.engine, limits)
        await self.frontend.start("127.0.0.1", 0, ssl=tls)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def do(self, coroutine: Any) -> Any:
        """Run a coroutine on the front end's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def eventually(self, predicate: Callable[[], bool]) -> None:
        """Wait until something has happened on the front end's loop."""

        async def poll() -> None:
            await until(predicate)

        self.do(poll())

    def release(self, number: int) -> None:
        self.loop.call_soon_threadsafe(self.engine.release, number)

    def close(self) -> None:
        self.do(self.frontend.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_S)
        self.loop.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(limits: GrpcLimits | None = None, tls: ssl.SSLContext | None = None) -> Running:
        loop = import_module(request.param).new_event_loop()
        started.append(Running(loop, limits, tls))
        return started[-1]

    yield start
    for running in started:
        running.close()


@pytest.fixture
def server(serve: Callable[..., Running]) -> Running:
    return serve()


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with triton.InferenceServerClient(server.address) as client:
        yield client


def tensor(values: Any) -> Any:
    return infer_input(triton, "INPUT0", values)


ROW = np.arange(16, dtype="f4").reshape(1, 16)


def test_the_server_and_its_models_are_described(server: Running, client: Any) -> None:
    server.engine.statistics = [ModelStatistics("identity", "1", inference_count=3)]

    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("identity", "1")
    assert client.get_server_metadata().extensions == ["binary_tensor_data"]
    assert client.get_model_metadata("identity").inputs[0].shape == [-1, 16]
    assert client.get_model_config("identity").config.max_batch_size == 8
    assert client.get_inference_statistics("identity").model_stats[0].inference_count == 3
    assert [m.name for m in client.get_model_repository_index().models] == ["identity", "unloaded"]
    assert dict(client.get_system_shared_memory_status().regions) == {}


def test_a_model_is_loaded_and_unloaded(server: Running, client: Any) -> None:
    client.load_model("m", config="{}", files={"file:1/model.onnx": b"onnx"})
    client.unload_model("m", unload_dependents=True)
    server.engine.control_error = unavailable("not in this mode")

    assert server.engine.loads == [("m", "{}", {"1/model.onnx": b"onnx"})]
    assert server.engine.unloads == [("m", True)]
    with pytest.raises(InferenceServerException, match="not in this mode") as caught:
        client.load_model("m")
    assert caught.value.status() == "StatusCode.UNAVAILABLE"


@pytest.mark.parametrize("datatype", list(DataType), ids=lambda datatype: datatype.wire)
def test_every_datatype_goes_both_ways(server: Running, client: Any, datatype: DataType) -> None:
    values: Any = np.array([[0, 1, 2]]).astype(datatype.numpy)
    if datatype is DataType.BYTES:
        values = np.array([[b"", b"ab\0", "é".encode()]], object)
    elif datatype is DataType.BF16:
        values = np.array([[0.5, 1.0, -2.0]], ml_dtypes.bfloat16)
    server.engine.models["m"] = identity_config("m", datatype, (3,))

    result = client.infer("m", [tensor(values)], request_id="a")

    assert result.as_numpy("OUTPUT0").tolist() == values.tolist()
    assert result.get_response().id == "a"


def test_parameters_and_outputs_reach_the_engine(server: Running, client: Any) -> None:
    client.infer(
        "identity",
        [tensor(ROW)],
        outputs=[triton.InferRequestedOutput("OUTPUT0", class_count=2)],
        sequence_id=7,
        sequence_start=True,
        priority=2,
        timeout=5000,
        parameters={"mine": "x"},
    )

    request = server.engine.tickets[0].request
    assert (request.correlation_id, request.flags, request.priority, request.timeout_us) == (7, 1, 2, 5000)
    assert request.parameters == {"mine": "x"}
    assert request.outputs[0].classification == 2


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_calls_may_be_compressed_both_ways(serve: Callable[..., Running], algorithm: str) -> None:
    server = serve(GrpcLimits(compression_level=6))
    server.engine.models["m"] = identity_config("m", dims=(-1,))
    values = np.zeros((1, 100_000), "f4")

    with triton.InferenceServerClient(server.address) as client:
        result = client.infer("m", [tensor(values)], compression_algorithm=algorithm)

    assert result.as_numpy("OUTPUT0").shape == (1, 100_000)


def test_a_stream_carries_answers_and_errors(server: Running, client: Any) -> None:
    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: results.put((result, error)))
    for request_id, model in (("a", "identity"), ("b", "nope"), ("c", "identity")):
        client.async_stream_infer(model, [tensor(ROW)], request_id=request_id)
    answers = [results.get(timeout=WAIT_S) for _ in range(3)]
    client.stop_stream()

    assert [result.get_response().id for result, _ in answers if result is not None] == ["a", "c"]
    assert "'nope'" in str(answers[1][1])


async def test_the_asyncio_client_infers_and_streams(server: Running) -> None:
    async with triton_aio.InferenceServerClient(server.address) as client:
        result = await client.infer("identity", [tensor(ROW)])
        assert result.as_numpy("OUTPUT0").tolist() == ROW.tolist()

        async def requests() -> Any:
            for request_id in ("a", "b"):
                yield {"model_name": "identity", "inputs": [tensor(ROW)], "request_id": request_id}

        answers = [answer async for answer in client.stream_infer(requests())]
        assert [(result.get_response().id, error) for result, error in answers] == [("a", None), ("b", None)]


def test_health_mirrors_readiness(server: Running) -> None:
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(service="any")).status == 1
        server.engine.ready = False
        assert health.Check(health_pb2.HealthCheckRequest()).status == 2
        with pytest.raises(grpc.RpcError) as caught:
            next(health.Watch(health_pb2.HealthCheckRequest()))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_reflection_describes_the_services(server: Running) -> None:
    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = list(database.get_services())
        pool = DescriptorPool(database)
        service = pool.FindServiceByName("inference.GRPCInferenceService")

    assert "grpc.health.v1.Health" in services
    assert service.methods_by_name["ModelInfer"].input_type.full_name == "inference.ModelInferRequest"
    assert pool.FindMessageTypeByName("inference.ModelConfig").fields_by_name["max_batch_size"].number == 4


def test_tls_is_spoken(serve: Callable[..., Running], tmp_path: Any) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    root = tmp_path / "root.pem"
    authority.cert_pem.write_to_path(str(root))
    server = serve(tls=context)

    with triton.InferenceServerClient(server.address, ssl=True, root_certificates=str(root)) as client:
        assert client.infer("identity", [tensor(ROW)]).as_numpy("OUTPUT0").tolist() == ROW.tolist()


@pytest.mark.parametrize("first_bytes", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b""])
def test_other_clients_do_no_harm(server: Running, client: Any, first_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.frontend.port), timeout=WAIT_S) as other:
        other.sendall(first_bytes)
        if first_bytes:
            assert other.recv(1000).startswith(b"HTTP/1.1 505 ")

    assert client.is_server_live()


def test_a_lost_connection_is_let_go_at_once(server: Running) -> None:
    gc.collect()
    gc.disable()
    try:
        with socket.create_connection(("127.0.0.1", server.frontend.port), timeout=WAIT_S) as client:
            client.sendall(PREFACE + b"\0\0\0\4\0\0\0\0\0")
            assert client.recv(1000)
            server.eventually(lambda: connections() == 1)

        server.eventually(lambda: connections() == 0)
    finally:
        gc.enable()


def connections() -> int:
    return sum(type(each) is GrpcConnection for each in gc.get_objects())


def test_stopping_lets_a_call_finish(server: Running, client: Any) -> None:
    server.engine.hold = True
    done: Future[Any] = Future()
    client.async_infer("identity", [tensor(ROW)], callback=lambda result, error: done.set_result((result, error)))
    server.eventually(lambda: len(server.engine.tickets) == 1)

    server.loop.call_soon_threadsafe(server.frontend.stop_accepting)
    drained = asyncio.run_coroutine_threadsafe(server.frontend.drain(WAIT_S), server.loop)
    server.release(0)

    result, error = done.result(WAIT_S)
    assert error is None
    assert result.as_numpy("OUTPUT0").tolist() == ROW.tolist()
    drained.result(WAIT_S)


def test_stopping_lets_a_large_response_out(server: Running, client: Any) -> None:
    rows = np.zeros((400_000, 16), "f4")
    server.engine.hold = True
    done: Future[Any] = Future()
    client.async_infer("identity", [tensor(rows)], callback=lambda result, error: done.set_result((result, error)))
    server.eventually(lambda: len(server.engine.tickets) == 1)

    server.loop.call_soon_threadsafe(server.frontend.stop_accepting)
    time.sleep(2 * RETIRE_NOTICE_S)
    drained = asyncio.run_coroutine_threadsafe(server.frontend.drain(WAIT_S), server.loop)
    server.release(0)

    result, error = done.result(WAIT_S)
    assert error is None, str(error)
    assert result.as_numpy("OUTPUT0").nbytes == rows.nbytes
    drained.result(WAIT_S)


def test_the_stock_messages_and_ours_live_in_one_process(server: Running) -> None:
    from tritonclient.grpc import model_config_pb2

    from charonia.schema.pool import message_class

    ours: Any = message_class("inference.ModelConfig")
    assert ours is not model_config_pb2.ModelConfig
    assert ours.DESCRIPTOR.full_name == model_config_pb2.ModelConfig.DESCRIPTOR.full_name
    assert ModelConfig().max_batch_size == 0


def test_an_address_in_use_is_reported(server: Running) -> None:
    expected = f"^cannot listen on {server.address}: Address already in use"

    async def start_another() -> None:
        await GrpcFrontend(server.engine).start("127.0.0.1", server.frontend.port)

    with pytest.raises(ServingError, match=expected) as refused:
        server.do(start_another())

    assert "--grpc-port" in refused.value.hint
