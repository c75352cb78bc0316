"""Tracing as front ends see it: its settings, and the trace of a request with the events of the front end."""

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from charonia.core.request import InferRequest
from charonia.core.response import Outcome, Reply
from charonia.core.trace import RemoteParent, TraceTree, parse_traceparent
from charonia.wire.trace_settings import Change


class Sampler(Protocol):
    """Picks the requests to trace."""

    def sample(self, model: str, remote: RemoteParent | None = None) -> TraceTree | None:
        """Return the beginning of a trace of a request for this model, None where it is not traced.

        Args:
            model: Model name.
            remote: The trace of the sender, None where there is none.
        """


class Tracing(Protocol):
    """Tracing of the server."""

    @property
    def can_trace(self) -> bool:
        """Whether requests may ever be traced: traces have a destination."""

    @property
    def sampler(self) -> Sampler | None:
        """The sampler, None while it would pick no request."""

    async def settings(self, model: str = "") -> dict[str, list[str]]:
        """Return the settings of a model, "" for the server's, by name in the protocol."""

    async def change(self, model: str, change: Change) -> None:
        """Change the settings of a model, or with "" of the server.

        Raises:
            ServingError: INVALID_ARG for settings that enable tracing without a rate or a destination.
        """


class EventNames(NamedTuple):
    """The names of a front end's events."""

    receive_start: str
    receive_end: str
    send_start: str
    send_end: str


NO_TRACING = "tracing is not offered by this server"
"""The error where tracing is not offered."""


def begin(
    tracing: Tracing,
    request: InferRequest,
    reply: Reply,
    *,
    names: EventNames,
    received_ns: int,
    headers: Callable[[bytes], bytes | None],
) -> Reply:
    """Begin the trace of a request, if it is picked, and return the reply to hand to the engine.

    Args:
        tracing: Tracing of the server.
        request: The request, which gets its trace here.
        reply: Sends outcomes to the client before it returns.
        names: Names of the events.
        received_ns: When the request began to arrive.
        headers: Returns a header of the request by its lower-case name.
    """
    sampler = tracing.sampler
    if sampler is None:
        return reply
    parent = headers(b"traceparent")
    remote = None
    if parent is not None:
        state = headers(b"tracestate") or b""
        remote = parse_traceparent(parent.decode("latin-1"), state.decode("latin-1"))
    tree = sampler.sample(request.model_name, remote)
    if tree is None:
        return reply
    tree.mark(names.receive_start, received_ns)
    tree.mark(names.receive_end, time.monotonic_ns())
    request.trace = tree.root

    def traced(outcome: Outcome, final: bool) -> None:
        if outcome is not None:
            tree.mark(names.send_start, time.monotonic_ns())
        try:
            reply(outcome, final)
        finally:
            if outcome is not None:
                tree.mark(names.send_end, time.monotonic_ns())
            if final:
                tree.release()

    return traced
