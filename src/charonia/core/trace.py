"""Traces: the timeline of each sampled request.

A `TraceTree` contains the traces of one client request: of the request itself, and of the requests that an
ensemble or a model made for it. It is reference-counted and ends with its last holder: the front end holds it until it
has responded, each request until its last response, each batch until it has been executed.

Events are named as in Triton's trace files. Times are monotonic, in ns.
"""

from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import Final, Protocol

from charonia.core.statistics import TokenUsage
from charonia.core.tensor import Tensor

CHILDREN_MAX: Final = 1024
"""Limit of requests by ensembles and models that are traced for one client request."""

EVENTS_MAX: Final = 8192
"""Limit of events of one request, because a stream of responses may be endless. Later events are dropped."""

REQUEST_START: Final = "REQUEST_START"
QUEUE_START: Final = "QUEUE_START"
COMPUTE_START: Final = "COMPUTE_START"
COMPUTE_INPUT_END: Final = "COMPUTE_INPUT_END"
COMPUTE_OUTPUT_START: Final = "COMPUTE_OUTPUT_START"
COMPUTE_END: Final = "COMPUTE_END"
INFER_RESPONSE_COMPLETE: Final = "INFER_RESPONSE_COMPLETE"
REQUEST_END: Final = "REQUEST_END"

_ORDER: Final = {
    name: rank
    for rank, name in enumerate(
        (
            REQUEST_START, QUEUE_START, COMPUTE_START, COMPUTE_INPUT_END, COMPUTE_OUTPUT_START, COMPUTE_END,
            INFER_RESPONSE_COMPLETE, REQUEST_END,
        )
    )
}  # fmt: skip

TENSOR_QUEUE_INPUT: Final = "TENSOR_QUEUE_INPUT"
TENSOR_BACKEND_OUTPUT: Final = "TENSOR_BACKEND_OUTPUT"


