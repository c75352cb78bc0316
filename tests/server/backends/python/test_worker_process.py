"""The processes of Python models: when they end, what ends with them, and who notices."""

import asyncio
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import uvloop
from tests.support.process import eventually, shared_memory_of, until
from tests.support.python_model import HEAD, IDENTITY, array_of, config, error_of, load, request, write

from charonia.config.kinds import InstanceKind
from charonia.core.errors import Code, ServingError
from charonia.server.backends.api import BackendSettings, Outputs, Placement
from charonia.server.backends.python.backend import PythonBackend
from charonia.server.backends.workers import process as process_module
from charonia.server.backends.workers.model import PythonModel
from charonia.server.backends.workers.reaper import reaper
from charonia.server.channel.channel import INLINE_BYTES_MAX

pytestmark = pytest.mark.cold_start

PARENT = (
    HEAD
    + """
    def initialize(self, args):
        self.child = os.fork()
        if not self.child:
            pb_utils.Logger.log_warn("this is the child")
            time.sleep(600)
            os._exit(0)

    def execute(self, requests):
        if value_of(requests[0])[0]:
            os._exit(3)
        return [answer(np.array([self.child], np.float32)) for _ in requests]
"""
)

ONE = np.ones(1, np.float32)
ZERO = np.zeros(1, np.float32)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_number_of_threads_in_the_environment_is_that_of_all_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "777")
    threads = 'int(os.environ["MKL_NUM_THREADS"])'
    code = IDENTITY.replace("answer(value_of(r))", f"answer(np.array([{threads}], np.float32))")

    loaded = await load(tmp_path, code)
    (result,) = await loaded.run([request(ZERO)])
    assert int(array_of(result)[0]) == 777


async def test_a_crash_in_a_library_says_where_the_model_was(tmp_path: Path) -> None:
    code = IDENTITY.replace("return", "import ctypes; ctypes.string_at(0)  #")

    loaded = await load(tmp_path, code)
    (result,) = await loaded.run([request(ZERO)])
    message = error_of(result).message
    assert "ended by SIGSEGV; its last output:" in message
    assert "Fatal Python error: Segmentation fault" in message
    assert re.search(r'model\.py", line \d+ in execute', message)


@pytest.mark.parametrize("has_pidfd", [True, False])
async def test_a_child_of_the_worker_does_not_hide_that_it_died_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    if not has_pidfd:
        monkeypatch.setattr(process_module, "_open_pidfd", lambda _: None)

    loaded = await load(tmp_path, PARENT)
    (result,) = await loaded.run([request(ZERO)])
    child = int(array_of(result)[0])
    assert is_running(child)

    start = time.monotonic()
    (result,) = await loaded.run([request(ONE)])

    assert "exited with status 3" in error_of(result).message
    assert time.monotonic() - start < 200  # the child would have gone on for ten minutes
    if has_pidfd:
        assert eventually(lambda: not is_running(child))
    else:
        os.kill(child, signal.SIGKILL)
    (result,) = await loaded.run([request(ZERO)])
    last = int(array_of(result)[0])
    await loaded.close()
    if is_running(last) and not has_pidfd:
        os.kill(last, signal.SIGKILL)
    assert eventually(lambda: not is_running(last))


async def test_what_a_forked_child_logs_reaches_the_log_as_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loaded = await load(tmp_path, PARENT)
    await loaded.run([request(ZERO)])
    await until(lambda: "this is the child" in caplog.text)


async def test_a_start_that_is_given_up_ends_at_once(tmp_path: Path) -> None:
    code = HEAD + "    def initialize(self, args): time.sleep(600)\n    def execute(s, r): 0\n"
    reaper.watch(0)  # so that it is there before, too
    reaper.unregister(0)
    before = set(psutil.Process().children())
    starting = asyncio.ensure_future(load(tmp_path, code))
    await until(lambda: set(psutil.Process().children()) > before)

    start = time.monotonic()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting

    assert time.monotonic() - start < 200  # of ten minutes
    assert set(psutil.Process().children()) == before


async def test_slow_models_start_side_by_side_while_the_event_loop_runs_on(tmp_path: Path) -> None:
    """None of them is ready before all have begun, and before the event loop has seen that."""
    code = (
        IDENTITY
        + """
    def initialize(self, args):
        folder = os.path.dirname(__file__)
        open(os.path.join(folder, f"{os.getpid()}.begun"), "w").close()
        while not os.path.exists(os.path.join(folder, "seen")):
            time.sleep(0.005)
"""
    )

    model = await PythonBackend().load(write(tmp_path, code), config(), BackendSettings())
    assert isinstance(model, PythonModel)
    starts = asyncio.gather(*(model.create_instance(Placement(f"m_0_{i}", InstanceKind.KIND_CPU)) for i in range(3)))
    folder = tmp_path / "m" / "1"
    while len(list(folder.glob("*.begun"))) < 3:
        assert not starts.done()
        await asyncio.sleep(0.005)
    (folder / "seen").touch()
    for instance in await starts:
        await instance.aclose()


