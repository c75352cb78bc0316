"""The worker as a process, under every Python that is at hand, with a server's end that is played here."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.server_end import ServerEnd, place

from charonia.server.backends.python.worker import errors
from charonia.server.channel.channel import Incoming, Outgoing

pytestmark = pytest.mark.cold_start

SCRIPT = Path(errors.__file__).with_name("script.py")

PIPELINE = """
import asyncio, threading
import numpy as np
import triton_python_backend_utils as pb_utils

def other(value, **more):
    tensor = pb_utils.Tensor("IN", np.array([value], np.float32))
    return pb_utils.InferenceRequest(model_name="double", requested_output_names=["OUT"], inputs=[tensor], **more)

def value_of(response):
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return float(response.output_tensors()[0].as_numpy()[0])

def answer(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))])
"""

SYNC = (
    PIPELINE
    + """
class TritonPythonModel:
    def execute(self, requests):
        results = [None] * 4
        def work(i):
            results[i] = value_of(other(i).exec())
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        work(3)
        for thread in threads:
            thread.join()
        streamed = [value_of(r) for r in other(10).exec(decoupled=True) if r.output_tensors()]
        return [answer(sum(results) + sum(streamed)) for _ in requests]
"""
)

ASYNC = (
    PIPELINE
    + """
class TritonPythonModel:
    async def execute(self, requests):
        first = await asyncio.gather(*(other(i).async_exec() for i in range(3)))
        nested = other(3).exec()
        streamed = [value_of(r) async for r in await other(10).async_exec(decoupled=True) if r.output_tensors()]
        return [answer(sum(map(value_of, [*first, nested])) + sum(streamed)) for _ in requests]
"""
)

OWN_LOOP = (
    PIPELINE
    + """
class TritonPythonModel:
    def execute(self, requests):
        async def together():
            calls = [other(i).async_exec() for i in range(4)]
            streamed = [value_of(r) for r in await other(10).async_exec(decoupled=True) if r.output_tensors()]
            return sum(map(value_of, await asyncio.gather(*calls))) + sum(streamed)
        return [answer(asyncio.run(together())) for _ in requests]
"""
)

DECOUPLED_ASYNC = (
    PIPELINE
    + """
class TritonPythonModel:
    async def execute(self, requests):
        values = await asyncio.gather(*(other(i).async_exec() for i in range(4)))
        streamed = [value_of(r) async for r in await other(10).async_exec(decoupled=True) if r.output_tensors()]
        for request in requests:
            request.get_response_sender().send(answer(sum(map(value_of, values)) + sum(streamed)), 1)
"""
)

TOTAL = 2.0 * (0 + 1 + 2 + 3) + 20 + 21


class Worker(ServerEnd):
    """A worker process and the server's end of its connection."""

    def __init__(self, folder: Path, code: str, *, decoupled: bool = False, python: str = sys.executable) -> None:
        super().__init__(timeout_s=200)
        version = folder / "m" / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / "model.py").write_text(code)
        numbers = [each.fileno() for each in self.theirs]
        self.process = subprocess.Popen(
            [python, str(SCRIPT), *map(str, numbers), str(os.getpid())], pass_fds=numbers, start_new_session=True
        )
        for each in self.theirs:
            each.close()
        path = str(version / "model.py")
        self.send(("initialize", path, str(version), str(version.parent), {}, "m_0_0", {"decoupled": decoupled}))

    def execute(self, number: int, *values: float) -> None:
        super().execute(number, *(np.array([value], np.float32) for value in values))

    def serve_until(self, *kinds: str) -> Incoming:
        """Answer calls, with twice the input, until a message of one of these kinds comes."""
        while (message := self.receive()).header[0] not in kinds:
            if message.header[0] == "call":
                number, decoupled, tensors = message.header[1], message.header[5], message.header[8]
                value = 2 * value_in(message, tensors)
                for extra in range(2 if decoupled else 1):
                    outgoing = Outgoing(self.pool)
                    result: tuple[object, ...] = (
                        -1,
                        [place("OUT", np.array([value + extra], np.float32), outgoing)],
                        {},
                    )
                    self.send(("reply", number, result, not decoupled, [], []), outgoing)
                if decoupled:
                    self.send(("reply", number, None, True, [], []))
        return message

    def answer(self, number: int = 1) -> float:
        """Return the output of a batch of one request."""
        self.execute(number, 0)
        done = self.serve_until("done")
        assert done.header[2][0][0] == -1, done.header
        return value_in(done, done.header[2][0][1])

    def close(self) -> None:
        self.hang_up()
        self.process.kill()
        self.process.wait(200)
        self.receiver.close()


