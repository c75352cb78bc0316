"""Runs one loaded version of a model or an ensemble behind a response cache.

Invariants:

1. Every request gets exactly one final reply, from `_deliver`.
2. A cached response was computed for a request with the same key, by this load of the model, from immutable inputs, and
   it was copied before it left the runner. Errors are never cached.
3. Identical requests in flight are coalesced (`SingleFlight`), except requests of a model that occupies an instance:
   waiting for another request could deadlock.
4. A response that was not computed for a request counts as a hit, not as an execution.

A flight is a request that is being looked up or computed, with the requests identical to it. Its first call is the
leader, which runs. If the leader is cancelled or fails, the next call becomes the leader; after `FAILURES_MAX`
failures the remaining calls run individually.
"""

import asyncio
import logging
import time
from functools import partial
from typing import Generic, TypeVar

from charonia.clock import now_ns
from charonia.config.backends import record_of
from charonia.config.model import ModelConfig
from charonia.core.errors import Code, ServingError, internal, unavailable
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome, Reply, Ticket
from charonia.core.tensor import Tensor
from charonia.server.execution.in_flight import OrderedOutcomes
from charonia.server.execution.tracing import begin
from charonia.server.execution.version_runner import Runner
from charonia.server.metrics.model_metrics import FailureReason
from charonia.server.response_cache.api import (
    CachedResponse,
    CacheKey,
    ResponseCache,
    is_private,
    own_copy,
    request_digest,
    tensor_bytes,
)
from charonia.server.scheduling.queue import NS_PER_US, queue_timeout_ns
from charonia.server.scheduling.schedulers import batch_policy

FAILURES_MAX = 2
"""Failed calls of a flight after which the remaining ones run individually."""

FOLLOWERS_MAX = 16_384
"""Most calls of a flight; later calls run individually."""

_C = TypeVar("_C")


class Flight(Generic[_C]):
    """Identical requests in flight.

    Attributes:
        key: Their key.
        priority: Their priority.
        calls: Calls without a response yet, in order of arrival.
        leader: The running call, None while none runs.
        response: The response, while the cache stores it.
        lookup_ns: Duration of the look-up.
        failures: How many of its calls failed.
    """

    __slots__ = ("calls", "failures", "key", "leader", "lookup_ns", "priority", "response")

    def __init__(self, key: CacheKey, priority: int, call: _C) -> None:
        self.key = key
        self.priority = priority
        self.calls: dict[_C, None] = {call: None}
        self.leader: _C | None = None
        self.response: CachedResponse | None = None
        self.lookup_ns = 0
        self.failures = 0

    def lead(self) -> _C | None:
        """Choose and return the next leader, None if no call is left."""
        self.leader = next(iter(self.calls), None)
        return self.leader

    def leave(self, call: _C) -> None:
        """A call was answered or cancelled, or runs individually."""
        self.calls.pop(call, None)
        if self.leader is call:
            self.leader = None

    @property
    def has_failed(self) -> bool:
        return self.failures >= FAILURES_MAX


