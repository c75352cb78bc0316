"""Sends single requests, compares responses with validation data and records the outcome: a worker's hot path.

It runs on the event loop's thread.
"""

import time
from array import array
from collections.abc import Callable, Mapping
from itertools import islice
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.native import mypyc_attr
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.tools.perf.api import InputSource, MeasuredTarget
from charonia.tools.perf.data.spec import is_integer
from charonia.tools.perf.samples import WIDTH, Chunk, ReceivedResponse, place, sequence_mark
from charonia.tools.perf.sequences import Part, steps_once
from charonia.tools.results.records import ERROR_SAMPLES_MAX
from charonia.wire import grpc_codec, http_codec
from charonia.wire.answer import Answer, Failure, Handle
from charonia.wire.python_values import readable
from charonia.wire.transport import PreparedRequest, RequestForm, Transport

_EXACT: Final = (DataType.BOOL, DataType.BYTES)


def mismatch(expected: Mapping[str, Tensor], outputs: Mapping[str, Tensor], tolerance: float = 0.0) -> str:
    """Return the first difference from the expected outputs, in one sentence; "" for none.

    Strings, integers and booleans must be equal. A floating-point number may differ by up to
    `tolerance * (1 + |expected|)`; NaN equals only NaN.

    Args:
        expected: Expected outputs; other outputs are ignored.
        tolerance: Absolute and relative tolerance of floating-point numbers.
    """
    for name, want in expected.items():
        got = outputs.get(name)
        if got is None:
            return f"output '{name}': expected in the answer, got none"
        if got.datatype is not want.datatype or got.array.shape != want.array.shape:
            return f"output '{name}': expected {_form(want)}, got {_form(got)}"
        wrong = _wrong(want, got, tolerance)
        if wrong.any():
            first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            place = "".join(f"[{int(index)}]" for index in first)
            return (
                f"output '{name}'{place}: expected {_shown(want, first)}, got {_shown(got, first)} "
                f"({int(wrong.sum())} of {wrong.size} elements differ)"
            )
    return ""


def _wrong(want: Tensor, got: Tensor, tolerance: float) -> NDArray[np.bool_]:
    differs: NDArray[np.bool_]
    if want.datatype in _EXACT or is_integer(want.datatype):
        differs = np.asarray(want.array != got.array, bool)
        return differs
    left, right = _floats(want), _floats(got)
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(right - left)
        close = (left == right) | (distance <= tolerance * (1 + np.abs(left)))
    close &= np.isfinite(left) & np.isfinite(right) | (left == right)
    differs = ~(close | (np.isnan(left) & np.isnan(right)))
    return differs


def _floats(tensor: Tensor) -> NDArray[np.float64]:
    return readable(tensor).astype(np.float64)


def _form(tensor: Tensor) -> str:
    return f"{tensor.datatype.wire} of shape {list(tensor.array.shape)}"


def _shown(tensor: Tensor, index: tuple[np.intp, ...]) -> str:
    if tensor.datatype is DataType.BYTES:
        return repr(tensor.array[index])[:60]
    return str(readable(tensor)[index])


class Validator:
    """Compares responses with the expected outputs of a data source.

    Args:
        tolerance: Absolute and relative tolerance of floating-point numbers.
    """

    def __init__(self, source: InputSource, target: MeasuredTarget, tolerance: float) -> None:
        self._source = source
        self._target = target
        self._tolerance = tolerance

    def problem(self, part: Part, answer: Answer) -> str:
        """Return the problem of the response to a request, in one sentence; "" for none."""
        expected = self._source.expected(part.stream, part.step)
        if expected is None:
            return ""
        try:
            response = self._decoded(answer)
        except ServingError as error:
            return error.message
        return mismatch(expected, {tensor.name: tensor for tensor in response.outputs}, self._tolerance)

    def _decoded(self, answer: Answer) -> InferResponse:
        if self._target.protocol == "http":
            return http_codec.decode_response(answer.body, answer.json_bytes)
        if not self._target.streaming:
            return grpc_codec.decode_response(answer.body)
        response = grpc_codec.decode_stream_response(answer.body)
        if isinstance(response, ServingError):
            raise response
        return response


PREPARED_BYTES_MAX: Final = 512 * 2**20
"""Limit of the cache of encoded requests; other requests are encoded each time they are sent."""

