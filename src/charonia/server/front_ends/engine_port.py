"""The engine's end of the links from front ends in other processes: a Unix socket in a private folder.

Each front end has a link. Its requests run like requests of a front end in this process; a lost link cancels them. A
change that must hold everywhere, such as a registered region, is made here, then in all front ends, then recorded for
the next engine, and only then answered.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from charonia.busy_poll import SiblingProcesses
from charonia.core.errors import ServingError, internal, unavailable, unsupported
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome, Reply, Ticket
from charonia.core.trace import TraceTree
from charonia.server.app import InferenceServer
from charonia.server.channel.channel import Incoming, Outgoing
from charonia.server.channel.regions import ChannelError
from charonia.server.directory import Target
from charonia.server.execution.version_runner import Runner
from charonia.server.facade import Engine, LoadReports, LogControl, Services, TrafficControl
from charonia.server.front_ends.bursts import RequestReader, ResponseWriter
from charonia.server.front_ends.calls import CALLS, LOG_CHANGE, OFFERED, Call, Effect, ServedEngine
from charonia.server.front_ends.children import ENGINE, ErrorRecord, ProcessReport, number_of, read_order
from charonia.server.front_ends.engine_changes import EngineChanges, read_changes
from charonia.server.front_ends.hand_over import SOCKET_NAME, HandOver, Listener
from charonia.server.front_ends.link import Link, LoadSender
from charonia.server.front_ends.local_models import software_of
from charonia.server.front_ends.messages import (
    EngineState,
    ServerReadiness,
    decode_parent,
    decode_request,
    encode_error,
    encode_outcome,
    plain,
    record,
)
from charonia.server.lifecycle.front_end_placement import ExecutionPlacement, Offer
from charonia.server.machine.cores import usable_cores
from charonia.server.machine.memory import collect_less_often, trim_idle_memory
from charonia.server.metrics.model_metrics import Increase
from charonia.server.metrics.processes import Traffic
from charonia.server.options import ServerOptions
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.server.tracing.requests import Tracing
from charonia.version import __version__

_log = logging.getLogger(__name__)

T = TypeVar("T")

CHANGE_S_MAX = 10.0
"""Time in which a front end confirms a change; one that does not is cut off, since it would answer from the past."""

COLLECT_S = 1.0
"""Time between two collections of what front ends have counted."""

COLLECT_S_MAX = 1.0
"""Time in which a front end hands it over; what comes later is counted then."""


class EnginePort:
    """Takes the requests of front ends in other processes. It fulfils `charonia.server.app.FrontEnds`.

    Args:
        folder: Private folder for the socket.
        name: Name of the socket. Any but `SOCKET_NAME` is for an engine beside the running one; it replaces that one
            when it hands over.
        is_strict: Whether `start` fails if a model that was loaded by request cannot be loaded.
        software: What front ends must have to run models of the engine; see `software_of`.

    Attributes:
        engine, services: The engine and the server's other services, once started.
        hand_over: Moves front ends to the next engine.
        failed: Done with the reason when it cannot replace the engine that hands over.
    """

    def __init__(self, folder: Path, name: str = SOCKET_NAME, *, is_strict: bool = False, software: str = "") -> None:
        self._folder = folder
        self._software = software
        self._engine_changes = EngineChanges(folder, is_strict=is_strict)
        self._is_due_to_catch_up = name != SOCKET_NAME
        self._listener = Listener(folder / name, self.connect)
        self._loop = asyncio.get_running_loop()
        self._peers: set[_Peer] = set()
        self._is_due = False
        self._answering = 0  # questions
        self._tasks: set[asyncio.Task[object]] = set()
        self._published: tuple[Mapping[Target, Offer], bool] = ({}, False)  # offers and readiness that all know
        self._changing = asyncio.Lock()  # one change at a time, so that all front ends see the same order
        self.engine: ServedEngine
        self.services: Services
        self.hand_over = HandOver(
            folder, self._listener, self._engine_changes, self._changing, self._tell_all, self.spawn
        )
        self.failed: asyncio.Future[ServingError] = self._loop.create_future()

    async def check(self) -> None:
        """Do nothing: the front ends bind the ports."""

    async def start(self, engine: ServedEngine, services: Services) -> None:
        """Make the changes of the previous engine, and accept front ends.

        Raises:
            ServingError: UNAVAILABLE when the socket cannot be made; INVALID_ARG when a model that was loaded by
                request cannot be loaded, and the port is strict.
        """
        self.engine, self.services = engine, services
        if self._is_due_to_catch_up:
            await self._engine_changes.replay_models(engine)
        else:
            await self._engine_changes.take_over(engine, services, has_ended=True)
        engine.on_change(self._changed)
        self._listener.open()
        self.spawn(self._follow_counters())

    def connect(self, sock: socket.socket) -> None:
        self._peers.add(_Peer(self, sock))

    def is_busy(self) -> bool:
        return self._answering > 0 or any(peer.is_busy for peer in self._peers)

    def stop_accepting(self) -> None:
        if self._listener.is_open:
            self._listener.close()
            self.spawn(self._tell_all("stop"))

    async def drain(self, timeout_s: float) -> bool:
        if self.hand_over.is_done:  # the front ends continue
            return True
        async with self._changing:
            answers = await asyncio.gather(*(peer.ask("drain", timeout_s) for peer in self._peers))
        return all(answer is not False for answer in answers)

    async def collect(self) -> list[Traffic]:
        """Take in what front ends have counted until now; one that is too slow is left out."""
        found = await asyncio.gather(*(peer.collect() for peer in self._peers if peer.is_welcome))
        return sorted((each for traffic in found for each in traffic), key=lambda each: each.process)

    def placement(self, runner: Runner) -> ExecutionPlacement:
        """Return where the requests of a version run."""
        offers = self.engine.offers
        number = offers.number_of(runner)
        return ExecutionPlacement(sum(number in peer.loaded for peer in self._peers), offers.reason(runner))

    async def close(self) -> None:
        """Leave all front ends."""
        self.stop_accepting()
        for peer in list(self._peers):
            peer.close()
        for task in list(self._tasks):
            task.cancel()

    # Called by peers.

    def front_end_gone(self, peer: "_Peer", reason: str) -> None:
        """A front end has gone."""
        self._peers.discard(peer)
        if not self.engine.is_exiting():
            _log.info("a front end has gone: %s", reason)

    def spawn(self, work: Coroutine[object, object, object]) -> "asyncio.Task[object]":
        """Run something beside the event loop's other work; the loop itself holds tasks weakly."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def answer(self, peer: "_Peer", question: str, arguments: list[Any], blobs: list[bytes]) -> object:
        """Answer a question of a front end. Raises ServingError."""
        self._answering += 1
        try:
            if question not in CALLS or CALLS[question].effect is Effect.NOTHING:
                return await self._answer(peer, question, arguments, blobs)
            async with self.hand_over.change():
                return await self._answer(peer, question, arguments, blobs)
        finally:
            self._answering -= 1

    async def _answer(self, peer: "_Peer", question: str, arguments: list[Any], blobs: list[bytes]) -> object:
        if question == "hello":
            return await self._accept_peer(peer)
        if question == "collect":
            await self.collect()
            return None
        if question == "result":
            others = [each for each in self._peers if each is not peer and each.is_welcome]
            found = await asyncio.gather(*(each.ask(question, *arguments) for each in others))
            return next((each for each in found if each is not None), None)
        call, services = CALLS.get(question), self.services
        owners: dict[type, object] = {
            Engine: self.engine,
            Services: services,
            TrafficControl: services.traffic,
            Tracing: services.tracing,
            LoadReports: services.load,
            LogControl: services.log,
            RegionRegistry: services.regions,
        }
        method = getattr(owners[call.owner], call.method, None) if call is not None else None
        if call is None or method is None:
            raise unsupported(f"'{question}' is not offered by this server")
        values = call.read(arguments, blobs)
        if call.counts:
            await self.collect()
        if call.effect is Effect.EVERYWHERE:
            async with self._changing:
                await self._everywhere(call, method, values)
                if call.owner is LogControl:
                    self._engine_changes.log_changed(*values)
                else:
                    self._engine_changes.regions_changed(services)
            return None
        try:
            work = method(*values)
            result = plain(await work) if work is not None else None
            if call.owner is Tracing and call.effect is Effect.ENGINE:
                self._engine_changes.trace_changed(*values)
            return result
        finally:
            if call.effect is Effect.ENGINE:  # front ends know of a change before the answer, even if it has failed
                await self._publish()

    # Inside.

    async def _everywhere(self, call: Call, method: Callable[..., Awaitable[None]], values: list[Any]) -> None:
        """Make a change here and in all front ends. Raises ServingError if one refuses; then nothing has changed."""
        await method(*values)
        try:
            await self._tell_all(call.question, *call.plain(values)[0])
        except ServingError:
            if call.undo is not None:
                undo = getattr(self.services.regions, call.undo.method)
                await self._everywhere(call.undo, undo, [values[0].name])
            raise

    async def _accept_peer(self, peer: "_Peer") -> object:
        services = self.services
        async with self._changing:
            self.hand_over.check()
            if self._is_due_to_catch_up:
                await self._catch_up()
            peer.is_welcome = True
            await peer.publish(self._state())
            if services.log is not None:
                await peer.ask(LOG_CHANGE, plain(services.log.options))
            if services.regions is not None:
                await peer.ask("regions", plain(services.regions.system()), plain(services.regions.cuda()))
        names = [name for name in OFFERED if getattr(services, name) is not None]
        if services.tracer is not None:
            names.append("tracer")
        return [plain(self.engine.server_metadata()), names, self._software]

    async def _catch_up(self) -> None:
        """Make the changes of the engine that hands over, which now waits. Raises the reason if one cannot be made."""
        if self.failed.done():
            raise self.failed.result()
        try:
            await self._engine_changes.take_over(self.engine, self.services, has_ended=False)
        except ServingError as error:
            self.failed.set_result(error)
            raise
        self._is_due_to_catch_up = False
        self._listener.path = self._folder / SOCKET_NAME  # by the engine that hands over

    def _state(self) -> EngineState:
        engine, tracing = self.engine, self.services.tracing
        is_tracing = tracing is not None and tracing.sampler is not None
        readiness = ServerReadiness(engine.is_live(), engine.is_ready(), engine.is_exiting(), is_tracing)
        sticky = self.services.traffic.sticky if self.services.traffic is not None else {}
        return EngineState(readiness, engine.directory(), dict(engine.offers.now()), sticky)

    async def _follow_counters(self) -> None:
        """Collect the counters of front ends, and follow the measurements of the engine."""
        while True:
            await asyncio.sleep(COLLECT_S)
            await asyncio.gather(*(peer.collect() for peer in self._peers if peer.is_offered))
            if (self.engine.offers.now(), self.engine.is_ready()) != self._published:
                self._changed()

    def _changed(self) -> None:
        """Tell all front ends in the next iteration of the event loop."""
        if not self._is_due and self._peers:
            self._is_due = True
            self.spawn(self._publish())

    async def _publish(self) -> None:
        """Return when all front ends know the present state."""
        self._is_due = False
        state = self._state()
        self._published = state.offers, state.readiness.is_ready
        await asyncio.gather(*(peer.publish(state) for peer in self._peers if peer.is_welcome))

    async def _tell_all(self, question: str, *arguments: object) -> None:
        """Tell all front ends; return when all have confirmed it. Raises the first refusal."""
        told = (peer.ask(question, *arguments) for peer in self._peers if peer.is_welcome)
        refusals = [r for r in await asyncio.gather(*told, return_exceptions=True) if isinstance(r, BaseException)]
        if refusals:
            raise refusals[0]


