"""A worker process, which sends load. `pool` starts it, and they exchange messages over sockets.

It has its own event loop and connections, and exits when the socket closes. Responses of language models are
stored undecoded; only a session's replies are decoded here, because its next request repeats them.
"""

import asyncio
import contextlib
import gc
import os
import pickle
import resource
import socket
import struct
import sys
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any, cast

import uvloop

from charonia.client.grpc_transport import GrpcTransport
from charonia.client.http_transport import HttpTransport
from charonia.clock import WakeTimer
from charonia.core.errors import ServingError
from charonia.tools.perf import schedule
from charonia.tools.perf.api import SequencePlan
from charonia.tools.perf.language.plan import LanguagePlan
from charonia.tools.perf.language.replies import Reply, read_reply
from charonia.tools.perf.language.requests import LanguageSource
from charonia.tools.perf.loops import ClosedLoopLoad, OpenLoop, PeriodicLoop, Slot
from charonia.tools.perf.pool import PrepareLoad, StartLoad, StopLoad, WorkerFailed, WorkerReady, WorkerSetup
from charonia.tools.perf.samples import ReceivedResponse, place
from charonia.tools.perf.sending import RequestLog, RequestSender, SentRequest, Then, Validator
from charonia.tools.perf.sequences import Part, SequenceIds, SequenceSlot, steps
from charonia.tools.results.records import LoadMode
from charonia.wire.answer import Answer
from charonia.wire.endpoint import parse_url
from charonia.wire.transport import PreparedRequest, RequestForm, Transport, WireOptions


class SessionSlot(SequenceSlot):
    """Runs one session at a time. The next turn waits for its delay; an open session needs no end.

    Args:
        ids: Numbers of sessions, shared by the slots of a process.
    """

    def __init__(self, source: LanguageSource, ids: SequenceIds, seed: int) -> None:
        super().__init__(SequencePlan(length_from_data=True), source, ids, seed)
        self._sessions = source

    @property
    def delay_s(self) -> float:
        return self._sessions.delay_s(self._stream, self._position) if self.is_open else 0.0

    def begin(self, stream: int) -> None:
        """Choose the session that comes next."""
        self._choose(stream)

    def finish(self) -> Part | None:
        """Give up the open session."""
        self.abandon()
        return None


class OpenSessions:
    """Sessions start at scheduled times; their later turns follow the responses.

    Args:
        times_ns: Scheduled starts, monotonic, ascending.
        session_count: Sessions to start; 0 for no limit.
    """

    def __init__(
        self,
        sender: RequestSender,
        make: Callable[[], SessionSlot],
        streams: Iterator[int],
        times_ns: Iterator[int],
        session_count: int = 0,
    ) -> None:
        self._sender = sender
        self._make = make
        self._streams = streams
        self._times_ns = times_ns
        self._left = session_count if session_count else -1
        self._open = 0
        self._is_stopped = False
        self._loop = asyncio.get_running_loop()
        self._next_ns = next(times_ns)
        self._timer = WakeTimer(self._loop, self._due)

    def start(self) -> None:
        """Set the timer for the first session."""
        self._timer.set(self._next_ns)

    def stop(self) -> None:
        """Stop starting sessions and sending turns."""
        if not self._is_stopped:
            self._is_stopped = True
            self._timer.close()

    waited_ns = 0

    @property
    def is_finished(self) -> bool:
        """Whether all sessions have ended, or a stopped load has no request in flight."""
        if self._is_stopped:
            return not self._sender.in_flight
        return not self._left and not self._open

    def _due(self) -> None:
        while self._left and not self._is_stopped and self._next_ns <= time.monotonic_ns():
            slot = self._make()
            slot.begin(next(self._streams))
            self._open += 1
            self._left -= 1
            self._send(slot, self._next_ns)
            self._next_ns = next(self._times_ns)
        if self._left and not self._is_stopped:
            self._timer.set(self._next_ns)

    def _send(self, slot: SessionSlot, intended_ns: int = 0) -> None:
        if self._is_stopped:
            return
        part = slot.next()
        self._sender.send(part, intended_ns or time.monotonic_ns(), partial(self._ended, slot))

    def _ended(self, slot: SessionSlot, kind: str) -> None:
        if kind:
            slot.abandon()
        if not slot.is_open:
            self._open -= 1
        elif slot.delay_s:
            self._loop.call_later(slot.delay_s, self._send, slot)
        else:
            self._send(slot)


