"""The file of API keys, read anew when it changes."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from charonia.core.errors import ServingError
from charonia.server.access.key_file import FILE_BYTES_MAX, KeyFile
from charonia.server.access.rules import Scope, digest_of

FIRST, SECOND = "first-key-of-many-letters", "second-key-of-many-letters"


def knows(file: KeyFile, key: str) -> bool:
    return file.ring.check(Scope.READ, {b"x-api-key": key.encode()}.get) is None


def write(path: Path, *keys: str) -> None:
    path.write_text("".join(f"k{n} read {digest_of(key)}\n" for n, key in enumerate(keys)))
    os.utime(path, ns=(0, hash(keys) & 0xFFFFFFFF))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "keys"
    write(made, FIRST)
    return made


def test_keys_are_read_at_start(path: Path) -> None:
    assert knows(KeyFile(str(path)), FIRST)


def test_a_change_counts_at_the_next_look(path: Path) -> None:
    file = KeyFile(str(path))

    write(path, SECOND)
    assert knows(file, FIRST)
    file.refresh()

    assert not knows(file, FIRST)
    assert knows(file, SECOND)


def test_looks_are_repeated(path: Path) -> None:
    file = KeyFile(str(path))

    async def watch() -> None:
        task = asyncio.create_task(file.watch(0.001))
        write(path, SECOND)
        while not knows(file, SECOND):
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(asyncio.wait_for(watch(), 10))


def test_a_change_that_cannot_be_used_leaves_the_keys_and_is_reported_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(str(path))
    path.write_text("nonsense")

    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            file.refresh()

    assert knows(file, FIRST)
    assert [record.message.partition(": ")[0] for record in caplog.records] == ["API keys"]
    write(path, SECOND)
    file.refresh()
    assert knows(file, SECOND)


def test_a_file_that_is_gone_leaves_the_keys_and_is_reported_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(str(path))
    path.unlink()

    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            file.refresh()

    assert knows(file, FIRST)
    assert len(caplog.records) == 1
    write(path, FIRST)
    file.refresh()
    assert knows(file, FIRST)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a b c", b"#" * (FILE_BYTES_MAX + 1)])
def test_a_file_that_holds_something_else_is_refused_at_start(path: Path, content: bytes) -> None:
    path.write_bytes(content)

    with pytest.raises(ServingError, match="--api-keys: "):
        KeyFile(str(path))


def test_a_file_that_is_not_there_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"--api-keys: cannot read .*: No such file"):
        KeyFile(str(tmp_path / "none"))
