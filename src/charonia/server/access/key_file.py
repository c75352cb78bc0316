"""The file of API keys, which is reloaded when it changes."""

import logging
import os
import secrets
from pathlib import Path

from charonia.core.errors import invalid
from charonia.server.access.rules import KEY_LINE, KeyLines, KeyRing, parse_keys

_log = logging.getLogger(__name__)

FILE_BYTES_MAX = 4 * 2**20
"""Lines of a file beyond this are ignored, and reported."""

PROBLEMS_SHOWN = 20
"""Most lines of a file that are reported one by one."""

LOOK_S = 1.0
"""Pause between two checks of the file."""

Signature = tuple[int, int, int]

_GONE: Signature = (0, 0, 0)


class KeyFile:
    """A file of keys that is reloaded whenever it changes.

    The valid lines of the current file are the keys; without a file there are none. Only a transient error, such as too
    many open files, leaves the keys unchanged.

    Attributes:
        ring: The valid keys.
    """

    def __init__(self, path: str) -> None:
        """Read the file.

        Raises:
            ServingError: INVALID_ARG if it cannot be read, or contains lines but no valid one.
        """
        self._path = Path(path)
        self._is_failing = False
        try:
            self._signature = self._stat()
            lines = self._read()
        except OSError as error:
            raise invalid(f"--api-keys: cannot read '{path}': {error.strerror}") from error
        if lines.problems and not lines.keys:
            raise invalid(f"--api-keys: '{path}': {'; '.join(lines.problems[:PROBLEMS_SHOWN])}", hint=KEY_LINE)
        self.ring = KeyRing(lines.keys, secrets.token_bytes(32))
        self._report(lines)

    def refresh(self) -> bool:
        """Reload the file if it has changed, and return whether it has."""
        try:
            signature = self._stat()
            if signature == self._signature:
                return False
            lines = self._read()
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            if self._signature == _GONE:
                return False
            signature, lines = _GONE, KeyLines([], [f"it cannot be read: {error.strerror}"])
        except OSError as error:
            if not self._is_failing:
                self._is_failing = True
                _log.error("API keys: '%s' cannot be read, its previous keys stay valid: %s", self._path, error)
            return False
        self._is_failing = False
        self._signature = signature
        self.ring.replace(lines.keys)
        self._report(lines)
        return True

    def _report(self, lines: KeyLines) -> None:
        for problem in lines.problems[:PROBLEMS_SHOWN]:
            _log.error("API keys: '%s': %s", self._path, problem)
        if len(lines.problems) > PROBLEMS_SHOWN:
            _log.error("API keys: '%s': %d more lines are refused", self._path, len(lines.problems) - PROBLEMS_SHOWN)
        if lines.keys:
            _log.info("API keys: %d read from '%s'", len(lines.keys), self._path)
        else:
            _log.error("API keys: there is none in '%s', so every call that needs one is refused", self._path)

    def _stat(self) -> Signature:
        status = os.stat(self._path)
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> KeyLines:
        with self._path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        # A byte that is not UTF-8 makes its line invalid, not the file.
        is_too_large = len(data) > FILE_BYTES_MAX
        if is_too_large:
            data = data.rpartition(b"\n")[0]
        lines = parse_keys(data.decode(errors="replace"))
        if is_too_large:
            lines.problems.append(f"expected at most {FILE_BYTES_MAX} bytes, what follows them is ignored")
        return lines
