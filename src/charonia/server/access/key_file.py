"""The file of API keys, which is reloaded when it changes."""

import asyncio
import logging
import os
import secrets
from pathlib import Path

from charonia.core.errors import ServingError, invalid
from charonia.server.access.rules import ApiKey, KeyRing, parse_keys

_log = logging.getLogger(__name__)

FILE_BYTES_MAX = 4 * 2**20
"""Largest file of keys."""

LOOK_S = 1.0
"""Pause between two checks of the file."""

Signature = tuple[int, int, int]

_GONE: Signature = (0, 0, 0)


class KeyFile:
    """A file of keys that is reloaded whenever it changes.

    Attributes:
        ring: The keys that are valid now.
    """

    def __init__(self, path: str) -> None:
        """Read the file.

        Raises:
            ServingError: INVALID_ARG when it cannot be read or is malformed.
        """
        self._path = Path(path)
        try:
            self._signature = self._look()
            keys = self._read()
        except OSError as error:
            raise invalid(f"--api-keys: cannot read '{path}': {error.strerror}") from error
        except ServingError as error:
            raise invalid(f"--api-keys: '{path}': {error.message}", hint=error.hint) from error
        self.ring = KeyRing(keys, secrets.token_bytes(32))

    async def watch(self, interval_s: float = LOOK_S) -> None:
        """Check the file periodically, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            self.refresh()

    def refresh(self) -> None:
        """Reload the file if it has changed. If it cannot be used, the present keys stay valid."""
        try:
            signature = self._look()
            if signature == self._signature:
                return
            self._signature = signature
            keys = self._read()
        except (OSError, ServingError) as error:
            if self._signature != _GONE or isinstance(error, ServingError):
                _log.error("API keys: '%s' cannot be used, the keys read before stay: %s", self._path, error)
            if isinstance(error, OSError):
                self._signature = _GONE
            return
        self.ring.replace(keys)
        _log.info("API keys: %d read from '%s'", len(keys), self._path)

    def _look(self) -> Signature:
        status = os.stat(self._path)
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> list[ApiKey]:
        with self._path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise invalid(f"expected at most {FILE_BYTES_MAX} bytes")
        try:
            return parse_keys(data.decode())
        except UnicodeDecodeError as error:
            raise invalid("it is not UTF-8 text") from error
