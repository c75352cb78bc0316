"""Lanes: one instance and the way its batches are run.

A lane takes one batch at a time (`run`) and reports back by calling `batch.executed` or, for asynchronous instances,
through the batch as its `BatchSink`. Blocking instances get a thread each. Where a model computes in microseconds the
hand-over to the thread and back costs more than the model, so a lane runs it in place on the event loop as long as that
stays short.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from charonia.core.errors import ServingError, internal
from charonia.core.request import InferRequest
from charonia.server.backends.api import AsyncInstance, BatchSink, BlockingInstance, Execution, Placement, Revivable
from charonia.server.execution.busy_poll import BusyPoll
from charonia.server.execution.clock import now_ns
from charonia.server.execution.switches import has_waited, switches
from charonia.server.machine.cores import bind_thread

IN_PLACE_NS_MAX = 100_000
"""An execution at most this long may run on the event loop: about what a hand-over to a thread and back costs."""

IN_PLACE_PROBES = 8
"""Executions in a row that must have been that short before the loop runs them itself."""

IN_PLACE_RETRY_MAX = 4096
"""Most executions in the thread after the loop was held up, before running in place is tried again."""

FORGIVEN_AFTER = 1000
"""Executions on the loop after which one that holds it up is taken for the system's doing, which has given the core to
somebody else, and not for the model's."""

FORGIVEN_NS_MAX = 10_000_000
"""A longer hold-up is never forgiven."""

WAITS_MAX = 2
"""Hold-ups in which the model waited for something, each within `FORGIVEN_AFTER` executions on the loop: then it runs
there again only after `IN_PLACE_RETRY_MAX` executions in the thread in which it computed more than it waited."""

PIPELINE_NS_MAX = 1_000_000
"""An instance in another process is kept supplied ahead of time with batches that together take so long on average."""

PIPELINE_DEPTH = 16
"""Most batches that such an instance has at once, the one that runs included; those of a model share this number."""

PIPELINE_DEPTH_BATCHED = 2
"""Most batches of a model whose scheduler makes batches: the longer requests wait there, the larger their batch."""

HELD_UP_NS = 10 * IN_PLACE_NS_MAX
"""A longer execution on the loop holds it up."""


class LaneBatch(BatchSink, Protocol):
    """What a lane needs of a batch."""

    requests: Sequence[InferRequest]

    def executed(self, execution: Execution | ServingError, start_ns: int, end_ns: int) -> None:
        """The batch was run from `start_ns` to `end_ns`, in the thread of the event loop."""
        ...


class Lane(Protocol):
    """One instance and the way its batches are run."""

    placement: Placement

    @property
    def depth(self) -> int:
        """Batches that the lane may have at once; they run one after the other."""
        ...

    def took(self, duration_ns: int) -> None:
        """Take in how long a batch computed."""
        ...

    def run(self, batch: LaneBatch) -> None:
        """Run the batch; returns at once, or when it is done where it runs in place."""
        ...

    def cancel(self, batch: LaneBatch, index: int) -> None:
        """The caller of request `index` of a batch has gone; the batch runs, or has left the request open."""
        ...

    def limit_depth(self, depth: int) -> None:
        """Take at most so many batches at once from now on."""
        ...

    def keep_warm(self, batches: Sequence[Sequence[InferRequest]]) -> None:
        """Run these batches first whenever the instance has to begin anew."""
        ...

    async def aclose(self) -> None:
        """Close the instance; the lane is idle."""
        ...


class PipelineRule:
    """Decides from measured times how many batches an instance may have at once. Pure.

    A batch that waits in the instance's own line cannot be taken by another instance that becomes free earlier, so this
    is for executions that are over sooner than a free instance could be told of the batch.
    """

    __slots__ = ("_depth_max", "_mean_ns", "depth")

    def __init__(self) -> None:
        self.depth = 1
        self._depth_max = PIPELINE_DEPTH
        self._mean_ns = PIPELINE_NS_MAX

    def limit(self, depth: int) -> None:
        """Have at most so many at once, whatever is measured."""
        self._depth_max = min(depth, self._depth_max)
        self.depth = min(self.depth, self._depth_max)

    def took(self, duration_ns: int) -> None:
        """Take in the duration of an execution."""
        self._mean_ns = mean_ns = self._mean_ns + (duration_ns - self._mean_ns) // 8
        if self.depth < self._depth_max and 2 * self.depth * mean_ns <= PIPELINE_NS_MAX:
            self.depth = min(2 * self.depth, self._depth_max)
        while self.depth > 1 and self.depth * mean_ns > 2 * PIPELINE_NS_MAX:
            self.depth //= 2


