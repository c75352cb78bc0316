"""Commands that end with the process that has started them."""

import os
import sys
from collections.abc import Sequence

# Python's own bindings lack prctl; 1 is PR_SET_PDEATHSIG, which lasts when the program takes over. A parent that is
# gone by then has no death to come.
_SCRIPT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
if os.getppid() == int(sys.argv[2]):
    os.execvp(sys.argv[3], sys.argv[3:])
"""


def tethered(command: Sequence[str], ends_with: int) -> list[str]:
    """Return the command that runs `command` such that it ends with this process, however this one ends.

    The system keeps watch from the start of the program on (Linux; elsewhere nothing does, and the command is returned
    as it is). It watches the thread that starts the program: let that be one that lasts.

    Args:
        command: A program and its arguments.
        ends_with: Number of the signal that the program is sent.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _SCRIPT, str(int(ends_with)), str(os.getpid()), *command]
