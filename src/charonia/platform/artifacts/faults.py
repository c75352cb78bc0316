"""Errors of disks and of sizes, which have statuses of their own."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from charonia.core.errors import Code, ServingError, internal

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class StorageFullError(ServingError):
    """There is no room left for what is to be kept."""


class TooLargeError(ServingError):
    """What was sent is larger than it may be."""


def storage_full(message: str) -> StorageFullError:
    """Return the error for a full disk."""
    return StorageFullError(Code.UNAVAILABLE, message, hint="delete versions that nobody uses, or add room")


def too_large(message: str, *, hint: str = "") -> TooLargeError:
    """Return the error for something that is too large."""
    return TooLargeError(Code.INVALID_ARG, message, hint=hint)


@contextmanager
def disk_faults(what: str, place: Path) -> Iterator[None]:
    """Turn errors of a disk into errors for people.

    Args:
        what: What is being done: "upload".
        place: Where.

    Raises:
        StorageFullError: If the disk is full.
        ServingError: INTERNAL for all other faults.
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if error.errno in _FULL:
            raise storage_full(f"{what}: there is no room left in '{place}'") from error
        raise internal(f"{what}: '{place}' cannot be used: {reason}") from error
