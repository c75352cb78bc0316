"""Files that are being sent: cut off, gone on with, sent twice, taken over."""

import fcntl
import os
import time
from pathlib import Path

import pytest

from charonia.core.errors import Code, ServingError, TooLargeError
from charonia.platform.artifacts import blobs, uploads
from charonia.platform.artifacts.blobs import StorageFullError
from charonia.platform.artifacts.uploads import UploadFolder


@pytest.fixture
def folder(tmp_path: Path) -> UploadFolder:
    found = UploadFolder(tmp_path / "uploads")
    found.begin({"k": 10})
    return found


def send(folder: UploadFolder, offset: int, content: bytes, size: int = 10) -> None:
    with folder.writing("k", offset, size) as writer:
        writer.write(content)


def test_pieces_follow_one_another(folder: UploadFolder) -> None:
    send(folder, 0, b"abcd")
    assert folder.received("k") == 4
    send(folder, 4, b"efghij")

    assert folder.path("k").read_bytes() == b"abcdefghij"


def test_a_piece_may_come_again(folder: UploadFolder) -> None:
    send(folder, 0, b"abcdef")
    send(folder, 2, b"cdefghij")

    assert folder.path("k").read_bytes() == b"abcdefghij"


def test_a_gap_is_refused_with_the_place_to_go_on_from(folder: UploadFolder) -> None:
    send(folder, 0, b"abcd")

    with pytest.raises(ServingError, match="offset of at most 4") as caught:
        send(folder, 5, b"f")
    assert caught.value.hint == "continue from 4"


def test_more_than_was_said_is_refused_and_what_came_before_stays(folder: UploadFolder) -> None:
    send(folder, 0, b"abcd")

    with pytest.raises(TooLargeError, match="expected 10 bytes"):
        send(folder, 4, b"efghijk")
    assert folder.path("k").read_bytes() == b"abcd"


def test_pieces_of_one_request_count_together(folder: UploadFolder) -> None:
    with folder.writing("k", 0, 10) as writer:
        writer.write(b"abcdef")
        with pytest.raises(TooLargeError):
            writer.write(b"ghijk")
        writer.write(b"ghij")

    assert folder.path("k").read_bytes() == b"abcdefghij"


def test_without_room_nothing_begins(folder: UploadFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageFullError, match="has room for"):
        folder.begin({"large": 2**62})
    assert not folder.path("large").exists()


def test_a_disk_that_fills_up_is_noticed(folder: UploadFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "LOOK_BYTES", 1)
    send(folder, 0, b"abcd")
    monkeypatch.setattr(blobs, "RESERVE_BYTES", 2**62)

    with pytest.raises(StorageFullError):
        send(folder, 4, b"e")
    assert folder.received("k") == 4


def test_what_is_sealed_cannot_be_changed_any_more(folder: UploadFolder) -> None:
    send(folder, 0, b"abcdefghij")
    folder.seal(["k"])
    folder.seal(["k"])  # the platform ended, and does it again

    with pytest.raises(ServingError, match="upload 'k' does not exist"):
        send(folder, 0, b"x")
    assert folder.sealed("k").read_bytes() == b"abcdefghij"
    folder.unseal(["k"])
    send(folder, 0, b"x")
    assert folder.path("k").read_bytes() == b"xbcdefghij"


def test_what_the_store_has_taken_over_stays_sealed(folder: UploadFolder, tmp_path: Path) -> None:
    send(folder, 0, b"abcdefghij")
    folder.seal(["k"])
    os.link(folder.sealed("k"), tmp_path / "blob")
    folder.unseal(["k"])

    assert folder.received("k") == 10
    with pytest.raises(ServingError, match="upload 'k' does not exist"):
        send(folder, 0, b"x")


def test_what_is_still_being_sent_cannot_be_sealed(folder: UploadFolder) -> None:
    with folder.writing("k", 0, 10), pytest.raises(ServingError, match="still being sent") as caught:
        folder.seal(["k"])
    assert caught.value.code is Code.CANCELLED
    with pytest.raises(ServingError, match="upload 'none' does not exist"):
        folder.seal(["none"])


def test_a_request_that_opened_a_file_before_it_was_sealed_comes_too_late(folder: UploadFolder) -> None:
    with folder.path("k").open("r+b") as late:
        folder.seal(["k"])
        with pytest.raises(ServingError, match="upload 'k' does not exist"):
            uploads._lock(late, folder.path("k"), fcntl.LOCK_SH)


def test_what_is_removed_is_gone_sealed_or_not(folder: UploadFolder) -> None:
    folder.begin({"other": 0})
    folder.seal(["k"])
    for key in ("k", "other"):
        folder.remove(key)

    assert list(folder.folder.iterdir()) == []


def test_what_nobody_goes_on_with_is_found(folder: UploadFolder) -> None:
    folder.begin({"new": 1, "sealed": 0})
    folder.seal(["sealed"])
    before = time.time() - 3600
    for path in (folder.path("k"), folder.sealed("sealed")):
        os.utime(path, (before, before))

    assert sorted(folder.unused(1800)) == ["k", "sealed"]


def test_an_empty_file_is_complete_at_once(folder: UploadFolder) -> None:
    folder.begin({"empty": 0})

    assert folder.received("empty") == 0
