"""Detects deadlocks between models that make requests of one another.

A model that makes a request holds its own instance until it has the response. If every instance of a model waits,
directly or through other models, for requests that wait for an instance of this model, there is a deadlock.
`DeadlockDetector` rejects the request that would close such a cycle, so that the others can continue.

Its events: a batch begins to make requests (`occupy`) and is over (`batch_ended`); a request of a model is submitted
(`submit`), sent to an instance (`run`), left open by its batch (`leave`) and over (`end`). Batches without requests and
requests of clients are not in the graph.

A request can be answered if an instance that could run it, or already runs it, can finish; an instance can finish
if all requests of its batch can be answered. Before each `submit` this is true of the whole graph, so only the new
request needs to be checked. Pure.
"""

from charonia.core.errors import ServingError, unavailable
from charonia.core.request import CallFrame
from charonia.server.rate_limiter.limiter import Claim


class InstancePool:
    """The instances of one model version.

    Attributes:
        model: Name of the model.
        instances: Numbers of the instances that there are.
        resources: The claim of the instances to resources, None if there is none.
        busy: The calling batch of each instance that runs one, by number of the instance.
    """

    def __init__(self, model: str, size: int, resources: Claim | None = None) -> None:
        self.model = model
        self.instances = set(range(size))
        self.resources = resources
        self.busy: dict[int, CallingBatch] = {}

    def is_blocked_by(self, stuck: "set[CallingBatch]") -> bool:
        """Whether no instance can take a request unless one of these batches finishes."""
        if self.resources is None:
            return all(self.busy.get(instance) in stuck for instance in self.instances)
        holders = [(c.pool.resources, c.instance) for c in stuck if c.pool.resources is not None]
        return all(
            self.busy.get(instance) in stuck or self.resources.is_blocked_by(instance, holders)
            for instance in self.instances
        )


class CallingBatch:
    """A batch that makes requests and occupies an instance.

    Attributes:
        pool: The instances of its model.
        instance: Number of the occupied instance.
        requests: Its requests that are not answered yet.
    """

    __slots__ = ("instance", "pool", "requests")

    def __init__(self, pool: InstancePool, instance: int) -> None:
        self.pool = pool
        self.instance = instance
        self.requests: set[WaitingRequest] = set()


class WaitingRequest:
    """A request that a model made.

    Attributes:
        pool: The instances of its model.
        instance: Number of its instance, -1 while it waits for one.
        has_left: Whether its batch left it open: its response no longer depends on an instance.
        waiter: The batch that waits for it, None if that is over or occupies no instance.
    """

    __slots__ = ("has_left", "instance", "pool", "waiter")

    def __init__(self, pool: InstancePool, waiter: CallingBatch | None) -> None:
        self.pool = pool
        self.instance = -1
        self.has_left = False
        self.waiter = waiter


class DeadlockDetector:
    """Keeps the wait-for graph of batches and requests in the whole server."""

    def __init__(self) -> None:
        self._callers: dict[CallFrame, CallingBatch] = {}

    def __len__(self) -> int:
        return len(self._callers)

    def occupy(self, frame: CallFrame, pool: InstancePool, instance: int) -> None:
        """A batch, known as `frame`, begins to make requests on an instance that runs no other batch."""
        caller = CallingBatch(pool, instance)
        self._callers[frame] = pool.busy[instance] = caller

    def batch_ended(self, frame: CallFrame) -> None:
        """The batch is over and its instance free. Requests that it made may continue; no batch waits for them."""
        caller = self._callers.pop(frame)
        del caller.pool.busy[caller.instance]
        for request in caller.requests:
            request.waiter = None

    def submit(self, frame: CallFrame, pool: InstancePool) -> WaitingRequest:
        """A model makes a request.

        Args:
            frame: Its call frame. The innermost frame in its chain that occupies an instance waits.
            pool: The instances of the requested model.

        Raises:
            ServingError: UNAVAILABLE: it would wait forever. The message has the chain of models.
        """
        callers = self._callers
        waiter = next((callers[f] for f in frame.chain() if f in callers), None) if callers else None
        request = WaitingRequest(pool, waiter)
        if waiter is None:
            return request
        waiter.requests.add(request)
        # Usually an instance makes no requests, and a deadlock is impossible.
        if len(pool.busy) >= len(pool.instances) or pool.resources is not None:
            stuck = self._stuck()
            if pool.is_blocked_by(stuck):
                waiter.requests.discard(request)
                raise _deadlock(frame, pool, stuck)
        return request

    def run(self, request: WaitingRequest, instance: int) -> None:
        request.instance = instance

    def leave(self, request: WaitingRequest) -> None:
        """The batch of the request is over, and the request is still open."""
        request.has_left = True

    def end(self, request: WaitingRequest) -> None:
        if request.waiter is not None:
            request.waiter.requests.discard(request)
            request.waiter = None

    def _stuck(self) -> set[CallingBatch]:
        """Return the batches that can never finish in the present state."""
        stuck = set(self._callers.values())
        is_settled = False
        while not is_settled:
            free = {caller for caller in stuck if not any(_is_stuck(request, stuck) for request in caller.requests)}
            stuck -= free
            is_settled = not free
        return stuck


def _is_stuck(request: WaitingRequest, stuck: set[CallingBatch]) -> bool:
    """Whether a request cannot be answered unless one of these batches finishes."""
    if request.has_left:
        return False
    busy = request.pool.busy
    if request.instance >= 0:
        return busy.get(request.instance) in stuck
    return request.pool.is_blocked_by(stuck)


def _deadlock(frame: CallFrame, pool: InstancePool, stuck: set[CallingBatch]) -> ServingError:
    wanted = pool.model
    chain = [*reversed([f.model for f in frame.chain()]), wanted]
    # If the model is not one of the callers, the cycle continues through the holders of its instances.
    while chain[-1] not in chain[:-1]:
        holder = next((caller for caller in pool.busy.values() if caller in stuck), None)
        if holder is None:
            return _resource_deadlock(chain[: chain.index(wanted) + 1])
        pool = next(request.pool for request in holder.requests if _is_stuck(request, stuck))
        chain.append(pool.model)
    return unavailable(
        f"a request to model '{wanted}' would deadlock: every instance of it waits for requests that wait for one "
        f"of its instances ({' -> '.join(chain)})",
        hint=f"give model '{wanted}' more instances (instance_group), or break the cycle",
    )


def _resource_deadlock(chain: list[str]) -> ServingError:
    return unavailable(
        f"a request to model '{chain[-1]}' would deadlock: the resources that it needs to run are held by models "
        f"that wait for it ({' -> '.join(chain)})",
        hint="raise --rate-limit-resource, or let these models use different resources",
    )
