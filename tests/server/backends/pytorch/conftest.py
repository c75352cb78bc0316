import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE_SECONDS = 300


@pytest.fixture(scope="session")
def aoti_perceptron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that AOTInductor compiled for the CPU; only machines with a compiler can make one."""
    if shutil.which("g++") is None:
        pytest.skip("AOTInductor needs g++ to make a package")
    folder = tmp_path_factory.mktemp("aoti") / "m"
    # In a process of its own: compiling leaves threads and processes behind.
    program = (
        "import sys; from pathlib import Path; from charonia.testing import torch_models\n"
        "torch_models.compile_package(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, timeout=COMPILE_SECONDS)
    return folder
