"""`charonia upgrade`: put a new engine and new front ends into a running server.

Exit status: 0 when the new engine serves and the previous one has stopped, 1 when the upgrade is refused or fails, 2
for invalid arguments. Interrupting the command does not stop the upgrade: the server logs its result.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from charonia.cli.command_line import CommandLine, Option, carry_out, flag
from charonia.cli.values import integer, number
from charonia.core.errors import ServingError, invalid, not_found, unavailable, unsupported
from charonia.server.guard.control import command, running_servers


@dataclass(frozen=True, slots=True)
class UpgradeOptions:
    """Values of the command line.

    Attributes:
        pid: Process id of the server, 0 for the only one of this user.
        stop_first: Whether the engine stops before the new one starts.
        finish_secs: Seconds that the previous engine and front ends have to finish requests, streams and sequences.
        python: The interpreter of the new engine and front ends, "" for the current one.
        cancel: Whether to cancel an upgrade in progress.
    """

    pid: int = 0
    stop_first: bool = False
    finish_secs: float = 300.0
    python: str = ""
    cancel: bool = False


LINE = CommandLine(
    command="charonia upgrade",
    intro="""\
usage: charonia upgrade [OPTIONS] [PID] [-- ARGUMENTS]

Start a new engine beside that of a running `charonia serve --front-ends N`, with the code, packages and models now on
the disk, move the front ends to it when it is ready, and then replace them, too. No request is lost. ARGUMENTS
replace the arguments of `charonia serve`; by default they stay. Their relative paths begin at the current folder.
""",
    groups={
        "Options": (
            Option("--pid PID", "pid", integer(1), "PID", "Process of the server, if you have several", default=""),
            flag(
                "--stop-first",
                "stop_first",
                True,
                "Stop the engine before the new one starts, if memory does not hold both: requests wait up to 10 s",
            ),
            Option(
                "--finish-secs",
                "finish_secs",
                number(0.0),
                "SECONDS",
                "Time that requests, streams and sequences have to finish on the previous engine and front ends",
            ),
            Option(
                "--python",
                "python",
                str,
                "PATH",
                "Interpreter of the new engine and front ends, from an environment with charonia",
                default="the current one",
            ),
            flag("--cancel", "cancel", True, "Cancel an upgrade whose engine has not loaded its models yet"),
        )
    },
    record=UpgradeOptions(),
)


def run(arguments: Sequence[str]) -> int:
    own, serve = list(arguments), None
    if "--" in own:
        at = own.index("--")
        own, serve = own[:at], own[at + 1 :]
        serve = serve[1:] if serve[:1] == ["serve"] else serve
    return carry_out(LINE, own, lambda options: _upgrade(options, serve))


def _upgrade(options: UpgradeOptions, arguments: list[str] | None) -> int:
    """Upgrade a server, and print the steps."""
    pid = options.pid or _only_server()
    asked = {
        "arguments": arguments,
        "folder": "" if arguments is None else os.getcwd(),
        "stop_first": options.stop_first,
        "finish_s": options.finish_secs,
        "python": str(Path(options.python).absolute()) if options.python else "",
        "cancel": options.cancel,
    }
    if pid not in running_servers():
        raise _no_server(pid)
    for message in command(pid, asked):
        match message:
            case {"version": version}:
                print(f"server {pid}: release {version}", flush=True)
            case {"step": text} | {"done": text}:
                print(text, flush=True)
                if "done" in message:
                    return 0
            case {"error": reason, "hint": hint}:
                raise invalid(str(reason), hint=str(hint))
    raise invalid(f"server {pid} has exited", hint="its log says why")


def _only_server() -> int:
    """Return the number of the only server of this user."""
    own = [pid for pid in running_servers() if _user_of(pid) == os.getuid()]
    if len(own) == 1:
        return own[0]
    if own:
        raise invalid(
            f"this user has {len(own)} servers: {', '.join(map(str, own))}", hint="charonia upgrade PID names one"
        )
    single = [
        process.pid for process in psutil.process_iter() if _is_serve(process) and _user_of(process.pid) == os.getuid()
    ]
    if single:
        raise _no_server(single[0])
    raise not_found("no server of this user is running", hint="charonia upgrade PID names one of another user")


def _no_server(pid: int) -> ServingError:
    """Return why a process cannot be upgraded."""
    if sys.platform != "linux":
        return unsupported("servers can be upgraded on Linux only", hint="restart the server")
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return not_found(f"process {pid} does not exist")
    if _is_serve(process) and any(word.startswith("--front-ends") for word in process.cmdline()):
        return unavailable(
            f"server {pid} is not ready yet",
            hint="wait until its log says that it has started; --front-ends=auto may mean one process, as the log says",
        )
    if _is_serve(process):
        return unsupported(
            f"server {pid} cannot be upgraded: its engine and its endpoints are one process",
            hint="start it with --front-ends 1 or more; until then, restart it",
        )
    return not_found(f"process {pid} is not a `charonia serve`")


def _is_serve(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "serve" in words[1:4] and any("charonia" in word for word in words[: words.index("serve")])


def _user_of(pid: int) -> int:
    try:
        return int(psutil.Process(pid).uids().real)
    except psutil.Error:
        return -1
