"""The store: content by its hash, folders of versions, collection."""

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.s3_server import S3, s3_server

from charonia.core.errors import Code, ServingError
from charonia.platform.artifacts import blobs, store
from charonia.platform.artifacts.blobs import BlobFolder, StorageFullError
from charonia.platform.artifacts.manifest import Blob, digest, from_json, served_path, to_json
from charonia.platform.artifacts.store import ArtifactStore, open_artifacts

HELLO = Blob(hashlib.sha256(b"hello").hexdigest(), 5)


@pytest.fixture
def here(tmp_path: Path) -> ArtifactStore:
    return open_artifacts("", tmp_path)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with s3_server(monkeypatch) as server:
        yield server


def leftovers(folder: Path) -> list[Path]:
    """Return what is there that is no blob, and all blobs."""
    return [*(folder / "incoming").iterdir(), *(folder / "sha256").glob("*/*")]


def test_content_is_kept_once_under_its_hash(here: ArtifactStore) -> None:
    first = here.add([b"hel", b"lo"], what="a")
    second = here.add([b"hello"], what="b")

    assert first == second == HELLO
    assert here.fetch(HELLO).read_bytes() == b"hello"
    assert leftovers(here.local.folder) == [here.local.path(HELLO.sha256)]


def test_a_file_of_the_platform_is_kept_without_a_copy(here: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"hello")

    assert here.adopt(tmp_path / "f", what="f") == HELLO
    assert os.path.samefile(tmp_path / "f", here.fetch(HELLO))
    assert here.adopt(tmp_path / "f", what="f") == HELLO


def test_nobody_writes_into_content_by_mistake(here: ArtifactStore) -> None:
    assert os.stat(here.fetch(here.add([b"hello"], what="a"))).st_mode & 0o222 == 0


def test_a_folder_is_made_of_links(here: ArtifactStore, tmp_path: Path) -> None:
    files = {"config.pbtxt": here.add([b"c"], what="c"), "1/model.onnx": here.add([b"hello"], what="m")}

    here.materialise({**files, "1/a/b": HELLO}, tmp_path / "repository" / "m")

    folder = tmp_path / "repository" / "m"
    assert (folder / "1" / "model.onnx").read_bytes() == (folder / "1" / "a" / "b").read_bytes() == b"hello"
    assert (folder / "config.pbtxt").read_bytes() == b"c"
    assert os.path.samefile(folder / "1" / "model.onnx", here.fetch(HELLO))


def test_an_ensemble_gets_the_folder_of_its_version(here: ArtifactStore, tmp_path: Path) -> None:
    here.materialise({"config.pbtxt": here.add([b"c"], what="c")}, tmp_path / "m")

    assert (tmp_path / "m" / "1").is_dir()


def test_on_another_disk_files_are_copied(here: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here.add([b"hello"], what="a")

    def other_disk(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    here.materialise({"1/f": HELLO}, tmp_path / "m")

    assert (tmp_path / "m" / "1" / "f").read_bytes() == b"hello"
    assert not os.path.samefile(tmp_path / "m" / "1" / "f", here.fetch(HELLO))


def test_a_full_disk_is_said_so_and_nothing_is_left(here: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"some"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageFullError, match="no room left"):
        here.add(pieces(), what="file 'a'")

    assert leftovers(here.local.folder) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk")
def test_on_a_disk_that_fills_up_nothing_half_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "RESERVE_BYTES", 0)
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True).returncode:
        pytest.skip("disks cannot be mounted here")
    try:
        here = ArtifactStore(BlobFolder(disk))
        with pytest.raises(StorageFullError, match=f"no room left in '{disk}'"):
            here.add((bytes(2**16) for _ in range(100)), what="file 'a'")
        with pytest.raises(StorageFullError, match="has room for"):
            blobs.demand_room(here.local.folder, 2**21, what="file 'a'")

        assert leftovers(disk) == []
        assert here.add([b"hello"], what="b") == HELLO
    finally:
        subprocess.run(["umount", disk], check=True)


def test_content_that_is_missing_is_said_so(here: ArtifactStore) -> None:
    with pytest.raises(ServingError, match="is missing"):
        here.fetch(HELLO)


def test_damage_is_found(here: ArtifactStore) -> None:
    path = here.fetch(here.add([b"hello"], what="a"))
    here.local.check(HELLO)
    path.chmod(0o600)
    path.write_bytes(b"jello")

    with pytest.raises(ServingError, match="has been damaged"):
        here.local.check(HELLO)


def test_a_collection_removes_what_nobody_names(here: ArtifactStore, tmp_path: Path) -> None:
    other = here.add([b"other"], what="b")
    here.materialise({"1/f": here.add([b"hello"], what="a")}, tmp_path / "m")

    assert here.collect(lambda: {other.sha256}) == (1, 5)

    assert [name for name, _ in here.local.all()] == [other.sha256]
    assert (tmp_path / "m" / "1" / "f").read_bytes() == b"hello"  # a deployment keeps its files


def test_nothing_is_collected_while_something_is_added(here: ArtifactStore) -> None:
    with here.adding():
        here.add([b"hello"], what="a")
        assert here.collect(set) is None
        assert here.is_collection_due

    assert here.collect(set) == (1, 5)
    assert not here.is_collection_due


def test_nothing_is_added_during_a_collection(here: ArtifactStore) -> None:
    done: list[str] = []
    begun = threading.Event()

    def add() -> None:
        begun.set()
        with here.adding():
            done.append("added")

    thread = threading.Thread(target=add)

    def used() -> set[str]:
        thread.start()
        begun.wait(200)
        thread.join(0.05)
        done.append("collected")
        return set()

    here.collect(used)
    thread.join(200)

    assert done == ["collected", "added"]