class InPlaceRule:
    """Decides from measured times whether the next execution may run on the event loop. Pure.

    In the thread, an execution waits for the interpreter whenever the loop has it. So what counts there is how long the
    thread computes, and that at least one execution was as short by the clock: of a model that waits for something,
    such as a GPU, none is.

    One that waits only sometimes passes. Whether it waited when the loop was held up, or the system took the core away,
    is looked at while `is_watched`: until `FORGIVEN_AFTER` executions on the loop in a row were short. So a model that
    waits more than it computes holds up the loop `WAITS_MAX` times, and stays in the thread.

    Args:
        is_bound: Whether the instance has cores of its own, which are not the loop's: it never may.

    Attributes:
        in_place: Whether it may.
        is_watched: Whether executions on the loop are to be told to `ran_watched`.
    """

    __slots__ = (
        "_balance_ns",
        "_is_bound",
        "_least_ns",
        "_ran",
        "_short",
        "_waits",
        "_wanted",
        "in_place",
        "is_watched",
    )

    def __init__(self, *, is_bound: bool = False) -> None:
        self.in_place = False
        self._is_bound = is_bound
        self._short = 0  # executions in a row that computed for a short time
        self._least_ns = HELD_UP_NS  # the shortest of them by the clock
        self._wanted = IN_PLACE_PROBES
        self._ran = 0  # executions on the loop since it was held up
        self._waits = 0  # hold-ups in which the model waited
        self._balance_ns = (
            0  # what the executions in a row computed, less what those waited that would hold the loop up
        )
        self.is_watched = True

    def ran_in_place(self, duration_ns: int) -> None:
        """Take in the duration of an execution on the loop."""
        self._ran += 1
        if duration_ns <= HELD_UP_NS:
            return
        if self._ran > FORGIVEN_AFTER and duration_ns <= FORGIVEN_NS_MAX:
            self._wanted = IN_PLACE_PROBES
        else:
            self.in_place = False
            self._wanted = min(2 * self._wanted, IN_PLACE_RETRY_MAX)
        self._ran = 0
        self.is_watched = True

    def ran_watched(self, duration_ns: int, *, has_waited: bool) -> None:
        """The same, with whether the thread of the loop waited for something meanwhile."""
        self.ran_in_place(duration_ns)
        if self._ran >= FORGIVEN_AFTER:
            self.is_watched = False
            self._waits = 0
        elif has_waited and duration_ns > HELD_UP_NS:
            self._waits += 1
            if self._waits >= WAITS_MAX:
                self._wanted = IN_PLACE_RETRY_MAX

    def ran_in_thread(self, duration_ns: int, cpu_ns: int) -> None:
        """Take in how long an execution in the thread took by the clock, and how long the thread computed."""
        if cpu_ns > IN_PLACE_NS_MAX:
            self._begin_count()
            return
        self._short += 1
        self._least_ns = min(self._least_ns, duration_ns)
        self._balance_ns += cpu_ns if duration_ns <= HELD_UP_NS else 2 * cpu_ns - duration_ns
        if self._short < self._wanted or self._least_ns > IN_PLACE_NS_MAX or self._is_bound:
            return
        self.in_place = self._waits < WAITS_MAX or self._balance_ns >= 0
        self._begin_count()

    def _begin_count(self) -> None:
        self._short, self._least_ns, self._balance_ns = 0, HELD_UP_NS, 0


def execute(instance: BlockingInstance, requests: Sequence[InferRequest]) -> Execution | ServingError:
    """Run a batch on a blocking instance; a foreign exception becomes an INTERNAL error."""
    try:
        execution = instance.execute(requests)
    except ServingError as error:
        return error
    except Exception as error:  # a backend's own fault must fail its batch, not its lane
        return internal(f"the model failed: {type(error).__name__}: {error}")
    if len(execution.results) != len(requests):
        return internal(f"the backend answered {len(execution.results)} of {len(requests)} requests of a batch")
    return execution


