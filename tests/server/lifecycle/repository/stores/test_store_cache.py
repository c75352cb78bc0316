"""What is kept on disk, and what may go."""

import os
from pathlib import Path

import pytest

from charonia.core.errors import Code, ServingError
from charonia.server.lifecycle.repository.mirror import Lease, StoreCache


def put(cache: StoreCache, key: str, content: bytes) -> Path:
    with cache.filling(), cache.new_blob(key, len(content)) as fd:
        os.pwrite(fd, content, 0)
    blob = cache.blob(key)
    assert blob is not None
    return blob


def planted(cache: StoreCache, key: str, *contents: bytes) -> Lease:
    blobs = {f"1/{n}": put(cache, f"{key}{n}", content) for n, content in enumerate(contents)}
    with cache.filling():
        cache.add_tree(key, "m", ["1"], blobs)
    lease = cache.lease(key, "m")
    assert lease is not None
    return lease


def age(cache: StoreCache, key: str, mtime: int) -> None:
    os.utime(cache.folder / "trees" / key, (mtime, mtime))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_what_is_put_in_is_there_and_what_fails_is_not(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path / "cache")

    assert put(cache, "a", b"hello").read_bytes() == b"hello"
    with pytest.raises(ZeroDivisionError), cache.filling(), cache.new_blob("b", 5):
        raise ZeroDivisionError

    assert cache.blob("b") is None
    assert names(cache.folder / "blobs") == ["a"]


def test_a_tree_shares_the_content_of_its_blobs(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path)

    lease = planted(cache, "t", b"one")

    blob = cache.blob("t0")
    assert blob is not None
    assert (lease.path / "1" / "0").samefile(blob)
    assert lease.path.name == "m"
    assert cache.used_bytes() == 3


def test_the_least_recently_used_tree_that_nobody_holds_goes_first(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path, bytes_max=10)
    for number, key in enumerate(("held", "old", "new")):
        lease = planted(cache, key, b"abc")
        age(cache, key, 1000 + number)
        if key != "held":
            lease.release()

    cache.trim(needed=4)

    assert names(tmp_path / "trees") == ["held", "new"]
    assert cache.used_bytes() == 6


def test_what_is_held_stays_whatever_the_limit(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path, bytes_max=4)
    lease = planted(cache, "t", b"abc")

    cache.trim(needed=4)

    assert (lease.path / "1" / "0").read_bytes() == b"abc"
    lease.release()
    lease.release()
    cache.trim(needed=4)
    assert cache.used_bytes() == 0
    assert cache.lease("t", "m") is None


def test_nothing_is_removed_while_something_is_put_in(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path, bytes_max=4)
    put(cache, "loose", b"abc")

    with cache.filling():
        cache.trim(needed=4)
        assert cache.blob("loose") is not None
    cache.trim(needed=4)

    assert cache.blob("loose") is None


def test_more_than_the_cache_may_ever_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="--model-store-cache-size") as caught:
        StoreCache(tmp_path, bytes_max=4).trim(needed=5)

    assert caught.value.code is Code.UNAVAILABLE


def test_what_a_process_was_making_when_it_ended_is_removed_a_day_later(tmp_path: Path) -> None:
    cache = StoreCache(tmp_path)
    put(cache, "a", b"x")
    left = [tmp_path / "blobs" / "b.1234.part", tmp_path / "trees" / "t.1234.part"]
    left[0].write_bytes(b"half")
    left[1].mkdir()

    cache.trim()
    assert all(path.exists() for path in left)
    for path in left:
        os.utime(path, (1, 1))
    cache.trim()

    assert not any(path.exists() for path in left)
    assert cache.blob("a") is not None


def test_where_there_are_no_hard_links_content_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)

    lease = planted(StoreCache(tmp_path), "t", b"abc")

    assert (lease.path / "1" / "0").read_bytes() == b"abc"


def test_two_processes_that_make_the_same_tree_do_not_disturb_each_other(tmp_path: Path) -> None:
    one, other = StoreCache(tmp_path), StoreCache(tmp_path)

    first, second = planted(one, "t", b"abc"), planted(other, "t", b"abc")

    assert first.path == second.path
    assert names(tmp_path / "trees") == ["t"]


def test_a_cache_is_trimmed_while_another_process_creates_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = StoreCache(tmp_path / "cache"), StoreCache(tmp_path / "cache")
    mkdir = Path.mkdir

    def trimmed(folder: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        mkdir(folder, mode, parents, exist_ok)
        other.trim()

    monkeypatch.setattr(Path, "mkdir", trimmed)

    assert put(cache, "a", b"abc").read_bytes() == b"abc"
