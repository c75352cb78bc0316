"""A repository in a store that does what the test says."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from charonia.core.errors import ServingError, unavailable
from charonia.server.lifecycle.repository import mirror as mirror_module
from charonia.server.lifecycle.repository.mirror import StoreCache, StoreMirror
from charonia.server.lifecycle.repository.sources import Sources
from charonia.server.model_options import StoreSettings
from charonia.stores.remote import RemoteFile, RemoteStore

URI = "s3://bucket/models"


class FakeStore:
    """Files by path, and what was read of them."""

    uri = URI

    def __init__(self, **files: bytes) -> None:
        self.content = {path.replace("__", "/").replace("_dot_", "."): data for path, data in files.items()}
        self.reads: list[tuple[str, int, int]] = []
        self.is_down = False
        self.cut = 0

    def files(self) -> Iterator[RemoteFile]:
        if self.is_down:
            raise unavailable("the store is down")
        for path, data in self.content.items():
            yield RemoteFile(path, len(data), f"tag-{data[:8]!r}-{len(data)}")

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        if self.is_down:
            raise unavailable("the store is down")
        self.reads.append((file.path, start, end))
        data = self.content[file.path][start:end]
        yield data[:3]
        yield data[3 : len(data) - self.cut]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def mirrored(store: RemoteStore, folder: Path, pool: ThreadPoolExecutor) -> StoreMirror:
    return StoreMirror(store, StoreCache(folder), pool)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_models_are_the_first_part_of_paths(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    store = FakeStore(a__config_dot_pbtxt=b"x", a__1__model_dot_onnx=b"y", b__1__model_dot_py=b"z", readme=b"r")
    store.content[".git/config"] = b"hidden"

    found = mirrored(store, tmp_path, pool).list_models()

    assert [(folder.name, folder.origin, folder.place) for folder in found] == [
        ("a", URI, f"{URI}/a"),
        ("b", URI, f"{URI}/b"),
    ]


def test_a_fetched_model_has_the_files_of_the_store(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    store = FakeStore(a__config_dot_pbtxt=b"config", a__1__model_dot_onnx=b"0123456789")
    store.content["a/1/.hidden"] = b"h"
    mirror = mirrored(store, tmp_path, pool)

    folder, lease = mirror.fetch(mirror.list_models()[0])

    assert content(folder.path) == {"config.pbtxt": b"config", "1/model.onnx": b"0123456789"}
    assert folder.path == lease.path
    assert folder.path.name == "a"
    assert mirror.size("a") == 16
    assert mirror.size("none") == 0


@pytest.mark.parametrize("marker", ["e/1", "e/1/", "e/1/.keep"])
def test_an_empty_version_folder_is_an_empty_object(tmp_path: Path, pool: ThreadPoolExecutor, marker: str) -> None:
    store = FakeStore(e__config_dot_pbtxt=b"c")
    store.content[marker] = b""
    mirror = mirrored(store, tmp_path, pool)

    folder, _ = mirror.fetch(mirror.list_models()[0])

    assert (folder.path / "1").is_dir()
    assert content(folder.path) == {"config.pbtxt": b"c"}


def test_only_what_changed_is_fetched_again_and_the_old_state_stays(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    store = FakeStore(a__config_dot_pbtxt=b"old", a__1__model_dot_onnx=b"weights")
    mirror = mirrored(store, tmp_path, pool)
    old = mirror.list_models()[0]
    before, _ = mirror.fetch(old)
    store.reads.clear()

    store.content["a/config.pbtxt"] = b"new!"
    new = mirror.list_models()[0]
    after, _ = mirror.fetch(new)

    assert new.fingerprint != old.fingerprint
    assert store.reads == [("a/config.pbtxt", 0, 4)]
    assert content(before.path)["config.pbtxt"] == b"old"
    assert content(after.path) == {"config.pbtxt": b"new!", "1/model.onnx": b"weights"}


def test_what_is_in_the_cache_is_not_fetched_at_all(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    first = mirrored(FakeStore(a__1__m=b"weights"), tmp_path, pool)
    first.fetch(first.list_models()[0])
    store = FakeStore(a__1__m=b"weights")
    second = mirrored(store, tmp_path, pool)

    second.fetch(second.list_models()[0])

    assert store.reads == []


def test_a_long_file_comes_in_parts(tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "PART_BYTES", 10)
    data = os.urandom(35)
    store = FakeStore(a__1__m=data)
    mirror = mirrored(store, tmp_path, pool)

    folder, _ = mirror.fetch(mirror.list_models()[0])

    assert content(folder.path) == {"1/m": data}
    assert sorted(store.reads) == [("a/1/m", 0, 10), ("a/1/m", 10, 20), ("a/1/m", 20, 30), ("a/1/m", 30, 35)]


def test_a_fetch_that_fails_leaves_nothing_in_part(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    store = FakeStore(a__1__m=b"0123456789", a__2__m=b"abcdefghij")
    mirror = mirrored(store, tmp_path, pool)
    found = mirror.list_models()[0]

    store.cut = 2
    with pytest.raises(ServingError, match="came incomplete: 8 of 10 bytes"):
        mirror.fetch(found)
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    store.cut = 0
    folder, _ = mirror.fetch(found)

    assert left == []
    assert content(folder.path) == {"1/m": b"0123456789", "2/m": b"abcdefghij"}


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    (tmp_path / "file").write_text("")
    mirror = mirrored(FakeStore(a__1__m=b"x"), tmp_path / "file", pool)

    with pytest.raises(ServingError, match="--model-store-cache names another"):
        mirror.fetch(mirror.list_models()[0])


def test_paths_that_would_leave_the_folder_are_passed_over(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    store = FakeStore(a__1__m=b"x")
    store.content |= {"a/../../evil": b"x", "../evil": b"x", "config.pbtxt": b""}
    mirror = mirrored(store, tmp_path, pool)

    folder, _ = mirror.fetch(mirror.list_models()[0])

    assert content(folder.path) == {"1/m": b"x"}
    assert len(mirror.notes) == 2


def test_a_store_with_too_many_files_is_refused(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "FILES_MAX", 1)

    with pytest.raises(ServingError, match="at most 1 files"):
        mirrored(FakeStore(a__1=b"", b__1=b""), tmp_path, pool).list_models()


def sources(store: FakeStore, cache: Path, *folders: Path, has_namespaces: bool = False) -> Sources:
    repositories: list[str | Path] = [URI, *folders]
    stores: dict[str, RemoteStore] = {URI: store}
    return Sources(repositories, StoreSettings(str(cache)), has_namespaces=has_namespaces, stores=stores)


def test_folders_and_stores_are_looked_at_together(tmp_path: Path) -> None:
    local = tmp_path / "local"
    (local / "b" / "1").mkdir(parents=True)
    (local / "a").mkdir()
    together = sources(FakeStore(a__1__m=b"x", c__1__m=b"yz"), tmp_path / "cache", local)

    found = together.scan_all()

    assert sorted(found.models) == ["b", "c"]
    assert found.ambiguous == {"a": (str(local / "a"), f"{URI}/a")}
    assert together.fetch(found.models["b"]) == (found.models["b"], None)
    assert together.size(found.models["c"]) == 2
    assert sorted(together.known().models) == ["b", "c"]
    together.close()


def test_with_namespaces_names_are_not_ambiguous(tmp_path: Path) -> None:
    local = tmp_path / "local"
    (local / "a").mkdir(parents=True)
    together = sources(FakeStore(a__1__m=b"x"), tmp_path / "cache", local, has_namespaces=True)

    assert sorted(together.scan_all().models) == sorted([f"{local}/a", f"{URI}/a"])
    together.close()


def test_a_store_that_is_down_is_taken_as_it_was_last_seen(tmp_path: Path) -> None:
    store = FakeStore(a__1__m=b"x")
    together = sources(store, tmp_path)
    store.is_down = True
    first = together.scan_all()
    store.is_down = False
    second = together.scan_all()
    store.is_down = True
    third = together.scan_all()

    assert (list(first.models), first.unread) == ([], ("the store is down",))
    assert (list(second.models), second.unread) == (["a"], ())
    assert (list(third.models), third.unread) == (["a"], ("the store is down",))
    assert together.refreshed(third.models["a"]) == third.models["a"]
    together.close()


def test_a_model_is_looked_at_again_alone(tmp_path: Path) -> None:
    store = FakeStore(a__1__m=b"x")
    local = tmp_path / "local"
    (local / "b" / "1").mkdir(parents=True)
    together = sources(store, tmp_path / "cache", local)
    found = together.scan_all()

    store.content["a/1/m"] = b"other"
    (local / "b" / "1" / "m").write_text("m")

    for name in ("a", "b"):
        assert together.refreshed(found.models[name]).fingerprint != found.models[name].fingerprint
    assert together.size(found.models["b"]) == 1
    together.close()