class BlockingLane:
    """A lane of a blocking instance: a thread, or the event loop while that is quicker."""

    def __init__(
        self,
        instance: BlockingInstance,
        placement: Placement,
        loop: asyncio.AbstractEventLoop,
        busy_poll: BusyPoll | None = None,
    ) -> None:
        self.placement = placement
        self._busy_poll = busy_poll
        self._instance = instance
        self._loop = loop
        self._rule = InPlaceRule(is_bound=bool(placement.cores))
        self._queue: SimpleQueue[LaneBatch | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=placement.name, daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """One batch at a time: the thread is told of the next one at once."""
        return 1

    def took(self, duration_ns: int) -> None:
        """Do nothing: what counts here is measured around the call."""

    def run(self, batch: LaneBatch) -> None:
        """Run the batch in place or hand it to the thread."""
        rule = self._rule
        if rule.in_place:
            before = switches() if rule.is_watched else None
            start = now_ns()
            execution = execute(self._instance, batch.requests)
            end = now_ns()
            if before is None:
                rule.ran_in_place(end - start)
            else:
                rule.ran_watched(end - start, has_waited=end - start > HELD_UP_NS and has_waited(before))
            batch.executed(execution, start, end)
        else:
            if self._busy_poll is not None:
                self._busy_poll.thread_runs()
            self._queue.put(batch)

    def cancel(self, batch: LaneBatch, index: int) -> None:
        """Do nothing: a computation in a library cannot be stopped."""

    def limit_depth(self, depth: int) -> None:
        """Do nothing: there is only ever one."""

    def keep_warm(self, batches: Sequence[Sequence[InferRequest]]) -> None:
        """Do nothing: an instance in this process does not begin anew."""

    async def aclose(self) -> None:
        """End the thread and close the instance."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._instance.close)

    def _work(self) -> None:
        if self.placement.cores:
            bind_thread(self.placement.cores)
        while (batch := self._queue.get()) is not None:
            start, cpu_start = now_ns(), time.thread_time_ns()
            execution = execute(self._instance, batch.requests)
            end, cpu_ns = now_ns(), time.thread_time_ns() - cpu_start
            if not self._report(self._done, batch, execution, start, end, cpu_ns):
                return
            del batch, execution

    def _done(
        self, batch: LaneBatch, execution: Execution | ServingError, start_ns: int, end_ns: int, cpu_ns: int
    ) -> None:
        self._rule.ran_in_thread(end_ns - start_ns, cpu_ns)
        if self._busy_poll is not None:
            self._busy_poll.thread_done()
        batch.executed(execution, start_ns, end_ns)

    def _report(self, callback: Callable[..., None], *args: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop was closed under a batch that outlived the shutdown's time limit
            return False
        return True


class AsyncLane:
    """A lane of an instance that computes elsewhere."""

    def __init__(self, instance: AsyncInstance, placement: Placement) -> None:
        self.placement = placement
        self._instance = instance
        self._rule = PipelineRule()

    @property
    def depth(self) -> int:
        """Several while executions are short: the way to another process and back would leave it idle."""
        return self._rule.depth

    def took(self, duration_ns: int) -> None:
        """Take in how long a batch computed."""
        self._rule.took(duration_ns)

    def run(self, batch: LaneBatch) -> None:
        """Start the batch; it is its own sink."""
        self._instance.start(batch.requests, batch)

    def cancel(self, batch: LaneBatch, index: int) -> None:
        """Tell the instance."""
        self._instance.cancel(batch, index)

    def limit_depth(self, depth: int) -> None:
        """Take at most so many batches at once from now on."""
        self._rule.limit(depth)

    def keep_warm(self, batches: Sequence[Sequence[InferRequest]]) -> None:
        """Tell the instance, where it can begin anew."""
        if isinstance(self._instance, Revivable):
            self._instance.keep_warm(batches)

    async def aclose(self) -> None:
        """Close the instance."""
        await self._instance.aclose()


def make_lane(
    instance: BlockingInstance | AsyncInstance,
    placement: Placement,
    loop: asyncio.AbstractEventLoop,
    busy_poll: BusyPoll | None = None,
) -> BlockingLane | AsyncLane:
    """Return the lane that fits the form of the instance."""
    if isinstance(instance, BlockingInstance):
        return BlockingLane(instance, placement, loop, busy_poll)
    return AsyncLane(instance, placement)
