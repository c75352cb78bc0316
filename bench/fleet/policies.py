"""Which server gets a request: the knowledge of clients or a balancer, and their choice."""

from collections.abc import Sequence
from hashlib import blake2b
from random import Random
from typing import Protocol

from bench.fleet.server import Request


class Fleet(Protocol):
    """The state that a policy sees."""

    @property
    def listed(self) -> Sequence[int]:
        """Numbers of the servers that clients believe to be there."""
        ...

    def outstanding(self, server: int) -> int:
        """Return the requests that a server has now, from all clients."""
        ...

    def own_outstanding(self, server: int, client: int) -> int:
        """Return the requests that a server has from one client."""
        ...

    def reported(self, server: int, client: int) -> int:
        """Return the queue depth that the server told this client with its last answer, 0 where it is too old."""
        ...


class Policy(Protocol):
    """Chooses servers."""

    def pick(self, fleet: Fleet, request: Request, random: Random) -> int:
        """Return the number of a server of those listed."""
        ...


class RoundRobin:
    """Each client goes through the servers in turn, as a Kubernetes Service or DNS does for connections."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}

    def pick(self, fleet: Fleet, request: Request, random: Random) -> int:
        """Return the next one of the client's."""
        count = len(fleet.listed)
        place = self._next.get(request.client, -1)
        place = (random.randrange(count) if place < 0 else place + 1) % count
        self._next[request.client] = place
        return fleet.listed[place]


class RandomChoice:
    """Any server."""

    def pick(self, fleet: Fleet, request: Request, random: Random) -> int:
        """Return any."""
        return fleet.listed[int(random.random() * len(fleet.listed))]


class PrefixAffinity:
    """The rule of `charonia.client`: rendezvous hashing on the prefix, here the model, with a bound of the load.

    Args:
        bound: Multiple of the mean of a client's requests to a server.
    """

    def __init__(self, bound: float = 1.25) -> None:
        self._bound = bound
        self._order: dict[int, list[int]] = {}

    def pick(self, fleet: Fleet, request: Request, random: Random) -> int:
        """Return the first server of the prefix that is below the bound."""
        order = self._order.get(request.model)
        if order is None:
            order = sorted(fleet.listed, key=lambda server: blake2b(b"%d" % request.model, key=b"%d" % server).digest())
            self._order[request.model] = order
        own = [fleet.own_outstanding(server, request.client) for server in order]
        bound = self._bound * (sum(own) + 1) / len(own)
        return next(server for server, count in zip(order, own, strict=True) if count < bound)


class LeastOutstanding:
    """Of two servers the one with fewer requests: a client's own ones, with or without reports, or all there are.

    Args:
        knows: "own": a client counts its own requests. "reports": the greater of these and the server's report
            (ORCA). "all": one balancer sends everything.
        spread: By model, the number of servers that it may go to; empty for all.
        subset: Each client knows only so many servers, drawn for it, as some name servers answer; 0 for all.
    """

    def __init__(self, knows: str = "own", spread: Sequence[int] = (), subset: int = 0) -> None:
        if knows not in ("own", "reports", "all"):
            raise ValueError(f"least outstanding: expected own, reports or all, got {knows!r}")
        self._knows = knows
        self._spread = spread
        self._subset = subset
        self._known: dict[int, Sequence[int]] = {}
        self._of: Sequence[int] = ()

    def pick(self, fleet: Fleet, request: Request, random: Random) -> int:
        """Return the one of two with fewer requests."""
        listed = self._subset_of(fleet, request.client, random) if self._subset else fleet.listed
        count = len(listed)
        if self._spread:
            wide = min(count, self._spread[request.model])
            start = request.model * 2654435761 % count
            first, second = (listed[(start + int(random.random() * wide)) % count] for _ in range(2))
        else:
            first, second = listed[int(random.random() * count)], listed[int(random.random() * count)]
        if first == second:
            return first
        return first if self._load(fleet, first, request) <= self._load(fleet, second, request) else second

    def _subset_of(self, fleet: Fleet, client: int, random: Random) -> Sequence[int]:
        """Return the servers that a client knows; others when the fleet changes."""
        if self._of is not fleet.listed:
            self._of = fleet.listed
            self._known.clear()
        if client not in self._known:
            self._known[client] = random.sample(fleet.listed, min(self._subset, len(fleet.listed)))
        return self._known[client]

    def _load(self, fleet: Fleet, server: int, request: Request) -> int:
        if self._knows == "all":
            return fleet.outstanding(server)
        own = fleet.own_outstanding(server, request.client)
        return own if self._knows == "own" else max(own, fleet.reported(server, request.client))
