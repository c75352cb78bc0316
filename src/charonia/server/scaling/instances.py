"""The instances of one model version whose number follows the load: carries out the decisions of the rule.

An added instance gets requests when it is created and warmed up. Only an idle instance is closed: it first returns its
slots, so no request waits for it, and closes in the background.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from charonia.clock import now_ns
from charonia.core.errors import ServingError
from charonia.server.execution.executor import Executor
from charonia.server.execution.runner import ModelRunner
from charonia.server.machine.gauges import CpuTimes
from charonia.server.metrics.prometheus import InstanceCount
from charonia.server.scaling.rule import (
    SAMPLE_NS,
    Change,
    ChangeReason,
    Demand,
    Headroom,
    InstanceRule,
    InstanceSample,
    idle_cores,
    obstacle,
    threads_of,
)

_log = logging.getLogger(__name__)

MakeInstance = Callable[[int, int], Awaitable[Executor]]
"""Creates the instance with this number and number of threads, and warms it up. Raises ServingError."""


class ScaledInstances:
    """The instances of one model version.

    Args:
        runner: Runs them.
        rule: Decides their number.
        make: Makes one.
        demand: Returns what one more takes.
        threads: Threads that each of the first ones may use.
    """

    def __init__(
        self, runner: ModelRunner, rule: InstanceRule, make: MakeInstance, demand: Callable[[], Demand], threads: int
    ) -> None:
        self.rule = rule
        self._runner = runner
        self._make = make
        self._demand = demand
        self._threads = threads
        self._starting: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._is_over = False

    @property
    def count(self) -> int:
        return len(self._runner.instances)

    def counts(self) -> InstanceCount:
        """Return the bounds of their number and its changes."""
        bounds, changes = self.rule.bounds, self.rule.changes
        return InstanceCount(bounds.least, bounds.most, {reason.value: changes[reason] for reason in ChangeReason})

    def check(self, room: Callable[[], Headroom]) -> bool:
        """Add an instance or close one, if it is time to; return whether one is being added from now on.

        Args:
            room: Returns the free capacity of the machine; called only while requests wait.
        """
        if self._is_over:
            return False
        now, free = now_ns(), len(self._runner.free_instances())
        waited = 0 if free else self._runner.waited_ns(now)
        left = room() if waited else Headroom(0)
        reason = obstacle(left, self._instance_demand()) if waited else ""
        change = self.rule.decide(InstanceSample(self.count, free, waited, reason), now)
        if change is Change.ADD:
            self._starting = asyncio.create_task(self._add(threads_of(left.idle_cores, self._threads)))
        elif change is Change.CLOSE:
            self._close()
        return change is Change.ADD

    async def aclose(self) -> None:
        """Stop, and abandon an instance that is being created. The others belong to the runner."""
        self._is_over = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._closing:
            await asyncio.wait(self._closing)

    def _instance_demand(self) -> Demand:
        return replace(self._demand(), on_event_loop=self._runner.runs_in_place)

    async def _add(self, threads: int) -> None:
        runner, config = self._runner, self._runner.config
        number = next(n for n in range(self.rule.bounds.most) if n not in runner.instances)
        began_ns = now_ns()
        try:
            executor = await self._make(number, threads)
        except Exception as error:
            reason = error.message if isinstance(error, ServingError) else f"{type(error).__name__}: {error}"
            self.rule.failed(reason, now_ns())
            _log.warning("'%s' version %s: one more instance failed to start: %s", config.name, runner.version, reason)
            return
        finally:
            self._starting = None
        runner.add_instance(number, executor)
        self.rule.started(now_ns() - began_ns, now_ns())
        _log.info("'%s' version %s: %s", config.name, runner.version, self.rule.explanation(now_ns()))

    def _close(self) -> None:
        executor = self._runner.remove_instance()
        if executor is None:  # a request has just arrived: the rule decides again later
            return
        self.rule.closed(now_ns())
        _log.info(
            "'%s' version %s: %s", self._runner.config.name, self._runner.version, self.rule.explanation(now_ns())
        )
        task = asyncio.create_task(executor.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


MEASURE_NS = 1_000_000_000
"""Time over which the use of cores is measured."""


class InstanceScaler:
    """Adds and closes instances.

    Args:
        models: Returns the versions whose number of instances follows the load.
        workers_s: Returns the CPU time of all workers so far, in seconds.
        room: Returns the cores that the server may use, and free memory; `idle_cores` is filled in.
    """

    def __init__(
        self,
        models: Callable[[], Sequence[ScaledInstances]],
        workers_s: Callable[[], float],
        room: Callable[[], Headroom],
    ) -> None:
        self._models = models
        self._workers_s = workers_s
        self._headroom = room
        self._times: CpuTimes | None = None
        self._measured_ns = 0
        self._idle_cores = 0.0

    async def run(self) -> None:
        """Look at all models periodically, until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_NS / 1e9)
            try:
                self.check()
            except Exception:  # a fault of ours must not end scaling
                _log.exception("the check of the instances of models failed")

    def check(self) -> None:
        """Look at all models now."""
        models = self._models()
        if not models:
            self._times = None
            return
        self._measure()
        for each in models:
            if each.check(self._room_now):
                self._idle_cores = max(0.0, self._idle_cores - 1)  # until the next measurement

    def _room_now(self) -> Headroom:
        return replace(self._headroom(), idle_cores=self._idle_cores)

    def _measure(self) -> None:
        now = now_ns()
        if self._times is not None and now - self._measured_ns < MEASURE_NS:
            return
        times = CpuTimes.read(self._workers_s())
        if self._times is not None:
            own, others = times.used_since(self._times, (now - self._measured_ns) / 1e9)
            self._idle_cores = idle_cores(self._headroom().cores, os.cpu_count() or 1, own, others)
        self._times, self._measured_ns = times, now