def value_in(message: Incoming, tensors: Any) -> float:
    return float(np.frombuffer(message.find(tensors[0][3]), np.float32)[0])


Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return what starts a worker with a model's code, after `PIPELINE`."""
    started: list[Worker] = []

    def begin(code: str, **options: Any) -> Worker:
        started.append(Worker(tmp_path, code if code.startswith(PIPELINE) else PIPELINE + code, **options))
        return started[-1]

    yield begin
    for worker in started:
        worker.close()


# Interpreters of other versions, as a model's environment may have them.
OTHER_PYTHONS = [
    path
    for minor in (8, 9, 10, 12, 13)
    if minor != sys.version_info.minor and (path := shutil.which(f"python3.{minor}")) is not None
]


@cache
def has_numpy(python: str) -> bool:
    return subprocess.run([python, "-c", "import numpy"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("python", [sys.executable, *OTHER_PYTHONS])
@pytest.mark.parametrize("code", [SYNC, ASYNC, OWN_LOOP], ids=["threads", "async", "own-loop"])
def test_a_model_calls_others_in_every_way(start: Start, code: str, python: str) -> None:
    if not has_numpy(python):
        pytest.skip(f"{python} has no numpy")
    worker = start(code, python=python)
    assert worker.receive().header == ("ready", {"has_is_ready": False})

    assert (worker.answer(1), worker.answer(2)) == (TOTAL, TOTAL)

    worker.send(("finalize",))
    assert worker.process.wait(200) == 0


def test_a_model_may_have_modules_with_the_names_of_the_workers(tmp_path: Path, start: Start) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "host.py").write_text("VALUE = 3\n")
    (version.parent / "errors.py").write_text("VALUE = 4\n")
    worker = start(
        """
import importlib.util
from errors import VALUE as FIRST
from host import VALUE as SECOND
others = [name for name in ("runner", "script", "tensor", "worker") if importlib.util.find_spec(name)]
class TritonPythonModel:
    def execute(self, requests):
        assert not others, others
        return [answer(FIRST + SECOND)]
"""
    )
    worker.receive()

    assert worker.answer() == 7


def test_a_process_that_a_model_spawns_imports_what_the_model_does(tmp_path: Path, start: Start) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "elsewhere.py").write_text(
        "import triton_python_backend_utils as pb_utils\n"
        "from c_python_backend_utils import InferenceRequest, InferenceResponse, Tensor, shared_memory\n"
        "assert Tensor is pb_utils.Tensor and shared_memory.free_memory() > 0\n"
        "def double(tensor):\n"
        "    return pb_utils.Tensor('OUT', 2 * tensor.as_numpy()).as_numpy()\n"
    )
    worker = start(
        """
import multiprocessing
from elsewhere import double
class TritonPythonModel:
    def execute(self, requests):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            doubled = pool.apply(double, (pb_utils.Tensor("IN", np.array([21], np.float32)),))
        return [answer(doubled[0])]
"""
    )
    worker.receive()

    assert worker.answer() == 42


def test_a_model_sees_the_arguments_of_an_embedded_interpreter(start: Start) -> None:
    worker = start("import sys\nassert sys.argv == ['']\nclass TritonPythonModel:\n    execute = 1\n")

    kind, text = worker.receive().header

    assert (kind, "has no method 'execute'" in text) == ("failed", True)


