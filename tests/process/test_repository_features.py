"""Namespaces, repository agents, host policies and models on demand, over the wire with the stock clients."""

import os
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tests.support.models import PYTHON_IDENTITY, answering, chain_pbtxt, identity_pbtxt, mlp, write_model
from tests.support.process import ServeProcess
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

CORES = "np.array([[sum(1 << core for core in os.sched_getaffinity(0)), 0, 0, 0]], np.float32)"
WHERE = answering(CORES, imports="import os")
CALLING = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            call = pb_utils.InferenceRequest(model_name="step", requested_output_names=["OUTPUT0"], inputs=[tensor])
            response = call.exec()
            answers.append(pb_utils.InferenceResponse(response.output_tensors(), response.error()))
        return answers
"""
CONFIG = identity_pbtxt("python", dims=(4,))
ENSEMBLE = chain_pbtxt("step", dims=(4,))


@contextmanager
def clients(server: ServeProcess) -> Iterator[tuple[Any, Any]]:
    with (
        http_client.InferenceServerClient(server.http) as http,
        grpc_client.InferenceServerClient(server.grpc) as grpc,
    ):
        yield http, grpc


def infer(client: Any, model: str) -> list[float]:
    library = grpc_client if isinstance(client, grpc_client.InferenceServerClient) else http_client
    tensor = infer_input(library, "INPUT0", np.array([[1, 2, 3, 4]], np.float32))
    values: list[float] = client.infer(model, [tensor]).as_numpy("OUTPUT0").ravel().tolist()
    return values


def write_namespaces(folder: Path) -> tuple[Path, Path]:
    one, two = folder / "one", folder / "two"
    for repository, amount in ((one, 10), (two, 20)):
        write_model(repository, "step", answering(f"array + {amount}"), config=CONFIG)
        write_model(repository, f"ensemble_{repository.name}", "", config=ENSEMBLE)
    write_model(two, "alone", PYTHON_IDENTITY, config=CONFIG)
    return one, two


def test_models_of_one_name_live_in_several_repositories(tmp_path: Path) -> None:
    one, two = write_namespaces(tmp_path)

    with (
        ServeProcess(one, f"--model-repository={two}", "--model-namespacing=true") as server,
        clients(server) as (h, g),
    ):
        for client in (h, g):
            assert infer(client, "ensemble_one") == [11, 12, 13, 14]
            assert infer(client, "ensemble_two") == [21, 22, 23, 24]
            assert infer(client, "alone") == [1, 2, 3, 4]
            with pytest.raises(InferenceServerException, match="There are 2 models named 'step'"):
                infer(client, "step")
        assert infer(g, f"{two}/step")[0] == 21
        quoted = urllib.parse.quote(f"{two}/step", safe="")
        assert server.ask(f"/v2/models/{quoted}")["name"] == "step"
        names = [(entry["name"], entry["state"]) for entry in h.get_model_repository_index()]
        assert sorted(names) == sorted((n, "READY") for n in ("alone", "ensemble_one", "ensemble_two", "step", "step"))
        page = server.metrics_page()
        assert f'nv_inference_request_success{{model="step",namespace="{one}",version="1"}} 2' in page
        steps = h.get_model_config("ensemble_one")["ensemble_scheduling"]["step"]
        assert [step["model_namespace"] for step in steps] == [str(one)]


def test_explicit_loads_mean_all_models_of_the_name(tmp_path: Path) -> None:
    one, two = write_namespaces(tmp_path)
    arguments = (f"--model-repository={two}", "--model-namespacing=1", "--model-control-mode=explicit")

    with ServeProcess(one, *arguments) as server, clients(server) as (http, _):
        http.load_model("ensemble_one")
        assert infer(http, "ensemble_one")[0] == 11
        assert infer(http, "step")[0] == 11  # the other one is not loaded
        http.load_model("step")
        with pytest.raises(InferenceServerException, match="There are 2"):
            infer(http, "step")
        http.unload_model("step")
        with pytest.raises(InferenceServerException, match="There are 2 models"):
            infer(http, "step")


def test_a_step_may_name_its_namespace_where_there_are_some(tmp_path: Path) -> None:
    one, two = write_namespaces(tmp_path)
    config = ENSEMBLE.replace('model_name: "step"', f'model_name: "step" model_namespace: "{two}"')
    write_model(one, "ensemble_one", "", config=config)

    with ServeProcess(one, f"--model-repository={two}", "--model-namespacing=on") as server, clients(server) as (h, _):
        assert infer(h, "ensemble_one")[0] == 21
    with pytest.raises(RuntimeError, match="--model-namespacing=true makes a namespace"), ServeProcess(one):
        pass


AGENT = """
import shutil
from pathlib import Path


class RepositoryAgent:
    def __init__(self, parameters):
        self.log = Path(parameters["log"])

    def note(self, text):
        with self.log.open("a") as log:
            log.write(text + " ")

    def on_load(self, model):
        self.note("load")
        folder = model.make_folder()
        shutil.copytree(model.folder, folder, dirs_exist_ok=True)
        path = folder / "1" / "model.py"
        path.write_text(path.read_text().replace("SECRET", "100"))
        return folder

    def on_load_complete(self, model):
        self.note("complete")

    def on_load_fail(self, model):
        self.note("fail")

    def on_unload(self, model):
        self.note("unload")

    def on_unload_complete(self, model):
        self.note("unloaded")
