"""Sends the requests of language models, and stores the undecoded responses: the hot path of a worker process.

Only a session's replies are decoded here, because its next request repeats them.
"""

from array import array
from collections.abc import Callable

from charonia.tools.perf.language.received import Received
from charonia.tools.perf.language.replies import Reply
from charonia.tools.perf.language.requests import LanguageSource
from charonia.tools.perf.samples import place
from charonia.tools.perf.sending import RequestLog, RequestSender, SentRequest, Then
from charonia.tools.perf.sequences import Part
from charonia.wire.transport import Answer, PreparedRequest, Transport

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
    """Sends requests of a `LanguageSource`.

    Args:
        transport: Connections to the server.
        source: The requests.
        encode: Encodes one.
        read: Decodes a response.
        log: Records the outcomes.
    """

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
