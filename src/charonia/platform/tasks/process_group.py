"""Ends a command together with all processes that it has started."""

import contextlib
import os
import signal
import subprocess

END_S_MAX = 5.0
"""Time that a command has to end after SIGTERM."""


def end_group(process: subprocess.Popen[str], end_s_max: float = END_S_MAX) -> None:
    """End a command that leads a session of its own: with SIGTERM, then with SIGKILL."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(end_s_max)
    _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
