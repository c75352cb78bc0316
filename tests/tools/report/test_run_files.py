import os
import stat
from pathlib import Path

import pytest
from tests.support.runs import synthetic_run

from charonia.core.errors import Code, ServingError
from charonia.tools.report.run_files import read_run, write_run, write_whole


def test_a_run_comes_back_as_it_was_written(tmp_path: Path) -> None:
    run = synthetic_run(error_share=0.01)

    write_run(tmp_path / "run.json", run)

    assert read_run(tmp_path / "run.json") == run


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(path, b"new")

    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_goes_on_leading_to_the_file_and_its_permissions_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)

    write_whole(link, b"new")

    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_device_is_written_to_and_not_replaced() -> None:
    write_whole(Path(os.devnull), b"content")

    assert not Path(os.devnull).is_file()


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_run(tmp_path / "missing" / "run.json", synthetic_run())


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="no such file") as error:
        read_run(tmp_path / "missing.json")

    assert error.value.code is Code.NOT_FOUND


def test_a_file_that_is_no_run_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"format": "something else"}')

    with pytest.raises(ServingError, match=r"other\.json: expected the JSON of a run"):
        read_run(path)
