"""Starts the server's Python programs as forks of a process that has their modules already: its template.

Workers, engines, front ends and load generators do little at first but import, and the tests start hundreds.
`install` changes how `subprocess` starts these programs. The template is a child of this process with a single thread.
What it forks is a child of this process, too (CLONE_PARENT), with the descriptors, variables, folder, session, cores,
limits and command line that it would have had. Every other program starts as ever, and so does every program in a test
that is marked `cold_start`.

The platform starts `charonia` commands in wrappers that detach, note, limit and confine a process and then become the
command (`_unwrapped`). A fork does the same to itself: what the kernel keeps from the process is real.

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
import re
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
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
CONFINE = str(Path(_PACKAGE.origin).parent / "platform" / "isolation" / "confine.py")
MODULES = ("charonia.__main__", "charonia.cli.serve_process", "charonia.tools.perf.worker")

PROGRAMS = ("charonia", *MODULES[1:])
"""What `python -m` gets for these modules."""

COMMANDS = (
    "charonia.server.app",
    *(f"charonia.cli.{name}" for name in ("config", "explain", "infer", "perf", "serve", "tune")),
    *MODULES,
)
"""The modules of the commands of a server."""

SCRIPT = str(Path(sys.executable).with_name("charonia"))
PLATFORM = ["-m", "charonia", "platform"]
_PLATFORM_MODULES = ("charonia.cli.platform", "charonia.platform.serve")

TEMPLATE = "charonia-test-template"
"""What the process list shows for a template."""

COLD = "CHARONIA_TESTS_START_COLD"
"""Environment variable: if it is set, every program starts as it would without this module."""

_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
_CLONE_PARENT = 0x8000
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_MESSAGE_BYTES_MAX = 128 * 1024
_DESCRIPTORS_MAX = 64
_DESCRIPTOR_MAX = 1 << 20
_COMMAND_LINE_BYTES = 1024

_SCRIPTS = {
    '"$@" &': "detach",
    'echo $$ > "$0.new" && mv "$0.new" "$0" && exec "$@"': "note",
    'ulimit -d "$0" && exec "$@"': "limit",
}
"""Scripts of the platform that become a command, and what each does with its first argument (`_prepare`)."""

_LAUNCHER = re.compile(r"#!/bin/sh\n(CUDA_VISIBLE_DEVICES)='(.*)' exec '(.*)' \"\$@\"\n")
"""The interpreter of a deployment without variables."""

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
    program, steps = recognised(words)
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
        steps,
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


def recognised(words: list[str]) -> tuple[list[str] | None, list[tuple[str, str]]]:
    """Return what a command line runs, None for what is not run warm, and what its process does before."""
    words, steps = _unwrapped(words)
    interpreter, program = words[:2], words[2:]
    # A template of workers and load generators alone has the platform and its commands, too.
    is_for_platform = program[:3] == PLATFORM or any(kind == "confine" for kind, _ in steps)
    programs = PROGRAMS if is_for_platform else _programs
    is_ours = program[:1] == [WORKER] or (program[:1] == ["-m"] and program[1] in programs)
    return (program, steps) if interpreter == [sys.executable, "-P"] and is_ours else (None, [])


def _unwrapped(words: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the command that others become, and what they do before: names and arguments of steps."""
    from charonia.die_with_parent import with_parent_death_signal  # a template does without the package

    steps: list[tuple[str, str]] = []
    dying = with_parent_death_signal([])[:-1]
    while words:
        if dying and words[: len(dying)] == dying:
            steps.append(("die", words[len(dying)]))
            words = words[len(dying) + 1 :]
        elif words[:2] == ["/bin/sh", "-c"] and words[2] in _SCRIPTS:
            steps.append((_SCRIPTS[words[2]], words[3]))
            words = words[4:]
        elif words[:4] == [sys.executable, "-I", "-S", CONFINE]:
            steps.append(("confine", words[4]))
            words = words[5:]
        elif words[0] == SCRIPT:
            words = [sys.executable, "-P", "-m", "charonia", *words[1:]]
        elif Path(words[0]).name == "python" and words[0] != sys.executable and (found := _launched(words[0])):
            steps.append(("set", found))
            words = [sys.executable, *words[1:]]
        else:
            break
    return words, steps


def _launched(launcher: str) -> str:
    """Return the variable that the launcher of a deployment sets for this interpreter, "" for any other file."""
    try:
        found = _LAUNCHER.fullmatch(Path(launcher).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return f"{found[1]}={found[2]}" if found and found[3] == sys.executable else ""


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
    _settle()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES_MAX, _DESCRIPTORS_MAX)
        if not message:
            return
        order = marshal.loads(message)
        program, *_ = order
        needed = () if program[0] == WORKER else COMMANDS if program[1] == PROGRAMS[0] else (program[1],)
        needed += _PLATFORM_MODULES if program[:3] == PLATFORM else ()
        if not sys.modules.keys() >= set(needed):
            for module in needed:
                importlib.import_module(module)
            _settle()
        pid = _clone()
        if not pid:
            _become(descriptors, *order)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(pid.to_bytes(8, "little"))


def _settle() -> None:
    """Prepare for forks by `_clone`: what is loaded stays, and OpenBLAS ends its threads, as at other forks."""
    gc.freeze()
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


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
    steps: list[tuple[str, str]],
    new_session: bool,
    numbers: list[int],
    cores: list[int],
    files_max: tuple[int, int],
) -> None:
    status = 1
    try:
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
        sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), _stream(1), _stream(2)  # noqa: SIM115
        for name in ("stdin", "stdout", "stderr"):
            setattr(sys, f"__{name}__", getattr(sys, name))
        for kind, argument in steps:
            _prepare(kind, argument)
        _rename([os.fsdecode(word) for word in words])
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


def _prepare(kind: str, argument: str) -> None:
    """Do what a wrapper of a command does to its process."""
    libc = ctypes.CDLL(None)
    match kind:
        case "die":
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != int(argument):  # it may have ended before
                os._exit(1)
        case "detach":
            if os.fork():
                os._exit(0)
        case "note":
            Path(f"{argument}.new").write_text(f"{os.getpid()}\n")
            Path(f"{argument}.new").rename(argument)
        case "limit":
            resource.setrlimit(resource.RLIMIT_DATA, (int(argument) << 10,) * 2)
        case "set":
            name, _, value = argument.partition("=")
            os.environ[name] = value
        case "confine":
            confine = importlib.import_module("charonia.platform.isolation.confine")
            confine.confine(argument)
            tempfile.tempdir = None
            libc.prctl(_PR_SET_DUMPABLE, 1)  # another user may look at its own process, as after the start of a program


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
            for module in MODULES:  # for `runpy`, a module that is there already is a mistake
                if module.removesuffix(".__main__") == program[1].removesuffix(".__main__"):
                    sys.modules.pop(module, None)
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