"""


def test_an_agent_sees_a_model_before_it_is_loaded_and_after_it_is_unloaded(tmp_path: Path) -> None:
    repository, agents, log = tmp_path / "models", tmp_path / "agents", tmp_path / "log"
    (agents / "secrets").mkdir(parents=True)
    (agents / "secrets" / "agent.py").write_text(AGENT)
    section = f'model_repository_agents {{ agents {{ name: "secrets" parameters {{ key: "log" value: "{log}" }} }} }}'
    write_model(repository, "m", answering("array + SECRET"), config=CONFIG + section)
    arguments = ("--model-control-mode=explicit", "--load-model=*", f"--repoagent-directory={agents}")

    with ServeProcess(repository, *arguments) as server, clients(server) as (http, _):
        assert infer(http, "m") == [101, 102, 103, 104]
        (repository / "m" / "1" / "model.py").write_text("SECRET +")
        with pytest.raises(InferenceServerException, match="load failed"):
            http.load_model("m")
        assert infer(http, "m") == [101, 102, 103, 104]
        assert log.read_text().split() == ["load", "complete", "load", "fail"]
        http.unload_model("m")

    assert log.read_text().split()[4:] == ["unload", "unloaded"]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes cannot be bound here")
def test_instances_run_on_the_cores_of_their_policy(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    group = 'instance_group { count: 1 kind: KIND_CPU host_policy: "one" }'
    in_thread = 'parameters { key: "EXECUTION_MODE" value { string_value: "thread" } }'
    write_model(tmp_path, "worker", WHERE, config=CONFIG + group)
    write_model(tmp_path, "anywhere", WHERE, config=CONFIG)
    write_model(tmp_path, "undefined", WHERE, config=CONFIG + group.replace('"one"', '"two"'))
    write_model(tmp_path, "onnx", mlp(), config=f'name: "onnx" {group}')
    write_model(tmp_path, "thread", WHERE, config=CONFIG + group + in_thread)

    with ServeProcess(tmp_path, f"--host-policy=one,cpu-cores={core}-{core}") as server, clients(server) as (http, _):
        assert infer(http, "worker")[0] == infer(http, "thread")[0] == 1 << core
        everywhere = sum(1 << each for each in os.sched_getaffinity(0))
        assert infer(http, "anywhere")[0] == infer(http, "undefined")[0] == everywhere
        bound = [
            int(task.name)
            for task in Path(f"/proc/{server.process.pid}/task").iterdir()
            if os.sched_getaffinity(int(task.name)) == {core}
        ]
        assert len(bound) >= 1  # the thread of the ONNX model

    assert "there is no --host-policy=two" in server.log


def test_models_are_loaded_when_the_first_request_needs_them(tmp_path: Path) -> None:
    write_model(tmp_path, "step", answering("array + 10"), config=CONFIG)
    write_model(tmp_path, "calls", CALLING, config=CONFIG)
    write_model(tmp_path, "ensemble", "", config=ENSEMBLE)
    write_model(tmp_path, "pinned", PYTHON_IDENTITY, config=CONFIG)
    write_model(tmp_path, "broken", "raise ValueError('no')", config=CONFIG)
    arguments = ("--model-control-mode=auto", "--model-memory-budget=1000", "--pin-model=pinned")

    with ServeProcess(tmp_path, *arguments) as server, clients(server) as (http, grpc):
        states = {entry["name"]: entry.get("state") for entry in http.get_model_repository_index()}
        assert states == {"broken": None, "calls": None, "ensemble": None, "pinned": "READY", "step": None}
        assert http.is_server_ready()
        assert grpc.is_model_ready("calls")
        assert grpc.get_model_metadata("ensemble").outputs[0].name == "OUTPUT0"
        assert infer(http, "ensemble") == [11, 12, 13, 14]
        http.unload_model("step")
        assert infer(grpc, "calls") == [11, 12, 13, 14]
        for client in (http, grpc):
            with pytest.raises(InferenceServerException, match="ValueError: no"):
                infer(client, "broken")
        assert not http.is_model_ready("broken")
        assert http.get_model_config("pinned")["name"] == "pinned"
        assert 'charonia_model_loads_total{model="step"} 2' in server.metrics_page()


@pytest.mark.cold_start  # a fork counts the memory that it shares with its template
def test_a_budget_for_one_model_serves_many_in_turn(tmp_path: Path) -> None:
    for number in range(4):
        write_model(tmp_path, f"m{number}", answering(f"array + {number}"), config=CONFIG)

    with (
        ServeProcess(tmp_path, "--model-control-mode=auto", "--model-memory-budget=60") as server,
        clients(server) as (http, _),
    ):
        for number in (0, 1, 2, 3, 0):
            assert infer(http, f"m{number}")[0] == 1 + number
        ready = [e["name"] for e in http.get_model_repository_index() if e.get("state") == "READY"]
        assert ready == ["m0"]
        raw = np.array([[1, 2, 3, 4]], np.float32).tobytes()
        request = urllib.request.Request(
            f"http://{server.http}/v2/models/m2/infer", data=raw, headers={"Inference-Header-Content-Length": "0"}
        )
        with urllib.request.urlopen(request, timeout=200) as answer:
            assert answer.status == 200
