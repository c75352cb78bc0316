"""One transport over the transports of several servers: carries out the decisions of `pool`.

A request is encoded once. It goes to one server, to another one if no model has seen it, and to a second one at the
same time where it is hedged: the first answer counts, and the other request is cancelled.
"""

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from charonia.client.balancing.budgets import Latencies, RetryBudget
from charonia.client.balancing.options import DEFAULT, Balancing
from charonia.client.balancing.pool import SERVERS_MAX, PoolServer, RequestEnd, ServerPool
from charonia.client.errors import failed
from charonia.core.errors import Code, invalid
from charonia.wire.answer import Answer, Failure, Handle, OnAnswer
from charonia.wire.endpoint import Endpoint, parse_url
from charonia.wire.query import Dialect
from charonia.wire.transport import Transport, WireOptions

DNS = "dns+"
"""Before the scheme of a URL: its host name stands for a server per address, such as dns+grpc://models:8001."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a name, for connections to a port. Raises OSError."""


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """The addresses of a client.

    Attributes:
        endpoints: Servers, or the one whose name stands for several.
        is_name: Whether its name is looked up, again and again.
    """

    endpoints: tuple[Endpoint, ...]
    is_name: bool = False

    @property
    def is_single(self) -> bool:
        """Whether there is only one server, without a choice."""
        return len(self.endpoints) == 1 and not self.is_name

    def __str__(self) -> str:
        return DNS * self.is_name + ", ".join(map(str, self.endpoints))


def parse_addresses(url: str | Sequence[str]) -> ServerAddresses:
    """Return the addresses in a URL, in several with commas between them, or in a sequence of URLs.

    Raises:
        ServingError: INVALID_ARG for text that is not a URL, and for servers that differ in more than host and port.
    """
    urls = _split(url) if isinstance(url, str) else list(url)
    if not urls:
        raise invalid("expected the URL of a server, got none")
    if any(each.startswith(DNS) for each in urls):
        if len(urls) > 1:
            raise invalid(f"expected a single URL with '{DNS}', got {', '.join(urls)}")
        return ServerAddresses((parse_url(urls[0].removeprefix(DNS)),), is_name=True)
    endpoints = tuple(dict.fromkeys(map(parse_url, urls)))
    if len(endpoints) > SERVERS_MAX:
        raise invalid(f"expected at most {SERVERS_MAX} servers, got {len(endpoints)}")
    first = endpoints[0]
    for other in endpoints:
        if replace(other, host=first.host, port=first.port) != first:
            raise invalid(f"servers of one client differ in host and port only: got {first} and {other}")
    return ServerAddresses(endpoints)


def _split(text: str) -> list[str]:
    """Return URLs with commas between them; the scheme of the first is that of others without one."""
    parts = [part.strip() for part in text.split(",")]
    scheme, separator, _ = parts[0].rpartition("://")
    return [part if "://" in part else f"{scheme}{separator}{part}" for part in parts]


