"""What lies in the folder that a command is started in is not imported: not by it, not by processes that it starts."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.hostile_folder import hostile_files_that_ran, write_hostile_files
from tests.support.models import identity_pbtxt, mlp, write_model

from charonia.python_command import python_module
from charonia.server.backends.tensorflow.original import WORKER

pytestmark = pytest.mark.cold_start

COMMAND = str(Path(sys.executable).with_name("charonia"))
SPAWNS = """
import multiprocessing
import beside
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        child = multiprocessing.get_context("spawn").Process(target=abs, args=(beside.ONE,))
        child.start()
        child.join()
        assert child.exitcode == 0
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy())
            ])
            for r in requests
        ]
"""
FUNCTION = """
from beside import ONE
import charonia

@charonia.model
def add_one(number: float) -> float:
    return number + ONE
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "hostile"
    folder.mkdir()
    write_hostile_files(folder)
    yield folder
    assert hostile_files_that_ran(folder) == set()


def python_model(repository: Path) -> None:
    model = write_model(repository, "spawns", SPAWNS, config=identity_pbtxt("python", dims=(1,), max_batch_size=0))
    (model / "1" / "beside.py").write_text("ONE = 1\n")


def run(hostile: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run([COMMAND, *arguments], cwd=hostile, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done


@contextmanager
def serving(hostile: Path, *arguments: str) -> Iterator[str]:
    """Serve from the hostile folder, and yield the HTTP endpoint."""
    ports = ("--host=127.0.0.1", "--port=0", "--allow-grpc=false", "--allow-metrics=false")
    with subprocess.Popen(
        [COMMAND, "serve", *arguments, *ports], cwd=hostile, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        log = []
        try:
            for line in process.stderr:
                log.append(line)
                if found := re.search(r"Started HTTPService at (127\.0\.0\.1:\d+)", line):
                    yield found[1]
                    return
            pytest.fail("".join(log))
        finally:
            process.send_signal(signal.SIGTERM)
            process.stderr.read()


def test_a_server_models_functions_and_perf_import_nothing_from_there(hostile: Path, tmp_path: Path) -> None:
    models, functions = tmp_path / "models", tmp_path / "functions.py"
    python_model(models)
    write_model(models, "identity", b"", config=identity_pbtxt(dims=(4,)))
    functions.write_text(FUNCTION)
    (tmp_path / "beside.py").write_text("ONE = 1\n")
    with serving(hostile, str(models), str(functions), "--front-ends=1", "--allow-client-shm=true") as url:
        assert "2" in run(hostile, "infer", "spawns", "--input", "INPUT0=2", "-u", url).stdout
        assert "3" in run(hostile, "infer", "add_one", "--input", "number=2", "-u", url).stdout
        load = ("perf", "-m", "identity", "-u", url, "--request-count=20", "--processes=2", "--no-progress")
        run(hostile, *load)
        run(hostile, *load, "--shared-memory=system")


def test_tune_imports_nothing_from_there(hostile: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "models", "m", b"", config=identity_pbtxt(dims=(4,), max_batch_size=0))
    run(
        hostile,
        *("tune", "-m", str(tmp_path / "models"), "--profile-models=m", "--run-config-search-disable"),
        *("-e", str(tmp_path / "results"), "-s", str(tmp_path / "journal"), "-c=1", "--measurement-time=0.2"),
        *("--output-model-repository-path", str(tmp_path / "out")),
    )


def test_the_doctor_imports_nothing_from_there(hostile: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "models", "mlp", mlp())
    run(hostile, "doctor", str(tmp_path / "models"))


def test_the_process_that_converts_imports_nothing_from_there(hostile: Path) -> None:
    done = subprocess.run(python_module(WORKER), cwd=hostile, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
