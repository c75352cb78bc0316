"""A process of `charonia serve --front-ends`: the engine, or a front end. For the parent to start, not for users.

    python -m charonia.cli.serve_process engine|front_end_1|... FOLDER [SOCKET] [http|grpc|metrics=DESCRIPTOR]...

The folder has the server's options, and the engine's socket; the report goes there, too. An engine that replaces
another one reads its own options from the command line in that folder. SOCKET is the name of its socket until then.
The descriptors are bound sockets to listen on.
"""

import asyncio
import contextlib
import faulthandler
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from charonia.cli import logs
from charonia.cli.serve import parse
from charonia.core.errors import ServingError, invalid
from charonia.server.app import new_event_loop
from charonia.server.files.served_files import classify
from charonia.server.front_ends.children import (
    ENGINE,
    ErrorRecord,
    NewEngine,
    ProcessReport,
    ServeCommand,
    options_of,
    read_new_engine,
    read_options,
    remove_report,
    with_descriptors,
    write_options,
    write_report,
)
from charonia.server.front_ends.engine_port import serve_engine
from charonia.server.front_ends.front_end import serve_front_end
from charonia.server.front_ends.hand_over import SOCKET_NAME
from charonia.server.front_ends.messages import encode_error
from charonia.server.guard import notify
from charonia.server.guard.notify import Notifier
from charonia.server.machine.memory import keep_freed_memory
from charonia.server.options import ServerOptions


def main(name: str, folder: Path, *further: str) -> int:
    """Run a process and return its exit status."""
    notifier = Notifier.taken_from(os.environ)
    if notifier.limit_s:
        faulthandler.enable()  # the guard sends SIGABRT when it misses heartbeats: the log then shows what hangs
    keep_freed_memory(os.environ)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run(name, folder, further, notifier))


async def _run(name: str, folder: Path, further: Sequence[str], notifier: Notifier) -> int:
    remove_report(folder, name)
    try:
        order = read_new_engine(folder, name)
        options = read_options(folder) if order is None else _new_options(order, read_options(folder))
        log = logs.configure(options.log)
    except ServingError as error:
        write_report(folder, name, ProcessReport(ErrorRecord(*encode_error(error))))
        return 1
    if order is not None:
        write_options(folder, options, name)
    options = with_descriptors(options, [word for word in further if "=" in word])
    socket = next((word for word in further if "=" not in word), SOCKET_NAME)

    def report(found: ProcessReport) -> None:
        write_report(folder, name, found)
        if found.error is None:
            notifier.send(notify.READY)

    pings = asyncio.create_task(notifier.ping())
    try:
        if name.startswith(ENGINE):
            moved = partial(notifier.send, notify.HANDED_OVER)
            return await serve_engine(options, log, folder, report, moved, socket_name=socket, is_new=order is not None)
        ready, leaving = lambda: report(ProcessReport()), lambda: notifier.send(notify.STOPPING)
        return await serve_front_end(options, log, folder, name, ready, leaving)
    except ServingError as error:
        report(ProcessReport(ErrorRecord(*encode_error(error))))
        return 1
    finally:
        pings.cancel()


def _new_options(order: NewEngine, running: ServerOptions) -> ServerOptions:
    """Return the options of a new engine; the addresses stay those of the running server. Raises ServingError."""
    options = options_of(order, parse_command)
    options = replace(
        options,
        http=replace(options.http, address=running.http.address),
        grpc=replace(options.grpc, address=running.grpc.address),
    )
    if options.models.repositories != tuple(order.repositories) and classify(options.models).needs_repository:
        raise invalid(
            "an upgrade takes repositories, not files", hint="leave out the arguments to have the same models again"
        )
    return options


def parse_command(command: ServeCommand) -> ServerOptions:
    """Return the options of a command line, in which all paths are absolute. Raises ServingError."""
    try:
        with contextlib.chdir(command.folder) if command.folder else contextlib.nullcontext():
            return parse(command.arguments, os.environ)[0]
    except OSError as error:
        raise invalid(
            f"the new engine cannot enter the folder of the command, '{command.folder}': {error.strerror}",
            hint="run `charonia upgrade` in another folder, with absolute paths",
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
