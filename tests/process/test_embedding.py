"""`charonia.Server`: a server inside the test's own process."""

import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tests.support.gate import Gate, gated
from tests.support.models import identity_pbtxt, write_model
from tests.support.onnx_writer import GraphWriter
from tests.support.process import eventually
from tests.support.stock_clients import infer_input

import charonia
from charonia import Code, ServerOptions, ServingError
from charonia.core.dtypes import DataType
from charonia.server.lifecycle.lifecycle import Lifecycle
from charonia.server.options import ModelOptions

EXAMPLE = Path(__file__).parents[2] / "examples" / "embedding.py"

PYTHON = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""

MODEL_PY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if values.size == 0:
                raise ValueError("nothing to double")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values * 2)]))
        return responses
"""


def write_identity(repository: Path, name: str, datatype: DataType = DataType.FP32) -> None:
    config = identity_pbtxt(datatype=datatype, dims=(-1,), max_batch_size=8, more="dynamic_batching { }")
    write_model(repository, name, "", config=config)


def write_python(repository: Path, name: str = "double", code: str = MODEL_PY, more: str = "") -> None:
    write_model(repository, name, code, config=PYTHON + more)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_identity(folder, "echo")
    write_identity(folder, "words", DataType.BYTES)
    overriding = "dynamic_batching { default_queue_policy { allow_timeout_override: true } }"
    write_python(folder, "gated", gated(MODEL_PY), "max_batch_size: 8\n" + overriding)
    write_python(folder)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[charonia.Server]:
    with charonia.Server(repository, http=True, grpc=True) as started:
        yield started


def failed_requests(server: charonia.Server, model: str) -> int:
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client:
        (statistics,) = client.get_inference_statistics(model)["model_stats"]
    return int(statistics["inference_stats"]["fail"]["count"])


def test_arrays_go_in_and_come_out(server: charonia.Server) -> None:
    sent = np.arange(6, dtype=np.float32).reshape(2, 3)

    outputs = server.infer("echo", {"INPUT0": sent}, version="1", outputs=["OUTPUT0"])

    assert list(outputs) == ["OUTPUT0"]
    np.testing.assert_array_equal(outputs["OUTPUT0"], sent)


@pytest.mark.parametrize("sent", [[[1, 2.5]], [[np.float32(1), 2.5]], np.array([[1, 2.5]], np.float32)])
def test_lists_and_numbers_have_the_datatype_of_the_model(server: charonia.Server, sent: object) -> None:
    assert server.infer("echo", {"INPUT0": sent})["OUTPUT0"].tolist() == [[1, 2.5]]  # type: ignore[dict-item]
    assert server.infer("words", {"INPUT0": [["a", b"b"]]})["OUTPUT0"].tolist() == [[b"a", b"b"]]


def test_files_functions_and_folders_are_served_as_by_the_command(tmp_path: Path) -> None:
    service, net = tmp_path / "service.py", tmp_path / "net.onnx"
    service.write_text("import charonia\n\n@charonia.model\ndef greet(name: str) -> str:\n    return f'Hi {name}'\n")
    graph = GraphWriter()
    graph.node("Neg", [graph.input("x", DataType.FP32, ["n", 2])], "y")
    graph.output("y", DataType.FP32, ["n", 2])
    net.write_bytes(graph.model())
    (tmp_path / "inside" / "1").mkdir(parents=True)
    (tmp_path / "inside" / "1" / "model.onnx").write_bytes(graph.model())

    with charonia.Server([service, f"minus={net}", tmp_path / "inside"]) as server:
        assert server.infer("greet", {"name": "Ada"})["output"].tolist() == [b"Hi Ada"]
        assert server.infer("minus", {"x": [[1, 2]]})["y"].tolist() == [[-1, -2]]
        assert server.infer("inside", {"x": [[3, 4]]})["y"].tolist() == [[-3, -4]]


def test_what_cannot_be_served_raises_the_error_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")

    with pytest.raises(ServingError, match="is weights without their model"):
        charonia.Server(tmp_path / "a.safetensors").__enter__()


def test_many_threads_get_their_own_answers(server: charonia.Server) -> None:
    def call(number: int) -> bool:
        model, name, factor = ("echo", "0", 1) if number % 2 else ("double", "", 2)
        inputs = {"INPUT0" if name else "IN": np.full((1, 4) if name else 4, number, np.float32)}
        (answer,) = server.infer(model, inputs).values()
        return bool((answer == number * factor).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(call, range(400)))


@pytest.mark.parametrize(
    ("model", "inputs", "code", "text"),
    [
        ("nobody", {"X": np.zeros(1, np.float32)}, Code.NOT_FOUND, "unknown model: 'nobody'"),
        ("echo", {"INPUT0": np.zeros((1, 4), np.float64)}, Code.INVALID_ARG, "data-type is 'FP64'"),
        ("echo", {"INPUT0": np.zeros((9, 4), np.float32)}, Code.INVALID_ARG, "batch-size must be <= 8"),
        ("echo", {"OTHER": np.zeros((1, 4), np.float32)}, Code.INVALID_ARG, "unexpected inference input 'OTHER'"),
        ("echo", {"INPUT0": np.zeros((1, 4), np.complex64)}, Code.INVALID_ARG, "numpy dtype complex64"),
        ("double", {"IN": np.zeros(0, np.float32)}, Code.INTERNAL, "nothing to double"),
    ],
)
def test_errors_have_a_code_and_say_what_is_wrong(
    server: charonia.Server, model: str, inputs: "dict[str, np.ndarray]", code: Code, text: str
) -> None:
    with pytest.raises(ServingError) as caught:
        server.infer(model, inputs)

    assert caught.value.code is code
    assert text in caught.value.message


@pytest.fixture
def gate(repository: Path) -> Gate:
    return Gate(repository / "gated" / "1")


@contextmanager
def busy(server: charonia.Server, gate: Gate) -> Iterator[None]:
    """Let the gated model run a request of its largest batch that does not end."""
    before = gate.runs
    with ThreadPoolExecutor(1) as threads, gate.closed():
        first = threads.submit(server.infer, "gated", {"IN": np.zeros((8, 1), np.float32)})
        while gate.runs == before:
            assert not first.done(), first.exception()
            time.sleep(0.005)
        yield
        assert not first.done()


def test_parameters_with_a_meaning_steer_the_scheduler(server: charonia.Server, gate: Gate) -> None:
    with busy(server, gate), pytest.raises(ServingError, match="Request timeout expired") as caught:
        server.infer("gated", {"IN": np.zeros((8, 1), np.float32)}, parameters={"timeout": 20_000})

    assert caught.value.code is Code.UNAVAILABLE
    with pytest.raises(ServingError, match="'triton_x'"):
        server.infer("echo", {"INPUT0": np.zeros((8, 1), np.float32)}, parameters={"triton_x": 1})


def test_a_timeout_takes_the_request_out_of_the_queue(server: charonia.Server, gate: Gate) -> None:
    sent = {"IN": np.zeros((8, 1), np.float32)}
    runs = gate.runs
    with busy(server, gate):
        failed = failed_requests(server, "gated")

        with pytest.raises(TimeoutError, match=r"'gated' did not answer within 0\.02 s"):
            server.infer("gated", sent, timeout_s=0.02)

        assert eventually(lambda: failed_requests(server, "gated") != failed)  # the server's own thread counts it
    server.infer("gated", sent)
    assert gate.runs == runs + 2  # not three


def test_stock_clients_reach_it_on_its_free_ports(server: charonia.Server) -> None:
    sent = np.arange(4, dtype=np.float32).reshape(1, 4)
    for module, port in ((httpclient, server.http_port), (grpcclient, server.grpc_port)):
        with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
            tensor = infer_input(module, "INPUT0", sent)
            np.testing.assert_array_equal(client.infer("echo", [tensor]).as_numpy("OUTPUT0"), sent)


def test_a_port_is_zero_where_the_endpoint_is_off(repository: Path) -> None:
    with charonia.Server(repository, control_mode="explicit", grpc=True) as server:
        assert server.http_port == 0
        assert server.grpc_port > 0


def test_models_are_loaded_and_unloaded_when_asked(repository: Path) -> None:
    sent = {"INPUT0": np.zeros((1, 1), np.float32)}
    with charonia.Server(repository, control_mode="explicit", load_models=["words"]) as server:
        assert server.is_ready()
        assert server.is_ready("words")
        with pytest.raises(ServingError, match="unknown model: 'echo'"):
            server.infer("echo", sent)
        server.load("echo")
        server.infer("echo", sent)
        server.unload("echo")
        assert not server.is_ready("echo")
        with pytest.raises(ServingError, match="no such model folder"):
            server.load("nobody")


def test_loading_is_refused_where_the_control_mode_does_not_allow_it(server: charonia.Server) -> None:
    with pytest.raises(ServingError, match="explicit") as caught:
        server.load("echo")

    assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.cold_start
def test_a_model_that_fails_to_load_raises_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_python(tmp_path, "fine")
    write_python(tmp_path, "broken", "raise RuntimeError('no weights here')")
    threads, children = set(threading.enumerate()), psutil.Process().children(recursive=True)

    with pytest.raises(ServingError, match="no weights here"), charonia.Server(tmp_path, http=True):
        pytest.fail("it was entered")

    assert set(threading.enumerate()) == threads
    assert psutil.Process().children(recursive=True) == children


def test_a_repository_that_does_not_exist_raises(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="nowhere"), charonia.Server(tmp_path / "nowhere"):
        pytest.fail("it was entered")


def test_the_rest_is_served_where_failures_at_start_are_allowed(tmp_path: Path) -> None:
    write_identity(tmp_path, "fine")
    write_python(tmp_path, "broken", "raise RuntimeError('no weights here')")

    with charonia.Server(tmp_path, options=ServerOptions(exit_on_error=False)) as server:
        assert server.is_ready("fine")
        assert not server.is_ready("broken")
        assert not server.is_ready()


@pytest.mark.cold_start
def test_servers_live_side_by_side_and_one_after_the_other(repository: Path) -> None:
    sent = {"IN": np.arange(3, dtype=np.float32)}
    threads, children = set(threading.enumerate()), psutil.Process().children(recursive=True)

    with charonia.Server(repository) as first:
        with charonia.Server(repository) as second:
            both = [server.infer("double", sent)["OUT"].tolist() for server in (first, second)]
        again = first.infer("double", sent)["OUT"].tolist()
    with second:
        reentered = second.infer("double", sent)["OUT"].tolist()

    assert [*both, again, reentered] == [[0, 2, 4]] * 4
    assert set(threading.enumerate()) == threads
    assert psutil.Process().children(recursive=True) == children


def test_an_answer_outlives_its_server(repository: Path) -> None:
    with charonia.Server(repository) as server:
        answer = server.infer("double", {"IN": np.ones(1_000_000, np.float32)})["OUT"]

    assert (answer == 2).all()


def waiting(server: charonia.Server, model: str) -> int:
    loaded = server._running()._lifecycle.table.loaded()
    return sum(version.runner.pending or 0 for version in loaded if version.runner.config.name == model)


def test_leaving_finishes_what_is_in_flight_and_refuses_what_comes_later(repository: Path) -> None:
    server, gate = charonia.Server(repository), Gate(repository / "gated" / "1")

    def open_when_left() -> None:
        with suppress(ServingError):
            assert eventually(lambda: not server.is_ready())
        gate.open()

    with ThreadPoolExecutor(5) as threads, gate.closed(), server:
        sent = {"IN": np.ones((1, 1), np.float32)}
        callers = [threads.submit(server.infer, "gated", sent) for _ in range(4)]
        assert eventually(lambda: waiting(server, "gated") >= 3)
        threads.submit(open_when_left)

    assert [caller.result()["OUT"].tolist() for caller in callers] == [[[2.0]]] * 4
    with pytest.raises(ServingError, match="not running") as caught:
        server.infer("gated", {})
    assert caught.value.code is Code.UNAVAILABLE


def test_a_server_that_is_never_entered_holds_nothing(repository: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        server = charonia.Server(repository)
        with pytest.raises(ServingError, match="use it as a context manager"):
            server.is_ready()


def test_a_server_cannot_be_entered_twice_at_once(server: charonia.Server) -> None:
    with pytest.raises(RuntimeError, match="running already"):
        server.__enter__()


def test_the_example_runs() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=True, timeout=200)

    assert done.stdout.splitlines()[:2] == ["Hello, Ada!", "Hello, Grace!"]
    assert done.stdout.splitlines()[2].startswith("INVALID_ARG: ")


def test_polling_outlives_a_look_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_identity(tmp_path, "early")
    looks = []
    poll = Lifecycle.poll

    async def failing_at_first(lifecycle: Lifecycle) -> bool:
        looks.append(lifecycle)
        if len(looks) == 1:
            raise ZeroDivisionError
        return await poll(lifecycle)

    monkeypatch.setattr(Lifecycle, "poll", failing_at_first)
    options = ServerOptions(models=ModelOptions(poll_secs=1))
    with charonia.Server(tmp_path, control_mode="poll", options=options) as server:
        assert eventually(lambda: bool(looks))
        write_identity(tmp_path, "late")
        give_up = time.monotonic() + 200
        is_there = False
        while not is_there:
            assert time.monotonic() < give_up, "the repository is no longer polled"
            with suppress(ServingError):  # it is unknown at first
                is_there = server.is_ready("late")
            time.sleep(0.05)
