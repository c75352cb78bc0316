"""Requests that models make of one another: which instances wait for what, so that none waits for ever.

A model that calls another one holds its own instance until it has the answer. When every instance of a model waits, by
whatever detours, for requests that wait for an instance of this model, nothing moves any more. `CallGraph` sees that
coming: the request that would close such a circle is refused, which lets the others go on.

It is told four things: that a batch has begun to make calls (`occupy`) and is over (`vacate`), that a request of a
model was submitted (`submit`), has got an instance (`run`), has left it without its last response (`leave`) and is over
(`end`). Batches that call nobody, and requests of clients, are not in it.

A request can be answered if an instance that could run it, or the one that runs it, can finish; an instance can finish
if all requests that its batch has made can be answered. Before each `submit` that holds for all of them, so only the
new request needs to be looked at. Pure.
"""

from charonia.core.caller import CallFrame
from charonia.core.errors import ServingError, unavailable
from charonia.server.rate_limiter.limiter import Claim


class Pool:
    """The instances of one model version.

    Attributes:
        model: Name of the model.
        size: Number of instances.
        resources: What they hold while they run, None where that is nothing.
        busy: The batch that makes calls on an instance, by the instance's number; other instances are not in here.
    """

    __slots__ = ("busy", "model", "resources", "size")

    def __init__(self, model: str, size: int, resources: Claim | None = None) -> None:
        self.model = model
        self.size = size
        self.resources = resources
        self.busy: dict[int, Caller] = {}

    def is_closed(self, stuck: "set[Caller]") -> bool:
        """Whether none of the instances can take a request while these batches do not finish."""
        if self.resources is None:
            return len(self.busy) == self.size and all(caller in stuck for caller in self.busy.values())
        holders = [(c.pool.resources, c.lane) for c in stuck if c.pool.resources is not None]
        return all(
            self.busy.get(lane) in stuck or self.resources.is_out_of_reach(lane, holders) for lane in range(self.size)
        )


class Caller:
    """A batch that makes calls and occupies an instance.

    Attributes:
        pool: The instances of its model.
        lane: Number of the one that it occupies.
        calls: Its requests that are not answered.
    """

    __slots__ = ("calls", "lane", "pool")

    def __init__(self, pool: Pool, lane: int) -> None:
        self.pool = pool
        self.lane = lane
        self.calls: set[Call] = set()


class Call:
    """A request that a model made.

    Attributes:
        pool: The instances of the model that it is for.
        lane: Number of the instance that has it, -1 while it waits for one.
        has_left: Whether it has left its instance open: its answer depends on no instance any more.
        waiter: The batch that waits for it, None where that is over or occupies nothing.
    """

    __slots__ = ("has_left", "lane", "pool", "waiter")

    def __init__(self, pool: Pool, waiter: Caller | None) -> None:
        self.pool = pool
        self.lane = -1
        self.has_left = False
        self.waiter = waiter


class CallGraph:
    """Who waits for whom, in the whole server."""

    def __init__(self) -> None:
        self._callers: dict[CallFrame, Caller] = {}

    def __len__(self) -> int:
        """Number of batches that make calls."""
        return len(self._callers)

    def occupy(self, frame: CallFrame, pool: Pool, lane: int) -> None:
        """A batch, known as `frame`, begins to make calls on an instance that runs no other batch."""
        caller = Caller(pool, lane)
        self._callers[frame] = pool.busy[lane] = caller

    def vacate(self, frame: CallFrame) -> None:
        """The batch is over and its instance free. Requests that it made may go on; nobody waits for them."""
        caller = self._callers.pop(frame)
        del caller.pool.busy[caller.lane]
        for call in caller.calls:
            call.waiter = None

    def submit(self, frame: CallFrame, pool: Pool) -> Call:
        """A model makes a request.

        Args:
            frame: Who makes it. The first one up from there that occupies an instance is who waits.
            pool: The instances of the model that it is for.

        Raises:
            ServingError: UNAVAILABLE: it would wait for ever. The message has the chain of models.
        """
        waiter = next((self._callers[f] for f in frame.chain() if f in self._callers), None)
        call = Call(pool, waiter)
        if waiter is None:
            return call
        waiter.calls.add(call)
        # Usually there is an instance that waits for nobody, and nothing to look at.
        if len(pool.busy) == pool.size or pool.resources is not None:
            stuck = self._stuck()
            if pool.is_closed(stuck):
                waiter.calls.discard(call)
                raise _would_wait_for_ever(frame, pool, stuck)
        return call

    def run(self, call: Call, lane: int) -> None:
        """The request has got an instance, or a place in its line."""
        call.lane = lane

    def leave(self, call: Call) -> None:
        """The request has left its instance without its last response."""
        call.has_left = True

    def end(self, call: Call) -> None:
        """The request is answered, or nobody waits for it any more. May be told twice."""
        if call.waiter is not None:
            call.waiter.calls.discard(call)
            call.waiter = None

    def _stuck(self) -> set[Caller]:
        """Return the batches that can never finish, as things stand."""
        stuck = set(self._callers.values())
        is_settled = False
        while not is_settled:
            free = {caller for caller in stuck if not any(_waits_in_vain(call, stuck) for call in caller.calls)}
            stuck -= free
            is_settled = not free
        return stuck


def _waits_in_vain(call: Call, stuck: set[Caller]) -> bool:
    """Whether a request is never answered while these batches do not finish."""
    if call.has_left:
        return False
    busy = call.pool.busy
    if call.lane >= 0:
        return busy.get(call.lane) in stuck
    return call.pool.is_closed(stuck)


def _would_wait_for_ever(frame: CallFrame, pool: Pool, stuck: set[Caller]) -> ServingError:
    wanted = pool.model
    chain = [*reversed([f.model for f in frame.chain()]), wanted]
    # Where the model is not one of its callers, the circle goes on through those who hold its instances.
    while chain[-1] not in chain[:-1]:
        holder = next((caller for caller in pool.busy.values() if caller in stuck), None)
        if holder is None:
            return _would_wait_for_resources(chain[: chain.index(wanted) + 1])
        pool = next(call.pool for call in holder.calls if _waits_in_vain(call, stuck))
        chain.append(pool.model)
    return unavailable(
        f"a request to model '{wanted}' would wait for ever: every instance of it waits for requests that wait for one "
        f"of its instances ({' -> '.join(chain)})",
        hint=f"give model '{wanted}' more instances (instance_group), or break the circle",
    )


def _would_wait_for_resources(chain: list[str]) -> ServingError:
    return unavailable(
        f"a request to model '{chain[-1]}' would wait for ever: the resources that it needs to run are held by models "
        f"that wait for it ({' -> '.join(chain)})",
        hint="raise --rate-limit-resource, or let these models use different resources",
    )
