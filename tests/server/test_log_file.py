"""The file of a log: others rename it, delete it, and fill its disk."""

import errno
import logging
import os
from pathlib import Path

import pytest

from charonia.server.access_log import AccessEntry, AccessLog
from charonia.server.log_file import LogFile


class Disk:
    """Stands for `os.write` on a disk with so many bytes of room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def write(self, file: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(file, data[: self.room])
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk(10**9)
    monkeypatch.setattr(os, "write", made.write)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.log"


def test_text_is_appended(path: Path) -> None:
    path.write_text("earlier\n")

    LogFile(str(path)).write("later \u00fc\ud800\n")

    assert path.read_text() == "earlier\nlater \u00fc\\ud800\n"


def test_a_relative_path_begins_where_the_server_has_started(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    file = LogFile(path.name)
    monkeypatch.chdir("/")
    path.unlink()

    file.write("later\n")

    assert path.read_text() == "later\n"


def test_a_file_that_was_renamed_is_opened_anew_at_the_next_write(path: Path) -> None:
    file = LogFile(str(path))
    file.write("first\n")
    path.rename(path.with_suffix(".1"))

    file.write("second\n")

    assert path.with_suffix(".1").read_text() == "first\n"
    assert path.read_text() == "second\n"


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_was_deleted_or_replaced_is_opened_anew(path: Path, is_replaced: bool) -> None:
    file = LogFile(str(path))
    file.write("first\n")
    path.unlink()
    if is_replaced:
        path.write_text("other\n")

    file.write("second\n")

    assert path.read_text() == "other\n" * is_replaced + "second\n"


def test_a_file_that_was_cut_is_written_on_from_its_new_end(path: Path) -> None:
    file = LogFile(str(path))
    file.write("first\n")
    os.truncate(path, 0)

    file.write("second\n")

    assert path.read_text() == "second\n"


def test_a_full_disk_loses_what_does_not_fit_and_nothing_later(path: Path, disk: Disk) -> None:
    file = LogFile(str(path))
    disk.room = 9
    file.write("first\n")
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            file.write("second\n")
    disk.room = 10**9
    file.write("third\n")

    assert path.read_text() == "first\nsec\nthird\n"


def test_a_folder_that_is_gone_loses_lines_until_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file = LogFile(str(folder / "a.log"))
    (folder / "a.log").unlink()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        file.write("lost\n")

    folder.mkdir()
    file.write("first\n")

    assert (folder / "a.log").read_text() == "first\n"


def test_the_log_and_the_access_log_write_on_after_a_full_disk(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = AccessLog(LogFile(str(path)))
    handler = logging.StreamHandler(LogFile(str(path)))
    record = logging.LogRecord("n", logging.INFO, __file__, 1, "of the log", (), None)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    disk.room = 0
    handler.handle(record)
    access.write(AccessEntry("http", "GET /lost", 200))
    disk.room = 10**9
    handler.handle(record)
    access.write(AccessEntry("http", "GET /v2", 200))

    first, second = path.read_text().splitlines()
    assert first == "of the log"
    assert "GET /v2" in second
