"""The servers of a client: which one gets a request, and which get none for a while. Pure.

A request goes to the less busy of two servers picked at random ("power of two choices"). A server gets none while it is
out: no connection can be made, it does not report ready, or it performs worse than the others (it is ejected).

Invariants, which a property test checks:

1. `outstanding` of a server is the number of requests that began there and have not ended.
2. At most half of the servers are ejected at any time. If all are out, all get requests.
3. A server that is out returns only when it reports ready; the time between two probes never exceeds
   `Balancing.eject_s_max`.
"""

import math
from collections.abc import Callable, Collection, Iterable
from enum import Enum
from hashlib import blake2b
from statistics import median

from charonia.client.balancing.options import Balancing
from charonia.wire.endpoint import Endpoint

SERVERS_MAX = 1024
"""Limit of servers. Of more addresses, the first ones are taken."""

SEQUENCES_MAX = 65_536
"""Limit of open sequences whose server is remembered; beyond it, the longest idle sequence is dropped."""

SLOW_SAMPLES_MIN = 32
"""Responses from which the mean latency of a server is known."""

SLOW_FLOOR_NS = 10_000_000
"""A mean latency below is never slow."""

_SMOOTHING = 1 / 16
_CHECK_EVERY = 16


class RequestEnd(Enum):
    """How a request ended at a server."""

    ANSWERED = "answered"
    """There was a response, which may be an error of the request or of its model."""

    TURNED_AWAY = "turned away"
    """The server reports that no model has seen the request."""

    FAILED = "failed"
    """There was no response, or one that means that the server cannot work."""

    UNREACHABLE = "unreachable"
    """No connection could be made."""

    CANCELLED = "cancelled"
    """The caller, or this client, did not wait for the end."""


class Unavailability(Enum):
    """Why a server gets no requests."""

    UNREACHABLE = "no connection can be made"
    NOT_READY = "it does not say that it is ready"
    ERRORS = "ejected for errors"
    SLOW = "ejected for its latency"


_EJECTED = (Unavailability.ERRORS, Unavailability.SLOW)


