"""Sends the requests of language models, alone and as turns of sessions: the hot path of a worker process.

Responses are stored undecoded. Only a session's replies are decoded here, because its next request repeats them.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial

from charonia.clock import WakeTimer
from charonia.tools.perf.api import SequencePlan
from charonia.tools.perf.language.replies import Reply
from charonia.tools.perf.language.requests import LanguageSource
from charonia.tools.perf.samples import Received, place
from charonia.tools.perf.sending import RequestLog, RequestSender, SentRequest, Then
from charonia.tools.perf.sequences import Part, SequenceIds, SequenceSlot
from charonia.wire.answer import Answer
from charonia.wire.transport import PreparedRequest, Transport


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

    def received(self) -> Received:
        return Received(self.arrivals.tobytes(), b"".join(self.pieces), self.history)


class LanguageSender(RequestSender):
    """Sends requests of a `LanguageSource`."""

    def __init__(
        self,
        transport: Transport,
        source: LanguageSource,
        encode: Encode,
        read: Callable[[Received], Reply],
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

    def _remember(self, request: SentPrompt, received: Received) -> None:
        part = request.part
        if part.end:
            self._histories.pop(part.sequence_id, None)
            return
        try:
            content = self._read(received).content
        except ValueError:
            content = ""
        self._histories[part.sequence_id] = (*request.history, content)
