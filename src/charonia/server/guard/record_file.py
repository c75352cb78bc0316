"""The files with messages of the guard to the processes of a server."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from charonia.server.metrics.processes import ProcessRecord, from_text, to_text

RECORD_VARIABLE = "CHARONIA_PROCESSES"
"""Environment variable of the processes of a server: path of the file."""


def write_record(path: Path, records: Sequence[ProcessRecord]) -> None:
    """Replace the record. On a full disk the file stays unchanged: that costs metrics, not the server."""
    new = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        new.write_text(to_text(records), encoding="utf-8")
        new.replace(path)


def read_record() -> tuple[ProcessRecord, ...]:
    """Return the record of the guard that started this process; nothing if there is none."""
    path = os.environ.get(RECORD_VARIABLE)
    if not path:
        return ()
    try:
        return from_text(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:  # the guard has ended, and so will this process
        return ()


def write_finish(folder: Path, name: str, finish_s: float) -> None:
    """Write how long a stopping front end has for its connections; 0 where the whole server stops."""
    with contextlib.suppress(OSError):
        (folder / f"{name}.finish").write_text(str(finish_s), encoding="utf-8")


def read_finish(folder: Path, name: str) -> float | None:
    """Return what `write_finish` wrote; None if another program stops the front end."""
    try:
        return float((folder / f"{name}.finish").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