async def resolve(name: str, port: int) -> Sequence[str]:
    """Return all addresses of a name. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


PREFIX_BLOCK_BYTES = 256
"""Block of a prompt; the prefix has whole ones."""

PREFIX_BLOCKS_MAX = 4
"""Blocks of a prompt that decide its server."""

_now_ns = time.monotonic_ns


@dataclass(frozen=True, slots=True)
class Routing:
    """The properties of a request that decide its server.

    Attributes:
        model: Its model, "" for a request without one.
        sequence: Id of its sequence, 0 or "" for none.
        start: Whether the sequence begins with it.
        end: Whether the sequence ends with it.
        is_stream: Whether it may have several responses.
        passes_timeout: Whether the server drops it from its queue when its client no longer waits.
        prefix: What its prompt begins with, b"" for nothing.
    """

    model: str = ""
    sequence: int | str = 0
    start: bool = False
    end: bool = False
    is_stream: bool = False
    passes_timeout: bool = False
    prefix: bytes = b""


def prefix_of(prompt: object) -> bytes:
    """Return the first whole blocks of a prompt, all of a shorter one, b"" for something else.

    The later turns of a conversation have the prefix of its first turn with as many blocks.
    """
    while isinstance(prompt, list | tuple | np.ndarray) and len(prompt):
        prompt = prompt[0]
    text = prompt.encode() if isinstance(prompt, str) else prompt if isinstance(prompt, bytes) else b""
    blocks = min(len(text) // PREFIX_BLOCK_BYTES, PREFIX_BLOCKS_MAX)
    return text[: blocks * PREFIX_BLOCK_BYTES] if blocks else text


ANYWHERE = Routing()
"""The routing of a request that any server may answer."""


class BalancedCall:
    """A request at one server after the other, or at two at the same time: the sender's handle."""

    __slots__ = (
        "_before",
        "_deadline_s",
        "_has_begun",
        "_keep_body",
        "_on_answer",
        "_owner",
        "_request",
        "_routing",
        "_sent_ns",
        "_timer",
        "_tried",
        "_tries",
        "is_over",
    )

    def __init__(
        self,
        owner: "BalancedTransport",
        request: Any,
        on_answer: OnAnswer,
        timeout_s: float,
        keep_body: bool,
        routing: Routing,
    ) -> None:
        self._owner = owner
        self._request = request
        self._on_answer = on_answer
        self._keep_body = keep_body
        self._routing = routing
        self._sent_ns = _now_ns()
        self._deadline_s = owner.loop.time() + timeout_s if timeout_s else 0.0
        self._tries: dict[PoolServer, Handle] = {}
        self._tried: list[PoolServer] = []
        self._before: list[str] = []
        self._has_begun = False
        self._timer: asyncio.TimerHandle | None = None  # the deadline while it waits, then the hedge
        self.is_over = False

    def cancel(self) -> None:
        if not self.is_over:
            self._end()

    def wait(self) -> None:
        """Wait until the servers are known, but not longer than the timeout."""
        if self._deadline_s:
            message = f"the address of {self._owner.addresses} was not found in time: its name server does not answer"
            self._timer = self._owner.loop.call_at(
                self._deadline_s, self.fail, Code.UNAVAILABLE, message, Failure.TIMEOUT
            )

    def begin(self) -> None:
        """Send it to its first server."""
        if self.is_over:
            return
        if self._timer is not None:
            self._timer.cancel()
        owner, routing = self._owner, self._routing
        key = (routing.model, routing.sequence)
        if routing.sequence and not routing.start:
            server = owner.pool.server_of(key)
            if server is None:
                self.fail(Code.INVALID_ARG, _UNKNOWN.format(*reversed(key)))
                return
            if server.is_gone:
                owner.pool.sequence_ended(key)
                self.fail(Code.UNAVAILABLE, _GONE.format(key[1], key[0], server.endpoint))
                return
            self._send(server)
            return
        server = owner.pool.pick(prefix=routing.prefix)
        if server is None:
            self.fail(Code.UNAVAILABLE, f"{owner.addresses} has no address")
            return
        self._send(server)
        if routing.model and not routing.sequence and not routing.is_stream:
            after_s = owner.hedge_after_s(routing.model)
            if after_s is not None:
                self._timer = owner.loop.call_later(after_s, self._send_second)

    def fail(self, code: Code, message: str, failure: Failure = Failure.REFUSED) -> None:
        """Answer with a failure, once the sender is done."""
        answer = failed(Answer(self._sent_ns), failure, message)
        answer.code = code
        self._owner.loop.call_soon(self._finish, answer)

    def _send(self, server: PoolServer) -> None:
        owner, routing = self._owner, self._routing
        timeout_s = 0.0
        request = self._request
        if self._deadline_s:
            timeout_s = max(self._deadline_s - owner.loop.time(), 1e-6)
            if self._tried and routing.passes_timeout:
                request = request.with_timeout(max(round(timeout_s * 1e6), 1))
        if routing.sequence:
            owner.pool.sequence_began((routing.model, routing.sequence), server)
        self._tried.append(server)
        begun_ns = _now_ns()
        server.begin(begun_ns)
        self._tries[server] = owner.transport_of(server).send(
            request.to(server.endpoint.authority),
            lambda answer: self._answered(server, answer, begun_ns),
            timeout_s,
            keep_body=self._keep_body,
        )
        owner.watch()

    def _send_second(self) -> None:
        self._timer = None
        owner = self._owner
        server = owner.pool.pick(self._tried)
        if server is not None and server.trouble is None and len(self._tries) == 1 and owner.budget.spend():
            self._send(server)

    def _answered(self, server: PoolServer, answer: Answer, begun_ns: int) -> None:
        if server not in self._tries:  # cancelled while it answered
            return
        owner = self._owner
        if not answer.final:
            self._has_begun = True
            owner.pool.record_contact(server, _now_ns())
            self._on_answer(answer)
            return
        del self._tries[server]
        now_ns = _now_ns()
        routing = self._routing
        latency_ns = 0
        if answer.failure is None and routing.model and not self._has_begun:
            latency_ns = now_ns - begun_ns
            owner.answered(routing.model, latency_ns)
        end = _end_of(answer)
        owner.ended(server, end, now_ns, 0 if routing.sequence else latency_ns)
        if answer.failure is not None and self._can_failover(server, answer, end):
            return
        if self._before and answer.failure is not None:
            answer.message += f" (before: {'; '.join(self._before)})"
        answer.sent_ns = self._sent_ns
        self._finish(answer)

    def _can_failover(self, server: PoolServer, answer: Answer, end: RequestEnd) -> bool:
        """Return whether the request may still be answered by another server; send it there if none works on it."""
        owner, routing = self._owner, self._routing
        text = answer.message
        where = str(server.endpoint)
        note = text if where in text else f"{where}: {text}"
        if routing.sequence and not routing.start:
            if answer.failure is Failure.REFUSED:
                owner.pool.sequence_ended((routing.model, routing.sequence))
                answer.message = f"{_GONE.format(routing.sequence, routing.model, where)}: {text}"
            return False
        if self._tries and end is not RequestEnd.ANSWERED:  # its hedge
            self._before.append(note)
            return True
        if not answer.is_unexecuted or self._has_begun or len(self._tried) >= owner.balancing.tries_max:
            return False
        if self._deadline_s and owner.loop.time() >= self._deadline_s:
            return False
        another = owner.pool.pick(self._tried, routing.prefix)
        if another is None:
            return False
        if not owner.budget.spend():
            answer.message += " (not sent to another server: too many retries)"
            return False
        self._before.append(note)
        self._send(another)
        return True

    def _finish(self, answer: Answer) -> None:
        if not self.is_over:
            routing = self._routing
            if routing.end:
                self._owner.pool.sequence_ended((routing.model, routing.sequence))
            self._end()
            self._on_answer(answer)

    def _end(self) -> None:
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        tries, self._tries = self._tries, {}
        for server, handle in tries.items():
            handle.cancel()
            self._owner.ended(server, RequestEnd.CANCELLED, _now_ns(), 0)