class SingleFlight(Generic[_C]):
    """The flights of one model version, by key and priority."""

    def __init__(self) -> None:
        self._flights: dict[tuple[CacheKey, int], Flight[_C]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def join(self, key: CacheKey, priority: int, call: _C) -> tuple[Flight[_C], bool]:
        """Return the flight for a call, and whether it is new. Requests of different priorities share none."""
        flight = self._flights.get((key, priority))
        if flight is None:
            flight = self._flights[key, priority] = Flight(key, priority, call)
            return flight, True
        if len(flight.calls) >= FOLLOWERS_MAX:
            return Flight(key, priority, call), True
        flight.calls[call] = None
        return flight, False

    def end(self, flight: Flight[_C]) -> None:
        if self._flights.get((flight.key, flight.priority)) is flight:
            del self._flights[flight.key, flight.priority]


_log = logging.getLogger(__name__)

HASH_IN_LOOP_BYTES_MAX = 256 * 1024
"""Requests up to this size are hashed on the event loop, which takes no longer than handing them to a thread."""

_NS_PER_S = 1e9


class CachedCall:
    """A request in flight; also the ticket that the front end holds."""

    __slots__ = ("arrival_ns", "flight", "id", "is_done", "reply", "request", "runner", "ticket", "timer")

    def __init__(self, runner: "CachedRunner", request: InferRequest, reply: Reply, arrival_ns: int) -> None:
        self.runner = runner
        self.request = request
        self.reply = reply
        self.arrival_ns = arrival_ns
        self.id = -1
        self.is_done = False
        self.flight: Flight[CachedCall] | None = None
        self.ticket: Ticket | None = None
        self.timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        if not self.is_done:
            self.runner.cancel(self)


class CachedRunner:
    """A runner with a cache in front of it. See `Runner`.

    Args:
        inner: The runner that computes responses.
        namespace: Cache namespace of this load.
    """

    def __init__(self, inner: Runner, cache: ResponseCache, namespace: bytes) -> None:
        self.config: ModelConfig = inner.config
        self.version = inner.version
        self.metrics = inner.metrics
        self.metrics.is_cached = True
        self.inner = inner
        self._cache = cache
        self._namespace = namespace
        self._flights: SingleFlight[CachedCall] = SingleFlight()
        self._calls: set[CachedCall] = set()
        self._hashing: set[asyncio.Task[None]] = set()
        self._next_id = 0
        dynamic = inner.config.dynamic_batching
        keeps_order = dynamic is not None and dynamic.preserve_ordering
        self._order: OrderedOutcomes[CachedCall] | None = OrderedOutcomes() if keeps_order else None
        self._with_parameters = record_of(inner.config.backend).reads_parameters
        self._policy = batch_policy(inner.config)
        self._idle: asyncio.Event | None = None
        self._is_abandoned = False

    def renew(self, namespace: bytes) -> None:
        """Invalidate the cached responses: the models of an ensemble have changed."""
        self._cache.evict_namespace(self._namespace)
        self.config = self.inner.config
        self._namespace = namespace

    @property
    def pending(self) -> int | None:
        return self.inner.pending

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    def submit(self, request: InferRequest, reply: Reply) -> CachedCall:
        call = CachedCall(self, request, reply, now_ns())
        self._calls.add(call)
        if self._order is not None and request.caller is None:
            self._next_id = call.id = self._next_id + 1
            self._order.submitted(call.id, call)
        if not all(is_private(tensor.array) for tensor in request.inputs.values()):
            request.inputs = {n: Tensor(n, t.datatype, own_copy(t.array)) for n, t in request.inputs.items()}
        if tensor_bytes(request.inputs.values()) <= HASH_IN_LOOP_BYTES_MAX:
            self._look_up(call, self._digest(request))
        else:
            task = asyncio.get_running_loop().create_task(self._hash_in_thread(call))
            self._hashing.add(task)
            task.add_done_callback(self._hashing.discard)
        return call

    def run_at_once(self, request: InferRequest) -> None:
        """Return None: the response is looked up first."""

    def cancel(self, call: CachedCall) -> None:
        if call.ticket is not None:
            call.ticket.cancel()
        else:
            self._fail(call, ServingError(Code.CANCELLED, "the request was cancelled"), FailureReason.CANCELED)

    async def drain(self) -> None:
        while self._calls:
            self._idle = asyncio.Event()
            await self._idle.wait()
        await self.inner.drain()

    async def aclose(self) -> None:
        """Drop the cached responses and release all resources; to be called when drained."""
        self._cache.evict_namespace(self._namespace)
        await self.inner.aclose()

    def abandon(self, error: ServingError) -> None:
        """Answer everything in flight with `error`."""
        self._is_abandoned = True
        for call in list(self._calls):
            if call.ticket is None:
                self._fail(call, error, FailureReason.OTHER)
        self.inner.abandon(error)

    def _digest(self, request: InferRequest) -> bytes:
        return request_digest(request, with_parameters=self._with_parameters)

    async def _hash_in_thread(self, call: CachedCall) -> None:
        """Hash a large request in a thread, to keep the event loop free."""
        try:
            digest = await asyncio.to_thread(self._digest, call.request)
        except Exception:  # our own fault: this request fails, not the server
            _log.exception("the key of a request of model '%s' cannot be computed", self.config.name)
            self._fail(call, internal("the key of the request cannot be computed"), FailureReason.OTHER)
            return
        if not call.is_done:
            self._look_up(call, digest)

    def _look_up(self, call: CachedCall, digest: bytes) -> None:
        """Look up the response of a call, or let it join the flight of an identical one."""
        request = call.request
        key = CacheKey(self._namespace, digest)
        caller = request.caller
        if caller is not None and any(frame.instance for frame in caller.chain()):
            flight, is_new = Flight(key, request.priority, call), True
        else:
            flight, is_new = self._flights.join(key, request.priority, call)
        call.flight = flight
        if is_new:
            self._cache.get(key, partial(self._found, flight, now_ns()))
        elif flight.response is not None:
            self.metrics.collapsed += 1
            self._hit(call, flight.response, now_ns())
        else:
            timeout_ns = queue_timeout_ns(self._policy, call.request.priority, call.request.timeout_us)
            if timeout_ns:
                call.timer = asyncio.get_running_loop().call_later(timeout_ns / _NS_PER_S, self._timed_out, call)

    def _found(self, flight: Flight[CachedCall], start_ns: int, response: CachedResponse | None) -> None:
        now = now_ns()
        flight.lookup_ns = now - start_ns
        if response is None:
            self._lead(flight)
            return
        self._flights.end(flight)
        for call in tuple(flight.calls):
            if not call.is_done:  # cancelled by the reply to an earlier one
                self._hit(call, response, max(start_ns, call.arrival_ns))

    def _lead(self, flight: Flight[CachedCall]) -> None:
        """Run the next call of a flight; all of them individually if too many have failed."""
        if flight.has_failed or self._is_abandoned:
            self._flights.end(flight)
            for call in tuple(flight.calls):
                if not call.is_done:  # cancelled by the reply to an earlier one
                    flight.leave(call)
                    self._run(Flight(flight.key, flight.priority, call), call)
            return
        leader = flight.lead()
        if leader is None:
            self._flights.end(flight)
        else:
            self._run(flight, leader)

    def _run(self, flight: Flight[CachedCall], call: CachedCall) -> None:
        request = call.request
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
            if request.timeout_us:  # what remains of it
                waited_us = (now_ns() - call.arrival_ns) // NS_PER_US
                request.timeout_us = max(1, request.timeout_us - waited_us)
        call.flight = flight
        flight.leader = call
        ticket = self.inner.submit(request, partial(self._computed, flight, call))
        if not call.is_done:
            call.ticket = ticket

    def _computed(self, flight: Flight[CachedCall], call: CachedCall, outcome: Outcome, final: bool) -> None:
        if not final or call.is_done:
            return
        call.ticket = None
        if not isinstance(outcome, InferResponse):
            is_cancelled = isinstance(outcome, ServingError) and outcome.code is Code.CANCELLED
            flight.failures += not is_cancelled
            self._finish(call, outcome)
            self._lead(flight)
            return
        start = now_ns()
        cached = flight.response = CachedResponse.of(outcome)
        copy_ns = now_ns() - start
        self._finish(call, outcome)
        for follower in tuple(flight.calls):
            if not follower.is_done:  # cancelled by the reply to an earlier one
                self.metrics.collapsed += 1
                self._hit(follower, cached, start)
        stored = partial(self._stored, flight, now_ns() - copy_ns)
        if flight.key.namespace == self._namespace:
            self._cache.put(flight.key, cached, stored)
        else:
            stored()

    def _stored(self, flight: Flight[CachedCall], start_ns: int) -> None:
        """The cache has stored the response of a flight, or has skipped it."""
        self._flights.end(flight)
        now = now_ns()
        self.metrics.cache_miss(now, flight.lookup_ns + now - start_ns)

    def _hit(self, call: CachedCall, cached: CachedResponse, start_ns: int) -> None:
        """Answer with a response computed for another request, available at `start_ns`."""
        request = call.request
        if request.trace is not None:
            call.reply = begin(request.trace, request, call.reply, (self.config.name, self.version))
        response = cached.response(request.id)
        now = now_ns()
        start = max(start_ns, call.arrival_ns)
        self.metrics.cache_hit(
            end_ns=now, duration_ns=now - call.arrival_ns, queue_ns=start - call.arrival_ns, lookup_ns=now - start,
            wall_ms=int(time.time() * 1000),
        )  # fmt: skip
        self._finish(call, response)

    def _timed_out(self, call: CachedCall) -> None:
        self._fail(call, unavailable("Request timeout expired"), FailureReason.REJECTED)

    def _fail(self, call: CachedCall, error: ServingError, reason: FailureReason) -> None:
        """Answer a call that does not run, with an error."""
        if not call.is_done:
            self.metrics.failed(reason, now_ns() - call.arrival_ns)
            self._finish(call, error)

    def _finish(self, call: CachedCall, outcome: Outcome) -> None:
        call.is_done = True
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        if call.flight is not None:
            call.flight.leave(call)
            call.flight = None
        if self._order is None or call.id < 0:
            self._deliver(call, outcome)
        else:
            self._order.pass_on(call.id, outcome, True, self._deliver)

    def _deliver(self, call: CachedCall, outcome: Outcome, final: bool = True) -> None:
        self._calls.discard(call)
        try:
            call.reply(outcome, final)
        except Exception:  # a front end's own fault must not reach the other calls
            _log.exception("the reply to request %r of model %s failed", call.request.id, self.config.name)
        if self._idle is not None and not self._calls:
            self._idle.set()
