"""A load that runs: what it tells is taken, the server is looked at, progress is told, and it is ended."""

import time
from dataclasses import dataclass
from enum import Enum

from charonia.perf.api import Progress, RunSettings, Stop, Tick
from charonia.perf.ledger import Ledger, Recent
from charonia.perf.messages import Begin
from charonia.perf.observer import Observer
from charonia.perf.pool import Pool
from charonia.results.records import LoadLevel

TICK_S = 0.25
"""Time between two progress events."""

DRAIN_S = 5.0
"""How long answers are waited for when a level has ended; an overloaded server works off its queue meanwhile."""

LISTEN_S = 0.05


class Interruption(Enum):
    """Why waiting ended before its time."""

    STOPPED = "stopped"
    """The user wants the end."""
    LOST = "lost"
    """The server has gone."""
    FINISHED = "finished"
    """All there was to send was sent and has ended."""


@dataclass(frozen=True, slots=True)
class Context:
    """What all levels of a run have in common.

    Attributes:
        pool: Processes that send load.
        observer: Looks at the server.
        settings: The run.
        batch_size: Items of a request.
        progress: Is told what happens.
        stop: A wish to end.
    """

    pool: Pool
    observer: Observer
    settings: RunSettings
    batch_size: int
    progress: Progress
    stop: Stop


class RunningLoad:
    """One load, from its begin on.

    Args:
        context: What it has in common with others.
        level: The load.
        request_count: Requests to send; 0 for no end.

    Attributes:
        ledger: All that ended so far.
        begin_ns: Monotonic time of the begin.
        level: The load.
        most_in_flight: Most requests that were on their way at a time.
    """

    def __init__(self, context: Context, level: LoadLevel, request_count: int) -> None:
        self.level = level
        self.ledger = Ledger(context.pool.count, context.settings.keep_requests)
        self.most_in_flight = 0
        self._context = context
        self._recent = Recent()
        self._window = 0
        self._left_s: float | None = None
        context.pool.prepare(Begin(level, request_count))
        context.observer.begin()
        self.begin_ns = context.pool.go()
        self._last_tick = time.monotonic()

    def expect(self, window: int, left_s: float | None) -> None:
        """Say which window runs, and how long the level may still take, for the display."""
        self._window = window
        self._left_s = None if left_s is None else left_s + time.monotonic()

    def wait(self, until_ns: int | None = None) -> Interruption | None:
        """Go on until this time, or without it until all has been sent; return why it ended early."""
        while until_ns is None or self.ledger.until_ns < until_ns:
            self._take()
            if self.ledger.is_finished:
                return Interruption.FINISHED
            if self._context.stop.requested:
                return Interruption.STOPPED
            if self.ledger.is_lost(time.monotonic_ns(), self.begin_ns):
                return Interruption.LOST
            self._context.observer.look()
            self._tick()
        return None

    def end(self) -> None:
        """Stop the load, and wait for what is on its way; a user who wants the end does not wait."""
        if self.ledger.is_finished:
            return
        hurry = self._context.stop.requested or self.ledger.is_lost(time.monotonic_ns(), self.begin_ns)
        self._context.pool.end(0.0 if hurry else DRAIN_S)
        while not self.ledger.is_finished:
            self._take()

    def _take(self) -> None:
        for process, chunk in self._context.pool.listen(LISTEN_S):
            self._recent.add(self.ledger.take(process, chunk))
        self.most_in_flight = max(self.most_in_flight, self.ledger.in_flight)

    def _tick(self) -> None:
        now = time.monotonic()
        passed = now - self._last_tick
        if passed < TICK_S:
            return
        self._last_tick = now
        count, p50_ns, p99_ns = self._recent.take()
        event = Tick(
            level=self.level,
            elapsed_s=now - self.begin_ns / 1e9,
            left_s=None if self._left_s is None else max(self._left_s - now, 0.0),
            rate=count * self._context.batch_size / passed,
            p50_ns=p50_ns,
            p99_ns=p99_ns,
            in_flight=self.ledger.in_flight,
            error_count=self.ledger.error_count,
            window=self._window,
            window_count_max=self._context.settings.measure.trials_max if self._window else 0,
        )
        self._context.progress(event)
