"""Commands that the kernel kills together with the process that started them."""

import os
import sys
from collections.abc import Sequence

# Python has no binding of prctl; 1 is PR_SET_PDEATHSIG, which survives exec, and 9 is SIGKILL, which cannot be ignored.
# The parent may have died before the call: then no signal would ever come.
_SCRIPT = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def with_parent_death_signal(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` and is killed when this process ends, however it ends.

    This works on Linux; elsewhere the command is returned unchanged. The kernel watches the thread that starts the
    program, so start it from a thread that lasts.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _SCRIPT, str(os.getpid()), *command]
