"""The public client, asynchronous and blocking, over both protocols."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from tests.support.client_servers import Served, served
from tests.support.fake_engine import identity_config
from tests.support.process import until

from charonia.client import AsyncClient, Client, ClientError, Failure, SequencePart, async_client
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.metadata import ModelIndexEntry, ModelState, TensorMetadata
from charonia.core.response import InferResponse
from charonia.core.statistics import ModelStatistics
from charonia.core.tensor import Tensor

ROW = np.arange(16, dtype=np.float32).reshape(1, 16)

protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


@asynccontextmanager
async def connected(protocol: str) -> AsyncIterator[tuple[Served, AsyncClient]]:
    async with served() as server, AsyncClient(server.urls[protocol]) as client:
        yield server, client


@protocols
async def test_arrays_go_there_and_back(protocol: str) -> None:
    async with connected(protocol) as (_, client):
        result = await client.infer("identity", {"INPUT0": ROW}, request_id="a", version="1")

        assert np.array_equal(result["OUTPUT0"], ROW)
        assert result.datatypes == {"OUTPUT0": "FP32"}
        assert (result.model_name, result.model_version, result.id) == ("identity", "1", "a")
        assert repr(result) == "InferResult('identity' v1: OUTPUT0 FP32 [1, 16])"


@protocols
@pytest.mark.parametrize("datatype", [d for d in DataType if d not in (DataType.BYTES, DataType.BF16)])
async def test_the_dtype_of_an_array_decides_on_the_datatype(protocol: str, datatype: DataType) -> None:
    async with connected(protocol) as (_, client):
        array = np.array([[0, 1, 1]]).astype(datatype.numpy)

        result = await client.infer("identity", {"INPUT0": array})

        assert result.datatypes["OUTPUT0"] == datatype.wire
        assert result["OUTPUT0"].dtype == array.dtype
        assert np.array_equal(result["OUTPUT0"], array)


@protocols
async def test_text_and_bytes_come_back_as_bytes(protocol: str) -> None:
    async with connected(protocol) as (_, client):
        for given in ([["ä", b"\x00\xff\x00"]], np.array([["ä", b"\x00\xff\x00"]], object)):
            result = await client.infer("text", {"INPUT0": given})

            assert result["OUTPUT0"].tolist() == [["ä".encode(), b"\x00\xff\x00"]]
        result = await client.infer("text", {"INPUT0": b"one\x00"})
        assert result["OUTPUT0"].tolist() == [[b"one\x00"]]


@protocols
async def test_bfloat16_is_named_and_comes_back_as_float32(protocol: str) -> None:
    async with connected(protocol) as (server, client):
        server.engine.models["bf16"] = identity_config("bf16", DataType.BF16, (2,))
        array = np.array([[1.5, -2.0]], np.float32)

        for given in ((array, "BF16"), array.tolist()):
            result = await client.infer("bf16", {"INPUT0": given})

            assert result.datatypes["OUTPUT0"] == "BF16"
            assert result["OUTPUT0"].dtype == np.float32
            assert np.array_equal(result["OUTPUT0"], array)


@protocols
async def test_lists_take_the_datatype_of_the_model_which_is_asked_for_once(protocol: str) -> None:
    async with connected(protocol) as (server, client):
        first = await client.infer("identity", {"INPUT0": [list(range(16))]})
        known = server.engine.models["identity"]
        server.engine.models["identity"] = identity_config(datatype=DataType.INT64)
        second = await client.infer("identity", {"INPUT0": [list(range(16))]})
        server.engine.models["identity"] = known

        assert first.datatypes == second.datatypes == {"OUTPUT0": "FP32"}
        assert np.array_equal(first["OUTPUT0"], ROW)


@protocols
async def test_a_request_says_all_that_the_caller_says(protocol: str) -> None:
    async with connected(protocol) as (server, client):
        await client.infer(
            "identity",
            {"INPUT0": ROW},
            ["OUTPUT0"],
            parameters={"priority": 3, "timeout": 1000, "tag": "x", "flag": True},
            sequence=SequencePart(9, start=True, end=True),
        )

        request = server.engine.tickets[0].request
        assert [output.name for output in request.outputs] == ["OUTPUT0"]
        assert (request.priority, request.timeout_us) == (3, 1000)
        assert request.parameters == {"tag": "x", "flag": True}
        assert (request.correlation_id, request.flags) == (9, 3)


@protocols
async def test_classes_come_instead_of_an_output(protocol: str) -> None:
    async with connected(protocol) as (_, client):
        result = await client.infer("identity", {"INPUT0": ROW}, {"OUTPUT0": 2})

        assert result["OUTPUT0"].tolist() == [[b"15.000000:15", b"14.000000:14"]]


@protocols
async def test_parameters_of_a_response_are_given(protocol: str) -> None:
    async with connected(protocol) as (server, client):
        output = [Tensor("OUTPUT0", DataType.FP32, ROW)]
        parameters: dict[str, Any] = {"a": 1, "b": "x", "c": True, "d": 2.5}
        server.engine.outcomes.append([(InferResponse("identity", "1", "", output, parameters), True)])

        result = await client.infer("identity", {"INPUT0": ROW})

        assert result.parameters == parameters


@protocols
async def test_the_server_and_its_models_describe_themselves(protocol: str) -> None:
    async with connected(protocol) as (server, client):
        server.engine.statistics = [ModelStatistics("identity", "1", inference_count=5)]

        assert await client.server_live()
        assert await client.server_ready()
        assert await client.model_ready("identity")
        assert not await client.model_ready("nothing")
        assert (await client.server_metadata()).name == "charonia"
        metadata = await client.model_metadata("identity")
        assert metadata.inputs == (TensorMetadata("INPUT0", DataType.FP32, (-1, 16)),)
        config: Any = await client.model_config("identity")
        assert config["max_batch_size"] == 8
        assert config["input"][0]["name"] == "INPUT0"
        assert config["input"][0]["data_type"] == "TYPE_FP32"
        statistics: Any = await client.statistics("identity")
        assert statistics[0]["inference_count"] == 5
        assert statistics[0]["inference_stats"]["queue"] == {"count": 0, "ns": 0}
        assert await client.repository_index(ready=True) == [ModelIndexEntry("identity", "1", ModelState.READY)]
        assert len(await client.repository_index()) == 2
        server.engine.ready = False
        assert not await client.server_ready()


@protocols
async def test_models_are_loaded_and_unloaded(protocol: str) -> None:
    async with connected(protocol) as (server, client):
        await client.load_model("m")
        await client.load_model("m", config={"backend": "x"}, files={"1/model.onnx": b"\x00\xff"})
        await client.unload_model("m", unload_dependents=True)

        assert server.engine.loads[0][:2] == ("m", None)
        name, config, files = server.engine.loads[1]
        assert (name, config, dict(files or {})) == ("m", '{"backend": "x"}', {"1/model.onnx": b"\x00\xff"})
        assert server.engine.unloads == [("m", True)]


@protocols
async def test_errors_have_the_code_of_the_server(protocol: str) -> None:
    async with connected(protocol) as (_, client):
        with pytest.raises(ClientError) as caught:
            await client.infer("nothing", {"INPUT0": ROW})

        assert isinstance(caught.value, ServingError)
        assert (caught.value.code, caught.value.failure) == (Code.NOT_FOUND, Failure.STATUS)
        assert str(caught.value) == "Request for unknown model: 'nothing' is not found"
        assert caught.value.status == {"http": 404, "grpc": 5}[protocol]


@protocols
async def test_a_request_that_takes_too_long_is_given_up(protocol: str) -> None:
    async with connected(protocol) as (server, client):
        server.engine.hold = True

        while not server.engine.tickets:  # a machine that stands still lets a request be late before it arrives
            # Over gRPC the server knows the deadline too, and its answer may be the first to say so.
            with pytest.raises(ClientError, match=r"did not respond (within|in time)") as caught:
                await client.infer("identity", {"INPUT0": ROW}, timeout_s=0.05)
            assert caught.value.failure is Failure.TIMEOUT

        while not server.engine.tickets[0].cancelled:
            await asyncio.sleep(0)


@protocols
async def test_cancelling_the_task_cancels_the_request(protocol: str) -> None:
    async with connected(protocol) as (server, client):
        server.engine.hold = True
        task = asyncio.ensure_future(client.infer("identity", {"INPUT0": ROW}))
        while not server.engine.tickets:
            await asyncio.sleep(0)

        task.cancel()
        server.engine.release(0)  # the answer may cross the cancellation
        with pytest.raises(asyncio.CancelledError):
            await task

        server.engine.hold = False
        assert (await client.infer("identity", {"INPUT0": ROW})).outputs


@protocols
async def test_a_server_that_is_not_there_is_not_live(protocol: str) -> None:
    async with served() as server:
        urls = server.urls
    async with AsyncClient(urls[protocol]) as client:
        assert not await client.server_live()
        with pytest.raises(ClientError, match="no connection to") as caught:
            await client.server_metadata()
        assert (caught.value.code, caught.value.failure) == (Code.UNAVAILABLE, Failure.REFUSED)


@pytest.mark.parametrize(
    "body", [b"[]", b'{"outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [2], "data": [1]}]}']
)
async def test_an_answer_that_is_none_of_the_protocol_is_a_failure_of_the_request(body: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length or b"0"))
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            for call in (client.infer("identity", {"INPUT0": ROW}), client.model_metadata("identity")):
                with pytest.raises(ClientError) as caught:
                    await call
                assert (caught.value.failure, caught.value.code) == (Failure.GARBLED, Code.INTERNAL)


def answers(count: int) -> list[tuple[Any, bool]]:
    responses = [
        InferResponse("identity", "1", "", [Tensor("OUTPUT0", DataType.INT32, np.array([n], np.int32))])
        for n in range(count)
    ]
    return [(response, response is responses[-1]) for response in responses]


async def test_a_stream_gives_its_responses_in_order() -> None:
    async with connected("grpc") as (server, client):
        server.engine.outcomes.append(answers(5))

        found = [int(r["OUTPUT0"][0]) async for r in client.stream_infer("identity", {"INPUT0": ROW})]

        assert found == [0, 1, 2, 3, 4]


async def test_a_stream_that_fails_gives_its_responses_and_then_the_error() -> None:
    async with connected("grpc") as (server, client):
        server.engine.outcomes.append([(answers(1)[0][0], False), (ServingError(Code.INTERNAL, "broke"), True)])
        stream = client.stream_infer("identity", {"INPUT0": ROW})

        assert int((await anext(stream))["OUTPUT0"][0]) == 0
        with pytest.raises(ClientError, match="broke"):
            await anext(stream)


async def test_leaving_a_stream_cancels_its_request() -> None:
    async with connected("grpc") as (server, client):
        server.engine.hold = True
        stream = client.stream_infer("identity", {"INPUT0": ROW})
        first = asyncio.ensure_future(anext(stream))
        while not server.engine.tickets:
            await asyncio.sleep(0)
        server.engine.tickets[0].answer(answers(2)[0][0], False)
        await first

        await stream.aclose()
        while not server.engine.tickets[0].cancelled:
            await asyncio.sleep(0)


async def test_responses_that_are_not_taken_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_client, "UNREAD_RESPONSES_MAX", 3)

    async with connected("grpc") as (server, client):
        server.engine.outcomes.append(answers(1000))
        stream = client.stream_infer("identity", {"INPUT0": ROW})

        taken = [await anext(stream) for _ in range(3)]
        with pytest.raises(ClientError, match="3 responses were not taken"):
            await anext(stream)

        assert [int(response["OUTPUT0"][0]) for response in taken] == [0, 1, 2]


async def test_streaming_over_http_is_refused() -> None:
    async with connected("http") as (_, client):
        with pytest.raises(ServingError, match="streaming is not possible over HTTP") as caught:
            await anext(client.stream_infer("identity", {"INPUT0": ROW}))
        assert caught.value.code is Code.UNSUPPORTED


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://x:1", "localhost:0", "localhost:70000", "grpc://x:1/path", "a b"]
)
def test_a_url_that_is_none_is_said_so(url: str) -> None:
    with pytest.raises(ServingError) as caught:
        Client(url)

    assert caught.value.code is Code.INVALID_ARG


class Background:
    """A fake engine served from a thread."""

    def __enter__(self) -> "Background":
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._ready.wait(200)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        async with served() as self.server:
            self._ready.set()
            await self._end.wait()


@protocols
def test_the_blocking_client_does_what_the_asynchronous_one_does(protocol: str) -> None:
    with Background() as background, Client(background.server.urls[protocol]) as client:
        assert client.server_live()
        assert client.server_ready()
        assert client.model_ready("identity")
        assert client.server_metadata().name == "charonia"
        assert client.model_metadata("identity").name == "identity"
        assert client.model_config("identity")["name"] == "identity"
        assert client.statistics() == []
        assert len(client.repository_index()) == 2
        client.load_model("m")
        client.unload_model("m")
        result = client.infer("identity", {"INPUT0": [list(range(16))]})
        assert np.array_equal(result["OUTPUT0"], ROW)
        with pytest.raises(ClientError, match="unknown model"):
            client.infer("nothing", {"INPUT0": ROW})


def test_the_blocking_client_streams() -> None:
    with Background() as background, Client(background.server.urls["grpc"]) as client:
        background.server.engine.outcomes += [answers(3), answers(3)]

        whole = [int(r["OUTPUT0"][0]) for r in client.stream_infer("identity", {"INPUT0": ROW})]
        left = next(client.stream_infer("identity", {"INPUT0": ROW}))

        assert whole == [0, 1, 2]
        assert int(left["OUTPUT0"][0]) == 0


@protocols
def test_threads_share_a_blocking_client(protocol: str) -> None:
    with Background() as background, Client(background.server.urls[protocol]) as client:
        found: list[float] = []

        def work(number: int) -> None:
            inputs = {"INPUT0": np.full((1, 16), number, np.float32)}
            found.extend(float(client.infer("identity", inputs)["OUTPUT0"][0, 0]) - number for _ in range(20))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert found == [0.0] * 160


def test_closing_a_blocking_client_wakes_who_waits_and_refuses_who_comes() -> None:
    with Background() as background:
        background.server.engine.hold = True
        client = Client(background.server.urls["http"])
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                client.infer("identity", {"INPUT0": ROW})
            except ClientError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        while not background.server.engine.tickets:
            pass
        client.close()
        client.close()
        thread.join()

        assert [str(error) for error in caught] == ["the client was closed"]
        with pytest.raises(ClientError, match="the client was closed"):
            client.server_live()


def test_a_forgotten_iterator_is_given_up_also_when_the_collector_finds_it_in_the_thread_of_the_client() -> None:
    class Holder:
        pass

    def forget(client: Client) -> None:
        holder: Any = Holder()
        holder.itself = holder
        holder.responses = client.stream_infer("identity", {"INPUT0": ROW})
        next(holder.responses)

    async def collect() -> None:
        gc.collect()

    with Background() as background, Client(background.server.urls["grpc"], timeout_s=200) as client:
        background.server.engine.outcomes.append(answers(3))
        forget(client)
        asyncio.run_coroutine_threadsafe(collect(), client._loop).result(200)

        assert client.server_live()


def test_a_blocking_client_may_be_closed_by_two_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client("localhost:1")
    both_are_at_it = threading.Event()
    caught: list[BaseException] = []
    calls: list[int] = []

    async def close() -> None:
        calls.append(1)
        if len(calls) == 2:
            both_are_at_it.set()
            await asyncio.sleep(60)
        await until(lambda: both_are_at_it.is_set())

    def work() -> None:
        try:
            client.close()
        except ClientError as error:
            caught.append(error)

    monkeypatch.setattr(client._client, "close", close)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert caught == []