Encode = Callable[[Part, tuple[str, ...]], PreparedRequest]
"""Returns a request of a part, with the replies to the turns before it."""


class SentPrompt(SentRequest):
    """A request in flight, and its response so far."""

    __slots__ = ("arrivals", "history", "pieces", "received_bytes")

    def __init__(self, sender: "LanguageSender", part: Part, intended_ns: int, then: Then) -> None:
        super().__init__(sender, part, intended_ns, then)
        self.history: tuple[str, ...] = ()
        self.arrivals = array("q")
        self.pieces: list[bytes | memoryview] = []
        self.received_bytes = 0

    def received(self) -> ReceivedResponse:
        return ReceivedResponse(self.arrivals.tobytes(), b"".join(self.pieces), self.history)


class LanguageSender(RequestSender):
    """Sends requests of a `LanguageSource`."""

    def __init__(
        self,
        transport: Transport,
        source: LanguageSource,
        encode: Encode,
        read: Callable[[ReceivedResponse], Reply],
        log: RequestLog,
    ) -> None:
        super().__init__(transport, source, None, log)
        self._encode = encode
        self._read = read
        self._histories: dict[int, tuple[str, ...]] = {}
        self.inspects = self.keeps_bodies = True

    def inspect(self, request: SentRequest, answer: Answer) -> None:
        """Store the data of an answer."""
        assert isinstance(request, SentPrompt)
        request.pieces.append(answer.body)
        if answer.arrivals:
            request.arrivals = answer.arrivals
        else:
            request.received_bytes += len(answer.body)
            request.arrivals.extend((answer.done_ns, request.received_bytes))

    def ended(self, request: SentRequest, answer: Answer) -> None:
        assert isinstance(request, SentPrompt)
        if not request.wrong_kind:
            received = request.received()
            if request.recorded:
                self.log.received(received)
            if request.part.sequence_id:
                self._remember(request, received)
        elif request.part.sequence_id:
            self._histories.pop(request.part.sequence_id, None)
        super().ended(request, answer)

    def _new(self, part: Part, intended_ns: int, then: Then) -> SentRequest:
        request = SentPrompt(self, part, intended_ns, then)
        if part.sequence_id and not part.start:
            request.history = self._histories.get(part.sequence_id, ())
        return request

    def _prepared_for(self, request: SentRequest) -> PreparedRequest:
        assert isinstance(request, SentPrompt)
        if request.history:
            return self._encode(request.part, request.history)
        key = place(request.part.stream, request.part.step)
        return self._prepared.get(key) or self._prepare(key, request.part)

    def _encoded(self, part: Part) -> PreparedRequest:
        return self._encode(part, ())

    def _remember(self, request: SentPrompt, received: ReceivedResponse) -> None:
        part = request.part
        if part.end:
            self._histories.pop(part.sequence_id, None)
            return
        try:
            content = self._read(received).content
        except ValueError:
            content = ""
        self._histories[part.sequence_id] = (*request.history, content)


_DEFAULT = WireOptions()


def connect(url: str, options: WireOptions = _DEFAULT) -> Transport:
    """Return a transport to the server at a URL, without connections; call it on the event loop.

    Args:
        url: `HOST:PORT` or `http://HOST:PORT` for HTTP, `grpc://HOST:PORT` for gRPC; `https://`, `grpcs://` with TLS.
    """
    endpoint = parse_url(url)
    transport = GrpcTransport(endpoint, options) if endpoint.protocol == "grpc" else HttpTransport(endpoint, options)
    return cast(Transport, transport)  # each only sends requests that it prepared