class _Peer:
    """A front end."""

    def __init__(self, port: EnginePort, sock: socket.socket) -> None:
        self.is_welcome = False
        self.is_offered = False  # whether it has ever had local models
        self.loaded: frozenset[int] = frozenset()  # numbers of the offers that it has loaded
        self._port = port
        self._sent = EngineState()
        self._latest: asyncio.Task[object] | None = None
        self._link = Link(
            sock, "the front end", ResponseWriter(),
            take=self._received,
            answer=partial(port.answer, self),
            ended=self._ended,
        )  # fmt: skip
        self._requests = RequestReader()
        self._open: dict[int, Ticket | None] = {}
        self._traces: dict[int, TraceTree] = {}
        self._load = LoadSender(port.services.load, self._link.send)

    @property
    def is_busy(self) -> bool:
        return bool(self._open)

    async def ask(self, question: str, *arguments: object) -> object:
        """Return the front end's answer, None if it is gone. Raises as `Link.ask`."""
        limit_s = CHANGE_S_MAX if question not in ("drain", "meet") else None
        try:
            async with asyncio.timeout(limit_s):
                return await self._link.ask(question, *arguments)
        except TimeoutError:
            self._link.close()
            self._ended(f"it did not confirm '{question}' within {CHANGE_S_MAX:g} s")
        except ServingError:
            if self._link.is_open:
                raise
        return None

    async def collect(self) -> list[Traffic]:
        """Fetch the counters of the front end; return its traffic, nothing if it is too slow."""
        with suppress(TimeoutError, ServingError):
            async with asyncio.timeout(COLLECT_S_MAX):
                return record(list[Traffic], await self._link.ask("counts") or [])
        return []

    async def publish(self, state: EngineState) -> None:
        """Send the changes of a state; return when the front end has it."""
        self.is_offered = self.is_offered or bool(state.offers)
        difference = state.difference(self._sent)
        self._sent = state
        if difference is not None:
            self._latest = self._port.spawn(self.ask("state", difference))
        if self._latest is not None:
            await asyncio.shield(self._latest)

    def close(self) -> None:
        self._link.close()
        self._ended("the engine dismissed it")

    def _received(self, message: Incoming) -> None:
        header = message.header
        match header[0]:
            case "infers":
                for numbers, requests in self._requests.read(message):
                    self._infer_together(numbers, requests)
            case "infer":
                self._infer(message)
            case "cancel":
                if (ticket := self._open.get(header[1])) is not None:
                    ticket.cancel()
            case "want_load":
                self._load.wanted()
            case "traced":
                if (tree := self._traces.pop(header[1], None)) is not None:
                    for name, at_ns in header[2]:
                        tree.mark(name, at_ns)
                    tree.release()
            case "counted":
                self.loaded = frozenset(header[1])
                for number, increase in header[2]:
                    self._port.engine.offers.count(number, record(Increase, increase))
                self._port.engine.usage.count(header[3])
            case kind:
                raise ChannelError(f"there is no message of kind {kind!r}")

    def _infer_together(self, numbers: Sequence[int], requests: Sequence[InferRequest]) -> None:
        while outcomes := self._port.engine.infer_together(requests):
            for number, outcome in zip(numbers, outcomes, strict=False):
                self._send(number, outcome, True)
            numbers, requests = numbers[len(outcomes) :], requests[len(outcomes) :]
            if not requests:
                return
            self._link.flush_burst()  # they took a while, and so may the rest
        for number, request in zip(numbers, requests, strict=True):
            self._run(number, request)

    def _infer(self, message: Incoming) -> None:
        _, number, fields, trace, *_ = message.header
        try:
            request = decode_request(fields, message, self._link.release)
        except ServingError as error:
            self._send(number, error, True)
            return
        tracing = self._port.services.tracing
        sampler = tracing.sampler if trace is not None and tracing is not None else None
        tree = sampler.sample(request.model_name, decode_parent(trace)) if sampler is not None else None
        if tree is not None:
            for name, at_ns in trace[0]:
                tree.mark(name, at_ns)
            request.trace = tree.root
            self._traces[number] = tree
        self._run(number, request)

    def _run(self, number: int, request: InferRequest) -> None:
        open_ = self._open
        open_[number] = None
        reply: Reply = partial(self._reply, number)
        if request.correlation_id and self._port.hand_over.draining is not None:
            reply = self._port.hand_over.announce_then_reply(request, reply)
        ticket = self._port.engine.infer(request, reply)
        if number in open_:
            open_[number] = ticket

    def _reply(self, number: int, outcome: Outcome, final: bool) -> None:
        open_, link = self._open, self._link
        if number not in open_:
            return
        if not final and link.is_full:
            outcome, final = unavailable("the responses were not read fast enough"), True
            ticket = open_.pop(number)
            if ticket is not None:
                ticket.cancel()
        elif final:
            del open_[number]
        self._send(number, outcome, final)

    def _send(self, number: int, outcome: Outcome, final: bool) -> None:
        link = self._link
        if self._load.is_wanted:
            self._load.send()
        outgoing: Outgoing | None = None
        try:
            if final and isinstance(outcome, InferResponse) and link.burst.add(number, outcome):
                link.burst_begun()
                return
            outgoing = link.outgoing()
            link.send(("outcome", number, final, encode_outcome(outcome, outgoing)), outgoing)
        except (ServingError, ChannelError, OSError, TypeError, ValueError) as error:
            if outgoing is not None:
                outgoing.withdraw()
            failure = error if isinstance(error, ServingError) else internal(f"the response cannot be sent: {error}")
            link.send(("outcome", number, final, encode_error(failure)))

    def _ended(self, reason: str) -> None:
        tickets = [ticket for ticket in self._open.values() if ticket is not None]
        self._open.clear()
        for ticket in tickets:
            ticket.cancel()
        trees = list(self._traces.values())
        self._traces.clear()
        for tree in trees:
            tree.release()
        self._port.front_end_gone(self, reason)


