"""The data folder, for the platform and for commands of the same user. Standard library only."""

import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import IO, NamedTuple

from charonia.core.errors import invalid, unavailable

DEFAULT_FOLDER = Path("~/.local/share/charonia")

KEY_FILE = "owner.key"
"""The API key for commands of the user who owns the folder."""

RECORD_FILE = "running.json"
LOCK_FILE = "lock"
FOLDER_MODE = 0o700
FILE_MODE = 0o600


class LocalAccess(NamedTuple):
    """How commands reach the platform of a data folder: its address, and a key."""

    url: str
    key: str


def claim(folder: Path, *, is_shared: bool = False) -> IO[str]:
    """Create a data folder if it is missing, and lock it for this process until the returned file is closed.

    Args:
        is_shared: Whether others may claim it, too.
    """
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a")
    except OSError as error:
        raise invalid(f"--data: '{folder}' cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise unavailable(
            f"another platform uses the folder '{folder}'", hint="stop it, or choose another folder with --data"
        ) from None
    return lock


def write_private(path: Path, text: str) -> None:
    """Write a file atomically that only its owner can read."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "w") as file:
        file.write(text)
    draft.replace(path)


def private_text(path: Path, random_bytes: int) -> str:
    """Return the random text of a private file, which is created if it is missing."""
    if not path.exists():
        write_private(path, secrets.token_hex(random_bytes))
    return path.read_text().strip()


def announce(folder: Path, url: str) -> None:
    """Record the platform's address on this machine."""
    write_private(folder / RECORD_FILE, json.dumps({"pid": os.getpid(), "url": url}))


def local_access(folder: Path) -> LocalAccess | None:
    """Return how to reach the platform that uses a folder, None if there is none, or this user may not."""
    import fcntl

    try:
        with (folder / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # several platforms may share it
        return None  # it is not in use: another program may have the recorded address by now
    except BlockingIOError:
        pass
    except OSError:
        return None
    try:
        record = json.loads((folder / RECORD_FILE).read_text())
        return LocalAccess(record["url"], (folder / KEY_FILE).read_text().strip())
    except (OSError, ValueError, KeyError):
        return None
