"""Runs one loaded version of a model or an ensemble behind a response cache.

Invariants:

1. Every request gets exactly one final reply, from `_deliver`.
2. What is kept was computed for a request with the same key, by this load of the model, from inputs that nobody could
   change meanwhile; and it was copied before anybody else saw it. Errors are never kept.
3. Equal requests in flight run once (`flights`). A request of a model that occupies an instance waits for no other one:
   that could close a circle of waiting.
4. A response that was not computed for a request counts as a hit, not as an execution.
"""

import asyncio
import logging
from functools import partial

from charonia.config.model import ModelConfig
from charonia.core.calls import Outcome, Reply, Ticket
from charonia.core.errors import Code, ServingError, internal, unavailable
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.server.execution.clock import now_ns
from charonia.server.execution.ordering import OrderedOutcomes
from charonia.server.execution.tracing import begin
from charonia.server.execution.version_runner import Runner
from charonia.server.metrics.model_metrics import FailureReason
from charonia.server.response_cache.api import KeptResponse, Key, ResponseCache, own_copy
from charonia.server.response_cache.key import is_private, request_digest, tensor_bytes
from charonia.server.response_cache.single_flight import Flight, SingleFlight
from charonia.server.scheduling.api import BatchPolicy
from charonia.server.scheduling.queue import NS_PER_US, queue_timeout_ns
from charonia.server.scheduling.schedulers import batch_policy

_log = logging.getLogger(__name__)

HASH_IN_LOOP_BYTES_MAX = 256 * 1024
"""Requests up to this size are hashed on the event loop: about what a hand-over to a thread and back costs at most."""

BLIND_BACKENDS = frozenset({"identity", "onnxruntime", "pytorch"})
"""Backends whose models get tensors only. Parameters of a request are no part of its key there."""

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
        """The caller has gone."""
        if not self.is_done:
            self.runner.cancel(self)


