"""Memory objects of the system: what can be registered, and what happens when they change."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from charonia.core.errors import Code, ServingError
from charonia.server.shared_memory.registry import OBJECT_NAME_BYTES_MAX, SHM_FOLDER, SystemMemory
from charonia.wire.shared_memory import SystemRegion

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def key() -> Iterator[str]:
    path = Path(SHM_FOLDER, f"charonia_test_{uuid4().hex}")
    path.write_bytes(CONTENT)
    yield f"/{path.name}"
    path.unlink(missing_ok=True)


def memory_of(key: str, offset: int, byte_size: int, folder: str = SHM_FOLDER) -> SystemMemory:
    return SystemMemory(SystemRegion("r", key, offset, byte_size), folder)


def path_of(key: str) -> Path:
    return Path(SHM_FOLDER, key.lstrip("/"))


@pytest.mark.parametrize("offset", [0, 4, 4096, 5000])
def test_a_part_is_read_and_written_where_it_lies(key: str, offset: int) -> None:
    memory = memory_of(key, offset, 1024)

    view = memory.view(16, 32)
    assert bytes(view) == CONTENT[offset + 16 : offset + 48]
    memory.write(16, memoryview(b"\xee" * 32))

    assert bytes(view) == b"\xee" * 32
    assert path_of(key).read_bytes() == CONTENT[: offset + 16] + b"\xee" * 32 + CONTENT[offset + 48 :]


def test_the_name_may_have_a_slash_at_its_start_or_none(key: str) -> None:
    assert bytes(memory_of(key.lstrip("/"), 0, 4).view(0, 4)) == CONTENT[:4]


def test_what_is_read_cannot_be_written(key: str) -> None:
    assert memory_of(key, 0, 4).view(0, 4).readonly


def test_a_view_outlives_the_region_and_the_object(key: str) -> None:
    view = memory_of(key, 0, 16).view(0, 16)
    path_of(key).unlink()

    assert bytes(view) == CONTENT[:16]


def test_files_are_closed_with_the_region(key: str) -> None:
    before = len(os.listdir("/proc/self/fd"))

    memory = memory_of(key, 0, 16)
    during = len(os.listdir("/proc/self/fd"))
    del memory

    assert during > before
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "name", ["", "/", ".", "..", "/..", "a/b", "../shm/x", "/a/../b", "x\0y", "n" * (OBJECT_NAME_BYTES_MAX + 1)]
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ServingError, match=r"cannot register shared memory region '.*' - invalid shm key") as caught:
        memory_of(name, 0, 1)

    assert caught.value.code is Code.INVALID_ARG


@pytest.mark.parametrize("name", ["triton_python_backend_shm_region_1", "/triton_python_backend_shm_region_", "sem.x"])
def test_reserved_names_are_refused_even_where_the_object_exists(tmp_path: Path, name: str) -> None:
    tmp_path.joinpath(name.lstrip("/")).write_bytes(CONTENT)

    with pytest.raises(ServingError, match="as the key contains the reserved prefix"):
        memory_of(name, 0, 1, str(tmp_path))


def test_an_object_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ServingError, match=f"Unable to open.*: {os.strerror(errno.ENOENT)}") as caught:
        memory_of(f"/charonia_test_{uuid4().hex}", 0, 1)

    assert caught.value.code is Code.INTERNAL


def test_links_folders_and_pipes_are_no_memory_objects(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(CONTENT)
    folder = tmp_path / "shm"
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")

    for name in ("link", "folder", "pipe"):
        with pytest.raises(ServingError, match=f"Unable to open shared memory region: '{name}'"):
            memory_of(name, 0, 1, str(folder))


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [(0, 0), (0, len(CONTENT) + 1), (len(CONTENT), 1), (2**63, 1), (8, 2**64 - 1)],
)
def test_a_part_that_is_not_in_the_object_is_refused(key: str, offset: int, byte_size: int) -> None:
    with pytest.raises(ServingError, match="failed to register shared memory region 'r': invalid args") as caught:
        memory_of(key, offset, byte_size)

    assert caught.value.code is Code.INVALID_ARG


def test_an_object_that_became_shorter_is_neither_read_nor_written(key: str) -> None:
    memory = memory_of(key, 4096, 8192)
    os.truncate(path_of(key), 4096 + 8191)

    for use in (lambda: memory.view(0, 1), lambda: memory.write(0, memoryview(b"x"))):
        with pytest.raises(ServingError, match="has 12287 bytes now, its registered part ends at 12288") as caught:
            use()
        assert caught.value.code is Code.INVALID_ARG
    os.truncate(path_of(key), 4096 + 8192)
    assert bytes(memory.view(0, 4)) == CONTENT[:4]


def test_memory_that_cannot_be_had_is_refused_when_it_is_registered(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(ServingError, match="16 bytes cannot be allocated: No space left") as caught:
        memory_of(key, 0, 16)

    assert caught.value.code is Code.UNAVAILABLE


def test_an_object_that_cannot_be_written_any_more_is_an_error(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(key, 0, 16)

    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "pwrite", broken)

    with pytest.raises(ServingError, match="cannot be written: broken"):
        memory.write(0, memoryview(b"x"))


def test_a_long_write_goes_on_where_the_system_stopped(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(key, 0, 64)
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, position: write(file, data[:5], position))

    memory.write(3, memoryview(b"0123456789ab"))

    assert bytes(memory.view(3, 12)) == b"0123456789ab"


def test_where_there_are_no_memory_objects_they_are_not_offered(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="not offered on this platform") as caught:
        memory_of("x", 0, 1, str(tmp_path / "none"))

    assert caught.value.code is Code.UNSUPPORTED


def test_writing_to_an_object_that_shrinks_in_between_does_not_end_the_process(key: str) -> None:
    # Through a mapping the same would be a SIGBUS, so a process of its own tries it.
    code = f"""
import os
from charonia.server.shared_memory import registry as system
memory = system.SystemMemory(system.SystemRegion("r", {key!r}, 0, 8192))
memory._check = lambda: None
os.truncate({str(path_of(key))!r}, 0)
memory.write(4096, memoryview(b"x" * 4096))
print("alive")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)

    assert (result.returncode, result.stdout.strip()) == (0, "alive")