def test_an_async_decoupled_model_runs_batches_side_by_side(start: Start) -> None:
    worker = start(DECOUPLED_ASYNC, decoupled=True)
    worker.receive()

    worker.execute(1, 0)
    worker.execute(2, 0)

    # Both `execute` have returned before any call is answered; one message at a time, as nothing is read ahead.
    kinds: list[str] = []
    calls: list[Incoming] = []
    while kinds.count("done") < 2 or len(calls) < 8:
        message = worker.receive()
        kinds.append(message.header[0])
        if message.header[0] == "call":
            calls.append(message)
    worker.waiting += calls
    for _ in range(2):
        message = worker.serve_until("responses")
        ((_, _, response, is_final),) = message.header[1]
        assert value_in(message, response[1]) == TOTAL
        assert is_final is True
    worker.send(("finalize",))
    assert worker.process.wait(200) == 0


def test_a_model_is_told_of_cancellation_while_it_computes(start: Start) -> None:
    worker = start(
        """
import time
class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_info("begun")
        while not requests[1].is_cancelled():
            time.sleep(0.001)
        assert not requests[0].is_cancelled()
        error = pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED)
        return [answer(1), pb_utils.InferenceResponse(error=error)]
"""
    )
    worker.receive()
    worker.execute(1, 0, 0)
    assert worker.receive().header[0] == "log"

    worker.send(("cancel", 1, 1))

    done = worker.receive()
    assert done.header[2][1] == (7, "gone")


def test_metrics_are_declared_while_the_model_initializes(start: Start) -> None:
    worker = start(
        """
class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.COUNTER)
        self.metric = self.family.Metric(labels={"a": "b"})
    def execute(self, requests):
        self.metric.increment(2)
        return [answer(self.metric.value())]
"""
    )
    ((_, number, *family),) = worker.receive().header[1]
    worker.send(("answer", number, ("ok", None)))
    worker.serve_until("ready")
    worker.execute(1, 0)

    updates = []
    while (message := worker.receive()).header[0] == "metrics":
        updates += message.header[1]
        if updates[-1][0] == "value":
            worker.send(("answer", updates[-1][1], ("ok", 7.0)))

    assert family == ["n", "d", "counter"]
    assert ("add", number + 1, 2.0) in updates
    assert value_in(message, message.header[2][0][1]) == 7  # what the server says: others may add to it, too


def test_a_family_that_is_refused_fails_the_model_with_the_servers_words(start: Start) -> None:
    code = (
        PIPELINE + "class TritonPythonModel:\n    def execute(self, requests): pass\n    def initialize(self, args):\n"
    )
    worker = start(code + "        pb_utils.MetricFamily('n', 'd', 0)\n")
    ((_, number, *_),) = worker.receive().header[1]

    worker.send(("answer", number, ("error", 6, "another model has a gauge of that name")))

    kind, text = worker.receive().header
    assert kind == "failed"
    assert "TritonModelException: another model has a gauge of that name" in text


def test_a_model_is_asked_whether_it_is_ready(start: Start) -> None:
    code = PIPELINE + (
        "class TritonPythonModel:\n    def execute(self, requests): pass\n    async def is_ready(self): return False\n"
    )
    worker = start(code)
    assert worker.receive().header == ("ready", {"has_is_ready": True})

    worker.send(("is_ready", 5))

    assert worker.receive().header == ("answer_ready", 5, False)


def test_a_model_that_waits_for_a_call_ends_with_the_server(start: Start) -> None:
    worker = start(
        """
class TritonPythonModel:
    def execute(self, requests):
        return [answer(value_of(other(1).exec()))]
"""
    )
    worker.receive()
    worker.execute(1, 0)
    assert worker.receive().header[0] == "call"

    worker.hang_up()

    assert worker.process.wait(200) == 0


def test_a_forked_child_is_told_that_it_cannot_call(start: Start) -> None:
    worker = start(
        """
import os
class TritonPythonModel:
    def execute(self, requests):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                other(1).exec()
            except BaseException as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError(os.read(read, 1000).decode()))]
"""
    )
    worker.receive()
    worker.execute(1, 0)

    assert "a process that a model has forked cannot reach the server" in worker.receive().header[2][0][1]
