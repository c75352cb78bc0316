"""Starts the server's Python programs as forks of a process that has their modules already: its template.

Workers, engines, front ends and load generators do little at first but import, and the tests start hundreds.
`install` changes how `subprocess` starts these programs. The template is a child of this process with a single thread.
What it forks is a child of this process, too (CLONE_PARENT), with the descriptors, variables, folder, session, cores,
limits and command line that it would have had. Every other program starts as ever, and so does every program in a test
that is marked `cold_start`.

A fork cannot show what the start of an interpreter does with its flags, and threads of numeric libraries that are set
by variables: these libraries are loaded already.
"""

import asyncio
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import io
import marshal
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_PACKAGE = importlib.util.find_spec("charonia")
assert _PACKAGE is not None
assert _PACKAGE.origin is not None
WORKER = str(Path(_PACKAGE.origin).parent / "server" / "backends" / "python" / "worker" / "script.py")
MODULES = ("charonia.__main__", "charonia.cli.serve_process", "charonia.tools.perf.worker")

PROGRAMS = ("charonia", *MODULES[1:])
"""What `python -m` gets for these modules."""

TEMPLATE = "charonia-test-template"
"""What the process list shows for a template."""

COLD = "CHARONIA_TESTS_START_COLD"
"""Environment variable: if it is set, every program starts as it would without this module."""

_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
_CLONE_PARENT = 0x8000
_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES_MAX = 128 * 1024
_DESCRIPTORS_MAX = 64
_DESCRIPTOR_MAX = 1 << 20
_COMMAND_LINE_BYTES = 1024

_start_cold: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]
_create_cold = asyncio.create_subprocess_exec
_template: "Template | None" = None
_programs: Sequence[str] = PROGRAMS
_lock = threading.Lock()

# Taken out of `sys.modules` again: a server that runs a model in a thread has its own idea of these names.
_worker_modules: dict[str, Any] = {}


class Template:
    """A template, as the process sees that it works for."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.owner = os.getpid()
        self._connection = connection

    def start(self, order: Any, descriptors: Sequence[int]) -> int:
        """Start a program and return its process.

        Raises:
            OSError: The template has ended: a test may kill whatever it finds.
        """
        socket.send_fds(self._connection, [marshal.dumps(order)], descriptors)
        answer = self._connection.recv(8)
        if not answer:
            raise BrokenPipeError("the template of warm starts has ended")
        return int.from_bytes(answer, "little")

    def close(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        os.waitpid(self.pid, 0)


def preload() -> None:
    """Import the modules of a worker process."""
    before = set(sys.modules)
    runpy.run_path(WORKER, run_name="_preloaded")
    _worker_modules.update({name: module for name, module in sys.modules.items() if name not in before})
    for name in list(_worker_modules):
        if name.startswith(("_charonia.", "triton_python_backend_utils")):
            del sys.modules[name]
        else:
            del _worker_modules[name]


def install(template: Template | None = None) -> None:
    """Start programs of this process warm from now on.

    Args:
        template: Their template. Without, one is made for the first worker or load generator, and for these alone.
    """
    global _template, _programs
    if _CLONE is not None:
        _template = template
        _programs = PROGRAMS if template is not None else PROGRAMS[-1:]
        subprocess._fork_exec = _start  # type: ignore[attr-defined]
        asyncio.create_subprocess_exec = _create_subprocess_exec  # type: ignore[assignment]


class _Process:
    """What the server uses of `asyncio.subprocess.Process`: uvloop starts processes by itself, without `subprocess`."""

    def __init__(self, started: "subprocess.Popen[bytes]") -> None:
        self.pid = started.pid
        self.send_signal, self.kill = started.send_signal, started.kill
        self._started = started

    async def wait(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.pidfd_open(self.pid)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return self._started.wait()


async def _create_subprocess_exec(*command: str, **options: Any) -> Any:
    if recognised(list(command))[0] is None or subprocess.PIPE in options.values() or COLD in os.environ:
        return await _create_cold(*command, **options)
    return _Process(subprocess.Popen(command, **options))


def end() -> None:
    """End the template that was made for the workers of this process."""
    global _template
    if _template is not None:
        _template.close()
        _template = None


def fork_template() -> Template:
    """Make a template of this process, which must have one thread only."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        try:
            _serve(theirs)
        finally:
            os._exit(1)
    theirs.close()
    return Template(ours, pid)


