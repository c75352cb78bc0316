import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
COMPILE_SECONDS = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "aoti_perceptron" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(COMPILE_SECONDS))


@pytest.fixture(scope="session")
def aoti_perceptron(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of a model that AOTInductor compiled for the CPU; only machines with a compiler can make one.

    The processes that the tests are spread over share it: the first one compiles.
    """
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs g++ to make a package")
    own = tmp_path_factory.getbasetemp()
    shared = own if worker_id == "master" else own.parent
    with (shared / "aoti.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = shared / "aoti" / "m"
        if not (folder / "compiled").exists():
            _compile(folder)
            (folder / "compiled").touch()
    return folder


def _compile(folder: Path) -> None:
    # In a process of its own: compiling leaves threads and processes behind.
    program = (
        "import sys; from pathlib import Path; from tests.support import torch_models\n"
        "torch_models.compile_package(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], cwd=ROOT, check=True, timeout=COMPILE_SECONDS)
