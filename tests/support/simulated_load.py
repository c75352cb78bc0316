"""A load that was never sent: levels of the load generator in simulated time, the same on every machine."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from charonia.client.sync_client import Client
from charonia.tools.perf import samples
from charonia.tools.perf.api import LoadPlan, MeasuredTarget, MeasurePlan, Progress, RunSettings, silent
from charonia.tools.perf.level import Context, measure
from charonia.tools.perf.observer import Observer
from charonia.tools.perf.pool import PrepareLoad, WorkerPool
from charonia.tools.perf.samples import Chunk
from charonia.tools.results.records import LevelResult, LoadLevel

Times = NDArray[np.int64]

BEGIN_NS = 1_000_000_000
"""When a simulated level begins: soon after the machine started, so that who falls silent has long been silent."""

STEP_NS = 50_000_000
"""Simulated time between two messages of the process that would send load."""


@dataclass(frozen=True)
class Traffic:
    """What becomes of a level's requests. Times are nanoseconds from its begin, one for each request, ascending.

    Attributes:
        done_ns: When each ends, in any order.
        is_open: Whether requests are sent at planned times.
        sent_ns: When each is sent, where that is not when it is to be.
        failed: Which of them fail, none where it is left out.
    """

    intended_ns: Times
    done_ns: Times
    is_open: bool = False
    sent_ns: Times | None = None
    failed: NDArray[np.bool_] | None = None
    kind: str = "UNAVAILABLE"

    def rows(self) -> samples.Rows:
        """Return the requests as a process that sends load tells them."""
        rows = np.zeros((len(self.intended_ns), samples.WIDTH), np.int64)
        rows[:, samples.INTENDED] = BEGIN_NS + self.intended_ns
        rows[:, samples.SENT] = BEGIN_NS + (self.intended_ns if self.sent_ns is None else self.sent_ns)
        rows[:, samples.DONE] = BEGIN_NS + self.done_ns
        rows[:, samples.RESPONSES] = 1
        if self.failed is not None:
            rows[self.failed, samples.OUTCOME] = 1
        return rows


class SimulatedPool(WorkerPool):
    """Stands in for the processes that send load, and says at once what they would say in time.

    Attributes:
        waits_s: How long answers were to be waited for when the load was ended; one number for each time.
    """

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(_settings(MeasurePlan()), cast(Any, None), 0)
        self.waits_s: list[float] = []
        self._traffic = traffic
        self._rows = traffic.rows()
        self._until_ns = BEGIN_NS

    @property
    def count(self) -> int:
        return 1

    def prepare(self, begin: PrepareLoad) -> None:
        """Be ready."""

    def start(self) -> int:
        """Begin at `BEGIN_NS`."""
        return BEGIN_NS

    def listen(self, seconds: float) -> Iterator[tuple[int, Chunk]]:
        """Yield what happens in the next `STEP_NS`, or in the time that is waited for answers."""
        from_ns = self._until_ns
        self._until_ns += int(self.waits_s[-1] * 1e9) if self.waits_s else STEP_NS
        yield 0, self._chunk(from_ns)

    def end(self, wait_s: float) -> None:
        self.waits_s.append(wait_s)
        self._rows = self._rows[self._rows[:, samples.SENT] < self._until_ns]

    def _chunk(self, from_ns: int) -> Chunk:
        rows = self._rows
        sent = rows[(rows[:, samples.SENT] >= from_ns) & (rows[:, samples.SENT] < self._until_ns)]
        ended = samples.joined([samples.ended_within(rows, from_ns, self._until_ns)])
        left = int(np.count_nonzero(rows[:, samples.DONE] >= self._until_ns))
        unsent = int(np.count_nonzero(rows[:, samples.SENT] >= self._until_ns))
        plan = np.ascontiguousarray(sent[:, [samples.INTENDED, samples.SENT]])
        return Chunk(
            until_ns=self._until_ns,
            rows=ended.tobytes(),
            sent=plan.tobytes() if self._traffic.is_open else b"",
            in_flight=left - unsent,
            busy_ns=0,
            kinds={1: self._traffic.kind},
            messages=((1, "no luck today"),) if np.any(ended[:, samples.OUTCOME]) else (),
            finished=bool(self.waits_s) or not left,
        )


def simulated_level(
    level: LoadLevel,
    pool: SimulatedPool,
    plan: MeasurePlan,
    progress: Progress = silent,
    stop: threading.Event | None = None,
) -> LevelResult:
    """Measure a level whose requests fare as the pool's do, without a server, a process or a pause.

    Args:
        pool: Says what becomes of its requests; enough of them for the time that the plan takes.
    """
    settings = _settings(plan)
    observer = Observer(cast(Client, None), settings, [], has_statistics=False, processes=None)
    return measure(Context(pool, observer, settings, 1, progress, stop or threading.Event()), level)


def _settings(plan: MeasurePlan) -> RunSettings:
    return RunSettings(MeasuredTarget("http://127.0.0.1:1", "m"), LoadPlan(), plan)
