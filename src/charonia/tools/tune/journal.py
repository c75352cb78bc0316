"""The journal of measurements: an append-only file, so that an interrupted run can be resumed.

A line is identified by its scope, a digest of everything besides the trial that the result depends on (the model's
files and configuration, the server, the relevant options), and by the trial's key. If any of it changes, the trial is
measured again. Truncated and foreign lines are skipped.
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from charonia.core.errors import ServingError, invalid
from charonia.tools.results.json_form import plain, record
from charonia.tools.results.records import LevelResult
from charonia.tools.tune.api import Failed, Measured, Outcome

FILE = "charonia-tune.jsonl"
VERSION = 1
"""Version of a line: raised when a reader of the old one would misunderstand the new one."""

_HASH_CHUNK = 1 << 20
_NOT_CONTENT = "__pycache__"


@dataclass(frozen=True, slots=True)
class Entry:
    """A trial that was measured, or failed.

    Attributes:
        measured: The measurements, None for a failure.
        failed: Why it failed, None otherwise.
    """

    scope: str
    key: str
    measured: Measured | None = None
    failed: Failed | None = None
    levels: dict[str, LevelResult] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        return self.measured or self.failed or Failed("nothing is known of it")


class Journal:
    """The journal of a folder. A context manager that locks the folder: one process at a time uses it.

    Args:
        folder: The folder; made where it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._entries: dict[tuple[str, str], Entry] = {}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """Open it and read its lines.

        Raises:
            ServingError: INVALID_ARG when it cannot be read or written, or another process has it.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+")
            _lock(self._file, self.path)
            self._file.seek(0)
            content = self._file.read()
            if content and not content.endswith(b"\n"):
                self._file.write(b"\n")  # a truncated entry stays a separate line
        except OSError as error:
            self._close()
            raise _unwritable(self.path, error) from error
        except ServingError:
            self._close()
            raise
        for line in content.split(b"\n"):
            if (entry := _entry(line)) is not None:
                self._entries[entry.scope, entry.key] = entry
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def find(self, scope: str, key: str) -> Entry | None:
        """Return the entry of a trial, None if there is none. Of several lines, the last counts."""
        return self._entries.get((scope, key))

    def append(self, entry: Entry) -> None:
        """Write a line and sync it to disk."""
        if self._file is None:
            raise invalid(f"journal '{self.path}' is not open")
        line = json.dumps({"version": VERSION, **plain(entry)}, allow_nan=False).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._entries[entry.scope, entry.key] = entry

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def scope_of(facts: Mapping[str, object]) -> str:
    """Return a digest of what results depend on. The facts must be representable in JSON."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def content_of(folder: Path) -> str:
    """Return a digest of the names and the content of all files of a model. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG when a file cannot be read.
    """
    digest = blake2b(digest_size=16)
    try:
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if not path.is_file() or _NOT_CONTENT in inside.parts or any(part.startswith(".") for part in inside.parts):
                continue
            digest.update(b"%s\0%d\0" % (os.fsencode(inside), path.stat().st_size))
            with path.open("rb") as file:
                while chunk := file.read(_HASH_CHUNK):
                    digest.update(chunk)
    except OSError as error:
        raise invalid(f"'{error.filename}' cannot be read: {(error.strerror or str(error)).lower()}") from error
    return digest.hexdigest()


def _entry(line: bytes) -> Entry | None:
    try:
        data: Any = json.loads(line)
        if not isinstance(data, dict) or data.get("version") != VERSION:
            return None
        entry = record(Entry, data)
    except (ValueError, TypeError, KeyError, RecursionError, ServingError):
        return None
    return entry if (entry.measured is None) != (entry.failed is None) else None


def _unwritable(path: Path, error: OSError) -> ServingError:
    return invalid(f"journal '{path}' cannot be written: {(error.strerror or str(error)).lower()}")


def _lock(file: IO[bytes], path: Path) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise invalid(
            f"journal '{path}' is in use by another run", hint="name another folder with --checkpoint-directory"
        ) from None
