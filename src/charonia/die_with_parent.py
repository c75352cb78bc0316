"""Commands that the kernel ends together with the process that started them."""

import os
import sys
from collections.abc import Sequence

# Python has no binding of prctl; 1 is PR_SET_PDEATHSIG, which survives exec. The parent may have died before the call:
# then no signal would ever come.
_SCRIPT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
if os.getppid() == int(sys.argv[2]):
    os.execvp(sys.argv[3], sys.argv[3:])
"""


def with_parent_death_signal(command: Sequence[str], death_signal: int) -> list[str]:
    """Return a command that runs `command` and ends together with this process, however this process ends.

    This works on Linux; elsewhere the command is returned unchanged. The kernel watches the thread that starts the
    program, so start it from a thread that lasts.

    Args:
        command: A program and its arguments.
        death_signal: Number of the signal that the program receives when this process ends.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _SCRIPT, str(int(death_signal)), str(os.getpid()), *command]
