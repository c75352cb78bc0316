"""What front ends offer beside the engine."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from charonia.core.access import Gate
from charonia.core.header_forward import HeaderForward
from charonia.frontends.log_settings import LogControl
from charonia.frontends.regions.registry import RegionRegistry
from charonia.frontends.tracing import Tracing
from charonia.stats.explanation import Explanation
from charonia.stats.resources import RateLimitView
from charonia.stats.sequences import ModelSequences

Demand = Callable[[str, str], Awaitable[None] | None]
"""Returns what to await until a model, given by name and version, is loaded; None where it is."""


@dataclass(frozen=True, slots=True)
class Services:
    """The server's collaborators of its front ends; one that is None is not offered.

    Attributes:
        regions: Shared memory of clients.
        tracing: Traces of requests.
        log: The server's log.
        http_gate: Decides who may make which call over HTTP; None where everybody may make all.
        grpc_gate: The same for gRPC.
        http_headers: Headers of HTTP requests that become request parameters.
        grpc_headers: The same for gRPC.
        rate_limits: Returns who holds which resource of the rate limiter.
        demand: Loads models that somebody asks about; None where they are not loaded on demand.
        explain: Says what limits a model, given by name and version, and what to change.
        sequences: Returns the slots and the backlog of a model, given by name and version, that works on sequences.
    """

    regions: RegionRegistry | None = None
    tracing: Tracing | None = None
    log: LogControl | None = None
    http_gate: Gate | None = None
    grpc_gate: Gate | None = None
    http_headers: HeaderForward | None = None
    grpc_headers: HeaderForward | None = None
    rate_limits: Callable[[], RateLimitView] | None = None
    demand: Demand | None = None
    sequences: Callable[[str, str], ModelSequences] | None = None
    explain: Callable[[str, str], Explanation] | None = None

    @property
    def tracer(self) -> Tracing | None:
        """What traces requests, None where none can ever be traced."""
        return self.tracing if self.tracing is not None and self.tracing.can_trace else None


NO_SERVICES = Services()
"""Nothing but the engine."""
