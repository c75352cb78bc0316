"""The file of API keys, read anew when it changes."""

import errno
import logging
import os
from pathlib import Path

import pytest

from charonia.core.errors import ServingError
from charonia.server.access.key_file import FILE_BYTES_MAX, PROBLEMS_SHOWN, KeyFile
from charonia.server.access.rules import Api, Operation, Scope, digest_of

FIRST, SECOND = "first-key-of-many-letters", "second-key-of-many-letters"


def knows(file: KeyFile, key: str) -> bool:
    return file.ring.check(Operation(Api.METADATA, Scope.READ), {b"x-api-key": key.encode()}.get) is None


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


def test_good_lines_hold_and_bad_ones_are_reported_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(str(path))
    path.write_bytes(f"# Schl\u00fcssel\nnew read {digest_of(SECOND)}\nnonsense\n".encode("latin-1"))

    with caplog.at_level(logging.ERROR):
        assert [file.refresh() for _ in range(3)] == [True, False, False]

    assert knows(file, SECOND)
    assert not knows(file, FIRST)
    assert [record.message for record in caplog.records] == [
        f"API keys: '{path}': line 3: expected NAME SCOPES KEY, got 1 words"
    ]


@pytest.mark.parametrize("content", [b"", b"# none\n", b"nonsense"])
def test_a_file_without_keys_lets_no_caller_in_and_says_so(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(str(path))
    path.write_bytes(content)

    file.refresh()

    assert not knows(file, FIRST)
    assert "every call that needs one is refused" in caplog.messages[-1]


def test_a_file_that_is_gone_takes_its_keys_along_and_is_reported_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(str(path))
    path.unlink()

    assert [file.refresh() for _ in range(3)] == [True, False, False]

    assert not knows(file, FIRST)
    assert [message.rpartition(": ")[2] for message in caplog.messages[:1]] == ["No such file or directory"]
    assert len(caplog.records) == 2
    write(path, FIRST)
    assert file.refresh()
    assert knows(file, FIRST)


def test_an_error_that_may_pass_leaves_the_keys_and_is_reported_once(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = KeyFile(str(path))
    write(path, SECOND)

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as failing:
        failing.setattr(Path, "open", fail)
        assert [file.refresh() for _ in range(3)] == [False] * 3
    assert knows(file, FIRST)
    assert len(caplog.records) == 1

    assert file.refresh()
    assert knows(file, SECOND)


def test_what_follows_the_limit_of_the_file_is_ignored(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text(f"k read {digest_of(FIRST)}\n" + "#" * FILE_BYTES_MAX)

    assert knows(KeyFile(str(path)), FIRST)
    assert f"expected at most {FILE_BYTES_MAX} bytes" in caplog.text


def test_the_report_of_a_file_is_short(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text(f"k read {digest_of(FIRST)}\n" + "nonsense\n" * (PROBLEMS_SHOWN + 5))

    KeyFile(str(path))

    assert len(caplog.records) == PROBLEMS_SHOWN + 1
    assert caplog.messages[-1].endswith("5 more lines are refused")


def test_the_server_may_start_without_a_key(path: Path) -> None:
    path.write_text("# later\n")

    assert not knows(KeyFile(str(path)), FIRST)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a b c", b"#" * (FILE_BYTES_MAX + 1)])
def test_a_file_that_holds_something_else_is_refused_at_start(path: Path, content: bytes) -> None:
    path.write_bytes(content)

    with pytest.raises(ServingError, match="--api-keys: "):
        KeyFile(str(path))


def test_a_file_that_is_not_there_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"--api-keys: cannot read .*: No such file"):
        KeyFile(str(tmp_path / "none"))
