"""The engine as a front end in another process sees it.

Requests travel unchanged, and queries of the request path are answered from the state that the engine sends
(`EngineState`). Everything else is a call to the engine. A change through one front end is in force in every other one
before its caller has the answer.
"""

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from charonia.busy_poll import SiblingProcesses
from charonia.clock import now_ns
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.metadata import ModelMetadata, ServerMetadata
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest
from charonia.core.response import ANSWERED, Outcome, Reply, Ticket
from charonia.core.tensor import array_bytes
from charonia.core.trace import RemoteParent, TraceLevel, TraceTree
from charonia.server.channel.channel import Incoming
from charonia.server.channel.regions import ChannelError
from charonia.server.directory import models_at
from charonia.server.facade import Engine, LoadReports, LogControl, Services, TrafficControl
from charonia.server.front_ends.bursts import BurstReader, RequestWriter
from charonia.server.front_ends.calls import CALLS, EngineRpc, remote_call, service
from charonia.server.front_ends.link import LOAD_AGE_NS, Blobs, Link
from charonia.server.front_ends.local_models import LocalModels
from charonia.server.front_ends.messages import (
    EngineState,
    decode_outcome,
    encode_request,
    encode_trace,
    record,
    take_events,
)
from charonia.server.front_ends.reconnect import (
    Cancel,
    Connected,
    Event,
    Leave,
    Lost,
    OpenSequences,
    Reconnect,
    Send,
    Submit,
    Tick,
    interrupted,
)
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.server.tracing.requests import Tracing
from charonia.wire.log_settings import LogOptions
from charonia.wire.orca import Load
from charonia.wire.shared_memory import CudaRegion, SystemRegion

IN_FLIGHT_MAX = 65_536
"""Requests of one front end that the engine has not answered; more are refused."""

_FULL_HINT = "try again later, or send fewer concurrent requests; more front ends do not help when models are the limit"

_log = logging.getLogger(__name__)


class RemoteCalls:
    """An engine in another process, without the requests: queries of its state, and calls.

    Attributes:
        state: Its last received state.
        load: Its latest report of its load.
    """

    state: EngineState
    load: Load

    @property
    def engine(self) -> "RemoteCalls":
        """What `remote_call` asks."""
        return self

    async def ask(self, question: str, *arguments: object, blobs: Blobs = ()) -> Any:
        """Ask it. Raises as `Link.ask`."""
        raise NotImplementedError

    def lend(self, size: int) -> memoryview | None:
        """Return memory to receive a request in that the engine then reads."""
        raise NotImplementedError

    def want_load(self) -> None:
        """Let it report its load now, then with responses; see `LoadSender`."""
        raise NotImplementedError

    def is_live(self) -> bool:
        """Whether the server can answer at all. During a restart of the engine, it will."""
        return self.state.readiness.is_live

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        return self.state.directory.model_config(name, version)

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        return self.state.directory.model_metadata(name, version)

    def models_at(self, path: str) -> Mapping[bytes, str]:
        return models_at(path, self.state.directory.configs.items())

    model_ready = remote_call(Engine.model_ready)
    model_statistics = remote_call(Engine.model_statistics)
    repository_index = remote_call(Engine.repository_index)
    load_model = remote_call(Engine.load_model)
    unload_model = remote_call(Engine.unload_model)


class SharedRegions(RegionRegistry):
    """The regions of all front ends, mapped in this one. A registration is in force in all of them, or in none."""

    def __init__(self, bytes_max: int, engine: EngineRpc) -> None:
        super().__init__(bytes_max)
        self.engine = engine

    register_system = remote_call(RegionRegistry.register_system)
    register_cuda = remote_call(RegionRegistry.register_cuda)
    unregister_system = remote_call(RegionRegistry.unregister_system)
    unregister_cuda = remote_call(RegionRegistry.unregister_cuda)

    async def take(self, change: str, arguments: list[Any]) -> None:
        """Apply a change here that the engine applies in every process."""
        if change == "regions":
            await self._follow(*record(tuple[list[SystemRegion], list[CudaRegion]], arguments))
        else:
            call = CALLS[change]
            await getattr(super(), call.method)(*call.read(arguments))

    async def _follow(self, system: list[SystemRegion], cuda: list[CudaRegion]) -> None:
        """Replace the regions by these. Regions that are already here stay mapped: requests may be using them."""
        for known in self.system():
            if known not in system:
                await super().unregister_system(known.name)
        for memory in self.cuda():
            if memory not in cuda:
                await super().unregister_cuda(memory.name)
        regions: list[SystemRegion | CudaRegion] = [*system, *cuda]
        for region in regions:
            if region in (*self.system(), *self.cuda()):
                continue
            try:
                if isinstance(region, SystemRegion):
                    await super().register_system(region)
                else:
                    await super().register_cuda(region)
            except ServingError as error:  # its owner may just have removed it
                _log.warning("this front end cannot use shared memory region '%s': %s", region.name, error)


