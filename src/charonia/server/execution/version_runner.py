"""The interface of a runner of one model version."""

from typing import Protocol

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Reply, Ticket
from charonia.server.metrics.model_metrics import ModelMetrics


class Runner(Protocol):
    """Runs the requests of one loaded version: a `ModelRunner`, an `EnsembleRunner`, or a `CachedRunner` around one."""

    config: ModelConfig
    version: str
    metrics: ModelMetrics

    @property
    def pending(self) -> int | None:
        """Number of requests that wait for an instance, None for a version without instances."""

    @property
    def in_flight(self) -> int:
        """Number of requests that are not answered."""

    def submit(self, request: InferRequest, reply: Reply) -> Ticket:
        """Take in a request; every outcome goes to `reply`."""

    def run_at_once(self, request: InferRequest) -> InferResponse | ServingError | None:
        """Run a request without a trace to its end before this returns, where that is possible: its only outcome.

        Returns:
            The outcome; None if nothing was done, and the caller has to submit the request.
        """

    async def drain(self) -> None:
        """Stop taking requests; return when every request in flight has been answered."""

    async def aclose(self) -> None:
        """Release all resources; to be called when drained."""

    def abandon(self, error: ServingError) -> None:
        """Answer all requests in flight with `error`."""
