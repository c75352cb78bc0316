"""The client against Triton itself, where `bench/peers.sh` has installed it."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.client_servers import ask
from tests.support.models import PYTHON_IDENTITY, identity_pbtxt, streaming, write_model
from tests.support.ports import free_port

from charonia.client import Client, ClientError, Failure, SharedMemoryRegion
from charonia.core.dtypes import DataType
from charonia.core.errors import Code
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.tools.perf.worker import connect
from charonia.wire.answer import Answer
from charonia.wire.grpc_codec import decode_response as grpc_response
from charonia.wire.http_codec import decode_response as http_response
from charonia.wire.transport import RequestForm, SharedTensor

TRITON = Path(os.environ.get("CHARONIA_PEERS", Path.home() / ".cache" / "charonia-peers")) / "bin" / "tritonserver"
START_SECONDS_MAX = 200.0


def is_ready(url: str) -> bool:
    with Client(url) as client:
        return client.server_ready()


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if not TRITON.exists():
        pytest.skip("Triton is not installed: bench/peers.sh installs it")
    folder = tmp_path_factory.mktemp("triton")
    for name, datatype in (("numbers", DataType.FP32), ("text", DataType.BYTES)):
        config = identity_pbtxt("python", datatype, (-1,), max_batch_size=0)
        write_model(folder, name, PYTHON_IDENTITY, config=config)
    decoupled = "model_transaction_policy { decoupled: true }"
    config = identity_pbtxt("python", DataType.INT32, (-1,), max_batch_size=0, more=decoupled)
    write_model(folder, "repeat", streaming("array.reshape(-1, 1)"), config=config)
    http, grpc = free_port(), free_port()
    command = [
        *(str(TRITON), f"--model-repository={folder}", "--model-control-mode=explicit", "--load-model=*"),
        *("--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--allow-metrics=false"),
        *(f"--http-port={http}", f"--grpc-port={grpc}"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = {"http": f"http://127.0.0.1:{http}", "grpc": f"grpc://127.0.0.1:{grpc}"}
    try:
        give_up = time.monotonic() + START_SECONDS_MAX
        for url in found.values():  # Triton opens one after the other
            while not is_ready(url):
                assert process.poll() is None, "Triton did not start"
                assert time.monotonic() < give_up, "Triton did not become ready"
                time.sleep(0.1)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(200)


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, urls: dict[str, str]) -> Iterator[Client]:
    with Client(urls[request.param]) as client:
        yield client


def test_tensors_go_there_and_back(client: Client) -> None:
    array = np.arange(100_000, dtype=np.float32)

    result = client.infer("numbers", {"INPUT0": array}, ["OUTPUT0"], request_id="a", parameters={"tag": "x"})
    listed = client.infer("numbers", {"INPUT0": [1, 2, 3]})
    text = client.infer("text", {"INPUT0": ["ä", b"\x00"]})

    assert np.array_equal(result["OUTPUT0"], array)
    assert result.id == "a"
    assert listed["OUTPUT0"].tolist() == [1.0, 2.0, 3.0]
    assert text["OUTPUT0"].tolist() == ["ä".encode(), b"\x00"]


def test_classes_come_instead_of_an_output(client: Client) -> None:
    result = client.infer("numbers", {"INPUT0": np.array([1, 9, 5], np.float32)}, {"OUTPUT0": 2})

    assert result["OUTPUT0"].tolist() == [b"9.000000:1", b"5.000000:2"]


def test_the_server_and_its_models_describe_themselves(client: Client) -> None:
    client.infer("numbers", {"INPUT0": [1.0]})

    statistics: Any = client.statistics("numbers")
    config: Any = client.model_config("numbers")
    assert client.server_live()
    assert client.server_metadata().name == "triton"
    assert client.model_metadata("numbers").inputs[0].shape == (-1,)
    assert statistics[0]["name"] == "numbers"
    assert statistics[0]["inference_stats"]["success"]["count"] >= 1
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert {entry.name for entry in client.repository_index(ready=True)} == {"numbers", "text", "repeat"}
    assert client.model_ready("numbers")
    assert not client.model_ready("nothing")


def test_errors_come_with_the_words_of_the_server(client: Client) -> None:
    with pytest.raises(ClientError, match="unknown model") as caught:
        client.infer("nothing", {"INPUT0": np.zeros(1, np.float32)})
    assert caught.value.failure is Failure.STATUS
    assert caught.value.code in (Code.NOT_FOUND, Code.INVALID_ARG, Code.UNAVAILABLE)

    with pytest.raises(ClientError, match=r"data-type|datatype|data type"):
        client.infer("numbers", {"INPUT0": np.zeros(1, np.int8)})


def test_models_are_unloaded_and_loaded(client: Client) -> None:
    client.unload_model("text")
    give_up = time.monotonic() + 200
    while client.model_ready("text") and time.monotonic() < give_up:
        time.sleep(0.05)
    assert not client.model_ready("text")

    client.load_model("text")

    assert client.model_ready("text")


def test_regions_of_shared_memory_are_registered_and_forgotten(client: Client) -> None:
    memory = SharedMemory(create=True, size=64)
    try:
        region = SharedMemoryRegion("charonia-test", f"/{memory.name.lstrip('/')}", 64)
        client.register_shared_memory(region)
        assert client.shared_memory_regions() == [region]
        client.unregister_shared_memory("charonia-test")
        assert client.shared_memory_regions() == []
    finally:
        memory.close()
        memory.unlink()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tensors_lie_in_shared_memory(urls: dict[str, str], protocol: str) -> None:
    memory = SharedMemory(create=True, size=64)
    given, got = (np.ndarray(8, np.float32, memory.buf, offset) for offset in (0, 32))
    given[:] = np.arange(8)
    form = RequestForm(
        shared_inputs={"INPUT0": SharedTensor("charonia-test", 32)},
        shared_outputs={"OUTPUT0": SharedTensor("charonia-test", 32, 32)},
    )
    request = InferRequest("numbers", {"INPUT0": Tensor("INPUT0", DataType.FP32, given)})

    async def send(request: InferRequest) -> Answer:
        transport = connect(urls[protocol])
        answer = await ask(transport, request, form)
        await transport.close()
        return answer

    try:
        with Client(urls[protocol]) as client:
            client.register_shared_memory(SharedMemoryRegion("charonia-test", f"/{memory.name.lstrip('/')}", 64))
            answer = asyncio.run(send(request))
            client.unregister_shared_memory("charonia-test")

        assert answer.message == ""
        assert got.tolist() == list(range(8))
        response = http_response(answer.body, answer.json_bytes) if protocol == "http" else grpc_response(answer.body)
        assert response.outputs == []
    finally:
        del given, got, request
        memory.close()
        memory.unlink()


def test_a_decoupled_model_streams(urls: dict[str, str]) -> None:
    with Client(urls["grpc"]) as client:
        values = [int(r["OUTPUT0"][0]) for r in client.stream_infer("repeat", {"INPUT0": [3, 1, 2]})]

        assert values == [3, 1, 2]
        assert list(client.stream_infer("repeat", {"INPUT0": np.zeros(0, np.int32)})) == []
        with pytest.raises(ClientError, match="unknown model"):
            list(client.stream_infer("nothing", {"INPUT0": np.zeros(1, np.int32)}))