class SharedLog:
    """The log of all processes of the server.

    Attributes:
        own: The log of this process.
    """

    def __init__(self, own: LogControl, engine: EngineRpc) -> None:
        self.own = own
        self.engine = engine

    @property
    def options(self) -> LogOptions:
        return self.own.options

    change = remote_call(LogControl.change)


class _NoIds:
    """Numbers of traces that the engine will number."""

    def trace_id(self) -> int:
        return 0

    def span_id(self) -> int:
        return 0


class RemoteTracing:
    """Tracing by the engine: it picks the requests, and a trace here only collects the events of this front end."""

    def __init__(self, engine: RemoteCalls, *, can_trace: bool) -> None:
        self.can_trace = can_trace
        self.engine = engine
        self._ids = _NoIds()

    @property
    def sampler(self) -> "RemoteTracing | None":
        """What makes traces; None while the engine would trace no request."""
        return self if self.engine.state.readiness.is_tracing else None

    def sample(self, model: str, remote: RemoteParent | None = None) -> TraceTree:
        return TraceTree(TraceLevel.TIMESTAMPS, self._ids, _dropped, remote)

    settings = remote_call(Tracing.settings)
    change = remote_call(Tracing.change)


class RemoteTraffic:
    """Traffic between versions, which the engine divides."""

    def __init__(self, engine: RemoteCalls) -> None:
        self.engine = engine

    @property
    def sticky(self) -> Mapping[str, tuple[bytes, ...]]:
        return self.engine.state.sticky

    show = remote_call(TrafficControl.show)
    change = remote_call(TrafficControl.change)
    reset = remote_call(TrafficControl.reset)


class RemoteLoad:
    """The load of an engine in another process, as it reports it with its responses."""

    def __init__(self, engine: RemoteCalls) -> None:
        self.engine = engine
        self._wanted_ns = 0

    def request_report(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._wanted_ns >= LOAD_AGE_NS:
            self._wanted_ns = now_ns
            self.engine.want_load()

    def latest(self) -> Load:
        return self.engine.load

    report = remote_call(LoadReports.report)


def _dropped(tree: TraceTree) -> None:
    """The front end is done with a trace whose events have been sent."""


def services_of(
    engine: RemoteCalls, offers: frozenset[str], regions: SharedRegions | None, log: LogControl | None
) -> Services:
    """Return the services that the engine offers.

    Args:
        offers: Their names.
        regions: The regions of all front ends; None where shared memory is off.
        log: The log of all processes; None where it cannot be changed.
    """
    load = service(engine, "demand")

    async def relay_result(method: str, id: str, owner: str) -> list[Any] | None:
        return cast(list[Any] | None, await engine.ask("result", method, id, owner))

    def demand(name: str, version: str) -> Awaitable[None] | None:
        configs = engine.state.directory.configs
        return None if (name, "") in configs or (name, version) in configs else load(name, version)

    def offered(name: str) -> Callable[..., Awaitable[Any]] | None:
        return service(engine, name) if name in offers else None

    return Services(
        relay_result=relay_result,
        regions=regions,
        tracing=RemoteTracing(engine, can_trace="tracer" in offers) if "tracing" in offers else None,
        log=log,
        rate_limits=offered("rate_limits"),
        demand=demand if "demand" in offers else None,
        sequences=offered("sequences"),
        explain=offered("explain"),
        folders=offered("folders"),
        count_tokens=service(engine, "count_tokens"),
        traffic=RemoteTraffic(engine) if "traffic" in offers else None,
        lend=engine.lend,
        load=RemoteLoad(engine),
    )


class HeldRequests:
    """Requests that wait for the engine.

    Attributes:
        is_disconnected: Whether the engine is being started again.
    """

    def __init__(self, send: Callable[[int, InferRequest, Reply], None]) -> None:
        self.is_disconnected = False
        self._send = send
        self._reconnect = Reconnect()
        self._held: dict[int, tuple[InferRequest, Reply]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, number: int, request: InferRequest, reply: Reply) -> None:
        """Keep a request until the engine is back, or refuse it."""
        self._held[number] = (request, reply)
        self._handle(Submit(number, size_of(request)))

    def cancel(self, number: int) -> None:
        """Drop a request, unless it is not held."""
        if self._held.pop(number, None) is not None:
            self._handle(Cancel(number))

    def engine_lost(self) -> None:
        self._handle(Lost())

    def engine_back(self) -> None:
        """The engine is there, and its models are known."""
        self._handle(Connected())

    def leave(self) -> None:
        """Refuse everything: the front end leaves."""
        self._handle(Leave())

    def _handle(self, event: Event) -> None:
        now_ns = time.monotonic_ns()
        commands = self._reconnect.handle(event, now_ns)
        self.is_disconnected = self._reconnect.is_disconnected
        for command in commands:
            request, reply = self._held.pop(command.id)
            if isinstance(command, Send):
                self._send(command.id, request, reply)
            else:
                reply(command.error, True)
        if self._timer is not None:
            self._timer.cancel()
        wake_at = self._reconnect.wake_at()
        if wake_at is not None:
            delay_s = max(0, wake_at - now_ns) / 1e9
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._handle, Tick())


