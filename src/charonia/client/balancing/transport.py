"""One transport over the transports of several servers: carries out the decisions of `pool`.

A request is encoded once. It goes to one server, to another one if no model has seen it, and to a second one at the
same time where it is hedged: the first answer counts, and the other request is cancelled.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from charonia.client.balancing.addresses import Resolve, ServerAddresses, resolve
from charonia.client.balancing.budgets import Latencies, RetryBudget
from charonia.client.balancing.call import ANYWHERE, BalancedCall, Routing
from charonia.client.balancing.options import DEFAULT, Balancing
from charonia.client.balancing.pool import PoolServer, RequestEnd, ServerPool
from charonia.core.errors import Code
from charonia.wire.answer import Answer, Failure, OnAnswer
from charonia.wire.endpoint import Endpoint
from charonia.wire.query import Dialect
from charonia.wire.transport import Transport, WireOptions

TICK_S = 0.1
"""Interval of checks of servers that are out, or have requests in flight."""

RESOLVE_AGAIN_S = 1.0
"""Shortest time between two look-ups of a name: one that cannot be reached may have new addresses."""

_now_ns = time.monotonic_ns

Connect = Callable[[Endpoint, WireOptions], Transport]
"""Returns a transport to one server, without connections."""


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """A server of a client.

    Attributes:
        url: Its address.
        is_in: Whether it gets requests.
        trouble: Why not, "" if it does.
        outstanding: Requests of this client in flight.
        latency_s: Mean latency of its recent responses, 0 if there were none.
        failures: Number of failures of this client there, by kind.
    """

    url: str
    is_in: bool
    trouble: str
    outstanding: int
    latency_s: float
    failures: dict[Failure, int]


class BalancedTransport:
    """Connections to several servers. `send` and `close` are as in `charonia.wire.transport.Transport`.

    Attributes:
        addresses: The configured addresses.
        balancing: How requests are balanced.
        pool: The servers.
        budget: Limits retries and hedges.
        loop: The event loop.
    """

    def __init__(
        self,
        addresses: ServerAddresses,
        options: WireOptions,
        balancing: Balancing = DEFAULT,
        *,
        connect: Connect,
        dialect: Dialect[Any],
        random: Callable[[], float] = random.random,
        resolve: Resolve = resolve,
    ) -> None:
        """Create a transport without connections; call it on the event loop.

        Args:
            addresses: The servers.
            options: Settings and limits of each server's connections.
            balancing: How requests are balanced.
            connect: Makes the transport to a server.
            dialect: Makes the questions to servers, for any of them.
            random: Returns numbers from 0 to below 1.
            resolve: Looks up a name.

        Raises:
            ServingError: INVALID_ARG for options that cannot be used.
        """
        self.addresses = addresses
        self.balancing = balancing
        self.pool = ServerPool(balancing, random)
        self.budget = RetryBudget(balancing.retry_ratio)
        self._options = options
        self._connect = connect
        self._dialect = dialect
        self._latencies = Latencies()
        self._transports: dict[PoolServer, Transport] = {}
        self._waiting: list[BalancedCall] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._look_up: asyncio.Task[None] | None = None
        self._resolve = resolve
        self._wake = asyncio.Event()
        self._is_ticking = False
        self._is_closed = False
        self.loop = asyncio.get_running_loop()
        if addresses.is_name:
            connect(addresses.endpoints[0], options)  # so that options that cannot be used are reported here
        else:
            self._set_endpoints(addresses.endpoints)

    @property
    def failures(self) -> dict[Failure, int]:
        """Number of failed connections and requests so far, by kind."""
        sums = dict.fromkeys(Failure, 0)
        for transport in self._transports.values():
            for failure, count in transport.failures.items():
                sums[failure] += count
        return sums

    def endpoints(self) -> list[EndpointStatus]:
        return [
            EndpointStatus(
                str(server.endpoint),
                server.trouble is None,
                server.trouble.value if server.trouble is not None else "",
                server.outstanding,
                server.latency_ns / 1e9,
                dict(self._transports[server].failures),
            )
            for server in self.pool.all
        ]

    def send(
        self,
        prepared: Any,
        on_answer: OnAnswer,
        timeout_s: float = 0.0,
        *,
        keep_body: bool = False,
        routing: Routing = ANYWHERE,
    ) -> BalancedCall:
        """Send a request."""
        call = BalancedCall(self, prepared, on_answer, timeout_s or self._options.timeout_s, keep_body, routing)
        self.budget.earn()
        if self._is_closed:
            call.fail(Code.UNAVAILABLE, "the client was closed", Failure.CLOSED)
        elif self.pool.all or not self.addresses.is_name:
            call.begin()
        elif len(self._waiting) >= self._options.waiting_max:
            call.fail(Code.UNAVAILABLE, f"{len(self._waiting)} requests wait for the address of {self.addresses}")
        else:
            self._waiting.append(call)
            call.wait()
        if self.addresses.is_name and self._look_up is None:
            self._look_up = self.loop.create_task(self._look_up_again_and_again())
        return call

    async def close(self) -> None:
        self._is_closed = True
        if self._look_up is not None:
            self._look_up.cancel()
            with suppress(asyncio.CancelledError):
                await self._look_up
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call.fail(Code.UNAVAILABLE, "the client was closed", Failure.CLOSED)
        await asyncio.gather(*(transport.close() for transport in self._transports.values()), *self._closing)

    # Called by calls.

    def transport_of(self, server: PoolServer) -> Transport:
        return self._transports[server]

    def hedge_after_s(self, model: str) -> float | None:
        balancing = self.balancing
        after = balancing.hedge_after_s
        if after is None or not (model in balancing.idempotent_models or "*" in balancing.idempotent_models):
            return None
        if after != "p95":
            return after
        p95_ns = self._latencies.p95_ns(model)
        return p95_ns / 1e9 if p95_ns is not None else None

    def answered(self, model: str, latency_ns: int) -> None:
        if self.balancing.hedge_after_s == "p95":
            self._latencies.add(model, latency_ns)

    def ended(self, server: PoolServer, end: RequestEnd, now_ns: int, latency_ns: int) -> None:
        self.pool.end(server, end, now_ns, latency_ns)
        if server.is_gone and not server.outstanding:
            self._retire(server)
        elif end is RequestEnd.TURNED_AWAY:
            self.loop.call_soon(self._probe_due)
        elif end is RequestEnd.UNREACHABLE:
            self._wake.set()

    def watch(self) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            self.loop.call_later(TICK_S, self._tick)

    # Servers come and go.

    def _set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        added, gone = self.pool.set_endpoints(endpoints)
        for server in added:
            self._transports[server] = self._connect(server.endpoint, self._options)
        for server in gone:
            if not server.outstanding:
                self._retire(server)

    def _retire(self, server: PoolServer) -> None:
        transport = self._transports.pop(server, None)
        if transport is not None and not self._is_closed:
            task = self.loop.create_task(transport.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _look_up_again_and_again(self) -> None:
        name = self.addresses.endpoints[0]
        while True:
            problem = "it has no address"
            try:
                found = await self._resolve(name.host, name.port)
            except (OSError, UnicodeError) as error:
                found, problem = (), getattr(error, "strerror", None) or str(error)
            if found:  # the last known ones stay otherwise
                self._set_endpoints([replace(name, host=host, name=name.host) for host in found])
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                if found:
                    call.begin()
                else:
                    call.fail(Code.UNAVAILABLE, f"cannot find {self.addresses}: {problem}")
            if not self.pool.all:  # the next request looks again
                self._look_up = None
                return
            self._wake.clear()
            await asyncio.sleep(min(RESOLVE_AGAIN_S, self.balancing.resolve_s))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(self.balancing.resolve_s - RESOLVE_AGAIN_S, 0))

    # Probes and load reports.

    def _tick(self) -> None:
        self._is_ticking = False
        if self._is_closed:
            return
        self._probe_due()
        if self.pool.is_watching:
            self.watch()

    def _probe_due(self) -> None:
        if self._is_closed:
            return
        for server in self.pool.due(_now_ns()):
            self._probe(server)

    def _probe(self, server: PoolServer) -> None:
        query = self._dialect.ready()

        def take(answer: Answer) -> None:
            is_ready = answer.failure is None and query.read(answer)
            self.pool.probed(server, is_ready, _now_ns())
            self.watch()

        request = query.request
        self._transports[server].send(
            request.to(server.endpoint.authority), take, self.balancing.probe_timeout_s, keep_body=True
        )
