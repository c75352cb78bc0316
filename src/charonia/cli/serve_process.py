"""A process of `charonia serve --front-ends`: the engine, or a front end. For the parent to start, not for users.

    python -m charonia.cli.serve_process engine|front-end FOLDER DESCRIPTOR

The folder has the server's options, and the engine's socket; the report goes to the descriptor.
"""

import asyncio
import os
import sys
from functools import partial
from pathlib import Path

from charonia.cli import logs
from charonia.core.errors import ServingError
from charonia.server.app import new_event_loop
from charonia.server.front_ends.engine_process import serve_engine
from charonia.server.front_ends.front_end import serve_front_end
from charonia.server.front_ends.messages import encode_error
from charonia.server.front_ends.processes import ErrorRecord, FrontEndReport, read_options, write_report
from charonia.server.machine.memory import keep_freed_memory


def main(role: str, folder: Path, descriptor: int) -> int:
    """Run a process and return its exit status."""
    os.set_inheritable(descriptor, False)
    options = read_options(folder)
    log = logs.configure(options.log)
    keep_freed_memory(os.environ)
    report = partial(write_report, descriptor)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        if role == "engine":
            return runner.run(serve_engine(options, log, folder, report))
        try:
            return runner.run(serve_front_end(options, log, folder, lambda: report(FrontEndReport())))
        except ServingError as error:
            report(FrontEndReport(ErrorRecord(*encode_error(error))))
            return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
