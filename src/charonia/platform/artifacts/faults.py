"""Errors of disks: a full disk has its own status."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from charonia.core.errors import Code, ServingError, internal

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class StorageFullError(ServingError):
    """The disk has no room left."""


def storage_full(message: str) -> StorageFullError:
    return StorageFullError(Code.UNAVAILABLE, message, hint="delete unused versions, or add room")


@contextmanager
def disk_faults(what: str, place: Path) -> Iterator[None]:
    """Turn errors of a disk into errors for users.

    Args:
        what: The operation: "upload".

    Raises:
        StorageFullError: If the disk is full.
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.errno in _FULL:
            raise storage_full(f"{what}: there is no room left in '{place}'") from error
        raise internal(f"{what}: '{place}' cannot be used: {reason}") from error
