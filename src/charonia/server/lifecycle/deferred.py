"""The requests that wait for their models to be loaded.

A request waits in the queue of its model, which has a limit, and no longer than its deadline. When the model answers,
the queue runs in the order of arrival; when the load fails, every request of the queue gets the reason.
"""

import asyncio
from collections.abc import Callable

from charonia.core.calls import Reply, Ticket
from charonia.core.errors import Code, ServingError, unavailable
from charonia.core.names import name_of
from charonia.core.request import InferRequest
from charonia.server.execution.admission import with_request_id
from charonia.server.execution.clock import now_ns

_NS_PER_S = 1_000_000_000


class DeferredRequest:
    """A request that waits for its model; also the ticket that the front end holds."""

    __slots__ = ("_queue", "is_over", "key", "reply", "request", "ticket", "timer")

    def __init__(self, queue: "DeferredRequests", key: str, request: InferRequest, reply: Reply) -> None:
        self.key = key
        self.request = request
        self.reply = reply
        self.ticket: Ticket | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_over = False
        self._queue = queue

    def cancel(self) -> None:
        if self.ticket is not None:
            self.ticket.cancel()
        else:
            self._queue.end(self, ServingError(Code.CANCELLED, "the request was cancelled"))


class DeferredRequests:
    """A queue of requests for each model that is being loaded.

    Args:
        infer: Runs a request of a model that is loaded.
        waiting_max: Requests that may wait for one model.
        wait_s: Longest time that a request waits.
    """

    def __init__(self, infer: Callable[[InferRequest, Reply], Ticket], waiting_max: int, wait_s: float) -> None:
        self._infer = infer
        self._waiting_max = waiting_max
        self._wait_s = wait_s
        self._queues: dict[str, list[DeferredRequest]] = {}

    def refusal(self, key: str) -> ServingError | None:
        """Return the error for a further request of a model, None while its queue has room."""
        length = len(self._queues.get(key, ()))
        if length < self._waiting_max:
            return None
        return unavailable(
            f"{length} requests wait already for model '{name_of(key)}' to be loaded",
            hint="retry later, or raise --auto-queue-size",
        )

    def refuse(self, key: str, request: InferRequest, reply: Reply, error: ServingError) -> DeferredRequest:
        """Answer a request with `error`, and return its ticket."""
        deferred = DeferredRequest(self, key, request, reply)
        self.end(deferred, error)
        return deferred

    def add(self, key: str, request: InferRequest, reply: Reply) -> DeferredRequest:
        """Let a request wait for its model, and return its ticket."""
        deferred = DeferredRequest(self, key, request, reply)
        self._queues.setdefault(key, []).append(deferred)
        deferred.timer = asyncio.get_running_loop().call_later(self._patience_s(request), self._expire, deferred)
        return deferred

    def end(self, deferred: DeferredRequest, error: ServingError) -> None:
        """Answer a request that waits with `error`, unless it already has its answer."""
        if deferred.is_over:
            return
        _stop_waiting(deferred)
        queue = self._queues.get(deferred.key, [])
        if deferred in queue:
            queue.remove(deferred)
        request = deferred.request
        deferred.reply(with_request_id(error, request) if request.id else error, True)

    def run(self, key: str) -> None:
        """Run the requests that wait for a model, which answers now."""
        for deferred in self._queues.pop(key, []):
            if not deferred.is_over:
                _stop_waiting(deferred)
                deferred.ticket = self._infer(deferred.request, deferred.reply)

    def fail(self, key: str, error: ServingError) -> None:
        """Answer the requests that wait for a model, which cannot be loaded."""
        for deferred in self._queues.pop(key, []):
            self.end(deferred, error)

    def close(self) -> None:
        """Answer every request: the server stops."""
        for key in list(self._queues):
            self.fail(key, unavailable("the server stops: the model is not loaded any more"))

    def counts(self) -> dict[str, int]:
        return {key: len(queue) for key, queue in self._queues.items()}

    def _patience_s(self, request: InferRequest) -> float:
        limits = [self._wait_s]
        if request.timeout_us:
            limits.append(request.timeout_us / 1e6)
        if request.deadline_ns:
            limits.append((request.deadline_ns - now_ns()) / _NS_PER_S)
        return max(0.0, min(limits))

    def _expire(self, deferred: DeferredRequest) -> None:
        self.end(deferred, too_late(deferred.key))


def too_late(key: str) -> ServingError:
    """Return the error for a caller that has waited too long for a model."""
    message = f"Request timeout expired: model '{name_of(key)}' was not loaded in time"
    return unavailable(message, hint="it goes on loading: a later request may find it")


def _stop_waiting(deferred: DeferredRequest) -> None:
    deferred.is_over = True
    if deferred.timer is not None:
        deferred.timer.cancel()
