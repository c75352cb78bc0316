"""The process with the engine of a server whose front ends are in other processes."""

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from charonia.core.errors import ServingError, internal, unavailable
from charonia.server.app import InferenceServer
from charonia.server.facade import LogControl
from charonia.server.front_ends.engine_port import EnginePort
from charonia.server.front_ends.keeper import read_changes
from charonia.server.front_ends.messages import encode_error
from charonia.server.front_ends.processes import EngineReport, ErrorRecord
from charonia.server.machine.memory import give_back_idle_memory
from charonia.server.options import ServerOptions

_log = logging.getLogger(__name__)


async def serve_engine(
    options: ServerOptions, log: LogControl | None, folder: Path, report: Callable[[EngineReport], None]
) -> int:
    """Run the engine until a signal arrives; return the exit status.

    Args:
        options: The server's options.
        log: The log of this process.
        folder: Where it listens for front ends.
        report: Called once when the models are loaded, or when the engine cannot start.
    """
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):  # an event loop on Windows
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        # The engine before this one may have left changes; the port makes them.
        left_out = read_changes(folder).models
        server = InferenceServer(options, log=log, front_ends=EnginePort(folder), left_out=left_out)
    except ServingError as error:
        report(EngineReport(ErrorRecord(*encode_error(error))))
        return 1
    starting = asyncio.ensure_future(server.start())
    stopping = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
    failure = unavailable("stopped while starting") if starting.cancelled() else starting.exception()
    if failure is not None:
        status = 0 if starting.cancelled() else 1
        if not isinstance(failure, ServingError):
            _log.error("the engine cannot start", exc_info=failure)
            failure = internal(f"the engine cannot start: {type(failure).__name__}: {failure}")
        report(EngineReport(ErrorRecord(*encode_error(failure)), tuple(server.models())))
    else:
        # Objects of the start-up stay alive; without them, full collections are too short to affect latency.
        gc.collect()
        gc.freeze()
        directory = server.engine.directory()
        configs = {name: config for (name, version), config in directory.configs.items() if not version}
        port = server.metrics.port if server.metrics is not None else 0
        report(EngineReport(models=tuple(server.models()), configs=configs, metrics_port=port))
        giving_back = asyncio.create_task(give_back_idle_memory())
        await stopping
        giving_back.cancel()
    stopping.cancel()
    return status if await server.shutdown() else 1