class CachedRunner:
    """A runner behind a cache. See `Runner`.

    Args:
        inner: What computes responses.
        cache: Where they are kept.
        space: Key space of this load.
    """

    def __init__(self, inner: Runner, cache: ResponseCache, space: bytes) -> None:
        self.config: ModelConfig = inner.config
        self.version = inner.version
        self.metrics = inner.metrics
        self.metrics.is_cached = True
        self.inner = inner
        self._cache = cache
        self._space = space
        self._flights: SingleFlight[CachedCall] = SingleFlight()
        self._calls: set[CachedCall] = set()
        self._hashing: set[asyncio.Task[None]] = set()
        self._next_id = 0
        dynamic = inner.config.dynamic_batching
        keeps_order = dynamic is not None and dynamic.preserve_ordering
        self._order: OrderedOutcomes[CachedCall] | None = OrderedOutcomes() if keeps_order else None
        self._with_parameters = inner.config.backend not in BLIND_BACKENDS
        self._policy = BatchPolicy()
        if dynamic is not None and inner.config.max_batch_size > 0:
            self._policy = batch_policy(dynamic, inner.config.max_batch_size, adapt_delay=False)
        self._idle: asyncio.Event | None = None
        self._is_abandoned = False

    def renew(self, space: bytes) -> None:
        """The models of an ensemble have changed: what was kept before is not found any more."""
        self._cache.forget(self._space)
        self.config = self.inner.config
        self._space = space

    @property
    def pending(self) -> int | None:
        """Number of requests that wait for an instance."""
        return self.inner.pending

    @property
    def in_flight(self) -> int:
        """Number of requests that are not answered."""
        return len(self._calls)

    def submit(self, request: InferRequest, reply: Reply) -> CachedCall:
        """Take in a request; every outcome goes to `reply`."""
        call = CachedCall(self, request, reply, now_ns())
        self._calls.add(call)
        if self._order is not None and request.caller is None:
            self._next_id = call.id = self._next_id + 1
            self._order.submitted(call.id, call)
        if not all(is_private(tensor.array) for tensor in request.inputs.values()):
            request.inputs = {n: Tensor(n, t.datatype, own_copy(t.array)) for n, t in request.inputs.items()}
        if tensor_bytes(request.inputs.values()) <= HASH_IN_LOOP_BYTES_MAX:
            self._take_off(call, self._digest(request))
        else:
            task = asyncio.get_running_loop().create_task(self._hash_elsewhere(call))
            self._hashing.add(task)
            task.add_done_callback(self._hashing.discard)
        return call

    def cancel(self, call: CachedCall) -> None:
        """The caller of an unanswered request has gone."""
        if call.ticket is not None:
            call.ticket.cancel()
        else:
            self._fail(call, ServingError(Code.CANCELLED, "the request was cancelled"), FailureReason.CANCELED)

    async def drain(self) -> None:
        """Stop taking requests; return when every request in flight has been answered."""
        while self._calls:
            self._idle = asyncio.Event()
            await self._idle.wait()
        await self.inner.drain()

    async def aclose(self) -> None:
        """Give up what was kept, and give back everything; to be called when drained."""
        self._cache.forget(self._space)
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

    async def _hash_elsewhere(self, call: CachedCall) -> None:
        """Hash a large request in a thread: the loop goes on meanwhile."""
        try:
            digest = await asyncio.to_thread(self._digest, call.request)
        except Exception:  # our own fault: this request fails, not the server
            _log.exception("the key of a request of model '%s'", self.config.name)
            self._fail(call, internal("the key of the request cannot be computed"), FailureReason.OTHER)
            return
        if not call.is_done:
            self._take_off(call, digest)

    def _take_off(self, call: CachedCall, digest: bytes) -> None:
        """Let a call follow one that is equal, or look its response up."""
        request = call.request
        key = Key(self._space, digest)
        caller = request.caller
        if caller is not None and any(frame.instance for frame in caller.chain()):
            flight, is_new = Flight(key, request.priority, call), True
        else:
            flight, is_new = self._flights.join(key, request.priority, call)
        call.flight = flight
        if is_new:
            self._cache.get(key, partial(self._found, flight, now_ns()))
        elif flight.answer is not None:
            self.metrics.collapsed += 1
            self._hit(call, flight.answer, now_ns())
        else:
            self._limit_wait(call)

    def _found(self, flight: Flight[CachedCall], start_ns: int, response: KeptResponse | None) -> None:
        """The cache has answered."""
        now = now_ns()
        flight.lookup_ns = now - start_ns
        if response is None:
            self._lead(flight)
            return
        self._flights.end(flight)
        for call in tuple(flight.calls):
            if not call.is_done:  # by the reply to one before it
                self._hit(call, response, max(start_ns, call.arrival_ns))

    def _lead(self, flight: Flight[CachedCall]) -> None:
        """Let the next call of a flight run; all of them, where that makes no sense any more."""
        if flight.is_hopeless or self._is_abandoned:
            self._flights.end(flight)
            for call in tuple(flight.calls):
                if not call.is_done:  # by the reply to one before it
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
            if request.timeout_us:  # what is left of it
                waited_us = (now_ns() - call.arrival_ns) // NS_PER_US
                request.timeout_us = max(1, request.timeout_us - waited_us)
        call.flight = flight
        flight.leader = call
        ticket = self.inner.submit(request, partial(self._computed, flight, call))
        if not call.is_done:
            call.ticket = ticket

    def _computed(self, flight: Flight[CachedCall], call: CachedCall, outcome: Outcome, final: bool) -> None:
        """The leader of a flight has an outcome."""
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
        kept = flight.answer = KeptResponse.of(outcome)
        copy_ns = now_ns() - start
        self._finish(call, outcome)
        for follower in tuple(flight.calls):
            if not follower.is_done:  # by the reply to one before it
                self.metrics.collapsed += 1
                self._hit(follower, kept, start)
        kept_by_cache = partial(self._kept, flight, now_ns() - copy_ns)
        if flight.key.space == self._space:
            self._cache.put(flight.key, kept, kept_by_cache)
        else:
            kept_by_cache()

    def _kept(self, flight: Flight[CachedCall], start_ns: int) -> None:
        """The cache has the response of a flight, or does not want it."""
        self._flights.end(flight)
        now = now_ns()
        self.metrics.cache_miss(now, flight.lookup_ns + now - start_ns)

    def _hit(self, call: CachedCall, kept: KeptResponse, start_ns: int) -> None:
        """Answer with a response that was computed for another request; it was available at `start_ns`."""
        request = call.request
        if request.trace is not None:
            call.reply = begin(request.trace, request, call.reply, (self.config.name, self.version))
        response = kept.response(request.id)
        now = now_ns()
        start = max(start_ns, call.arrival_ns)
        self.metrics.cache_hit(
            end_ns=now, duration_ns=now - call.arrival_ns, queue_ns=start - call.arrival_ns, lookup_ns=now - start
        )
        self._finish(call, response)

    def _limit_wait(self, call: CachedCall) -> None:
        """Respect the queue timeout of a call that waits for another one."""
        timeout_ns = queue_timeout_ns(self._policy, call.request.priority, call.request.timeout_us)
        if timeout_ns:
            call.timer = asyncio.get_running_loop().call_later(timeout_ns / _NS_PER_S, self._timed_out, call)

    def _timed_out(self, call: CachedCall) -> None:
        error = unavailable("Request timeout expired", hint="the request waited longer than its queue timeout")
        self._fail(call, error, FailureReason.REJECTED)

    def _fail(self, call: CachedCall, error: ServingError, reason: FailureReason) -> None:
        """Answer a call that does not run with an error."""
        if not call.is_done:
            self.metrics.failed(reason, now_ns() - call.arrival_ns)
            self._finish(call, error)

    def _finish(self, call: CachedCall, outcome: Outcome) -> None:
        """Give a call its answer."""
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