def ordered(events: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return events in order of time; simultaneous ones in the order in which they occur."""
    return sorted(events, key=lambda event: (event[1], _ORDER.get(event[0], 0)))


class TraceLevel(IntFlag):
    """The events that a trace records."""

    OFF = 0
    TIMESTAMPS = 1
    TENSORS = 2


class TraceIds(Protocol):
    """The source of trace and span numbers."""

    def trace_id(self) -> int:
        """Return the number of a new trace, unique during the life of the server."""

    def span_id(self) -> int:
        """Return a random 64-bit number, 0 if traces are not exported as spans."""


class RemoteParent:
    """The span of the client program that sent a request.

    Attributes:
        trace_id: Number of the whole distributed trace, 128 bits.
        span_id: Number of the span, 64 bits.
        state: `tracestate` as sent, "" for none.
    """

    __slots__ = ("span_id", "state", "trace_id")

    def __init__(self, trace_id: int, span_id: int, state: str = "") -> None:
        self.trace_id = trace_id
        self.span_id = span_id
        self.state = state


class Trace:
    """The trace of one request.

    Attributes:
        tree: The tree that it belongs to.
        id: Its number.
        parent_id: Number of the trace of the request that this one was made for, 0 for none.
        span_id: Number of its span, 0 without spans.
        compute_span_id: Number of the span of its execution.
        model_name: Model that runs it, "" until that accepts it.
        model_version: Version that runs it, as text.
        request_id: The caller's id.
        events: Name and time of each event, in no particular order.
        tensors: Activity and tensor.
        answered_ns: When its last response was complete, 0 before.
        usage: The tokens of a request to a language model, None where they are not known.
    """

    __slots__ = (
        "answered_ns", "compute_span_id", "events", "id", "model_name", "model_version", "parent_id",
        "request_id", "span_id", "tensors", "tree", "usage",
    )  # fmt: skip

    def __init__(self, tree: "TraceTree", id: int, parent_id: int, span_ids: tuple[int, int]) -> None:
        self.tree = tree
        self.id = id
        self.parent_id = parent_id
        self.span_id, self.compute_span_id = span_ids
        self.model_name = ""
        self.model_version = ""
        self.request_id = ""
        self.events: list[tuple[str, int]] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self.answered_ns = 0
        self.usage: TokenUsage | None = None

    @property
    def context(self) -> str:
        """The context that a model sees: JSON text with `traceparent`, or with the server's own trace number."""
        tree = self.tree
        if not self.span_id:
            return f'{{"charonia_trace_id":"{self.id}"}}'
        text = f'{{"traceparent":"00-{tree.trace_id:032x}-{self.span_id:016x}-01"'
        return f'{text},"tracestate":"{tree.state}"}}' if tree.state else text + "}"

    def mark(self, name: str, at_ns: int) -> None:
        if len(self.events) < EVENTS_MAX:
            self.events.append((name, at_ns))

    def show(self, activity: str, tensors: Iterable[Tensor]) -> None:
        if self.tree.level & TraceLevel.TENSORS and len(self.tensors) < EVENTS_MAX:
            self.tensors += [(activity, tensor) for tensor in tensors]

    def child(self) -> "Trace | None":
        """Return a trace for a request made for this one, None beyond the limit."""
        return self.tree.trace(self.id)


class TraceTree:
    """All traces of one client request.

    Args:
        level: What to record.
        ids: The source of numbers.
        done: Called with the tree when it ends.
        remote: The span of the sender, if known.

    Attributes:
        level: What to record.
        traces: The traces; the first is that of the client's request.
        front: Name and time of each event in the front end.
        trace_id: Number of the whole distributed trace, 0 without spans.
        span_id: Number of the outermost span, 0 without spans.
        remote: The span of the sender, None if unknown.
    """

    __slots__ = ("_done", "_holders", "_ids", "front", "level", "remote", "span_id", "trace_id", "traces")

    def __init__(
        self,
        level: TraceLevel,
        ids: TraceIds,
        done: "Callable[[TraceTree], None]",
        remote: RemoteParent | None = None,
    ) -> None:
        self.level = level
        self.front: list[tuple[str, int]] = []
        self.remote = remote
        self.span_id = ids.span_id()
        self.trace_id = remote.trace_id if remote is not None else ids.span_id() << 64 | self.span_id
        self.traces: list[Trace] = []
        self._ids = ids
        self._done = done
        self._holders = 1  # the front end
        self.trace(0)

    @property
    def root(self) -> Trace:
        return self.traces[0]

    @property
    def state(self) -> str:
        """`tracestate` of the distributed trace, "" for none."""
        return self.remote.state if self.remote is not None else ""

    def trace(self, parent_id: int) -> Trace | None:
        """Add a trace; None beyond the limit."""
        if len(self.traces) > CHILDREN_MAX:
            return None
        trace = Trace(self, self._ids.trace_id(), parent_id, (self._ids.span_id(), self._ids.span_id()))
        self.traces.append(trace)
        return trace

    def mark(self, name: str, at_ns: int) -> None:
        if len(self.front) < EVENTS_MAX:
            self.front.append((name, at_ns))

    def hold(self) -> None:
        self._holders += 1

    def release(self) -> None:
        """Drop a reference; the last one ends the tree."""
        self._holders -= 1
        if not self._holders:
            self._done(self)


_PARENT_LENGTH: Final = 55
_PARENT_DASHES: Final = (2, 35, 52)


def parse_traceparent(value: str, state: str = "") -> RemoteParent | None:
    """Parse a `traceparent` header; None for one that must be ignored.

    Args:
        value: The header.
        state: The header `tracestate`; dropped if it could not be part of a JSON text.

    Source: W3C Trace Context, level 1.
    """
    value = value.strip()
    version = value[:2]
    has_more = len(value) > _PARENT_LENGTH
    if len(value) < _PARENT_LENGTH or version == "ff" or (has_more and (version == "00" or value[55] != "-")):
        return None
    if any(value[at] != "-" for at in _PARENT_DASHES):
        return None
    fields = (version, value[3:35], value[36:52], value[53:55])
    if any(not set(field) <= _HEX for field in fields):
        return None
    trace_id, span_id = int(fields[1], 16), int(fields[2], 16)
    if not trace_id or not span_id:
        return None
    return RemoteParent(trace_id, span_id, state if _is_plain(state) else "")


_HEX: Final = frozenset("0123456789abcdef")
_STATE_MAX: Final = 512


def _is_plain(state: str) -> bool:
    return len(state) <= _STATE_MAX and state.isascii() and state.isprintable() and not set(state) & {'"', "\\"}
