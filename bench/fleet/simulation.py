"""The simulation: requests come, a policy chooses servers, servers are lost, added, drained and slowed."""

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, inf
from random import Random

from bench.fleet.policies import Policy
from bench.fleet.server import Request, Server, ServiceTimes

REPORT_AGE_MAX_S = 1.0
"""A reported queue depth that is older says nothing."""

RETRY_TOKENS_MAX = 100.0


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """Kubernetes' rule: servers are in proportion to a figure, looked at every so often, with a figure that is late.

    Attributes:
        target: Requests in flight for each server.
        least: Fewest servers.
        most: Most servers.
        period_s: Between two looks.
        figure_age_s: How old the figure is when it is looked at.
        start_s: From the decision until a new server answers.
        calm_s: Servers leave only when no look of this many seconds wanted them.
        tolerance: Share of the target by which the figure may differ before anything is done.
    """

    target: float
    least: int
    most: int
    period_s: float = 15.0
    figure_age_s: float = 15.0
    start_s: float = 30.0
    calm_s: float = 300.0
    tolerance: float = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a simulation.

    Attributes:
        servers: Number of servers at first.
        rate: Requests a second, at a time.
        seconds: How long.
        times: Service times of a server.
        policy: Makes the policy.
        clients: Processes that send, each with its own knowledge.
        warm_s: Requests that come earlier are not counted.
        deadline_s: How long a client waits.
        network_s: Of a request and its answer together.
        waiting_max: Limit of a server's queue: one more is refused immediately.
        retries_max: How often a request that was not executed is sent to another server.
        retry_share: Retries for each request, on average, at most.
        noticed_s: Until clients no longer send to a lost server.
        connect_s: Until a connection to a lost server is given up.
        hedge_s: Sent to a second server after this time, infinite for never.
        models: Share of the requests by model.
        models_max: Models that fit into a server's memory, 0 for all.
        zones: Number of zones.
        autoscaler: None for a fixed number of servers.
        happenings: What happens when.
        seed: Of the random numbers.
    """

    servers: int
    rate: Callable[[float], float]
    seconds: float
    times: ServiceTimes
    policy: Callable[[], Policy]
    clients: int = 20
    warm_s: float = 2.0
    deadline_s: float = 1.0
    network_s: float = 0.0005
    waiting_max: int = 1000
    retries_max: int = 2
    retry_share: float = 0.2
    noticed_s: float = 1.0
    connect_s: float = 0.2
    hedge_s: float = inf
    models: Sequence[float] = (1.0,)
    models_max: int = 0
    zones: int = 3
    autoscaler: Autoscaler | None = None
    happenings: Sequence[tuple[float, Callable[["Fleet"], None]]] = ()
    seed: int = 1


@dataclass(slots=True)
class Result:
    """What came of it.

    Attributes:
        offered: Requests that were counted.
        latencies: Seconds of requests answered before their deadline.
        failed: Lost with a server, at work or in its queue.
        refused: No server took them.
        executions: Requests that servers answered, in time or not, hedged ones twice.
        hits: Share of the batches whose model, or prefix, was in the server's memory.
        by_second: In each second: requests that came, and of them those answered in time.
        servers: By time: number of servers that answer.
    """

    offered: int = 0
    latencies: "array[float]" = field(default_factory=lambda: array("d"))
    failed: int = 0
    refused: int = 0
    executions: int = 0
    hits: float = 0.0
    by_second: dict[int, list[int]] = field(default_factory=dict)
    servers: list[tuple[float, int]] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Share of the requests answered before their deadline."""
        return len(self.latencies) / self.offered if self.offered else 1.0

    def quantile(self, share: float) -> float:
        """Return the latency of a share of all requests: infinite where fewer were answered in time."""
        ordered = sorted(self.latencies)
        place = ceil(share * self.offered) - 1
        return ordered[place] if place < len(ordered) else inf


