"""The process with the engine of a server whose front ends are in other processes."""

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charonia.busy_poll import Neighbours
from charonia.core.errors import ServingError, internal, unavailable
from charonia.server.app import InferenceServer
from charonia.server.facade import LogControl
from charonia.server.front_ends.children import ENGINE, ErrorRecord, ProcessReport, number_of, read_order
from charonia.server.front_ends.engine_port import EnginePort
from charonia.server.front_ends.hand_over import SOCKET_NAME
from charonia.server.front_ends.keeper import read_changes
from charonia.server.front_ends.local_models import software_of
from charonia.server.front_ends.messages import encode_error
from charonia.server.machine.cores import usable_cores
from charonia.server.machine.memory import collect_less_often, give_back_idle_memory
from charonia.server.options import ServerOptions
from charonia.version import __version__

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where an engine listens for front ends.

    Attributes:
        folder: Private folder of the server.
        socket: Name of the socket; see `EnginePort`.
        is_new: Whether it replaces another one, so that nothing may be missing.
    """

    folder: Path
    socket: str = SOCKET_NAME
    is_new: bool = False


async def serve_engine(
    options: ServerOptions,
    log: LogControl | None,
    place: EnginePlace,
    report: Callable[[ProcessReport], None],
    handed_over: Callable[[], None],
) -> int:
    """Run the engine until a signal arrives, or until it has handed over and finished; return the exit status.

    Args:
        options: The server's options.
        log: The log of this process.
        place: Path of its socket.
        report: Called once when the models are loaded, or when the engine cannot start.
        handed_over: Called when front ends send no new requests here.
    """
    folder, stopped, handing_over = place.folder, asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError):  # an event loop on Windows
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, handing_over.set)
    try:
        # The previous engine may have left changes; the port makes them.
        left_out = read_changes(folder).models
        is_strict = place.is_new and options.exit_on_error
        port = EnginePort(folder, place.socket, is_strict=is_strict, software=software_of(options))
        neighbours = Neighbours(folder, number_of(ENGINE), options.front_ends + 1, usable_cores())
        server = InferenceServer(options, log=log, front_ends=port, neighbours=neighbours, left_out=left_out)
    except ServingError as error:
        report(ProcessReport(ErrorRecord(*encode_error(error))))
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
        report(ProcessReport(ErrorRecord(*encode_error(failure)), tuple(server.models())))
    else:
        collect_less_often()
        directory = server.engine.directory()
        configs = {name: config for (name, version), config in directory.configs.items() if not version}
        report(ProcessReport(models=tuple(server.models()), configs=configs, version=__version__))
        giving_back = asyncio.create_task(give_back_idle_memory())
        handing = asyncio.create_task(_hand_over(server, port, folder, handing_over, handed_over))
        ends: set[asyncio.Future[Any]] = {stopping, handing, port.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if port.failed.done():
            status = 1
            report(ProcessReport(ErrorRecord(*encode_error(port.failed.result())), tuple(server.models())))
        handing.cancel()
        giving_back.cancel()
    stopping.cancel()
    return status if await server.shutdown() else 1


async def _hand_over(
    server: InferenceServer, port: EnginePort, folder: Path, asked: asyncio.Event, handed_over: Callable[[], None]
) -> None:
    """Hand over on each request, until it succeeds; return when all requests are finished."""
    while True:
        await asked.wait()
        asked.clear()
        order = read_order(folder)
        try:
            await port.hand_over.run(order.socket, server.engine.open_sequences)
        except ServingError as error:
            _log.error("the front ends stay with this engine: %s", error)
            continue
        if server.metrics is not None:
            await server.metrics.close()
        handed_over()
        await port.hand_over.finish(order.finish_s, port.is_busy, server.engine.open_sequences)
        return