VALIDATION: Final = "VALIDATION"
"""Kind of the error of a successful response with unexpected content."""

# A third of the time of `array.extend`.
_pack_row: Final = Struct(f"{WIDTH}q").pack
_pack_sent: Final = Struct("2q").pack

_MESSAGE_CHARS_MAX: Final = 500
_WARM_MAX: Final = 256

Then = Callable[[str], None]
"""Called when a request has ended, with the kind of its error, "" for success."""

FormOf = Callable[[Part], RequestForm]


class RequestLog:
    """The requests completed since the last chunk.

    Args:
        keep_responses: Whether to keep the times of all responses of a request.
    """

    def __init__(self, keep_responses: bool) -> None:
        self.keep_responses = keep_responses
        self._rows = array("q")
        self._sent = array("q")
        self._responses: dict[int, tuple[int, ...]] = {}
        self._replies: dict[int, ReceivedResponse] = {}
        self._row_count = 0
        self._kinds: dict[str, int] = {}
        self._new_kinds: dict[int, str] = {}
        self._messages: list[tuple[int, str]] = []
        self._samples: dict[int, set[str]] = {}

    def sent(self, intended_ns: int, sent_ns: int) -> None:
        """Record the sending of a request of an open loop."""
        self._sent.frombytes(_pack_sent(intended_ns, sent_ns))

    def ended(self, row: tuple[int, ...], responses_ns: tuple[int, ...]) -> None:
        """Record a completed request: a row of `samples`, and the times of its responses if they are kept."""
        self._rows.frombytes(_pack_row(*row))
        if responses_ns:
            self._responses[self._row_count] = responses_ns
        self._row_count += 1

    def received(self, reply: ReceivedResponse) -> None:
        """Keep the response of a language model to the request that is recorded next."""
        self._replies[self._row_count] = reply

    def kind(self, name: str, message: str) -> int:
        """Return the number of a kind of error, and keep the message as one of a few samples."""
        number = self._kinds.get(name)
        if number is None:
            number = self._kinds[name] = len(self._kinds) + 1
            self._new_kinds[number] = name
        samples = self._samples.setdefault(number, set())
        short = message[:_MESSAGE_CHARS_MAX]
        if len(samples) < ERROR_SAMPLES_MAX and short not in samples:
            samples.add(short)
            self._messages.append((number, short))
        return number

    def chunk(self, in_flight: int, waited_ns: int, finished: bool) -> Chunk:
        """Return the records since the last chunk; `waited_ns` is the time that the load has polled for something."""
        chunk = Chunk(
            until_ns=time.monotonic_ns(),
            rows=self._rows.tobytes(),
            sent=self._sent.tobytes(),
            in_flight=in_flight,
            busy_ns=time.process_time_ns() - waited_ns,
            kinds=self._new_kinds,
            messages=tuple(self._messages),
            responses=self._responses,
            replies=self._replies,
            finished=finished,
        )
        self._rows, self._sent = array("q"), array("q")
        self._responses, self._replies, self._row_count = {}, {}, 0
        self._new_kinds, self._messages = {}, []
        return chunk