class Fleet:
    """The servers, and the requests between them and the clients."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.random = Random(plan.seed)
        self.result = Result()
        self.now = 0.0
        self.servers: list[Server] = []
        self.listed: list[int] = []
        self._own: list[int] = []
        self._depth = array("i")
        self._told = array("d")
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._ordinal = 0
        self._tokens = RETRY_TOKENS_MAX
        self._popular = list(accumulate(plan.models))
        self._policy = plan.policy()
        self._wanted: list[tuple[float, int]] = []
        self._starting = 0
        for _ in range(plan.servers):
            self.add_server()

    def run(self) -> Result:
        """Simulate the plan.

        Returns:
            What came of it; requests in flight at the end are followed until they are answered.
        """
        plan = self.plan
        for at, happening in plan.happenings:
            self.at(at, lambda happening=happening: happening(self))  # type: ignore[misc]
        if plan.autoscaler:
            self.at(plan.autoscaler.period_s, self._look)
        arrival = self._gap(0.0)
        while arrival < plan.seconds:
            while self._events and self._events[0][0] <= arrival:
                self._happen()
            self.now = arrival
            self._arrive()
            arrival += self._gap(arrival)
        end = plan.seconds + plan.deadline_s
        while self._events and self._events[0][0] <= end:
            self._happen()
        for server in self.servers:
            self.update(server, inf)
        hits = sum(server.hits for server in self.servers)
        self.result.hits = hits / max(1, hits + sum(server.misses for server in self.servers))
        return self.result

    def at(self, when: float, happens: Callable[[], object]) -> None:
        """Let something happen at a time."""
        self._ordinal += 1
        heapq.heappush(self._events, (when, self._ordinal, happens))

    def add_server(self) -> Server:
        """Add a server that answers immediately."""
        plan = self.plan
        number = len(self.servers)
        server = Server(number, number % plan.zones, plan.times, plan.models_max, self.random)
        self.servers.append(server)
        self.listed.append(number)
        self._own += [0] * plan.clients
        self._depth.extend([0] * plan.clients)
        self._told.extend([-inf] * plan.clients)
        self.result.servers.append((self.now, len(self.listed)))
        return server

    def drain(self, server: Server, unlisted_s: float = 0.0) -> None:
        """Let a server complete its requests and accept no more; clients learn of it later."""
        server.accepts = False
        self.at(self.now + unlisted_s, lambda: self._unlist([server.number]))

    def lose(self, servers: Sequence[Server]) -> None:
        """Lose servers with all their requests; clients notice later."""
        for server in servers:
            self.update(server, self.now)
            server.accepts = False
            server.dead_since = self.now
            for request in [*server.batch, *server.waiting]:
                if request.done == inf:
                    self._own[server.number * self.plan.clients + request.client] -= 1
                    if request.arrived >= self.plan.warm_s:
                        self.result.failed += 1
            server.batch = []
            server.waiting.clear()
        self.at(self.now + self.plan.noticed_s, lambda: self._unlist([server.number for server in servers]))

    def outstanding(self, server: int) -> int:
        """Return the requests that a server has now."""
        self.update(self.servers[server], self.now)
        return self.servers[server].outstanding

    def own_outstanding(self, server: int, client: int) -> int:
        """Return the requests that a server has from one client."""
        self.update(self.servers[server], self.now)
        return self._own[server * self.plan.clients + client]

    def reported(self, server: int, client: int) -> int:
        """Return the queue depth that a server told a client with its last answer, if that is new enough."""
        place = server * self.plan.clients + client
        return self._depth[place] if self.now - self._told[place] <= REPORT_AGE_MAX_S else 0

    def update(self, server: Server, now: float) -> None:
        """Update a server, and count its answers."""
        if not server.batch or server.busy_until > now:
            return
        plan = self.plan
        result = self.result
        for end, request in server.finished(now):
            place = server.number * plan.clients + request.client
            self._own[place] -= 1
            self._depth[place] = server.outstanding
            self._told[place] = end
            result.executions += request.arrived >= plan.warm_s
            first = request.done == inf
            request.done = min(end, request.done)
            latency = end + plan.network_s - request.arrived
            if first and request.arrived >= plan.warm_s and latency <= plan.deadline_s:
                result.latencies.append(latency)
                result.by_second[int(request.arrived)][1] += 1
        for request in server.dropped:
            self._own[server.number * plan.clients + request.client] -= 1
        server.dropped.clear()

    def _gap(self, now: float) -> float:
        return self.random.expovariate(self.plan.rate(now))

    def _happen(self) -> None:
        self.now, _, happens = heapq.heappop(self._events)
        happens()

    def _arrive(self) -> None:
        plan = self.plan
        client = int(self.random.random() * plan.clients)
        model = 0
        if len(self._popular) > 1:
            model = bisect_right(self._popular, self.random.random() * self._popular[-1])
        request = Request(self.now, client, model, self.now + plan.deadline_s)
        if self.now >= plan.warm_s:
            self.result.offered += 1
            self.result.by_second.setdefault(int(self.now), [0, 0])[0] += 1
        self._tokens = min(RETRY_TOKENS_MAX, self._tokens + plan.retry_share)
        self._send(request)
        if plan.hedge_s < inf:
            self.at(self.now + plan.hedge_s, lambda: self._hedge(request))

    def _send(self, request: Request) -> None:
        """Send a request to a server other than the previous one; a refusal costs a retry."""
        plan = self.plan
        if not self.listed:
            self._refuse(request)
            return
        number = self._policy.pick(self, request, self.random)
        while number == request.server and len(self.listed) > 1:
            number = self.random.choice(self.listed)
        request.server = number
        server = self.servers[number]
        self.update(server, self.now)
        if server.accepts and len(server.waiting) < plan.waiting_max:
            self._own[server.number * plan.clients + request.client] += 1
            server.add(request, self.now)
            return
        if request.attempts >= plan.retries_max or self._tokens < 1.0:
            self._refuse(request)
            return
        request.attempts += 1
        self._tokens -= 1.0
        self.at(self.now + (plan.connect_s if server.dead_since < inf else plan.network_s), lambda: self._send(request))

    def _refuse(self, request: Request) -> None:
        if request.arrived >= self.plan.warm_s:
            self.result.refused += 1

    def _hedge(self, request: Request) -> None:
        """Send a request that is not answered yet to a second server, where the budget of retries allows."""
        if request.server >= 0:
            self.update(self.servers[request.server], self.now)
        if request.done == inf and self._tokens >= 1.0:
            self._tokens -= 1.0
            self._send(request)

    def _unlist(self, numbers: Sequence[int]) -> None:
        gone = set(numbers)
        self.listed = [number for number in self.listed if number not in gone]
        self.result.servers.append((self.now, len(self.listed)))

    def _look(self) -> None:
        """Compare the servers with the target figure, by Kubernetes' rule."""
        scaler = self.plan.autoscaler
        assert scaler is not None
        ready = len(self.listed)
        in_flight = sum(self.outstanding(number) for number in self.listed)
        wanted = ready
        if abs(in_flight / (ready * scaler.target) - 1.0) > scaler.tolerance:
            wanted = ceil(in_flight / scaler.target)
        wanted = min(max(wanted, scaler.least), scaler.most)
        self.at(self.now + scaler.figure_age_s, lambda: self._scale(wanted))
        self.at(self.now + scaler.period_s, self._look)

    def _scale(self, wanted: int) -> None:
        scaler = self.plan.autoscaler
        assert scaler is not None
        self._wanted = [(at, count) for at, count in self._wanted if at > self.now - scaler.calm_s]
        self._wanted.append((self.now, wanted))
        there = len(self.listed) + self._starting
        for _ in range(wanted - there):
            self._starting += 1
            self.at(self.now + scaler.start_s, self._started)
        for number in self.listed[max(count for _, count in self._wanted) :]:
            self.drain(self.servers[number])

    def _started(self) -> None:
        self._starting -= 1
        self.add_server()
