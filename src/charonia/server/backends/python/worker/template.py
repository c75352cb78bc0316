"""The script of a template: a process that imports a library or a model once, and that workers are forked from.

It has one thread, so a fork of it is as good as a process that has just imported the same, and shares the memory of the
import with its siblings. It takes one order at a time from the server:

- "fork": with the worker's two sockets and its output; answered with the process's number, and its pidfd;
- "wait": answered with the status of a forked process that has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import marshal
import os
import runpy
import signal
import socket
import sys
import traceback

MESSAGE_BYTES_MAX = 128 * 1024

_PR_SET_PDEATHSIG = 1
_FOLDER = os.path.dirname(os.path.realpath(__file__))


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    server, (modules, model) = int(sys.argv[2]), json.loads(sys.argv[3])
    connection.set_inheritable(False)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.argv[:] = [""]
    runpy.run_path(os.path.join(_FOLDER, "script.py"), run_name="_template")
    try:
        for name in modules:
            importlib.import_module(name)
        if model:
            sys.modules["_charonia.backends.python.worker.runner"].preload(*model)
    except BaseException as error:
        traceback.print_exc()
        connection.send(marshal.dumps(("failed", f"{type(error).__name__}: {error}")))
        return
    unsafe = _unsafe()
    if unsafe:
        what = ", ".join([*modules, *model[:1]])
        text = f"{unsafe} after the import of {what}, so workers cannot be forked"
        connection.send(marshal.dumps(("failed", text)))
        return
    gc.collect()
    gc.freeze()  # or the first collection of every worker would copy the memory of all objects
    connection.send(marshal.dumps(("ready",)))
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, 3)
        if not message:
            return
        kind, *content = marshal.loads(message)
        if kind == "wait":
            _, status = os.waitpid(content[0], 0)
            connection.send(marshal.dumps(os.waitstatus_to_exitcode(status)))
            continue
        pid = os.fork()
        if not pid:
            connection.close()
            _work(descriptors, *content)
        os.setpgid(pid, pid)  # the child does the same: whoever comes first
        pidfd = os.pidfd_open(pid)
        for descriptor in descriptors:
            os.close(descriptor)
        socket.send_fds(connection, [marshal.dumps(pid)], [pidfd])
        os.close(pidfd)


def _unsafe() -> str:
    """Return what a fork of this process would lack, "" for nothing."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"{threads - 1} threads run"
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            if os.readlink(f"/proc/self/fd/{number}").startswith("/dev/nvidia"):
                return "CUDA is in use"
    return ""


def _work(descriptors: list[int], variables: dict[str, str], cores: list[int]) -> None:
    """Be a worker, and exit."""
    status = 1
    try:
        os.setpgid(0, 0)
        receiving, sending, output = descriptors
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = open(number, "wb", 0, closefd=False)  # noqa: SIM115 # like the standard streams, it stays open
            setattr(sys, name, io.TextIOWrapper(file, errors="backslashreplace", write_through=True))
        if cores:
            os.sched_setaffinity(0, cores)
        os.environ.clear()
        os.environ.update(variables)
        sys.modules["numpy"].random.seed()  # as Python does with its own generator
        worker = sys.modules["_charonia.backends.python.worker.main"]
        worker.work(socket.socket(fileno=receiving), socket.socket(fileno=sending))
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
