import stat
import tempfile
from pathlib import Path

import pytest

from charonia.core.errors import Code, ServingError
from charonia.server.lifecycle import provision
from charonia.server.lifecycle.provision import write_override


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_files_are_written_into_a_folder_that_only_this_user_can_enter(temporary: Path) -> None:
    folder = write_override({"1/model.onnx": b"graph", "./labels.txt": b"cat"}).path

    assert folder.parent == temporary
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "1" / "model.onnx").read_bytes() == b"graph"
    assert (folder / "labels.txt").read_bytes() == b"cat"


@pytest.mark.parametrize("path", ["/1/model.onnx", "//1/model.onnx"])
def test_a_slash_at_the_start_means_the_model_folder(path: str) -> None:
    assert (write_override({path: b"graph"}).path / "1" / "model.onnx").read_bytes() == b"graph"


@pytest.mark.parametrize("path", ["../x", "/../etc/passwd", "1/../../x", "1/.."])
def test_a_path_out_of_the_model_folder_is_refused(temporary: Path, path: str) -> None:
    with pytest.raises(ServingError, match="must stay within model directory") as caught:
        write_override({"1/model.onnx": b"", path: b""})

    assert caught.value.code is Code.INVALID_ARG
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "path", ["", ".", "1/", "a\\b", "a\0b", "a\nb", "\ud800", "x" * 1025, "1/" + "x" * 256, "ü" * 128]
)
def test_a_path_that_is_no_files_is_refused(temporary: Path, path: str) -> None:
    with pytest.raises(ServingError, match=r"^Invalid file path"):
        write_override({path: b""})

    assert list(temporary.iterdir()) == []


def test_one_path_in_two_spellings_and_a_file_that_is_also_a_folder_are_refused() -> None:
    with pytest.raises(ServingError, match="is given twice"):
        write_override({"1/model.onnx": b"", "./1//model.onnx": b""})
    with pytest.raises(ServingError, match="'1' is a file, too"):
        write_override({"1": b"", "1/model.onnx": b""})


def test_too_many_files_and_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provision, "OVERRIDE_FILES_MAX", 1)
    monkeypatch.setattr(provision, "OVERRIDE_BYTES_MAX", 3)

    with pytest.raises(ServingError, match="at most 1 files, got 2"):
        write_override({"a": b"", "b": b""})
    with pytest.raises(ServingError, match="at most 3 bytes in all, got 4"):
        write_override({"a": b"1234"})


def test_a_failed_write_leaves_nothing_behind(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provision, "OVERRIDE_NAME_BYTES_MAX", 300)
    with pytest.raises(ServingError, match=r"cannot be written .*: file name too long") as caught:
        write_override({"a": b"1", "x" * 300: b""})

    assert caught.value.code is Code.INTERNAL
    assert list(temporary.iterdir()) == []


def test_a_missing_folder_for_temporary_files_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/no/where")

    with pytest.raises(ServingError, match="no such file or directory"):
        write_override({"a": b""})
