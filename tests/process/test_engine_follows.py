"""An engine that follows one that was killed: what requests had changed holds, what was in its memory is lost."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tests.process.test_guarded_server import ask, kill_engine
from tests.support.models import PYTHON_IDENTITY, identity_pbtxt, write_model
from tests.support.process import ServeProcess, eventually
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

SENT = np.arange(4, dtype=np.float32).reshape(1, 4)
TENSORS = {
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [4]}],
}
SEQUENCES = identity_pbtxt("python", dims=(4,)) + "\nsequence_batching { max_sequence_idle_microseconds: 60000000 }\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServeProcess]:
    folder = tmp_path / "models"
    for name in ("first", "second", "overridden"):
        write_model(folder, name, b"", config=identity_pbtxt("identity", dims=(4,)))
    write_model(folder, "counter", PYTHON_IDENTITY, config=SEQUENCES)
    with ServeProcess(
        folder,
        "--front-ends=2",
        "--model-control-mode=explicit",
        "--load-model=first",
        "--load-model=counter",
        "--allow-client-shm=true",
        f"--trace-config=triton,file={tmp_path / 'trace'}",
    ) as started:
        yield started


@pytest.fixture
def client(server: ServeProcess) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(server.grpc) as made:
        yield made


def ready(client: grpcclient.InferenceServerClient) -> set[str]:
    index = client.get_model_repository_index(as_json=True)
    return {model["name"] for model in index["models"] if model.get("state") == "READY"}


def config(backend: str, max_batch_size: int) -> str:
    return json.dumps({**TENSORS, "backend": backend, "max_batch_size": max_batch_size})


def sent() -> grpcclient.InferInput:
    return infer_input(grpcclient, "INPUT0", SENT)


def test_models_settings_and_regions_are_as_before(
    server: ServeProcess, client: grpcclient.InferenceServerClient
) -> None:
    client.unload_model("first")
    client.load_model("second")
    client.load_model("overridden", config=config("identity", 3))
    client.load_model("sent", config=config("python", 8), files={"file:1/model.py": PYTHON_IDENTITY.encode()})
    client.update_trace_settings("second", {"trace_rate": "7"})
    client.update_log_settings({"log_verbose_level": 2})
    key = f"/charonia-follows-{os.getpid()}"
    region = shm.create_shared_memory_region("region", key, 64)
    try:
        shm.set_shared_memory_region(region, [SENT])
        client.register_system_shared_memory("region", key, 64)

        for _ in range(2):  # the second one gets what the first one got
            kill_engine(server)

            assert eventually(lambda: ready(client) == {"second", "overridden", "sent", "counter"}), ready(client)
            assert client.get_model_config("overridden", as_json=True)["config"]["max_batch_size"] == 3
            assert client.get_model_config("sent", as_json=True)["config"]["backend"] == "python"
            trace = client.get_trace_settings("second", as_json=True)["settings"]["trace_rate"]["value"]
            assert trace == ["7"]
            assert client.get_log_settings(as_json=True)["settings"]["log_verbose_level"]["uint32_param"] == 2
            in_region = httpclient.InferInput("INPUT0", SENT.shape, "FP32")
            in_region.set_shared_memory("region", SENT.nbytes)
            with httpclient.InferenceServerClient(server.http) as over_http:
                answer = over_http.infer("second", [in_region])
            assert answer.as_numpy("OUTPUT0").tolist() == SENT.tolist()
    finally:
        shm.destroy_shared_memory_region(region)
    assert server.stop() == 0


def test_a_region_that_is_unregistered_stays_so(server: ServeProcess, client: grpcclient.InferenceServerClient) -> None:
    key = f"/charonia-follows-{os.getpid()}"
    region = shm.create_shared_memory_region("region", key, 64)
    try:
        client.register_system_shared_memory("region", key, 64)
        kill_engine(server)
        client.unregister_system_shared_memory("region")
        kill_engine(server)
    finally:
        shm.destroy_shared_memory_region(region)

    assert client.get_system_shared_memory_status(as_json=True) == {}
    # Its name is free, in every front end once that has found the new engine.
    assert eventually(lambda: ask(server.http, "GET", "/v2/systemsharedmemory/status")[1] == "[]")


def test_a_sequence_that_was_open_ends_with_an_error_that_names_it(
    server: ServeProcess, client: grpcclient.InferenceServerClient
) -> None:
    client.infer("counter", [sent()], sequence_id=41, sequence_start=True)
    kill_engine(server)

    with pytest.raises(InferenceServerException, match="sequence 41 of model 'counter' was lost"):
        client.infer("counter", [sent()], sequence_id=41)
    client.infer("counter", [sent()], sequence_id=41, sequence_start=True, sequence_end=True)
