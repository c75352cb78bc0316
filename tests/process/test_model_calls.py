"""Models that call models, with the stock clients over the wire: sync, async, decoupled, and all that goes wrong."""

import asyncio
import os
import queue
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tests.support.models import chain_pbtxt, write_model
from tests.support.process import eventually
from tests.support.stock_clients import infer_input
from tritonclient.utils import InferenceServerException

import charonia
from charonia import Code, ServingError

HEAD = """
import asyncio, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def value(request):
    return pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()

def out(array):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.asarray(array, np.float32))])

def call(model, array, **more):
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", np.asarray(array, np.float32))],
        **more)

def passed(response):
    if response.has_error():
        return pb_utils.InferenceResponse(error=response.error())
    return out(pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy())
"""

CONFIG = """
backend: "python"
input {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }}
instance_group {{ count: {instances} kind: KIND_CPU }}
parameters {{ key: "EXECUTION_MODE" value {{ string_value: "{mode}" }} }}
{more}
"""

DECOUPLED = "model_transaction_policy { decoupled: true }"

MODELS: dict[str, tuple[str, int, str]] = {
    "double": (
        """
class TritonPythonModel:
    def execute(self, requests):
        return [out(value(r) * 2) for r in requests]
""",
        1,
        "",
    ),
    "slow": (
        """
class TritonPythonModel:
    def execute(self, requests):
        with open(os.path.join(os.path.dirname(__file__), "begun"), "a") as file:
            file.write("x")
        time.sleep(float(value(requests[0])[0]))
        return [out([os.getpid()])]
""",
        1,
        "",
    ),
    # Sends n, n - 1, ..., 1, from a thread; negative values end with an error; 1000 sends 1 when it is cancelled.
    "count": (
        """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            work = (request.get_response_sender(), value(request))
            threading.Thread(target=self.answer, args=work, daemon=True).start()

    def answer(self, sender, array):
        number = int(array[0])
        if number == 1000:
            with open(os.path.join(os.path.dirname(__file__), "begun"), "a") as file:
                file.write("x")
            sender.send(out([1000]))
            while not sender.is_cancelled():
                time.sleep(0.002)
            with open(os.path.join(os.path.dirname(__file__), "cancelled"), "a") as file:
                file.write("x")
            sender.send(out([1]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        for left in range(abs(number), 0, -1):
            sender.send(out(np.full(array.size, left)))
        if number < 0:
            error = pb_utils.InferenceResponse(error=pb_utils.TritonError("below zero", pb_utils.TritonError.NOT_FOUND))
            sender.send(error, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        else:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
        1,
        DECOUPLED,
    ),
    "sync": (
        """
class TritonPythonModel:
    def execute(self, requests):
        return [passed(call("double", value(r)).exec()) for r in requests]
""",
        1,
        "",
    ),
    "gather": (
        """
class TritonPythonModel:
    async def execute(self, requests):
        answers = []
        for request in requests:
            calls = [call("double", value(request) + i).async_exec() for i in range(8)]
            responses = await asyncio.gather(*calls)
            answers.append(out(sum(pb_utils.get_output_tensor_by_name(r, "OUT").as_numpy() for r in responses)))
        return answers
""",
        1,
        "",
    ),
    "total": (
        """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            total, error = 0.0, None
            for response in call("count", value(request)).exec(decoupled=True):
                if response.has_error():
                    error = response.error()
                elif response.output_tensors():
                    total += float(pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy().sum())
            answers.append(pb_utils.InferenceResponse(error=error) if error is not None else out([total]))
        return answers
""",
        1,
        "",
    ),
    "first": (
        """
class TritonPythonModel:
    def execute(self, requests):
        responses = call("count", value(requests[0])).exec(decoupled=True)
        first = next(responses)
        responses.cancel()
        rest = [r for r in responses if r.output_tensors()]
        return [passed((first, *rest)[-1])]
""",
        1,
        "",
    ),
    "to_missing": (
        """
class TritonPythonModel:
    def execute(self, requests):
        return [passed(call("nowhere", value(r)).exec()) for r in requests]
""",
        1,
        "",
    ),
    "to_slow": (
        """
class TritonPythonModel:
    def execute(self, requests):
        return [passed(call("slow", value(r)).exec()) for r in requests]
""",
        1,
        "",
    ),
    "to_endless": (
        """
class TritonPythonModel:
    def execute(self, requests):
        for response in call("count", [1000.0]).exec(decoupled=True):
            pass
        return [out([0])]
""",
        1,
        "",
    ),
    # ping calls pong calls ping, as often as the input says.
    "ping": (
        """
class TritonPythonModel:
    def execute(self, requests):
        n = value(requests[0])[0]
        return [out([0]) if n == 0 else passed(call("pong", [n]).exec())]
""",
        2,
        "",
    ),
    "pong": (
        """
class TritonPythonModel:
    def execute(self, requests):
        n = value(requests[0])[0]
        time.sleep(0.05)
        return [passed(call("ping", [n - 1]).exec())]
""",
        2,
        "",
    ),
    # Calls an ensemble: one that ends, or one that the model itself is a step of.
    "round": (
        """
class TritonPythonModel:
    def execute(self, requests):
        n = value(requests[0])[0]
        return [passed(call("ensemble_of_round" if n < 0 else "ensemble_of_double", [n]).exec())]
""",
        1,
        "",
    ),
    "self": (
        """
class TritonPythonModel:
    def execute(self, requests):
        return [passed(call("self", value(requests[0])).exec())]
""",
        1,
        "",
    ),
}


def write(folder: Path, name: str, code: str, instances: int = 1, more: str = "", *, mode: str) -> None:
    write_model(folder, name, HEAD + code, config=CONFIG.format(instances=instances, more=more, mode=mode))


@pytest.fixture(scope="module", params=["process", "thread"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def in_processes(mode: str) -> None:
    if mode != "process":
        pytest.skip("only a process can be killed")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, mode: str) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, (code, instances, more) in MODELS.items():
        write(folder, name, code, instances, more, mode=mode)
    for name, step in (("ensemble_of_double", "double"), ("ensemble_of_round", "round")):
        config = chain_pbtxt(step, given="IN", wanted="OUT", dims=(-1,), max_batch_size=0)
        write_model(folder, name, "", config=config)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[charonia.Server]:
    with charonia.Server(repository, http=True, grpc=True, control_mode="explicit", load_models=["*"]) as started:
        yield started


def run(server: charonia.Server, model: str, *values: float, **more: Any) -> list[float]:
    outputs = server.infer(model, {"IN": np.array(values, "f4")}, timeout_s=200, **more)
    return [float(v) for v in outputs["OUT"]]


def refused(server: charonia.Server, model: str, *values: float) -> ServingError:
    with pytest.raises(ServingError) as caught:
        run(server, model, *values)
    return caught.value


def grpc_input(*values: float) -> list[Any]:
    return [infer_input(grpcclient, "IN", np.array(values, "f4"))]


def marks(repository: Path, model: str, kind: str) -> int:
    """How many executions of a model have left a mark: `begun`, `cancelled`."""
    file = repository / model / "1" / kind
    return file.stat().st_size if file.exists() else 0


# Calls.


def test_a_model_calls_another_one(server: charonia.Server) -> None:
    assert run(server, "sync", 1, 2) == [2, 4]


def test_a_model_calls_others_at_once(server: charonia.Server) -> None:
    assert run(server, "gather", 1) == [2 * sum(1 + i for i in range(8))]


def test_large_tensors_go_through_a_call(server: charonia.Server) -> None:
    values = np.arange(500_000, dtype="f4")
    for _ in range(20):
        outputs = server.infer("sync", {"IN": values}, timeout_s=200)
        np.testing.assert_array_equal(outputs["OUT"], values * 2)


def test_a_model_takes_the_responses_of_a_decoupled_one(server: charonia.Server) -> None:
    assert run(server, "total", 4) == [10]
    assert run(server, "total", 0) == [0]
    assert refused(server, "total", -2).code is Code.NOT_FOUND


def test_a_model_gives_up_a_decoupled_call_after_its_first_response(server: charonia.Server, repository: Path) -> None:
    before = marks(repository, "count", "cancelled")
    assert run(server, "first", 1000) == [1]  # what the model sends when it is cancelled
    assert eventually(lambda: marks(repository, "count", "cancelled") == before + 1)


def test_a_model_that_is_not_there_is_named(server: charonia.Server) -> None:
    error = refused(server, "to_missing", 1)
    assert "Failed for execute the inference request. Model 'nowhere' is not ready." in error.message


# Circles.


def test_a_model_with_one_instance_that_calls_itself_is_refused_with_the_chain(server: charonia.Server) -> None:
    error = refused(server, "self", 1)
    assert "(self -> self)" in error.message
    assert "more instances" in str(error)


def test_a_model_with_two_instances_calls_itself_once_but_not_twice(server: charonia.Server) -> None:
    assert run(server, "ping", 1) == [0]
    assert "(ping -> pong -> ping -> pong -> ping)" in refused(server, "ping", 2).message


def test_a_model_calls_an_ensemble_and_is_called_by_one(server: charonia.Server) -> None:
    assert run(server, "round", 3) == [6]
    assert run(server, "ensemble_of_round", 3) == [6]
    assert "(round -> ensemble_of_round -> round)" in refused(server, "round", -1).message
    chain = "(ensemble_of_round -> round -> ensemble_of_round -> round)"
    assert chain in refused(server, "ensemble_of_round", -1).message


# Cancellation and death.


def test_a_client_that_leaves_cancels_what_the_model_calls(server: charonia.Server, repository: Path) -> None:
    begun, cancelled = (marks(repository, "count", kind) for kind in ("begun", "cancelled"))
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        done = threading.Event()
        call = client.async_infer("to_endless", grpc_input(1), callback=lambda result, error: done.set())
        assert eventually(lambda: marks(repository, "count", "begun") == begun + 1)
        call.cancel()
        assert done.wait(200)
    assert eventually(lambda: marks(repository, "count", "cancelled") == cancelled + 1)
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        while marks(repository, "count", "begun") == begun + 1:  # on a busy machine it may be late before it gets there
            with pytest.raises(InferenceServerException):
                client.infer("to_endless", grpc_input(1), client_timeout=0.5)
    assert eventually(lambda: marks(repository, "count", "cancelled") == marks(repository, "count", "begun"))


@pytest.mark.usefixtures("in_processes")
def test_the_death_of_a_called_worker_fails_the_call_with_the_reason(server: charonia.Server, repository: Path) -> None:
    (pid,) = run(server, "slow", 0)
    begun = marks(repository, "slow", "begun")

    def kill() -> None:
        assert eventually(lambda: marks(repository, "slow", "begun") > begun)
        os.kill(int(pid), signal.SIGKILL)

    with ThreadPoolExecutor(1) as other:
        other.submit(kill)
        error = refused(server, "to_slow", 300)
    assert "slow_0" in error.message
    assert "SIGKILL" in error.message
    assert run(server, "to_slow", 0)


@pytest.mark.usefixtures("in_processes")
def test_the_death_of_a_calling_worker_cancels_its_calls_and_leaves_the_others(
    server: charonia.Server, repository: Path
) -> None:
    begun, cancelled = (marks(repository, "count", kind) for kind in ("begun", "cancelled"))
    callers = [p for p in psutil.Process().children() if _is_instance(p, server, "to_endless")]
    errors: list[ServingError] = []
    asking = threading.Thread(target=lambda: errors.append(refused(server, "to_endless", 1)))
    asking.start()
    assert eventually(lambda: marks(repository, "count", "begun") == begun + 1)
    for process in callers:
        process.kill()
    asking.join()
    assert len(errors) == 1
    assert eventually(lambda: marks(repository, "count", "cancelled") == cancelled + 1)
    assert run(server, "sync", 3) == [6]


def _is_instance(process: psutil.Process, server: charonia.Server, model: str) -> bool:
    """Whether a worker has the model's code mapped: its folder is in its working state."""
    parts = server._running()
    loaded = [v for v in parts._lifecycle.table.loaded() if v.runner.config.name == model]
    return any(instance.pid == process.pid for v in loaded for instance in v.model._instances)  # type: ignore[union-attr]


# Decoupled models over the wire.


class Stream:
    """A gRPC stream of the stock client and what came on it."""

    def __init__(self, server: charonia.Server) -> None:
        self.came: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        self.client.start_stream(partial(_put, self.came))

    def send(self, model: str, id: str, *values: float, empty_final: bool = False) -> None:
        self.client.async_stream_infer(
            model, grpc_input(*values), request_id=id, enable_empty_final_response=empty_final
        )

    def take(self) -> tuple[str, list[float] | str, bool]:
        """Return id, values or the error's text, and the final flag of the next response."""
        result, error = self.came.get(timeout=200)
        if error is not None:
            return "", error.message(), True
        response = result.get_response()
        values = result.as_numpy("OUT") if response.outputs else None
        return (
            response.id,
            [] if values is None else values.tolist(),
            response.parameters["triton_final_response"].bool_param,
        )

    def close(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def _put(came: "queue.Queue[tuple[Any, Any]]", result: Any, error: Any) -> None:
    came.put((result, error))


@pytest.fixture
def stream(server: charonia.Server) -> Iterator[Stream]:
    opened = Stream(server)
    yield opened
    opened.close()


def test_large_responses_do_not_pile_up(stream: Stream, server: charonia.Server) -> None:
    stream.send("count", "a", *([40] + [0] * 200_000), empty_final=True)
    for left in range(40, 0, -1):
        _, values, _ = stream.take()
        assert values[:1] == [left]
    assert stream.take()[2]


def test_responses_are_taken_one_by_one_in_process(server: charonia.Server) -> None:
    came = [o["OUT"].tolist() for o in server.stream_infer("count", {"IN": np.array([3], "f4")}, timeout_s=200)]
    assert came == [[3], [2], [1]]
    stream = server.stream_infer("count", {"IN": np.array([-1], "f4")}, timeout_s=200)
    assert next(stream)["OUT"].tolist() == [1]
    with pytest.raises(ServingError, match="below zero"):
        next(stream)


def test_leaving_the_responses_in_process_cancels_the_request(server: charonia.Server, repository: Path) -> None:
    before = marks(repository, "count", "cancelled")
    for outputs in server.stream_infer("count", {"IN": np.array([1000], "f4")}, timeout_s=200):
        assert outputs["OUT"].tolist() == [1000]
        break
    assert eventually(lambda: marks(repository, "count", "cancelled") == before + 1)
    stream = server.stream_infer("count", {"IN": np.array([1000], "f4")}, timeout_s=5)
    next(stream)
    with pytest.raises(TimeoutError, match="no response within"):
        next(stream)
    assert eventually(lambda: marks(repository, "count", "cancelled") == before + 2)


@pytest.mark.usefixtures("in_processes")
def test_the_death_of_a_worker_in_mid_stream_ends_the_request_with_the_reason(
    stream: Stream, server: charonia.Server
) -> None:
    stream.send("count", "a", 1000)
    assert stream.take() == ("a", [1000], False)
    (process,) = [p for p in psutil.Process().children() if _is_instance(p, server, "count")]
    process.kill()
    assert "SIGKILL" in str(stream.take()[1])
    stream.send("count", "b", 1)
    assert stream.take() == ("b", [1], False)


# Nothing is left behind. The last test of the module.


def test_nothing_gathers_in_server_or_workers(server: charonia.Server) -> None:
    large = np.arange(100_000, dtype="f4")

    def work(rounds: int) -> None:
        for _ in range(rounds):
            server.infer("sync", {"IN": large}, timeout_s=200)
            run(server, "total", 5)
            run(server, "first", 3)
            list(server.stream_infer("count", {"IN": np.concatenate([[3], large]).astype("f4")}, timeout_s=200))
            refused(server, "self", 1)
            refused(server, "to_missing", 1)

    def open_files() -> int:
        this = psutil.Process()
        return this.num_fds() + sum(child.num_fds() for child in this.children())

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    work(5)
    files, running = open_files(), server._call(lambda _: tasks())
    work(15)
    assert open_files() <= files + 2
    assert server._call(lambda _: tasks()) <= running
    parts = server._running()
    assert len(parts._backends.deadlocks) == 0
    for loaded in parts._lifecycle.table.loaded():
        assert loaded.runner.in_flight == 0