FLUSH_S_MAX = 0.04
FLUSH_S_MIN = 0.004
CHUNK_ROWS = 256
"""A chunk is sent when there are about so many requests, within these times. A larger one delays the load."""

ENDING_S = 0.003
"""Polling interval for the end of the last request."""

ABANDONED_S_MAX = 5.0
"""Time that a worker has to end after the measuring process, whatever it waits for."""

OPEN_AHEAD_MIN = 16
OPEN_AHEAD_S = 0.02
"""An open loop opens as many connections before it starts as it sends requests in this time, at least `OPEN_AHEAD_MIN`.
More are opened on demand, which takes longer than sending a request."""

GARBAGE_OBJECTS = 100_000
"""New objects between two searches for garbage: requests leave none, and each search delays the load."""

RESERVED_DESCRIPTORS = 64
"""File descriptors reserved for other purposes than connections."""

WAITING_MAX = 1_000_000
"""Limit of requests that wait for a connection."""

Loop = ClosedLoopLoad | OpenLoop | PeriodicLoop | OpenSessions
"""One process's share of a load."""

CALLS_PER_CONNECTION = 6
"""Calls in flight per gRPC connection, as in the C++ client library."""


_DESCRIPTORS_MAX = 65_536  # the number of ports

Tell = Callable[[object], None]


def language_sender(
    transport: Transport, source: LanguageSource, plan: LanguagePlan, log: RequestLog
) -> LanguageSender:
    """Return a sender of the requests of a language model."""
    is_grpc = not isinstance(transport, HttpTransport)
    form = RequestForm(streaming=plan.streaming)

    def encode(part: Part, history: tuple[str, ...]) -> PreparedRequest:
        if isinstance(transport, HttpTransport):
            body = source.body(part.stream, part.step, history)
            request = transport.encoder.request("POST", source.path(transport.endpoint.prefix), body)
            return cast(PreparedRequest, request)
        return transport.prepare(source.request(part.stream, part.step, history), form)

    return LanguageSender(transport, source, encode, lambda reply: read_reply(plan.endpoint, reply, is_grpc), log)


def next_flush_s(last_s: float, rows: int) -> float:
    """Return the time until the next chunk, after one with so many rows in `last_s`. Pure."""
    return min(max(last_s * CHUNK_ROWS / max(rows, 1), FLUSH_S_MIN), FLUSH_S_MAX)


