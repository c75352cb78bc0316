"""Executors: each runs the batches of one instance.

An executor takes a batch (`run`) and reports back through `batch.executed` or, for asynchronous instances, through the
batch as its `BatchSink`. Each blocking instance has a thread. If a model computes for microseconds only, handing a
batch to the thread and back costs more than the model, so the executor runs it in place, on the event loop, as long as
executions stay short (`server.scheduling.in_place`).
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import ClassVar, Protocol

from charonia.busy_poll import BusyPoll
from charonia.clock import now_ns
from charonia.core.errors import ServingError, internal
from charonia.core.native import mypyc_attr
from charonia.core.request import InferRequest
from charonia.server.backends.api import AsyncInstance, BatchSink, BlockingInstance, Execution, Placement, Restartable
from charonia.server.closing import close_safely
from charonia.server.machine.cores import bind_thread
from charonia.server.scheduling.in_place import HELD_UP_NS, InPlaceRule, ShortRequests
from charonia.server.scheduling.slots import CAPACITY_MAX

Usage = tuple[int, int, int]
"""CPU time of a thread in ns, and the numbers of its voluntary and involuntary context switches."""

if sys.platform == "linux":
    import resource

    def usage() -> Usage:
        """Return the usage of the calling thread since its start. Costs about a microsecond."""
        used = resource.getrusage(resource.RUSAGE_THREAD)  # its times are as of the last tick, up to 10 ms ago
        return time.thread_time_ns(), used.ru_nvcsw, used.ru_nivcsw

else:

    def usage() -> Usage:
        """Return the CPU time of the calling thread, and zeros: this system does not count switches by thread."""
        return time.thread_time_ns(), 0, 0


def used_since(before: Usage) -> tuple[int, bool]:
    """Return the CPU time of this thread since then, and whether it waited more often than it was pre-empted."""
    cpu_ns, waited, taken = usage()
    return cpu_ns - before[0], waited - before[1] > taken - before[2]


class ExecutableBatch(BatchSink, Protocol):
    """A batch, as an executor sees it."""

    requests: Sequence[InferRequest]

    def executed(self, execution: Execution | ServingError, start_ns: int, end_ns: int) -> None:
        """The batch ran from `start_ns` to `end_ns`. Called in the thread of the event loop."""


def execute(instance: BlockingInstance, requests: Sequence[InferRequest]) -> Execution | ServingError:
    """Run a batch on a blocking instance; an exception other than `ServingError` becomes an INTERNAL error."""
    try:
        execution = instance.execute(requests)
    except ServingError as error:
        return error
    except Exception as fault:  # a fault of a backend must fail its batch, not its executor
        return _model_failed(fault)
    if len(execution.results) != len(requests):
        return internal(f"the backend answered {len(execution.results)} of {len(requests)} requests of a batch")
    return execution


@mypyc_attr(allow_interpreted_subclasses=True)
class SharedExecutor:
    """Base of executors: runners may share one, while the next replaces the first.

    Attributes:
        placement: Placement of the instance.
        users: Runners that have it.
    """

    placement: Placement
    users = 1

    def share(self) -> None:
        """One more runner has it, and closes it when it ends."""
        self.users += 1

    async def aclose(self) -> None:
        """A runner needs it no longer; the last one closes the instance. A failure of that is logged."""
        self.users -= 1
        if not self.users:
            await close_safely(self._end(), f"instance '{self.placement.name}'")

    async def _end(self) -> None:
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockingExecutor(SharedExecutor):
    """Runs the batches of a blocking instance: in a thread, or in place while that is faster.

    A runner gives it one batch at a time: the thread gets the next one without delay. While it is shared, all batches
    run in the thread, one after the other.

    Attributes:
        rule: Decides whether the next batch runs in place.
        requests: Measurements of requests in the thread.
    """

    capacity_max = 1

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
        self.rule = InPlaceRule(is_bound=bool(placement.cores))
        self.requests = ShortRequests()
        self._queue: SimpleQueue[ExecutableBatch | None] = SimpleQueue()
        self._closed: asyncio.Future[None] = loop.create_future()
        try:
            threading.Thread(target=self._work, name=placement.name, daemon=True).start()
        except RuntimeError:  # the limit of threads is reached
            instance.close()
            raise

    def __repr__(self) -> str:
        where = "on the event loop" if self.rule.in_place else "in its thread"
        return f"<BlockingExecutor {self.placement.name} [runs {where} | {self._queue.qsize()} in line]>"

    def run(self, batch: ExecutableBatch) -> None:
        """Run the batch in place or hand it to the thread."""
        if self.rule.in_place:
            batch.executed(*self.run_in_place(batch.requests))
        else:
            if self._busy_poll is not None:
                self._busy_poll.thread_runs()
            self._queue.put(batch)

    def run_in_place(self, requests: Sequence[InferRequest]) -> tuple[Execution | ServingError, int, int]:
        """Run a batch now, as the rule allows; return what came of it, when it began and when it ended."""
        rule = self.rule
        before = usage() if rule.is_watched else None
        start = now_ns()
        execution = execute(self._instance, requests)
        end = now_ns()
        count = len(requests) if rule.counts_requests else 1
        took_ns = (end - start) // count
        if before is None or took_ns <= HELD_UP_NS:
            rule.ran_in_place(took_ns, 0)
        else:
            cpu_ns, has_waited = used_since(before)
            rule.ran_in_place(took_ns, cpu_ns // count, has_waited=has_waited)
        return execution, start, end

    def cancel(self, batch: ExecutableBatch, index: int) -> None:
        """Do nothing: a running computation cannot be stopped."""

    def keep_warm(self, batches: Sequence[Sequence[InferRequest]]) -> None:
        """Do nothing: an instance in this process is never restarted."""

    def when_lost(self, lost: Callable[[], None]) -> None:
        """Do nothing: an instance in this process is never restarted."""

    def share(self) -> None:
        """One more runner has it: from now on, all batches run in the thread."""
        super().share()
        self.rule = InPlaceRule(is_bound=True)

    async def aclose(self) -> None:
        """A runner needs it no longer; with one left, batches may run in place again."""
        await super().aclose()
        if self.users == 1:
            self.rule = InPlaceRule(is_bound=bool(self.placement.cores))

    async def _end(self) -> None:
        self._queue.put(None)  # its thread closes the instance: another one cannot always be started
        await self._closed

    def _work(self) -> None:
        if self.placement.cores:
            bind_thread(self.placement.cores)
        cpu_end = time.thread_time_ns()
        while (batch := self._queue.get()) is not None:
            start, cpu_start = now_ns(), time.thread_time_ns()
            passed_on_ns = cpu_start - cpu_end
            execution = execute(self._instance, batch.requests)
            end, cpu_end = now_ns(), time.thread_time_ns()
            if not self._report(self._done, batch, execution, start, end, cpu_end - cpu_start, passed_on_ns):
                return
            del batch, execution
        failure: Exception | None = None
        try:
            self._instance.close()
        except Exception as fault:
            failure = fault
        self._report(self._has_closed, failure)

    def _has_closed(self, failure: Exception | None) -> None:
        if self._closed.done():  # nothing waits for it any more
            return
        if failure is None:
            self._closed.set_result(None)
        else:
            self._closed.set_exception(failure)

    def _done(
        self,
        batch: ExecutableBatch,
        execution: Execution | ServingError,
        start_ns: int,
        end_ns: int,
        cpu_ns: int,
        passed_on_ns: int,
    ) -> None:
        self.rule.ran_in_thread(end_ns - start_ns, cpu_ns, passed_on_ns)
        self.requests.ran(len(batch.requests), end_ns - start_ns, cpu_ns)
        if self._busy_poll is not None:
            self._busy_poll.thread_done()
        batch.executed(execution, start_ns, end_ns)

    def _report(self, callback: Callable[..., None], *args: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop was closed: the batch exceeded the shutdown's time limit
            return False
        return True


class AsyncExecutor(SharedExecutor):
    """Runs the batches of an asynchronous instance, which computes in another process.

    It has several concurrent batches while executions are short: with one, it would be idle while messages travel.
    """

    capacity_max: ClassVar[int] = CAPACITY_MAX

    def __init__(self, instance: AsyncInstance, placement: Placement) -> None:
        self.placement = placement
        self._instance = instance

    def __repr__(self) -> str:
        return f"<AsyncExecutor {self.placement.name} [{self._instance!r}]>"

    def run(self, batch: ExecutableBatch) -> None:
        """Start the batch; it is its own sink."""
        try:
            self._instance.start(batch.requests, batch)
        except Exception as error:  # a fault of a backend must fail its batch, not its executor
            now = now_ns()
            batch.finish(now, now, _model_failed(error))

    def cancel(self, batch: ExecutableBatch, index: int) -> None:
        self._instance.cancel(batch, index)

    def keep_warm(self, batches: Sequence[Sequence[InferRequest]]) -> None:
        """Forward to the instance, if it can be restarted."""
        if isinstance(self._instance, Restartable):
            self._instance.keep_warm(batches)

    def when_lost(self, lost: Callable[[], None]) -> None:
        """Forward to the instance, if it can be restarted."""
        if isinstance(self._instance, Restartable):
            self._instance.when_lost(lost)

    async def _end(self) -> None:
        await self._instance.aclose()


Executor = BlockingExecutor | AsyncExecutor


def make_executor(
    instance: BlockingInstance | AsyncInstance,
    placement: Placement,
    loop: asyncio.AbstractEventLoop,
    busy_poll: BusyPoll | None = None,
) -> Executor:
    """Return the executor for a kind of instance."""
    if isinstance(instance, BlockingInstance):
        return BlockingExecutor(instance, placement, loop, busy_poll)
    return AsyncExecutor(instance, placement)


def _model_failed(error: Exception) -> ServingError:
    return internal(f"the model failed: {type(error).__name__}: {error}")
