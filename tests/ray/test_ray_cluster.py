"""Applications in a real Ray cluster of this machine, with stock clients."""

import http.client
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import yaml
from ray import serve
from tests.ray.cluster import ENVIRONMENT, Cluster, cluster, load, wait_until
from tests.support.models import COUNT, COUNT_PBTXT, identity_pbtxt, write_model
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

import charonia.ray

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.loop_faults]

IDENTITY = identity_pbtxt(dims=(4,), max_batch_size=8, more="dynamic_batching { }")
SLOW = IDENTITY.replace('"identity"', '"python"')
SLOW_MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.03)
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]
"""
CALLER = """
backend: "python"
input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "MODEL" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
CALLER_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "IN")
            model = pb_utils.get_input_tensor_by_name(request, "MODEL").as_numpy()[0].decode()
            answer = pb_utils.InferenceRequest(model_name=model, inputs=[text], requested_output_names=["OUT"]).exec()
            if answer.has_error():
                responses.append(pb_utils.InferenceResponse(error=answer.error()))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(answer, "OUT")]))
        return responses
"""
UPPER = CALLER.replace('input { name: "MODEL" data_type: TYPE_STRING dims: [ 1 ] }\n', "")
UPPER_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        arrays = [np.array([text[0].upper()], object) for text in texts]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]) for array in arrays]
"""
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray" / "serve.yaml"
QUICK = {
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 1.0,
    "look_back_period_s": 1.0,
    "metrics_interval_s": 0.2,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root / "own", "identity", b"", config=IDENTITY)
    write_model(root / "own", "slow", SLOW_MODEL, config=SLOW)
    write_model(root / "own", "count", COUNT, config=COUNT_PBTXT)
    write_model(root / "own", "caller", CALLER_MODEL, config=CALLER)
    write_model(root / "texts", "upper", UPPER_MODEL, config=UPPER)
    return root


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
        cluster(Path(folder)) as found,
    ):
        yield found


def run(models: Path, **options: Any) -> None:
    serve.run(charonia.ray.app(repository=str(models / "own"), num_cpus=0.5, elsewhere={"upper": "texts"}, **options))


@pytest.fixture(scope="module")
def application(ray_cluster: Cluster, models: Path) -> Cluster:
    run(models, options=["--strict-readiness=false"])
    return ray_cluster


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_stock_client_works_through_rays_proxy(application: Cluster, protocol: str) -> None:
    module = httpclient if protocol == "http" else grpcclient
    client = module.InferenceServerClient(getattr(application, protocol))
    array = np.arange(4, dtype=np.float32).reshape(1, 4)

    result = client.infer("identity", [infer_input(module, "INPUT0", array)], request_id="seven")

    assert client.is_server_ready()
    assert client.is_model_ready("identity")
    assert np.array_equal(result.as_numpy("OUTPUT0"), array)
    with pytest.raises(InferenceServerException, match="unknown model: 'nope'"):
        client.infer("nope", [infer_input(module, "INPUT0", array)])
    client.close()


def test_a_stream_of_grpc_goes_through_rays_proxy(application: Cluster) -> None:
    client = grpcclient.InferenceServerClient(application.grpc)
    arrived: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: arrived.put((result, error)))

    client.async_stream_infer("count", [infer_input(grpcclient, "UPTO", np.array([3], np.int32))])
    found = [arrived.get(timeout=200) for _ in range(3)]
    client.stop_stream()
    client.close()

    assert [error for _, error in found] == [None] * 3
    assert [int(result.as_numpy("NUMBER")[0]) for result, _ in found] == [0, 1, 2]


def test_server_sent_events_go_through_rays_proxy(application: Cluster) -> None:
    connection = http.client.HTTPConnection(application.http, timeout=200)
    connection.request("POST", "/v2/models/count/generate_stream", json.dumps({"UPTO": 3}))

    response = connection.getresponse()
    events = [json.loads(line[6:]) for line in response.read().decode().splitlines() if line.startswith("data: ")]
    connection.close()

    assert response.getheader("content-type", "").startswith("text/event-stream")
    assert [event["NUMBER"] for event in events] == [0, 1, 2]


def test_replicas_are_reached_at_ports_of_their_own(application: Cluster) -> None:
    (replica,) = charonia.ray.addresses()
    connection = http.client.HTTPConnection(application.http, timeout=200)
    connection.request("GET", "/addresses")

    assert json.loads(connection.getresponse().read()) == [replica]
    connection.close()
    with grpcclient.InferenceServerClient(replica["grpc"]) as client:
        assert client.is_server_live()


def test_addresses_are_found_by_a_program_that_is_set_up_for_throughput(application: Cluster) -> None:
    address = ray.get_runtime_context().gcs_address
    program = f"import ray, charonia.ray; ray.init({address!r}); print(charonia.ray.addresses())"
    environment = {**os.environ, **ENVIRONMENT, "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}

    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)

    assert found.stdout.splitlines()[-1:] == [str(charonia.ray.addresses())], found.stderr


