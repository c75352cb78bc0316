import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.kept import kept_folder

ROOT = Path(__file__).parents[4]
COMPILE_SECONDS = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "aoti_perceptron" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(COMPILE_SECONDS))


@pytest.fixture(scope="session")
def aoti_perceptron(request: pytest.FixtureRequest) -> Path:
    """The folder of a model that AOTInductor compiled for the CPU; only machines with a compiler can make one."""
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs g++ to make a package")
    torch = pytest.importorskip("torch")
    kept = kept_folder(
        *(request.config, "aoti-perceptron", _compile),
        sources=(Path(__file__), ROOT / "tests" / "support" / "torch_models.py"),
        packages=("torch",),
        machine=torch.backends.cpu.get_cpu_capability(),
    )
    return kept / "m"


def _compile(folder: Path) -> None:
    # In a process of its own: compiling leaves threads and processes behind.
    program = (
        "import sys; from pathlib import Path; from tests.support import torch_models\n"
        "torch_models.compile_package(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(folder / "m")], cwd=ROOT, check=True, timeout=COMPILE_SECONDS)