class LoadWorker:
    """One worker's part of a run."""

    def __init__(self, commands: Connection, tell: Tell, setup: WorkerSetup) -> None:
        self._commands = commands
        self._send = tell
        self._setup = setup
        settings, source = setup.settings, setup.source
        target = settings.target
        self._events = asyncio.get_running_loop()
        # An open loop is limited only by the system, and reaching that limit is an error.
        options = replace(
            target.transport, connections_max=_descriptors() - RESERVED_DESCRIPTORS, waiting_max=WAITING_MAX
        )
        if settings.language is not None and settings.language.asks_for_events(target.protocol):
            options = replace(options, headers=(*options.headers, ("Accept", "text/event-stream")))
        self._transport: Transport = connect(target.url, options)
        form = RequestForm(target.json_inputs, target.json_outputs, target.streaming)
        validator = Validator(source, target, settings.tolerance) if source.expected(0, 0) is not None else None
        layout = setup.layout

        def form_of(part: Part) -> RequestForm:
            return form if layout is None else layout.form(part, form)

        log = RequestLog(settings.keep_requests)
        self._sender: RequestSender
        if settings.language is not None and isinstance(source, LanguageSource):
            self._sender = language_sender(self._transport, source, settings.language, log)
        else:
            self._sender = RequestSender(self._transport, source, form_of, log, validator)
        ids = SequenceIds(settings.sequences, setup.process, setup.process_count) if settings.sequences else None
        self._ids = ids
        self._steps = steps(source, setup.process, setup.process_count)
        self._next = asyncio.Event()
        self._message: PrepareLoad | StartLoad | StopLoad | None = None
        self._flush_s = FLUSH_S_MIN
        self._flush_is_due = asyncio.Event()
        self._events.add_reader(commands.fileno(), self._receive)

    async def run(self) -> None:
        """Execute messages until the connection closes."""
        try:
            while (message := await self._next_message()) is not None:
                if isinstance(message, PrepareLoad):
                    await self._load(message)
                else:
                    self._send(self._sender.log.chunk(0, 0, finished=True))
        finally:
            self._events.remove_reader(self._commands.fileno())
            self._sender.cancel()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._transport.close(), ABANDONED_S_MAX)

    async def _load(self, begin: PrepareLoad) -> None:
        self._sender.log = RequestLog(self._setup.settings.keep_requests)
        slots = self._slots(begin)
        await self._transport.open(self._connection_count(begin, len(slots)))
        self._sender.warm()
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE_OBJECTS)
        self._send(WorkerReady())
        go = await self._next_message()
        if not isinstance(go, StartLoad):
            return
        loop = self._make(begin, slots, go.begin_ns)
        loop.start()
        give_up_s = 0.0
        while not loop.is_finished and not (give_up_s and self._events.time() >= give_up_s):
            await self._pause(loop, is_ending=bool(begin.request_count or give_up_s))
            chunk = self._sender.log.chunk(len(self._sender.in_flight), loop.waited_ns, finished=False)
            self._send(chunk)
            self._flush_s = next_flush_s(self._flush_s, chunk.row_count)
            if self._next.is_set() and not give_up_s:
                message = await self._next_message()
                if message is None:
                    raise EOFError
                if isinstance(message, StopLoad):
                    loop.stop()
                    give_up_s = self._events.time() + message.wait_s
        loop.stop()
        unanswered = len(self._sender.in_flight)
        self._sender.cancel()
        self._send(self._sender.log.chunk(unanswered, loop.waited_ns, finished=True))

    async def _pause(self, loop: Loop, *, is_ending: bool) -> None:
        """Wait until the next chunk is due or a message arrives; near the end, until the load has ended."""
        if not is_ending:
            timer = self._events.call_later(self._flush_s, self._flush_is_due.set)
            await self._flush_is_due.wait()
            self._flush_is_due.clear()
            timer.cancel()
            return
        until = self._events.time() + self._flush_s
        while not loop.is_finished and self._events.time() < until:
            await asyncio.sleep(ENDING_S)

    def _slots(self, begin: PrepareLoad) -> list[Slot]:
        settings, process, count = self._setup.settings, self._setup.process, self._setup.process_count
        plan = settings.sequences
        mode, value = begin.level.mode, int(begin.level.value)
        if mode is LoadMode.PERIODIC:
            return [self._steps]
        if plan is None or self._ids is None:
            return [self._steps] * (schedule.split(value, count)[process] if mode is LoadMode.CONCURRENCY else 1)
        total = value if mode is LoadMode.CONCURRENCY else plan.concurrent
        seed = settings.load.seed
        source = self._setup.source
        if isinstance(source, LanguageSource):
            numbers = range(process, total, count)
            return [SessionSlot(source, self._ids, seed * 1_000_003 + number) for number in numbers]
        return [
            SequenceSlot(plan, source, self._ids, seed * 1_000_003 + number) for number in range(process, total, count)
        ]

    def _make(self, begin: PrepareLoad, slots: list[Slot], begin_ns: int) -> Loop:
        settings, process, count = self._setup.settings, self._setup.process, self._setup.process_count
        plan = settings.load
        mine = schedule.split(begin.request_count, count)[process] if begin.request_count else 0
        if begin.level.mode is LoadMode.PERIODIC:
            numbers = (int(plan.start), int(plan.end), int(plan.step), plan.request_period)
            return PeriodicLoop(self._sender, self._steps, *numbers)
        if begin.level.mode is LoadMode.CONCURRENCY:
            return ClosedLoopLoad(self._sender, slots, mine, polls=begin.level.value == 1)
        offsets = schedule.arrivals(plan.distribution, begin.level.value, plan.intervals_ns, plan.seed)
        times = _from(begin_ns, schedule.share(offsets, process, count))
        source, ids = self._setup.source, self._ids
        if isinstance(source, LanguageSource) and ids is not None:
            streams = cycle(range(process % source.stream_count, source.stream_count, count))
            return OpenSessions(self._sender, lambda: SessionSlot(source, ids, 0), streams, times, mine)
        serial = settings.sequences is not None and settings.sequences.serial
        return OpenLoop(self._sender, slots, times, mine, serial)

    def _connection_count(self, begin: PrepareLoad, slot_count: int) -> int:
        is_grpc = self._setup.settings.target.protocol == "grpc"
        if begin.level.mode is LoadMode.CONCURRENCY:
            wanted = slot_count
        elif begin.level.mode.is_rate and not is_grpc:
            wanted = max(int(begin.level.value * OPEN_AHEAD_S / self._setup.process_count), OPEN_AHEAD_MIN)
        else:
            wanted = OPEN_AHEAD_MIN
        return -(-wanted // CALLS_PER_CONNECTION) if is_grpc else wanted

    async def _next_message(self) -> PrepareLoad | StartLoad | StopLoad | None:
        await self._next.wait()
        self._next.clear()
        message, self._message = self._message, None
        return message

    def _receive(self) -> None:
        try:
            self._message = self._commands.recv()
        except (EOFError, OSError):
            self._message = None
            self._events.remove_reader(self._commands.fileno())
            self._events.call_later(ABANDONED_S_MAX, os._exit, 0)
        self._next.set()
        self._flush_is_due.set()


class MessageWriter(asyncio.Protocol):
    """Sends messages to the measuring process. While that is busy, messages wait here and do not delay the load.

    They are sent on the event loop: passing them to a thread, and the interpreter lock back, delays a load for longer.
    """

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport
        self._closed: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def send(self, message: object) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._transport.write(_LENGTH.pack(len(data)) + data)

    async def close(self) -> None:
        """Send the remaining messages, and end."""
        self._closed = asyncio.get_running_loop().create_future()
        self._transport.close()
        await self._closed

    def eof_received(self) -> bool:
        """Stay open: the worker ends when the other socket closes."""
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closed is None:
            os._exit(0)  # the measuring process has exited
        self._closed.set_result(None)


_LENGTH = struct.Struct("!i")  # what `Connection` reads before a message


def main(commands_descriptor: int, answers_descriptor: int) -> None:
    """Run a worker, with the file descriptors of the sockets from and to the measuring process."""
    commands = Connection(commands_descriptor)
    with contextlib.suppress(EOFError, OSError):  # the measuring process has exited
        setup = commands.recv()
        _run(_work(commands, socket.socket(fileno=answers_descriptor), setup))
    # Skips the interpreter's clean-up, which takes long for big inputs.
    os._exit(0)


async def _work(commands: Connection, answers: socket.socket, setup: WorkerSetup) -> None:
    _, writer = await asyncio.get_running_loop().create_unix_connection(MessageWriter, sock=answers)
    try:
        await LoadWorker(commands, writer.send, setup).run()
    except ServingError as error:
        writer.send(WorkerFailed(error.code.name, error.message, error.hint))
    await writer.close()


def _run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def _descriptors() -> int:
    """Raise the limit of open files to the maximum and return it: each HTTP request in flight needs a socket."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(most, _DESCRIPTORS_MAX) if most != resource.RLIM_INFINITY else _DESCRIPTORS_MAX
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def _from(begin_ns: int, offsets: Iterator[int]) -> Iterator[int]:
    return (begin_ns + offset for offset in offsets)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
