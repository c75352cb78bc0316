"""Services of the server to Python models: custom metrics, loading of other models, and an orderly end."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tests.support.gate import Gate, gated
from tests.support.process import ServeProcess, eventually
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""

HEAD = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils

def words(request):
    return pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0].decode().split()

def out(text):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([str(text)], object))])
"""

ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [out(" ".join(words(r))) for r in requests]
"""

COUNTER = """
class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily
        self.pages = family(name="pages_total", description="Pages read", kind=family.COUNTER)
        self.metric = self.pages.Metric(labels={"kind": "scan"})
        self.time = family(name="page_seconds", description="Time", kind=family.HISTOGRAM)
        self.histogram = self.time.Metric(labels={}, buckets=[0.1, 1.0])

    def execute(self, requests):
        answers = []
        for request in requests:
            self.metric.increment(1)
            self.histogram.observe(0.5)
            answers.append(out(os.getpid()))
        return answers
"""

CONTROL = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(*words(r)) for r in requests]

    def answer(self, what, model):
        if what == "load":
            pb_utils.load_model(model)
        elif what == "unload":
            pb_utils.unload_model(model)
        return out(pb_utils.is_model_ready(model))
"""

SLEEPER = """
class TritonPythonModel:
    def execute(self, requests):
        late = pb_utils.Tensor("IN", np.array(["late"], object))
        answer = pb_utils.InferenceRequest(model_name="echo", requested_output_names=["OUT"], inputs=[late]).exec()
        if answer.has_error():
            return [pb_utils.InferenceResponse(error=answer.error()) for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(answer, "OUT")]) for r in requests]
"""

LARGE = """
import gc

class TritonPythonModel:
    def initialize(self, args):
        self.pages = [[] for _ in range(10)]

    def execute(self, requests):
        return [out(any(found is self.pages for found in gc.get_objects())) for _ in requests]
"""

MODELS = {
    "echo": ECHO,
    "counter": COUNTER,
    "control": CONTROL,
    "sleeper": gated(SLEEPER),
    "large": LARGE,
    "large_thread": LARGE,
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, code in MODELS.items():
        (folder / name / "1").mkdir(parents=True)
        mode = "thread" if name.endswith("_thread") else "process"
        parameter = f'parameters {{ key: "EXECUTION_MODE" value {{ string_value: "{mode}" }} }}'
        (folder / name / "config.pbtxt").write_text(CONFIG + parameter)
        (folder / name / "1" / "model.py").write_text(HEAD + code)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServeProcess]:
    loads = [f"--load-model={name}" for name in MODELS]
    with ServeProcess(repository, "--model-control-mode=explicit", *loads) as started:
        yield started


def ask(server: ServeProcess, model: str, text: str = "x") -> str:
    tensor = infer_input(grpcclient, "IN", np.array([text.encode()], object))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        (answer,) = client.infer(model, [tensor], client_timeout=200).as_numpy("OUT")
    return str(answer.decode())


def metrics(server: ServeProcess, *names: str) -> list[str]:
    return [line for line in server.metrics_page().splitlines() if line.startswith(names)]


def test_metrics_of_a_model_are_on_the_page_until_its_process_ends(server: ServeProcess) -> None:
    pid = int(ask(server, "counter"))
    ask(server, "counter")
    assert metrics(server, "pages_total") == ['pages_total{kind="scan"} 2']
    assert 'page_seconds_bucket{le="1"} 2' in metrics(server, "page_seconds")
    psutil.Process(pid).kill()
    deadline = time.monotonic() + 200
    while metrics(server, "pages_total") != ['pages_total{kind="scan"} 0']:
        assert time.monotonic() < deadline, metrics(server, "pages_total")
        time.sleep(0.02)
    ask(server, "counter")
    assert metrics(server, "pages_total") == ['pages_total{kind="scan"} 1']


def test_a_model_loads_and_unloads_another(server: ServeProcess) -> None:
    assert ask(server, "control", "ready echo") == "True"
    assert ask(server, "control", "unload echo") == "False"
    with pytest.raises(InferenceServerException):
        ask(server, "echo")
    assert ask(server, "control", "load echo") == "True"
    assert ask(server, "echo", "here again") == "here again"
    assert ask(server, "control", "ready nowhere") == "False"
    with pytest.raises(InferenceServerException, match="there is no such model folder"):
        ask(server, "control", "load nowhere")


@pytest.mark.parametrize("model", ["large", "large_thread"])
def test_garbage_is_not_looked_for_in_what_a_model_has_read(server: ServeProcess, model: str) -> None:
    assert ask(server, model) == "False"


def test_a_server_that_stops_lets_models_finish_what_they_ask_of_others(repository: Path) -> None:
    gate = Gate(repository / "sleeper" / "1")
    loads = ("--load-model=sleeper", "--load-model=echo")
    with ServeProcess(repository, "--model-control-mode=explicit", *loads) as server, gate.closed():
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(ask(server, "sleeper")))
        asking.start()
        assert eventually(lambda: bool(gate.runs))
        server.begin_to_stop()
        gate.open()
        assert server.wait() == 0
        asking.join()
    assert answers == ["late"]