def test_a_python_model_calls_a_model_of_another_application(
    application: Cluster, models: Path, ray_cluster: Cluster
) -> None:
    upper = charonia.ray.app(repository=str(models / "texts"), num_cpus=0.5)
    serve.run(upper, name="texts", route_prefix=None)
    with httpclient.InferenceServerClient(application.http) as client:

        def call(model: str) -> Any:
            inputs = [
                infer_input(httpclient, "IN", np.array([b"ahoy"], object)),
                infer_input(httpclient, "MODEL", np.array([model.encode()], object)),
            ]
            return client.infer("caller", inputs).as_numpy("OUT")[0]

        assert call("upper") == b"AHOY"
        with pytest.raises(InferenceServerException, match="'nope' is not ready"):
            call("nope")
        serve.delete("texts")
        with pytest.raises(InferenceServerException, match="upper"):
            call("upper")


def test_replicas_follow_the_load_and_no_request_is_lost(application: Cluster, models: Path) -> None:
    run(models, max_replicas=2, target_ongoing_requests=2, autoscaling=QUICK)
    with load(application.http, "slow", 8) as found:
        wait_until(lambda: len(charonia.ray.addresses()) == 2, "a second replica")
        before = found.statuses.total()
        wait_until(lambda: found.statuses.total() > before + 30, "requests to both")
    assert found.failures == []
    wait_until(lambda: len(charonia.ray.addresses()) == 1, "one replica without any load")

    with load(application.http, "slow", 8) as found:
        wait_until(lambda: len(charonia.ray.addresses()) == 2, "a second replica")
    with load(application.http, "slow", 1) as found:
        wait_until(lambda: len(charonia.ray.addresses()) == 1, "one replica")
        before = found.statuses.total()
        wait_until(lambda: found.statuses.total() > before + 10, "requests to one")
    assert found.failures == []


def test_a_replica_that_is_killed_is_replaced_and_the_others_answer(application: Cluster, models: Path) -> None:
    run(models, min_replicas=2)
    before = {each["replica"] for each in charonia.ray.addresses()}
    with load(application.http, "slow", 6) as found:
        wait_until(lambda: found.statuses.total() > 20, "requests")
        victim = next(process for process in psutil.process_iter(["cmdline"]) if is_replica(process))
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(
            lambda: len(now := {each["replica"] for each in charonia.ray.addresses()}) == 2 and now != before,
            "another replica",
        )
        count = found.statuses.total()
        wait_until(lambda: found.statuses.total() > count + 30, "requests afterwards")

    assert len(found.failures) <= 6
    assert {failure[:5] for failure in found.failures} <= {"500: "}  # what Ray answers for a replica that is gone


def is_replica(process: psutil.Process) -> bool:
    return any("ServeReplica:default" in part for part in process.info["cmdline"] or ())


def test_a_rolling_update_loses_no_request(application: Cluster, models: Path) -> None:
    with load(application.http, "slow", 4) as found:
        run(models, options=["--id=second", "--model-control-mode=auto"], models_per_replica=1)
        count = found.statuses.total()
        wait_until(lambda: found.statuses.total() > count + 20, "requests afterwards")

    with httpclient.InferenceServerClient(application.http) as client:
        assert client.get_server_metadata()["name"] == "second"
    assert found.failures == []


def test_a_replica_holds_as_many_multiplexed_models_as_it_may(application: Cluster) -> None:
    (replica,) = charonia.ray.addresses()  # as the update has left it: one model is held at a time
    array = np.zeros((1, 4), np.float32)
    with (
        httpclient.InferenceServerClient(application.http) as client,
        httpclient.InferenceServerClient(replica["http"]) as direct,
    ):

        def loaded() -> set[str]:
            return {model["name"] for model in direct.get_model_repository_index() if model.get("state") == "READY"}

        def infer(model: str) -> None:
            inputs = [infer_input(httpclient, "INPUT0", array)]
            client.infer(model, inputs, headers={"serve_multiplexed_model_id": model})

        infer("identity")
        assert "identity" in loaded()
        infer("slow")
        wait_until(lambda: "identity" not in loaded(), "only one model is held")
        assert "slow" in loaded()
        with pytest.raises(InferenceServerException, match="nope"):
            infer("nope")


def test_serve_deploy_takes_the_example(application: Cluster, models: Path, tmp_path: Path) -> None:
    config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    config["http_options"]["port"], config["grpc_options"]["port"] = (
        int(address.rpartition(":")[2]) for address in (application.http, application.grpc)
    )
    (deployed,) = config["applications"]
    smaller = {"repository": str(models / "own"), "num_cpus": 0.5, "min_replicas": 1, "max_replicas": 2}
    deployed["args"] |= smaller | {"address": "127.0.0.1", "options": ["--id=deployed"]}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    serve_command = Path(sys.executable).with_name("serve")

    command: list[str | Path] = [serve_command, "deploy", file, "--address", f"http://{application.dashboard}"]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    with httpclient.InferenceServerClient(application.http) as client:

        def name() -> str:
            try:
                found: str = client.get_server_metadata()["name"]
            except InferenceServerException:  # between the applications
                return ""
            return found

        wait_until(lambda: name() == "deployed", "the application of the file")
        array = np.zeros((1, 4), np.float32)
        result = client.infer("identity", [infer_input(httpclient, "INPUT0", array)])
    assert np.array_equal(result.as_numpy("OUTPUT0"), array)