def test_what_a_killed_platform_has_left_goes_after_a_day(here: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    left = here.local.folder / "incoming" / "left"
    left.mkdir()
    (left / "f").touch()
    here.collect(set)
    assert left.exists()

    monkeypatch.setattr(store, "SWEEP_S", -1.0)
    here.collect(set)

    assert not left.exists()


def test_manifests_go_through_the_database_and_have_a_hash() -> None:
    files = {"1/b": HELLO, "a": Blob("0" * 64, 0)}

    assert from_json(to_json(files)) == files
    assert digest(files) == digest(dict(reversed(files.items())))
    assert len({digest(files), digest({"1/c": HELLO, "a": files["a"]}), digest({"1/b": HELLO})}) == 3
    assert [served_path(path, 3) for path in ("1/a/b", "1", "12/a", "labels.txt")] == [
        "3/a/b",
        "1",
        "12/a",
        "labels.txt",
    ]


def test_an_object_store_has_the_content_and_the_folder_is_its_cache(s3: S3, tmp_path: Path) -> None:
    uri = f"s3://127.0.0.1:{s3.port}/bucket/artifacts"
    first = open_artifacts(uri, tmp_path / "one")
    first.add([b"hello"], what="a")
    empty = first.add([], what="b")
    large = first.add((bytes([n]) * 2**20 for n in range(12)), what="c")

    second = open_artifacts(uri, tmp_path / "two")
    second.materialise({"1/a": HELLO, "1/b": empty, "1/c": large}, tmp_path / "m")

    assert (tmp_path / "m" / "1" / "a").read_bytes() == b"hello"
    assert (tmp_path / "m" / "1" / "b").read_bytes() == b""
    assert (tmp_path / "m" / "1" / "c").stat().st_size == large.size == 12 * 2**20
    second.local.check(large)


def test_there_must_be_room_for_what_is_fetched(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = open_artifacts(f"s3://127.0.0.1:{s3.port}/bucket/artifacts", tmp_path)
    here.add([b"hello"], what="a")
    here.local.remove(HELLO.sha256)
    usage = shutil.disk_usage(tmp_path)
    room = blobs.RESERVE_BYTES + 4
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=room))

    with pytest.raises(StorageFullError, match="needs 5 bytes"):
        here.materialise({"1/f": HELLO}, tmp_path / "m")

    assert not (tmp_path / "m").exists()
    room += 1
    here.materialise({"1/f": HELLO}, tmp_path / "m")
    room = 0
    here.materialise({"1/f": HELLO}, tmp_path / "again")


def test_a_collection_empties_the_object_store_too(s3: S3, tmp_path: Path) -> None:
    here = open_artifacts(f"s3://127.0.0.1:{s3.port}/bucket/artifacts", tmp_path)
    here.add([b"hello"], what="a")
    other = here.add([b"other"], what="b")
    s3.put("unrelated", b"of somebody else")

    assert here.collect(lambda: {other.sha256}) == (1, 5)

    here.local.remove(other.sha256)
    assert here.fetch(other).read_bytes() == b"other"
    with pytest.raises(ServingError):
        here.fetch(HELLO)


def test_what_no_deployment_has_leaves_the_cache_after_a_while(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "UNUSED_S_MAX", -1.0)
    here = open_artifacts(f"s3://127.0.0.1:{s3.port}/bucket/artifacts", tmp_path)
    other = here.add([b"other"], what="b")
    here.materialise({"1/f": here.add([b"hello"], what="a")}, tmp_path / "m")

    assert here.collect(lambda: {other.sha256, HELLO.sha256}) == (0, 0)

    assert [name for name, _ in here.local.all()] == [HELLO.sha256]
    assert here.fetch(other).read_bytes() == b"other"


def test_a_store_that_is_away_is_said_so_and_content_in_the_cache_still_serves(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charonia.stores.remote.RETRIES_MAX", 0)
    here = open_artifacts(f"s3://127.0.0.1:{s3.port}/bucket/artifacts", tmp_path)
    here.add([b"hello"], what="a")
    s3.stop()
    try:
        assert here.fetch(HELLO).read_bytes() == b"hello"
        with pytest.raises(ServingError, match=r"artifact store 's3://.*cannot be") as caught:
            here.add([b"other"], what="b")
        assert caught.value.code is Code.UNAVAILABLE
    finally:
        s3.start()

    assert here.add([b"other"], what="b").size == 5


def test_content_that_the_object_store_has_damaged_is_refused(s3: S3, tmp_path: Path) -> None:
    here = open_artifacts(f"s3://127.0.0.1:{s3.port}/bucket/models", tmp_path)
    here.add([b"hello"], what="a")
    here.local.remove(HELLO.sha256)
    s3.put(f"sha256/{HELLO.sha256[:2]}/{HELLO.sha256}", b"jello")

    with pytest.raises(ServingError, match="has been damaged"):
        here.fetch(HELLO)

    assert list(here.local.all()) == []


def test_a_folder_anywhere_can_be_the_store(tmp_path: Path) -> None:
    here = open_artifacts(str(tmp_path / "elsewhere"), tmp_path / "data")
    here.add([b"hello"], what="a")

    assert (tmp_path / "elsewhere" / "sha256" / HELLO.sha256[:2] / HELLO.sha256).is_file()
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(tmp_path / "elsewhere")


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ServingError, match="cannot be used"):
        open_artifacts(str(tmp_path / "file" / "store"), tmp_path)
