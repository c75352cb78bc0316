"""Folders that take long to make and are the same each time: exported networks, compiled packages.

They are kept in pytest's cache, which `make clean` removes: other tests and later runs find them there.
"""

import fcntl
import hashlib
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest


def kept_folder(
    config: pytest.Config,
    name: str,
    make: Callable[[Path], None],
    *,
    sources: Sequence[Path],
    packages: Sequence[str],
    machine: str = "",
) -> Path:
    """Return a folder, made now unless it was made from the same sources with the same packages before.

    Args:
        name: What the folder is; of one name only the latest folder is kept.
        make: Makes what is in it, given an empty folder. Others wait meanwhile.
        sources: Files that say how, for the most part the scripts that do it.
        machine: What else it depends on, such as the instructions that a processor has.
    """
    words = "\n".join([*map(_version, packages), sys.version, machine])
    parts = [words.encode(), *(path.read_bytes() for path in sources)]
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts))
    assert config.cache is not None
    kept = config.cache.mkdir("charonia")
    folder = kept / f"{name}-{key.hexdigest()[:16]}"
    with (kept / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for old in kept.glob(f"{name}-*"):
                shutil.rmtree(old)
            begun = kept / f"{name}-begun"
            begun.mkdir()
            make(begun)
            begun.rename(folder)
    return folder


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} none"
