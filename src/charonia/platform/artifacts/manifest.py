"""The files of a version: path within the model's folder -> content; and which names from users are valid paths. Pure.

The files of the version itself are stored under `1/`, whatever number it is served as.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from charonia.core.errors import invalid

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


FILES_MAX = 10_000
"""Files of a version."""

PATH_CHARS_MAX = 1000
"""Length of a path."""

NAME_BYTES_MAX = 255
"""Length of one name in a path, in UTF-8: the limit of file systems."""

_NOT_CONTENT = frozenset({"__MACOSX", "__pycache__", "Thumbs.db", "desktop.ini"})


def safe_path(text: str) -> str:
    """Return the normalised form of a path below a folder: names with "/" between them."""
    names = [name for name in text.split("/") if name not in ("", ".")]
    problem = ""
    if text.startswith("/"):
        problem = "is absolute"
    elif ".." in names:
        problem = "leads out of its folder"
    elif not names:
        problem = "names no file"
    elif any(ord(char) < 32 or char in "\\\x7f" for char in text):
        problem = "holds a backslash or a control character"
    elif len(text) > PATH_CHARS_MAX or any(len(name.encode(errors="replace")) > NAME_BYTES_MAX for name in names):
        problem = "is too long"
    elif not _is_text(text):
        problem = "is not UTF-8"
    if problem:
        raise invalid(f"file {text[:200]!a}: expected a path below a folder, this one {problem}")
    return "/".join(names)


def check_together(paths: Iterable[str]) -> None:
    """Check that paths can be files of one folder."""
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise invalid(f"file '{path}': expected it once, got it twice")
        seen.add(path)
    for path in seen:
        for folder in parents(path):
            if folder in seen:
                raise invalid(f"'{folder}' is a file and also the folder of '{path}'")


def parents(path: str) -> Sequence[str]:
    """Return the folders that contain a path, without the root."""
    names = path.split("/")[:-1]
    return ["/".join(names[: count + 1]) for count in range(len(names))]


def is_content(path: str) -> bool:
    """Return whether a file belongs to a model, and is not a leftover of an editor, a system or a cache."""
    return not any(name.startswith(".") or name in _NOT_CONTENT for name in path.split("/"))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
