"""Real sockets: the stock clients, TLS, shutdown."""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import trustme
import uvloop
from tests.support.fake_engine import FakeEngine, identity_config
from tests.support.stock_clients import infer_input
from tritonclient.utils import triton_to_np_dtype

from charonia.core.dtypes import BY_WIRE
from charonia.core.errors import ServingError
from charonia.server.http.connection import HttpConnection
from charonia.server.http.frontend import HttpFrontend, HttpLimits

HOST = "127.0.0.1"
LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [uvloop.new_event_loop, asyncio.new_event_loop]


@asynccontextmanager
async def started(engine: FakeEngine, tls: ssl.SSLContext | None = None) -> AsyncIterator[HttpFrontend]:
    frontend = HttpFrontend(engine, HttpLimits())
    await frontend.start(HOST, 0, ssl=tls)
    try:
        yield frontend
    finally:
        await frontend.close()


@contextmanager
def serving(
    engine: FakeEngine,
    tls: ssl.SSLContext | None = None,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> Iterator[str]:
    """Serve in a thread; yield the address."""
    address: list[str] = []
    is_up = threading.Event()
    loop = new_loop()
    done = asyncio.Event()

    async def main() -> None:
        async with started(engine, tls) as frontend:
            address.append(f"{HOST}:{frontend.port}")
            is_up.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert is_up.wait(200)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(200)
        loop.close()


def engine_of(datatype: str, size: int) -> FakeEngine:
    return FakeEngine(models={"identity": identity_config(datatype=BY_WIRE[datatype], dims=(size,))})


def values(datatype: str) -> Any:
    if datatype == "BYTES":
        return np.array([[b"a", b"", "\u00e9".encode(), b"\x01"]], np.object_)
    if datatype == "BOOL":
        return np.array([[True, False, True, True]])
    return np.array([[0, 1, 2, 100]], triton_to_np_dtype(datatype))


@pytest.mark.parametrize(
    ("datatype", "binary"),
    [*((d, True) for d in BY_WIRE), *((d, False) for d in BY_WIRE if d not in ("FP16", "BF16"))],
)
def test_the_stock_client_gets_its_tensor_back(datatype: str, binary: bool) -> None:
    data = values(datatype)
    with serving(engine_of(datatype, 4)) as address, triton.InferenceServerClient(address) as client:
        tensor = infer_input(triton, "INPUT0", data, binary_data=binary)
        output = triton.InferRequestedOutput("OUTPUT0", binary_data=binary)

        result = client.infer("identity", [tensor], outputs=[output], request_id="9")

    received = result.as_numpy("OUTPUT0")
    assert result.get_response()["id"] == "9"
    if datatype == "BYTES" and not binary:
        received = np.array([[v if isinstance(v, bytes) else v.encode() for v in received[0]]], np.object_)
    assert received.tolist() == data.tolist()


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("size", [4, 1_000_000])
def test_large_and_compressed_tensors_come_back(size: int, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    data = np.arange(size, dtype=np.float32).reshape(1, size)
    tensor = infer_input(triton, "INPUT0", data)
    with (
        serving(engine_of("FP32", size), new_loop=new_loop) as address,
        triton.InferenceServerClient(address) as client,
    ):
        for request_coding, response_coding in [(None, None), ("gzip", "deflate"), ("deflate", "gzip")]:
            result = client.infer(
                "identity",
                [tensor],
                request_compression_algorithm=request_coding,
                response_compression_algorithm=response_coding,
            )

            assert np.array_equal(result.as_numpy("OUTPUT0"), data)


def test_the_stock_client_sees_the_server() -> None:
    engine = FakeEngine()
    with serving(engine) as address, triton.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("identity")
        assert not client.is_model_ready("other")
        assert client.get_server_metadata()["name"] == "charonia"
        assert client.get_model_metadata("identity", "1")["versions"] == ["1"]
        assert client.get_model_config("identity")["max_batch_size"] == 8
        assert client.get_inference_statistics() == {"model_stats": []}
        assert client.get_model_repository_index()[0]["state"] == "READY"
        assert client.get_system_shared_memory_status() == []
        client.load_model("a", config="{}", files={"file:1/x": b"y"})
        client.unload_model("a")
    assert engine.loads == [("a", "{}", {"1/x": b"y"})]
    assert engine.unloads == [("a", False)]


@pytest.mark.parametrize("new_loop", LOOPS)
def test_the_stock_asyncio_client_is_served_concurrently(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        engine = FakeEngine(delay_s=0.01)
        async with started(engine) as frontend, triton_aio.InferenceServerClient(f"{HOST}:{frontend.port}") as client:

            async def one(number: int) -> float:
                tensor = infer_input(triton_aio, "INPUT0", np.full((1, 1), number, np.float32))
                result = await client.infer("identity", [tensor])
                return float(result.as_numpy("OUTPUT0")[0, 0])

            assert await asyncio.gather(*(one(i) for i in range(50))) == [float(i) for i in range(50)]

    run(main(), new_loop)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("size", [4, 200_000])
def test_tls_clients_are_served(
    authority: trustme.CA, new_loop: Callable[[], asyncio.AbstractEventLoop], size: int
) -> None:
    server_side, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert(HOST).configure_cert(server_side)
    authority.configure_trust(client_side)
    data = np.ones((1, size), np.float32)

    async def main() -> None:
        async with (
            started(engine_of("FP32", size), server_side) as frontend,
            triton_aio.InferenceServerClient(f"{HOST}:{frontend.port}", ssl=True, ssl_context=client_side) as client,
        ):
            tensor = infer_input(triton_aio, "INPUT0", data)
            for _ in range(2):
                result = await client.infer("identity", [tensor])
                assert np.array_equal(result.as_numpy("OUTPUT0"), data)

    run(main(), new_loop)


def test_a_slow_client_is_found_by_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.server.http.frontend.SWEEP_S", 0.01)

    async def main() -> None:
        frontend = HttpFrontend(FakeEngine(), HttpLimits(header_timeout_s=0.05))
        await frontend.start(HOST, 0)
        reader, writer = await asyncio.open_connection(HOST, frontend.port)
        writer.write(b"GET /v2 HTTP/1.1\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await frontend.close()

    run(main(), uvloop.new_event_loop)


def test_a_fault_in_the_sweep_closes_its_connection_and_the_sweep_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def check_time(connection: HttpConnection, now_s: float) -> None:
        raise KeyError("secret")

    monkeypatch.setattr("charonia.server.http.frontend.SWEEP_S", 0.01)
    monkeypatch.setattr(HttpConnection, "check_time", check_time)

    async def main() -> None:
        frontend = HttpFrontend(FakeEngine(), HttpLimits())
        await frontend.start(HOST, 0)
        for _ in range(2):
            reader, writer = await asyncio.open_connection(HOST, frontend.port)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        await frontend.close()

    run(main(), uvloop.new_event_loop)
    assert "is closed after a fault" in caplog.text


def test_an_address_in_use_is_reported() -> None:
    async def main() -> None:
        async with started(FakeEngine()) as frontend:
            taken = f"^cannot listen on {HOST}:{frontend.port}: Address already in use"
            with pytest.raises(ServingError, match=taken) as caught:
                await HttpFrontend(FakeEngine(), HttpLimits()).start(HOST, frontend.port)
            assert caught.value.hint.startswith("another program listens there; --port 9000 takes ports 9000 to 9002")

    run(main(), uvloop.new_event_loop)


def run(main: Any, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(main, 30))