def _begin_template() -> Template:
    """Make a template that has nothing but the modules of a worker."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        os.set_inheritable(theirs.fileno(), True)
        command = [sys.executable, __file__, str(theirs.fileno()), "-" * _COMMAND_LINE_BYTES]
        # What dies with its parent dies with the thread that started it, or with the main thread if that has ended.
        with ThreadPoolExecutor(1) as thread:
            pid = thread.submit(os.posix_spawn, sys.executable, command, os.environ).result()
    return Template(ours, pid)


def _start(args: Sequence[Any], executables: object, close_fds: object, keep: Sequence[int], *rest: Any) -> int:
    """Start a program: what `subprocess` calls."""
    global _template
    folder, variables, from_us, _, _, to_us, _, errors, _, own_pipe, _, new_session, group, *others = rest
    words = [os.fsdecode(word) for word in args]
    program, death_signal = recognised(words)
    is_as_usual = others[:4] == [None, None, None, -1] and others[4] is None and (new_session or group == 0)
    if program is None or not is_as_usual or COLD in os.environ:
        return _start_cold(args, executables, close_fds, keep, *rest)
    passed = [descriptor for descriptor in keep if descriptor != own_pipe]
    streams = [own if given == -1 else given for own, given in enumerate((from_us, to_us, errors))]
    order = (
        program,
        [os.fsencode(word) for word in (sys.executable, "-P", *program)],
        list(variables) if variables is not None else [b"%s=%s" % item for item in os.environb.items()],
        os.fsencode(folder if folder is not None else os.getcwd()),
        death_signal,
        new_session,
        [0, 1, 2, *passed],
        list(os.sched_getaffinity(0)),
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    with _lock:
        if _template is None:
            _template = _begin_template()
        if _template.owner == os.getpid():  # otherwise this is a fork of the process that it works for
            with contextlib.suppress(OSError):
                return _template.start(order, [*streams, *passed])
    return _start_cold(args, executables, close_fds, keep, *rest)


def recognised(words: list[str]) -> tuple[list[str] | None, int]:
    """Return what a command line runs, None for what is not run warm, and the signal that it gets when we end."""
    from charonia.die_with_parent import with_parent_death_signal  # a template does without the package

    death_signal, prefix = 0, with_parent_death_signal([])[:-1]
    if prefix and words[: len(prefix)] == prefix:
        death_signal = int(signal.SIGKILL)
        words = words[len(prefix) + 1 :]  # the number of the parent, too
    interpreter, program = words[:2], words[2:]
    is_ours = program[:1] == [WORKER] or (program[:1] == ["-m"] and program[1] in _programs)
    if interpreter == [sys.executable, "-P"] and is_ours:
        return program, death_signal
    return None, 0


# What follows runs in the template.


def _serve(connection: socket.socket) -> None:
    """Start what the owner wants until it has ended."""
    os.setsid()  # a signal to the owner's group is not for this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _place([connection.detach()], [3])
    connection = socket.socket(fileno=3)
    for _ in range(3):
        os.open(os.devnull, os.O_RDWR)  # gets the least number
    _rename([TEMPLATE])
    for name in list(sys.modules):  # a model's process is no process of multiprocessing
        if name.split(".")[0] in ("multiprocessing", "tests", "__mp_main__"):
            del sys.modules[name]
    # Added by pytest, as the folder of a script, and by a variable that each program has for itself.
    added = (ROOT, Path(__file__).parent, Path(sys.executable).parent, *map(Path, _python_path()))
    sys.path[:] = [path for path in sys.path if path and Path(path) not in added]
    atexit._clear()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES_MAX, _DESCRIPTORS_MAX)
        if not message:
            return
        order = marshal.loads(message)
        if order[0][0] == "-m" and order[0][1] in MODULES and order[0][1] not in sys.modules:
            importlib.import_module(order[0][1])
            gc.freeze()
        pid = _clone()
        if not pid:
            _become(descriptors, *order)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(pid.to_bytes(8, "little"))


def _clone() -> int:
    """Fork a process whose parent is this one's parent; return its number, 0 in itself."""
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(ctypes.PyDLL(None, use_errno=True).syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone failed")
    return pid


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors these numbers, and close all others."""
    first = max(*descriptors, *numbers, 64) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, first) for descriptor in descriptors]
    os.closerange(0, first)
    os.closerange(max(moved) + 1, _DESCRIPTOR_MAX)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _become(
    descriptors: list[int],
    program: list[str],
    words: list[bytes],
    variables: list[bytes],
    folder: bytes,
    death_signal: int,
    new_session: bool,
    numbers: list[int],
    cores: list[int],
    files_max: tuple[int, int],
) -> None:
    status = 1
    try:
        owner = os.getppid()
        if death_signal:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != owner:
            return
        if new_session:
            os.setsid()
        else:
            os.setpgid(0, 0)
        _place(descriptors, numbers)
        resource.setrlimit(resource.RLIMIT_NOFILE, files_max)
        os.sched_setaffinity(0, cores)
        os.chdir(folder)
        os.environ.clear()
        os.environb.update(variable.split(b"=", 1) for variable in variables)  # type: ignore[misc] # in two
        sys.path[:0] = _python_path()
        _rename([os.fsdecode(word) for word in words])
        sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), _stream(1), _stream(2)  # noqa: SIM115
        for name in ("stdin", "stdout", "stderr"):
            setattr(sys, f"__{name}__", getattr(sys, name))
        sys.modules["numpy"].random.seed()  # as Python does with its own generator
        if program[0] == WORKER:
            sys.modules.update(_worker_modules)
        elif program[1] != MODULES[-1]:
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # as libuv does, which starts engines and front ends
            signal.signal(signal.SIGINT, signal.default_int_handler)
            install(fork_template())  # for the workers of a server
        status = _run(program)
    finally:
        os._exit(status & 0xFF)


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _stream(number: int) -> Any:
    if number == 1 and "PYTHONUNBUFFERED" not in os.environ:
        return open(number, "w", closefd=False)
    file = open(number, "wb", 0, closefd=False)  # noqa: SIM115 # like the standard streams, it stays open
    return io.TextIOWrapper(file, "utf-8", errors="backslashreplace" if number == 2 else "strict", write_through=True)


def _rename(words: Sequence[str]) -> None:
    """Let the process list show a command line, as far as there is room."""
    stat = Path("/proc/self/stat").read_text()
    begin, end = (int(word) for word in stat[stat.rindex(")") + 2 :].split()[45:47])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _run(program: list[str]) -> int:
    """Run a program as an interpreter does, and return its exit status."""
    status: object = 0
    try:
        if program[0] == "-m":
            sys.argv = program[1:]
            if program[1] in MODULES:  # for `runpy`, a module that is there already is a mistake
                del sys.modules[program[1]]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as leaving:
        status = leaving.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(status, int):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    return status if isinstance(status, int) else 1


if __name__ == "__main__":
    preload()
    _serve(socket.socket(fileno=int(sys.argv[1])))