def size_of(request: InferRequest) -> int:
    """Return the bytes of a request's tensors."""
    return sum(array_bytes(tensor.array) for tensor in request.inputs.values())


class _Ticket:
    """A request in flight."""

    __slots__ = ("_engine", "_number")

    def __init__(self, engine: "RemoteEngine", number: int) -> None:
        self._engine = engine
        self._number = number

    def cancel(self) -> None:
        """Ask the engine to drop the request, unless it is over."""
        self._engine.cancel(self._number)


class RemoteEngine(RemoteCalls):
    """An `Engine` in another process.

    Args:
        take: Handles a message of the engine to all front ends: its name and its arguments.
        ended: Called with the reason when the engine has gone; `connect` connects the next one.

    Attributes:
        state: Its last received state.
        held: The requests that wait for it.
        sequences: Its open sequences, and the lost ones.
        software: The software that a process needs to run its models; see `software_of`. Set by `connect`.
        local: The models that this process runs itself, None for none.
        siblings: The other processes of the server, None where they do not matter.
        load: The engine's latest report of its load, empty until `want_load`.
    """

    def __init__(self, *, take: Callable[[str, list[object]], Awaitable[object]], ended: Callable[[str], None]) -> None:
        self.state = EngineState()
        self.held = HeldRequests(self._send)
        self.software = ""
        self.local: LocalModels | None = None
        self.siblings: SiblingProcesses | None = None
        self.load: Load = {}
        self._take = take
        self._ended = ended
        self._link: Link[RequestWriter]
        self._responses = BurstReader()
        self._has_news = False  # whether this engine has sent its state
        self.sequences = OpenSequences()
        self._numbers = itertools.count(1)
        self._replies: dict[int, Reply] = {}
        self._metadata = ServerMetadata("", "", ())
        self._is_leaving = False
        self._is_exiting = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def connect(self, sock: socket.socket) -> frozenset[str]:
        """Meet the engine; return the names of the services that it offers.

        Raises:
            ServingError: UNAVAILABLE when it is gone again, or has handed its front ends over.
        """
        self._has_news = False
        self._responses = BurstReader()
        self._link = Link(
            sock, "the engine", RequestWriter(), take=self._received, answer=self._told, ended=self._lost
        )  # fmt: skip
        try:
            metadata, offers, self.software = cast(list[Any], await self.ask("hello"))
        except ServingError:
            self._link.close()  # its end must not count as the end of the next engine
            raise
        self._metadata = record(ServerMetadata, metadata)
        self.held.engine_back()
        return frozenset(offers)

    async def ask(self, question: str, *arguments: object, blobs: Blobs = ()) -> Any:
        return await self._link.ask(question, *arguments, blobs=blobs)

    def lend(self, size: int) -> memoryview | None:
        return self._link.lend(size)

    def want_load(self) -> None:
        self._link.send(("want_load",))

    def close(self) -> None:
        """Leave the engine: it cancels the requests in flight."""
        self._link.close()

    # Calls of the request path

    def infer(self, request: InferRequest, reply: Reply) -> Ticket:
        if self.local is not None and not self._is_exiting:
            ticket = self.local.infer(request, reply)
            if ticket is not None:
                return ticket
        number = next(self._numbers)
        if refusal := self._refusal(request):
            reply(refusal, True)
            return ANSWERED
        if self.held.is_disconnected:
            self.held.hold(number, request, reply)
        else:
            self._send(number, request, reply)
        return _Ticket(self, number)

    def _send(self, number: int, request: InferRequest, reply: Reply) -> None:
        link, trace, is_first = self._link, request.trace, True
        if link.burst.add(number, request):
            is_first = link.burst_begun()
        else:
            outgoing = link.outgoing()
            try:
                fields = encode_request(request, outgoing)
                link.send(("infer", number, fields, None if trace is None else encode_trace(trace.tree)), outgoing)
            except (ChannelError, OSError) as error:
                outgoing.withdraw()
                reply(internal(f"the request cannot be handed to the engine: {error}"), True)
                return
        if is_first and self.siblings is not None:
            self.siblings.record_request(now_ns())
        if not self._replies:
            self._is_idle.clear()
        self._replies[number] = reply if trace is None else traced(link, number, trace.tree, reply)

    def cancel(self, number: int) -> None:
        """Drop a request, unless it is over."""
        if number in self._replies:
            self._link.send(("cancel", number))
        else:
            self.held.cancel(number)

    def is_ready(self) -> bool:
        return not self.held.is_disconnected and self.state.readiness.is_ready and not self._is_leaving

    def is_exiting(self) -> bool:
        return self._is_exiting or self.state.readiness.is_exiting

    def server_metadata(self) -> ServerMetadata:
        return self._metadata

    # The end

    def begin_exit(self, *, refuses: bool = True) -> None:
        self._is_leaving = True
        self._is_exiting = refuses
        if refuses:
            self.held.leave()

    async def drained(self, timeout_s: float) -> bool:
        try:
            if self._replies:
                await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        except TimeoutError:
            self._fail_all(unavailable("the server stopped before the request was done: exit timeout expired"))
            return False
        return True

    def _refusal(self, request: InferRequest) -> ServingError | None:
        """Return why the request is not taken."""
        if self._is_exiting:
            return unavailable("Server is stopping, scheduler for model has stopped accepting new inference requests")
        if self._link.is_full or len(self._replies) >= IN_FLIGHT_MAX:
            return unavailable(
                f"the engine does not keep up: {len(self._replies)} requests of this front end are in flight",
                hint=_FULL_HINT,
            )
        if not request.correlation_id:
            return None
        config = self.state.directory.configs.get((request.model_name, request.model_version))
        return lost_sequence(self.sequences, config, request)

    def _received(self, message: Incoming) -> None:
        header = message.header
        if header[0] == "outcomes":
            replies = self._replies
            for number, response in self._responses.read(message):
                reply = replies.pop(number, None)
                if reply is not None:
                    reply(response, True)
            if not replies:
                self._is_idle.set()
            return
        if header[0] == "load":
            self.load = header[1]
            return
        if header[0] != "outcome":
            raise ChannelError(f"there is no message of kind {header[0]!r}")
        number, final = header[1], header[2]
        outcome = decode_outcome(header[3], message, self._link.release)
        reply = self._replies.get(number)
        if reply is None:
            return
        if final:
            del self._replies[number]
            if not self._replies:
                self._is_idle.set()
        reply(outcome, final)

    async def _told(self, question: str, arguments: list[object], blobs: list[bytes]) -> object:
        if question == "state":
            state = self.state if self._has_news else EngineState()
            state.apply(arguments[0])
            if self.local is not None:
                if not self._has_news:
                    self.local.reset()
                self.local.follow(state.offers, state.directory.configs)
            self.state, self._has_news = state, True
            return None
        if question == "counts":
            if self.local is not None:
                self.local.report(self._link.send)
            return await self._take("traffic", [])
        return await self._take(question, arguments)

    def _lost(self, reason: str) -> None:
        self.load = {}
        was_away = self.held.is_disconnected
        self.held.engine_lost()
        self.sequences.engine_ended()
        self._fail_all(interrupted())
        if not was_away:
            self._ended(reason)

    def _fail_all(self, error: ServingError) -> None:
        replies, self._replies = self._replies, {}
        self._is_idle.set()
        for reply in replies.values():
            reply(error, True)


def traced(link: Link[RequestWriter], number: int, tree: TraceTree, reply: Reply) -> Reply:
    """Return a reply that sends the front end's last events to the engine, whose trace they belong to."""

    def then_sent(outcome: Outcome, final: bool) -> None:
        reply(outcome, final)
        if final:
            link.send(("traced", number, take_events(tree)))

    return then_sent


def lost_sequence(sequences: OpenSequences, config: ModelConfig | None, request: InferRequest) -> ServingError | None:
    """Note a request with a sequence id; return the error if its sequence was lost with an engine."""
    if config is None or config.sequence_batching is None:
        return None
    starts, ends = bool(request.flags & SEQUENCE_START), bool(request.flags & SEQUENCE_END)
    return sequences.sent((request.model_name, request.correlation_id), starts=starts, ends=ends)
