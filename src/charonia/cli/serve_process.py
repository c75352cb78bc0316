"""A process of `charonia serve --front-ends`: the engine, or a front end. For the parent to start, not for users.

    python -m charonia.cli.serve_process engine|front_end_1|... FOLDER

The folder has the server's options, and the engine's socket; the report goes there, too.
"""

import asyncio
import faulthandler
import os
import sys
from pathlib import Path

from charonia.cli import logs
from charonia.core.errors import ServingError
from charonia.server.app import new_event_loop
from charonia.server.front_ends.engine_process import serve_engine
from charonia.server.front_ends.front_end import serve_front_end
from charonia.server.front_ends.messages import encode_error
from charonia.server.front_ends.processes import (
    ENGINE,
    EngineReport,
    ErrorRecord,
    FrontEndReport,
    forget_report,
    number_of,
    read_options,
    write_report,
)
from charonia.server.guard import notify
from charonia.server.guard.notify import Notifier
from charonia.server.machine.memory import keep_freed_memory


def main(name: str, folder: Path) -> int:
    """Run a process and return its exit status."""
    notifier = Notifier.taken_from(os.environ)
    if notifier.limit_s:
        faulthandler.enable()  # the guard sends SIGABRT when it misses heartbeats: the log then shows what hangs
    keep_freed_memory(os.environ)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run(name, folder, notifier))


async def _run(name: str, folder: Path, notifier: Notifier) -> int:
    options = read_options(folder)
    log = logs.configure(options.log)

    def report(found: EngineReport | FrontEndReport) -> None:
        write_report(folder, name, found)
        if found.error is None:
            notifier.send(notify.READY)

    forget_report(folder, name)
    pings = asyncio.create_task(notifier.ping())
    try:
        if name == ENGINE:
            return await serve_engine(options, log, folder, report)
        return await serve_front_end(options, log, folder, number_of(name), lambda: report(FrontEndReport()))
    except ServingError as error:
        report(FrontEndReport(ErrorRecord(*encode_error(error))))
        return 1
    finally:
        pings.cancel()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
