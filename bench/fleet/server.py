"""One simulated server: a queue, and an accelerator that takes what waits as one batch."""

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from random import Random


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """How long a server works on a batch.

    Attributes:
        by_batch: Median seconds by size of the batch, from 1 to the greatest, without gaps.
        factors: What single batches took, as shares of their median: one of them is drawn for each batch.
        load_s: Seconds to load a model that is not in the server's memory.
    """

    by_batch: tuple[float, ...]
    factors: tuple[float, ...] = (1.0,)
    load_s: float = 0.0

    @property
    def greatest(self) -> int:
        """The greatest batch."""
        return len(self.by_batch)

    @property
    def capacity(self) -> float:
        """Requests a second of a server whose batches are all full."""
        return self.greatest / (self.by_batch[-1] * sum(self.factors) / len(self.factors))

    @classmethod
    def measured(cls, seconds: Mapping[int, list[float]]) -> "ServiceTimes":
        """Return the times of measured batches, by their size.

        Raises:
            ValueError: When a size is missing.
        """
        sizes = sorted(seconds)
        if not sizes or sizes != list(range(1, len(sizes) + 1)):
            raise ValueError(f"measured batches: expected all sizes from 1 on, got {sizes}")
        medians = tuple(sorted(seconds[size])[len(seconds[size]) // 2] for size in sizes)
        return cls(medians, tuple(s / medians[size - 1] for size in sizes for s in seconds[size]))


class Request:
    """A request: when it came, from which client, when it was answered.

    Attributes:
        arrived: Seconds.
        client: Number of the client.
        model: Number of the model.
        deadline: When its client stops waiting.
        done: When it was answered, infinite until then.
        server: The server that it was last given to.
        attempts: How often it was sent again.
    """

    __slots__ = ("arrived", "attempts", "client", "deadline", "done", "model", "server")

    def __init__(self, arrived: float, client: int, model: int, deadline: float) -> None:
        self.arrived = arrived
        self.client = client
        self.model = model
        self.deadline = deadline
        self.done = inf
        self.server = -1
        self.attempts = 0


class Server:
    """A server whose state is updated on access: it depends only on its own requests.

    Attributes:
        number: Its place in the fleet.
        zone: Number of its zone.
        waiting: Requests in its queue.
        batch: The running requests.
        busy_until: When the batch is done.
        slowness: Its batches take this many times as long.
        accepts: Whether it takes new requests: neither starting, nor draining, nor dead.
        dead_since: When it was lost, infinite while it lives.
        loaded: The models in its memory, the one used longest ago first.
        dropped: Requests whose clients had stopped waiting, since the last update.
        hits: Batches whose model was in memory.
        misses: Batches whose model was not.
    """

    __slots__ = (
        "accepts",
        "batch",
        "busy_until",
        "dead_since",
        "dropped",
        "hits",
        "loaded",
        "misses",
        "models_max",
        "number",
        "random",
        "slowness",
        "times",
        "waiting",
        "zone",
    )

    def __init__(self, number: int, zone: int, times: ServiceTimes, models_max: int, random: Random) -> None:
        self.number = number
        self.zone = zone
        self.times = times
        self.models_max = models_max
        self.random = random
        self.waiting: deque[Request] = deque()
        self.batch: list[Request] = []
        self.busy_until = 0.0
        self.slowness = 1.0
        self.accepts = True
        self.dead_since = inf
        self.loaded: OrderedDict[int, None] = OrderedDict()
        self.dropped: list[Request] = []
        self.hits = self.misses = 0

    @property
    def outstanding(self) -> int:
        """Requests that it has and that are not answered."""
        return len(self.waiting) + len(self.batch)

    def add(self, request: Request, now: float) -> None:
        """Take a request; the server is up to date."""
        self.waiting.append(request)
        if not self.batch:
            self.begin(now)

    def finished(self, now: float) -> list[tuple[float, Request]]:
        """Update the server, and return its answers since the last time, in order."""
        answered = []
        while self.batch and self.busy_until <= now:
            end = self.busy_until
            answered += [(end, request) for request in self.batch]
            self.batch = []
            self.begin(end)
        return answered

    def begin(self, now: float) -> None:
        """Begin the next batch, if a client still waits for a queued request."""
        waiting = self.waiting
        batch: list[Request] = []
        others: list[Request] = []
        while waiting and len(batch) < self.times.greatest:
            request = waiting.popleft()
            if request.deadline <= now or request.done <= now:
                self.dropped.append(request)
            elif not batch or request.model == batch[0].model:
                batch.append(request)
            else:
                others.append(request)
        waiting.extendleft(reversed(others))
        if batch:
            self.batch = batch
            seconds = self.times.by_batch[len(batch) - 1] * self.random.choice(self.times.factors) * self.slowness
            self.busy_until = now + self._load(batch[0].model) + seconds

    def _load(self, model: int) -> float:
        """Return the seconds until a model is in memory; the one used longest ago leaves for it."""
        if not self.models_max:
            return 0.0
        if model in self.loaded:
            self.loaded.move_to_end(model)
            self.hits += 1
            return 0.0
        self.misses += 1
        if len(self.loaded) == self.models_max:
            self.loaded.popitem(last=False)
        self.loaded[model] = None
        return self.times.load_s