def test_no_worker_and_nothing_that_it_has_started_survives_a_killed_server(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def initialize(self, args):
        import multiprocessing, subprocess
        self.folder = args["model_repository"]
        started = [subprocess.Popen(["sleep", "60"]).pid]
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
        forked.start()
        with open(self.folder + "/started", "w") as file:
            print(*started, forked.pid, file=file)

    def execute(self, requests):
        open(self.folder + "/executing", "w").close()
        time.sleep(60)
"""
    )
    write(tmp_path, code)
    script = tmp_path / "server.py"
    script.write_text(
        """
import asyncio, sys
from pathlib import Path
import numpy as np
from tests.support.python_model import load, request

async def main():
    loaded = await load(Path(sys.argv[1]), Path(sys.argv[1], "m/1/model.py").read_text())
    running = asyncio.ensure_future(loaded.run([request(np.zeros(1, np.float32))]))
    while not Path(sys.argv[1], "m/executing").exists():
        await asyncio.sleep(0.01)
    print(loaded.instance.pid, flush=True)
    await running

asyncio.run(main())
"""
    )
    command = [sys.executable, str(script), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the script imports `tests`
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as server:
        assert server.stdout is not None
        worker = int(server.stdout.readline())
        started = [int(pid) for pid in (tmp_path / "m" / "started").read_text().split()]
        everything = [worker, *started]
        assert len(everything) == 3
        assert all(is_running(pid) for pid in everything)
        assert not any(shared_memory_of(pid) for pid in (server.pid, *everything))  # or some could be left

        server.kill()

    assert eventually(lambda: not any(is_running(pid) for pid in everything))


async def test_only_the_last_lines_of_output_are_in_the_error(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        for number in range(200):
            print(f"line {number}.", file=sys.stderr)
        print("half a line", end="")
        sys.stdout.flush()
        os._exit(7)
"""
    )

    loaded = await load(tmp_path, code)
    (result,) = await loaded.run([request(ZERO)])
    error = error_of(result)
    assert error.code is Code.INTERNAL
    assert "exited with status 7" in error.message
    assert "line 199.\nhalf a line" in error.message
    assert "line 150." in error.message
    assert "line 149." not in error.message


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_batches_of_random_sizes_come_back_right_on_every_event_loop(
    tmp_path: Path, run: Callable[..., object]
) -> None:
    rng = random.Random(20)
    limit = INLINE_BYTES_MAX // 4
    counts = [
        rng.choice([0, 1, rng.randrange(100), limit + rng.randrange(-1, 2), rng.randrange(8 * limit)])
        for _ in range(200)
    ]

    async def scenario() -> None:
        loaded = await load(tmp_path, IDENTITY)
        position = 0
        while position < len(counts):
            batch = counts[position : position + rng.randrange(1, 6)]
            arrays = [np.full(count, position + i, np.float32) for i, count in enumerate(batch)]
            for array, result in zip(arrays, await loaded.run([request(a) for a in arrays]), strict=True):
                assert isinstance(result, Outputs)
                np.testing.assert_array_equal(result.tensors[0].array, array)
            position += len(batch)
        await loaded.close()

    run(scenario())


def test_auto_complete_does_not_wait_for_what_the_model_left_running(tmp_path: Path) -> None:
    files = write(tmp_path, IDENTITY + "\nthreading.Thread(target=time.sleep, args=(600,)).start()\n")
    start = time.monotonic()

    completion = asyncio.run(PythonBackend().complete(files, config(), BackendSettings()))

    assert completion.config == config()
    assert time.monotonic() - start < 200  # it runs for ten minutes


def test_an_environment_that_is_not_there_is_refused_before_the_model_is_imported(tmp_path: Path) -> None:
    files = write(tmp_path, "import a_module_of_the_environment")

    with pytest.raises(ServingError) as caught:
        asyncio.run(PythonBackend().complete(files, config(EXECUTION_ENV_PATH="no/such/env"), BackendSettings()))

    assert caught.value.code is Code.INVALID_ARG
    assert f"parameter EXECUTION_ENV_PATH: there is no folder or archive '{tmp_path}/m/no/such/env'" in str(
        caught.value
    )
