import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from charonia.server.machine.private_folder import PREFIX, PrivateFolder, remove_abandoned

_MAKES_ONE = """
import time
from charonia.server.machine.private_folder import PrivateFolder
folder = PrivateFolder()
(folder.path / "1").mkdir()
(folder.path / "1" / "model.onnx").write_bytes(b"graph")
print(folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_removed_folder_is_gone_and_removing_it_again_is_no_error(temporary: Path) -> None:
    folder = PrivateFolder()

    folder.remove()
    folder.remove()

    assert list(temporary.iterdir()) == []


def test_the_folders_of_a_killed_process_are_removed_and_those_of_a_living_one_stay() -> None:
    own = PrivateFolder()
    process = subprocess.Popen([sys.executable, "-c", _MAKES_ONE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    other = Path(process.stdout.readline().strip())

    remove_abandoned()
    assert (other / "1" / "model.onnx").exists()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    remove_abandoned()

    assert not other.exists()
    assert own.path.exists()
    own.remove()


def test_a_folder_that_another_process_removes_before_it_is_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], tempfile.mkdtemp

    def make_and_lose(prefix: str) -> str:
        made.append(make(prefix=prefix))
        if len(made) == 1:
            remove_abandoned()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)

    folder = PrivateFolder()

    assert list(temporary.iterdir()) == [folder.path] == [Path(made[1])]
    folder.remove()


def test_what_only_looks_like_such_a_folder_stays(temporary: Path) -> None:
    (temporary / f"{PREFIX}file").write_bytes(b"")
    (temporary / "precious").mkdir()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "precious")

    remove_abandoned()

    assert len(list(temporary.iterdir())) == 3
