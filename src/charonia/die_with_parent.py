"""Commands that die with the process that started them."""

import os
import sys
from collections.abc import Sequence

# Python has no binding of prctl. 1 is PR_SET_PDEATHSIG, which survives exec. No signal follows if the parent died
# before the call, so the script checks.
_SCRIPT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
if os.getppid() == int(sys.argv[2]):
    os.execvp(sys.argv[3], sys.argv[3:])
"""


def dying_with_parent(command: Sequence[str], ends_with: int) -> list[str]:
    """Return a command that runs `command` and gets a signal when this process ends, however it ends.

    The kernel sends the signal (Linux only; elsewhere the command is returned unchanged) when the thread that started
    the program ends, so start it from a thread that lives as long as the process.

    Args:
        command: A program and its arguments.
        ends_with: Number of the signal.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _SCRIPT, str(int(ends_with)), str(os.getpid()), *command]
