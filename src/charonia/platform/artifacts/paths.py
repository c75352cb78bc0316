"""Untrusted file names: which ones are valid paths below a folder. Pure."""

from collections.abc import Iterable, Sequence

from charonia.core.errors import invalid

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
