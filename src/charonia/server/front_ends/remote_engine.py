"""The engine as a front end in another process sees it.

Requests travel as they are, and what the request path asks is answered from the state that the engine sends
(`state.py`). Everything else is a question to the engine. What changes through one front end is in force in every other
one before the one that changed it has its answer.
"""

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, cast

from charonia.config.model import ModelConfig
from charonia.core.calls import ANSWERED, Outcome, Reply, Ticket
from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ServerMetadata
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest
from charonia.core.statistics import ModelStatistics
from charonia.core.trace import TraceTree
from charonia.server.backends.python.worker.channel import Incoming
from charonia.server.backends.python.worker.regions import ChannelError
from charonia.server.execution.clock import now_ns
from charonia.server.execution.neighbours import Neighbours
from charonia.server.front_ends.bursts import BurstReader, RequestWriter
from charonia.server.front_ends.held_requests import HeldRequests
from charonia.server.front_ends.link import Link
from charonia.server.front_ends.local_models import LocalModels
from charonia.server.front_ends.messages import decode_outcome, encode_request, encode_trace, take_events
from charonia.server.front_ends.reconnect import OpenSequences, interrupted
from charonia.server.front_ends.records import record
from charonia.server.front_ends.state import EngineState
from charonia.wire.orca import Load
from charonia.wire.tensors import Lend

IN_FLIGHT_MAX = 65_536
"""Requests of one front end that the engine has not answered; more are refused."""

_FULL_HINT = "try again later, or send fewer requests at once; more front ends do not help when models are the limit"


class _Ticket:
    """A request in flight."""

    __slots__ = ("_engine", "_number")

    def __init__(self, engine: "RemoteEngine", number: int) -> None:
        self._engine = engine
        self._number = number

    def cancel(self) -> None:
        """Ask the engine to drop the request, unless it is over."""
        self._engine.cancel(self._number)


class RemoteEngine:
    """An `Engine` in another process.

    Args:
        take: Handles what the engine tells all front ends: its name and its arguments.
        ended: Called with the reason when the engine has gone; `connect` meets the next one.

    Attributes:
        state: What is known of it.
        held: The requests that wait for it.
        sequences: The sequences that it has, and those that were lost.
        software: What a process must have to run its models; see `software_of`. Set by `connect`.
        local: The models that this process runs itself, None for none.
        neighbours: The other processes of the server, None where they do not matter.
        load: The engine's latest report of its load, empty until `want_load`.
        want_load: Lets the engine report its load now, then with responses; see `LoadSender`. Set by `connect`.
        lend: Lends memory to receive requests in that the engine then reads. Set by `connect`.
    """

    lend: Lend
    want_load: Callable[[], None]

    def __init__(self, *, take: Callable[[str, list[object]], Awaitable[object]], ended: Callable[[str], None]) -> None:
        self.state = EngineState()
        self.held = HeldRequests(self._send)
        self.software = ""
        self.local: LocalModels | None = None
        self.neighbours: Neighbours | None = None
        self.load: Load = {}
        self._take = take
        self._ended = ended
        self._link: Link[RequestWriter]
        self._responses = BurstReader()
        self._has_news = False  # whether this engine has told its state
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

        Args:
            sock: Connected to an `EnginePort`.

        Raises:
            ServingError: UNAVAILABLE when it is gone again, or has handed its front ends over.
        """
        self._has_news = False
        self._responses = BurstReader()
        self._link = Link(
            *(sock, "the engine", RequestWriter()), take=self._received, answer=self._told, ended=self._lost
        )
        self.lend = self._link.lend
        self.want_load = partial(self._link.send, ("want_load",))
        try:
            metadata, offers, self.software = cast(list[Any], await self.ask("hello"))
        except ServingError:
            self._link.close()  # its end must not count as that of the engine which is met instead
            raise
        self._metadata = record(ServerMetadata, metadata)
        self.held.engine_back()
        return frozenset(offers)

    async def ask(self, question: str, *arguments: object) -> Any:
        return await self._link.ask(question, *arguments)

    def close(self) -> None:
        """Leave the engine: it cancels what is in flight."""
        self._link.close()

    # What the request path needs

    def infer(self, request: InferRequest, reply: Reply) -> Ticket:
        if self.local is not None and not self._is_exiting:
            ticket = self.local.infer(request, reply)
            if ticket is not None:
                return ticket
        number = next(self._numbers)
        if refusal := self._refusal(request):
            reply(refusal, True)
            return ANSWERED
        if self.held.is_away:
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
        if is_first and self.neighbours is not None:
            self.neighbours.note(now_ns())
        if not self._replies:
            self._is_idle.clear()
        self._replies[number] = reply if trace is None else traced(link, number, trace.tree, reply)

    def cancel(self, number: int) -> None:
        """Drop a request, unless it is over."""
        if number in self._replies:
            self._link.send(("cancel", number))
        else:
            self.held.cancel(number)

    def is_live(self) -> bool:
        """Whether the server can answer at all. While the engine is started again, it will."""
        return self.state.readiness.is_live

    def is_ready(self) -> bool:
        return not self.held.is_away and self.state.readiness.is_ready and not self._is_leaving

    def is_exiting(self) -> bool:
        return self._is_exiting or self.state.readiness.is_exiting

    def server_metadata(self) -> ServerMetadata:
        return self._metadata

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        return self.state.directory.model_config(name, version)

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        return self.state.directory.model_metadata(name, version)

    # Questions to the engine

    async def model_ready(self, name: str, version: str = "") -> bool:
        return bool(await self.ask("model_ready", name, version))

    async def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        return record(list[ModelStatistics], await self.ask("statistics", name, version))

    async def repository_index(self, ready_only: bool = False) -> list[ModelIndexEntry]:
        return record(list[ModelIndexEntry], await self.ask("index", ready_only))

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        names = None if files is None else list(files)
        await self._link.ask("load", name, config, names, blobs=list((files or {}).values()))

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        await self.ask("unload", name, unload_dependents)

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
                    self.local.begin_anew()
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
        was_away = self.held.is_away
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