@mypyc_attr(allow_interpreted_subclasses=True)
class SentRequest:
    """A request in flight."""

    __slots__ = (
        "first_ns",
        "handle",
        "intended_ns",
        "last_ns",
        "part",
        "receive_ns",
        "recorded",
        "responded",
        "response_count",
        "responses_ns",
        "sender",
        "then",
        "wrong_kind",
        "wrong_message",
    )

    def __init__(self, sender: "RequestSender", part: Part, intended_ns: int, then: Then) -> None:
        self.sender = sender
        self.part = part
        self.intended_ns = intended_ns
        self.then = then
        self.recorded = sender.is_recording
        self.responded: Callable[[int], None] | None = None
        self.handle: Handle | None = None
        self.first_ns = 0
        self.last_ns = 0
        self.receive_ns = 0
        self.response_count = 0
        self.responses_ns: tuple[int, ...] = ()
        self.wrong_kind = ""
        self.wrong_message = ""

    def on_answer(self, answer: Answer) -> None:
        """Process an answer."""
        if answer.failure is not None:
            status = answer.failure is Failure.STATUS
            self.wrong_kind = answer.code.name if status else answer.failure.name
            self.wrong_message = answer.message
        elif not answer.is_empty:
            done_ns = answer.done_ns
            if not self.response_count:
                self.first_ns = done_ns
            self.last_ns = done_ns
            self.response_count += 1
            self.receive_ns += answer.receive_ns
            if self.sender.inspects:
                self.sender.inspect(self, answer)
            if self.responded is not None:
                self.responded(self.response_count)
        if answer.final:
            self.sender.ended(self, answer)


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestSender:
    """Sends requests of a data source over a transport.

    Args:
        form_of: Returns the encoding of a request; None for a sender that encodes requests itself.
        validator: Checks the responses, None for no check.
    """

    def __init__(
        self,
        transport: Transport,
        source: InputSource,
        form_of: FormOf | None,
        log: RequestLog,
        validator: Validator | None = None,
    ) -> None:
        self._transport = transport
        self._source = source
        self._form_of = form_of
        self.log = log
        self._prepared: dict[int, PreparedRequest] = {}
        self._prepared_bytes = 0
        self._validator = validator
        self.inspects = validator is not None or log.keep_responses
        self.keeps_bodies = validator is not None
        self.in_flight: set[SentRequest] = set()
        self.is_recording = True

    def send(self, part: Part, intended_ns: int, then: Then) -> SentRequest:
        """Send a request.

        Args:
            intended_ns: Scheduled send time; 0 for now, in a closed loop.
        """
        request = self._new(part, intended_ns, then)
        prepared = self._prepared_for(request)
        self.in_flight.add(request)
        if intended_ns and self.is_recording:
            self.log.sent(intended_ns, time.monotonic_ns())
        request.handle = self._transport.send(prepared, request.on_answer, keep_body=self.keeps_bodies)
        return request

    def warm(self) -> None:
        """Encode the requests that the cache holds in advance."""
        for part in islice(steps_once(self._source), _WARM_MAX):
            key = place(part.stream, part.step)
            if key not in self._prepared:
                self._prepare(key, part)

    def ended(self, request: SentRequest, answer: Answer) -> None:
        """Record a request that has ended."""
        self.in_flight.discard(request)
        request.handle = None  # breaks a reference cycle that only the garbage collector would free
        kind = request.wrong_kind
        if request.recorded:
            part = request.part
            done_ns = answer.done_ns if kind or not request.response_count else request.last_ns
            self.log.ended(
                (
                    request.intended_ns or answer.sent_ns,
                    answer.sent_ns,
                    answer.send_end_ns,
                    request.first_ns,
                    request.receive_ns,
                    done_ns,
                    self.log.kind(kind, request.wrong_message) if kind else 0,
                    request.response_count,
                    part.stream << 32 | part.step,
                    sequence_mark(part.sequence_id, part.end),
                ),
                request.responses_ns,
            )
        request.then(kind)

    def cancel(self) -> None:
        """Cancel all requests in flight."""
        for request in self.in_flight:
            if request.handle is not None:
                request.handle.cancel()
        self.in_flight.clear()

    def inspect(self, request: SentRequest, answer: Answer) -> None:
        """Record the time of a response, and validate it."""
        if self.log.keep_responses:
            request.responses_ns += (answer.done_ns,)
        if self._validator is not None and not request.wrong_kind:
            request.wrong_message = self._validator.problem(request.part, answer)
            request.wrong_kind = VALIDATION if request.wrong_message else ""

    def _new(self, part: Part, intended_ns: int, then: Then) -> SentRequest:
        return SentRequest(self, part, intended_ns, then)

    def _prepared_for(self, request: SentRequest) -> PreparedRequest:
        """Return the encoded request."""
        part = request.part
        key = place(part.stream, part.step)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepare(key, part)
        if part.sequence_id:
            prepared = prepared.with_sequence(part.sequence_id, part.start, part.end)
        return prepared

    def _encoded(self, part: Part) -> PreparedRequest:
        assert self._form_of is not None
        return self._transport.prepare(self._source.request(part.stream, part.step), self._form_of(part))

    def _prepare(self, key: int, part: Part) -> PreparedRequest:
        prepared = self._encoded(part)
        if self._prepared_bytes + prepared.byte_size <= PREPARED_BYTES_MAX:
            self._prepared[key] = prepared
            self._prepared_bytes += prepared.byte_size
        return prepared
