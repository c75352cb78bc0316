"""Detects deadlocks between models that make requests of one another.

A model that makes a request holds its own instance until it has the answer. When every instance of a model waits, by
whatever detours, for requests that wait for an instance of this model, nothing moves any more. `DeadlockDetector`
refuses the request that would close such a circle, which lets the others go on.

It is told that a batch has begun to make requests (`occupy`) and is over (`vacate`), that a request of a model was
submitted (`submit`), has got an instance (`run`), has left it without its last response (`leave`) and is over (`end`).
It holds neither batches that make no requests, nor requests of clients.

A request can be answered if an instance that could run it, or the one that runs it, can finish; an instance can finish
if all requests that its batch has made can be answered. Before each `submit` that holds for all of them, so only the
new request needs to be looked at. Pure.
"""

from charonia.core.caller import CallFrame
from charonia.core.errors import ServingError, unavailable
from charonia.server.rate_limiter.limiter import Claim


class InstancePool:
    """The instances of one model version.

    Attributes:
        model: Name of the model.
        size: Number of instances.
        resources: What they hold while they run, None where that is nothing.
        busy: The batch that makes requests on an instance, by number of the instance; other instances are not in here.
    """

    __slots__ = ("busy", "model", "resources", "size")

    def __init__(self, model: str, size: int, resources: Claim | None = None) -> None:
        self.model = model
        self.size = size
        self.resources = resources
        self.busy: dict[int, CallingBatch] = {}

    def is_blocked_by(self, stuck: "set[CallingBatch]") -> bool:
        """Whether none of the instances can take a request while these batches do not finish."""
        if self.resources is None:
            return len(self.busy) == self.size and all(caller in stuck for caller in self.busy.values())
        holders = [(c.pool.resources, c.instance) for c in stuck if c.pool.resources is not None]
        return all(
            self.busy.get(instance) in stuck or self.resources.is_blocked_by(instance, holders)
            for instance in range(self.size)
        )


class CallingBatch:
    """A batch that makes requests and occupies an instance.

    Attributes:
        pool: The instances of its model.
        instance: Number of the one that it occupies.
        requests: Its requests that are not answered.
    """

    __slots__ = ("instance", "pool", "requests")

    def __init__(self, pool: InstancePool, instance: int) -> None:
        self.pool = pool
        self.instance = instance
        self.requests: set[WaitingRequest] = set()


class WaitingRequest:
    """A request that a model made.

    Attributes:
        pool: The instances of the model that it is for.
        instance: Number of the instance that has it, -1 while it waits for one.
        has_left: Whether it has left its instance open: its answer depends on no instance any more.
        waiter: The batch that waits for it, None where that is over or occupies nothing.
    """

    __slots__ = ("has_left", "instance", "pool", "waiter")

    def __init__(self, pool: InstancePool, waiter: CallingBatch | None) -> None:
        self.pool = pool
        self.instance = -1
        self.has_left = False
        self.waiter = waiter


class DeadlockDetector:
    """Knows which batches wait for which requests, in the whole server."""

    def __init__(self) -> None:
        self._callers: dict[CallFrame, CallingBatch] = {}

    def __len__(self) -> int:
        """Number of batches that make requests."""
        return len(self._callers)

    def occupy(self, frame: CallFrame, pool: InstancePool, instance: int) -> None:
        """A batch, known as `frame`, begins to make requests on an instance that runs no other batch."""
        caller = CallingBatch(pool, instance)
        self._callers[frame] = pool.busy[instance] = caller

    def vacate(self, frame: CallFrame) -> None:
        """The batch is over and its instance free. Requests that it made may go on; no batch waits for them."""
        caller = self._callers.pop(frame)
        del caller.pool.busy[caller.instance]
        for request in caller.requests:
            request.waiter = None

    def submit(self, frame: CallFrame, pool: InstancePool) -> WaitingRequest:
        """A model makes a request.

        Args:
            frame: Who makes it. The first one up from there that occupies an instance is the one that waits.
            pool: The instances of the model that it is for.

        Raises:
            ServingError: UNAVAILABLE: it would wait for ever. The message has the chain of models.
        """
        waiter = next((self._callers[f] for f in frame.chain() if f in self._callers), None)
        request = WaitingRequest(pool, waiter)
        if waiter is None:
            return request
        waiter.requests.add(request)
        # Usually there is an instance that waits for nobody, and nothing to look at.
        if len(pool.busy) == pool.size or pool.resources is not None:
            stuck = self._stuck()
            if pool.is_blocked_by(stuck):
                waiter.requests.discard(request)
                raise _deadlock(frame, pool, stuck)
        return request

    def run(self, request: WaitingRequest, instance: int) -> None:
        """The request has got an instance, or a place in its line."""
        request.instance = instance

    def leave(self, request: WaitingRequest) -> None:
        """The request has left its instance without its last response."""
        request.has_left = True

    def end(self, request: WaitingRequest) -> None:
        """The request is answered, or its caller has gone. May be told twice."""
        if request.waiter is not None:
            request.waiter.requests.discard(request)
            request.waiter = None

    def _stuck(self) -> set[CallingBatch]:
        """Return the batches that can never finish, as things stand."""
        stuck = set(self._callers.values())
        is_settled = False
        while not is_settled:
            free = {caller for caller in stuck if not any(_is_stuck(request, stuck) for request in caller.requests)}
            stuck -= free
            is_settled = not free
        return stuck


def _is_stuck(request: WaitingRequest, stuck: set[CallingBatch]) -> bool:
    """Whether a request is never answered while these batches do not finish."""
    if request.has_left:
        return False
    busy = request.pool.busy
    if request.instance >= 0:
        return busy.get(request.instance) in stuck
    return request.pool.is_blocked_by(stuck)


def _deadlock(frame: CallFrame, pool: InstancePool, stuck: set[CallingBatch]) -> ServingError:
    wanted = pool.model
    chain = [*reversed([f.model for f in frame.chain()]), wanted]
    # Where the model is not one of its callers, the circle goes on through those who hold its instances.
    while chain[-1] not in chain[:-1]:
        holder = next((caller for caller in pool.busy.values() if caller in stuck), None)
        if holder is None:
            return _resource_deadlock(chain[: chain.index(wanted) + 1])
        pool = next(request.pool for request in holder.requests if _is_stuck(request, stuck))
        chain.append(pool.model)
    return unavailable(
        f"a request to model '{wanted}' would wait for ever: every instance of it waits for requests that wait for one "
        f"of its instances ({' -> '.join(chain)})",
        hint=f"give model '{wanted}' more instances (instance_group), or break the circle",
    )


def _resource_deadlock(chain: list[str]) -> ServingError:
    return unavailable(
        f"a request to model '{chain[-1]}' would wait for ever: the resources that it needs to run are held by models "
        f"that wait for it ({' -> '.join(chain)})",
        hint="raise --rate-limit-resource, or let these models use different resources",
    )