_UNKNOWN = "no request of this client has begun sequence {} of model '{}'; its server is not known"
_GONE = "sequence {} of model '{}' cannot continue: its server {} is gone; start a new sequence"


def _end_of(answer: Answer) -> RequestEnd:
    match answer.failure:
        case Failure.REFUSED:
            return RequestEnd.UNREACHABLE
        case Failure.RESET | Failure.TIMEOUT | Failure.GARBLED:
            return RequestEnd.FAILED
        case Failure.CLOSED | Failure.EXHAUSTED:
            return RequestEnd.CANCELLED
        case Failure.STATUS if answer.is_unexecuted:
            return RequestEnd.TURNED_AWAY
        case Failure.STATUS if answer.code is Code.UNAVAILABLE:
            return RequestEnd.FAILED
    return RequestEnd.ANSWERED


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
    """Connections to several servers. `send` and `close` are as in `charonia.wire.transport.Transport`."""

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
        """Create a transport without connections; call it on the event loop. Raises INVALID_ARG for invalid options."""
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
        self.budget.deposit()
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
            self._look_up = self.loop.create_task(self._resolve_periodically())
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
        """Return the time after which a request to a model is hedged, None for never."""
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
        """A request has ended at a server."""
        self.pool.end(server, end, now_ns, latency_ns)
        if server.is_gone and not server.outstanding:
            self._retire(server)
        elif end is RequestEnd.TURNED_AWAY:
            self.loop.call_soon(self._probe_due)
        elif end is RequestEnd.UNREACHABLE:
            self._wake.set()

    def watch(self) -> None:
        """Requests are in flight: see to it that they get on."""
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

    async def _resolve_periodically(self) -> None:
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