async def serve_engine(
    options: ServerOptions,
    log: LogControl | None,
    folder: Path,
    report: Callable[[ProcessReport], None],
    handed_over: Callable[[], None],
    *,
    socket_name: str,
    is_new: bool,
) -> int:
    """Run the engine until a signal arrives, or until it has handed over and finished; return the exit status.

    Args:
        options: The server's options.
        log: The log of this process.
        folder: Private folder of the server.
        report: Called once when the models are loaded, or when the engine cannot start.
        handed_over: Called when front ends send no new requests here.
        socket_name: Name of the socket for front ends; see `EnginePort`.
        is_new: Whether it replaces another one, so that nothing may be missing.
    """
    stopped, handing_over = asyncio.Event(), asyncio.Event()
    for number, event in ((signal.SIGTERM, stopped), (signal.SIGINT, stopped), (signal.SIGUSR2, handing_over)):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    try:
        # The previous engine may have left changes; the port makes them.
        left_out = read_changes(folder).models
        is_strict = is_new and options.exit_on_error
        port = EnginePort(folder, socket_name, is_strict=is_strict, software=software_of(options))
        siblings = SiblingProcesses(folder, number_of(ENGINE), options.front_ends + 1, usable_cores())
        server = InferenceServer(options, log=log, front_ends=port, siblings=siblings, left_out=left_out)
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
        giving_back = asyncio.create_task(trim_idle_memory())
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
