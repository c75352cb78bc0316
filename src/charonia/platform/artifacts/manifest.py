"""The files of a version: path within the model's folder -> content. Pure.

The files of the version itself are stored under `1/`, whatever number it is served as.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION_FOLDER = "1/"


@dataclass(frozen=True, slots=True)
class Blob:
    """A file's content.

    Attributes:
        size: Bytes.
    """

    sha256: str
    size: int


Manifest = Mapping[str, Blob]
"""Content by path."""


def to_json(files: Manifest) -> dict[str, Any]:
    return {path: {"sha256": blob.sha256, "size": blob.size} for path, blob in sorted(files.items())}


def from_json(files: Mapping[str, Any]) -> dict[str, Blob]:
    return {path: Blob(entry["sha256"], entry["size"]) for path, entry in files.items()}


def digest(files: Manifest) -> str:
    """Return the hash of all paths and contents."""
    text = json.dumps([[path, blob.sha256] for path, blob in sorted(files.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def size(files: Manifest) -> int:
    return sum(blob.size for blob in files.values())


def served_path(path: str, number: int) -> str:
    """Return the path of a file in the model's folder when it is served under that version number."""
    return f"{number}/{path.removeprefix(VERSION_FOLDER)}" if path.startswith(VERSION_FOLDER) else path