class PoolServer:
    """A server.

    Attributes:
        endpoint: Its address.
        outstanding: Requests in flight.
        trouble: Why it gets no requests, None if it gets some.
        errors: Failures since the last response.
        latency_ns: Mean latency of recent responses, 0 before the first.
        samples: Number of these responses.
        is_gone: Whether it was removed from the client's servers.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.outstanding = 0
        self.trouble: Unavailability | None = None
        self.errors = 0
        self.latency_ns = 0.0
        self.samples = 0
        self.is_gone = False
        self._delay_ns = 0
        self._heard_ns = 0
        self._in_since_ns = 0
        self._is_asked = False
        self._is_suspect = False
        self._probe_at_ns = 0

    def begin(self, now_ns: int) -> None:
        """A request goes to it."""
        if not self.outstanding:
            self._heard_ns = now_ns
        self.outstanding += 1


class ServerPool:
    """The servers.

    Args:
        options: When servers are ejected, and for how long.
        random: Returns numbers from 0 to below 1.

    Attributes:
        all: All servers.
    """

    def __init__(self, options: Balancing, random: Callable[[], float]) -> None:
        self.all: list[PoolServer] = []
        self._options = options
        self._random = random
        self._in: list[PoolServer] = []
        self._sequences: dict[tuple[str, int | str], PoolServer] = {}

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> tuple[list[PoolServer], list[PoolServer]]:
        """Set the present addresses; return the new servers and the removed servers."""
        wanted = dict.fromkeys(endpoints)
        kept = {server.endpoint: server for server in self.all}
        servers = [kept.get(endpoint) or PoolServer(endpoint) for endpoint in list(wanted)[:SERVERS_MAX]]
        added = [server for server in servers if server.endpoint not in kept]
        gone = [server for server in self.all if server not in servers]
        for server in gone:
            server.is_gone = True
        self.all = servers
        self._changed()
        return added, gone

    def pick(self, tried: Collection[PoolServer] = (), prefix: bytes = b"") -> PoolServer | None:
        """Return the server for a request, None if all were tried.

        Args:
            tried: Servers that it does not go to.
            prefix: What its prompt begins with, b"" for nothing.
        """
        among = self._in
        if tried:
            among = [server for server in among if server not in tried]
            among = among or [server for server in self.all if server not in tried]
        count = len(among)
        if count < 2:
            return among[0] if among else None
        if prefix and self._options.prefix_load:
            bound = self._options.prefix_load * (sum(server.outstanding for server in among) + 1) / count
            # Rendezvous hashing: when a server comes or goes, only its share of the prefixes moves.
            return max(
                (server for server in among if server.outstanding < bound),
                key=lambda server: blake2b(prefix, key=str(server.endpoint).encode()[:64], digest_size=8).digest(),
            )
        first = int(self._random() * count)
        second = int(self._random() * (count - 1))
        one, other = among[first], among[second + (second >= first)]
        return one if one.outstanding <= other.outstanding else other

    def end(self, server: PoolServer, outcome: RequestEnd, now_ns: int, latency_ns: int = 0) -> None:
        """A request has ended.

        Args:
            server: Its server.
            outcome: How it ended.
            now_ns: The time.
            latency_ns: How long a single response took, 0 for a request that does not count.
        """
        server.outstanding -= 1
        if outcome is RequestEnd.CANCELLED or server.trouble is not None:
            return
        if outcome is RequestEnd.UNREACHABLE:
            self._leave(server, Unavailability.UNREACHABLE, now_ns)
        elif outcome is RequestEnd.FAILED:
            server.errors += 1
            if server.errors >= self._options.errors_max:
                self._leave(server, Unavailability.ERRORS, now_ns)
        else:
            server.errors = 0
            server._heard_ns = now_ns
            if outcome is RequestEnd.TURNED_AWAY:
                server._is_suspect = True
            elif latency_ns:
                self._record_latency(server, latency_ns, now_ns)

    def record_contact(self, server: PoolServer, now_ns: int) -> None:
        server._heard_ns = now_ns

    def due(self, now_ns: int) -> list[PoolServer]:
        """Return the servers to ask whether they are ready; `probed` takes the answer of each."""
        stall_ns = self._options.stall_s * 1e9
        asked = [
            server
            for server in self.all
            if not server._is_asked
            and (
                now_ns >= server._probe_at_ns
                if server.trouble is not None
                else server._is_suspect or (server.outstanding and now_ns - server._heard_ns >= stall_ns)
            )
        ]
        for server in asked:
            server._is_asked = True
        return asked

    def probed(self, server: PoolServer, is_ready: bool, now_ns: int) -> None:
        """A readiness probe of a server has ended."""
        server._is_asked = server._is_suspect = False
        if not is_ready:
            self._leave(server, server.trouble or Unavailability.NOT_READY, now_ns)
            return
        server._heard_ns = now_ns
        if server.trouble is not None:
            server.trouble = None
            server.errors = server.samples = 0
            server.latency_ns = 0.0
            server._in_since_ns = now_ns
            self._changed()

    @property
    def is_watching(self) -> bool:
        return any(server.outstanding or server.trouble or server._is_suspect for server in self.all)

    # Sequences keep their server.

    def server_of(self, sequence: tuple[str, int | str]) -> PoolServer | None:
        """Return the server that has a sequence, given by its model and id; None if it is not known."""
        server = self._sequences.pop(sequence, None)
        if server is not None:
            self._sequences[sequence] = server  # now the last one to be forgotten
        return server

    def sequence_began(self, sequence: tuple[str, int | str], server: PoolServer) -> None:
        """A sequence has its server."""
        self._sequences.pop(sequence, None)
        if len(self._sequences) >= SEQUENCES_MAX:
            del self._sequences[next(iter(self._sequences))]
        self._sequences[sequence] = server

    def sequence_ended(self, sequence: tuple[str, int | str]) -> None:
        self._sequences.pop(sequence, None)

    # Who is out.

    def _record_latency(self, server: PoolServer, latency_ns: int, now_ns: int) -> None:
        server.samples += 1
        server.latency_ns += (latency_ns - server.latency_ns) * max(_SMOOTHING, 1 / server.samples)
        if server.samples % _CHECK_EVERY or not self._is_slow(server):
            return
        self._leave(server, Unavailability.SLOW, now_ns)

    def _is_slow(self, server: PoolServer) -> bool:
        factor = self._options.slow_factor
        if not factor or server.samples < SLOW_SAMPLES_MIN or server.latency_ns < SLOW_FLOOR_NS:
            return False
        others = [m.latency_ns for m in self._in if m is not server and m.samples >= SLOW_SAMPLES_MIN]
        return bool(others) and server.latency_ns > factor * median(others)

    def _leave(self, server: PoolServer, trouble: Unavailability, now_ns: int) -> None:
        if server.is_gone:
            return
        if server.trouble is None and trouble in _EJECTED and not self._may_eject(server, trouble):
            return
        options = self._options
        first_ns, limit_ns = math.ceil(options.eject_s * 1e9), math.ceil(options.eject_s_max * 1e9)
        was_steady = server.trouble is None and now_ns - server._in_since_ns > limit_ns
        server._delay_ns = min(first_ns if was_steady or not server._delay_ns else 2 * server._delay_ns, limit_ns)
        server._probe_at_ns = now_ns + server._delay_ns
        server._is_suspect = False
        server.trouble = trouble
        self._changed()

    def _may_eject(self, server: PoolServer, trouble: Unavailability) -> bool:
        if sum(other.trouble in _EJECTED for other in self.all) + 1 > len(self.all) // 2:
            return False
        # What fails everywhere, such as a model, is not the fault of a server.
        return trouble is not Unavailability.ERRORS or any(m.errors == 0 for m in self._in if m is not server)

    def _changed(self) -> None:
        self._in = [server for server in self.all if server.trouble is None] or self.all
