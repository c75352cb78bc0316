"""Measures one level: runs the load, analyses it in windows, and stops once it is settled or cannot settle.

While a load runs, it collects the reports of the workers, observes the server and reports progress.
"""

import threading
import time
from dataclasses import dataclass, replace

from charonia.tools.perf import intervals, outcome
from charonia.tools.perf.api import LevelTick, MeasurementMode, Progress, RunSettings, WindowDone
from charonia.tools.perf.language.replies import ReplyReader
from charonia.tools.perf.ledger import Ledger, Recent
from charonia.tools.perf.observer import Observer
from charonia.tools.perf.outcome import LevelObservations, ResultSpan, clamped, level_backlog, level_result, relative
from charonia.tools.perf.pool import PrepareLoad, WorkerPool
from charonia.tools.perf.samples import ended_within
from charonia.tools.results.records import LevelResult, LoadLevel, LoadMode, Verdict, Window

TICK_S = 0.25
"""Time between two progress events."""

DRAIN_S = 5.0
"""Time to wait for answers at the end of a level, in which an overloaded server can drain its queue."""

LISTEN_S = 0.05


@dataclass(frozen=True, slots=True)
class Context:
    """What all levels of a run share."""

    pool: WorkerPool
    observer: Observer
    settings: RunSettings
    batch_size: int
    progress: Progress
    stop: threading.Event
    replies: ReplyReader | None = None


class RunningLoad:
    """A load in progress.

    Args:
        request_count: Requests to send; 0 for no limit.
    """

    def __init__(self, context: Context, level: LoadLevel, request_count: int) -> None:
        self.level = level
        self.ledger = Ledger(context.pool.count, context.settings.keep_requests, context.replies)
        self.most_in_flight = 0
        self._context = context
        self._recent = Recent()
        self._window = 0
        self._left_s: float | None = None
        context.pool.prepare(PrepareLoad(level, request_count))
        context.observer.begin()
        self.begin_ns = context.pool.start()
        self._last_tick = time.monotonic()

    def expect(self, window: int, left_s: float | None) -> None:
        """Set the number of the current window and the time left, for the progress display."""
        self._window = window
        self._left_s = None if left_s is None else left_s + time.monotonic()

    def wait(self, until_ns: int | None = None) -> Verdict | None:
        """Wait until this time, or until all requests have ended; return the verdict that ended the wait early."""
        while until_ns is None or self.ledger.until_ns < until_ns:
            self._take()
            if self.ledger.is_finished:
                return Verdict.COMPLETE
            if self._context.stop.is_set():
                return Verdict.INTERRUPTED
            if self.ledger.is_lost(time.monotonic_ns(), self.begin_ns):
                return Verdict.SERVER_LOST
            self._context.observer.sample_due()
            self._tick()
        return None

    def end(self) -> None:
        """Stop the load, and wait for requests in flight, unless the user requested a stop."""
        if self.ledger.is_finished:
            return
        hurry = self._context.stop.is_set() or self.ledger.is_lost(time.monotonic_ns(), self.begin_ns)
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
        event = LevelTick(
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


_PARTIAL_NS = 200_000_000
_COUNT_STEP_NS = 1_000_000_000
_COUNT_WINDOW_NS_MAX = 60_000_000_000
_OVERLOAD_NS = 2_000_000_000

_REASONS = {
    Verdict.INTERRUPTED: "The run was stopped before the measurement of this level was complete.",
    Verdict.SERVER_LOST: "The server stopped responding and accepts no connections.",
    Verdict.COMPLETE: "All requests were sent and have ended.",
}
_OVERLOADED = "A backlog builds up: the server completes fewer requests than are sent, so response times keep growing."


def measure(context: Context, level: LoadLevel) -> LevelResult:
    """Measure one level."""
    plan = context.settings.measure
    if plan.warmup_request_count:
        warmup = RunningLoad(context, level, plan.warmup_request_count)
        warmup.wait()
        warmup.end()
    load = RunningLoad(context, level, plan.request_count)
    if plan.request_count or level.mode is LoadMode.PERIODIC:
        verdict = load.wait() or Verdict.COMPLETE
        span = ResultSpan(load.begin_ns, load.begin_ns, load.ledger.until_ns, (), verdict, (_REASONS[verdict],))
    elif plan.mode is MeasurementMode.ADAPTIVE:
        span = _adaptively(context, load)
    else:
        span = _Windows(context, load).measure()
    context.observer.mark()
    load.end()
    if span.verdict is Verdict.COMPLETE:
        low, high = clamped(load.ledger.rows, span.used_begin_ns, span.used_end_ns)
        span = replace(span, used_begin_ns=low, used_end_ns=high)
        span = replace(span, windows=(_used_window(context, load, low, high),))
    return _result(context, load, _judged(load, span))


def _adaptively(context: Context, load: RunningLoad) -> ResultSpan:
    """Analyse repeatedly until the intervals are tight."""
    plan = context.settings.measure
    decision = intervals.AdaptiveStop(plan, load.begin_ns)
    load.expect(0, plan.time_max_s)
    at_ns = load.begin_ns
    while True:
        at_ns = decision.next_ns(at_ns)
        interruption = load.wait(at_ns)
        now_ns = _end_ns(load, interruption) if interruption else at_ns
        seen = intervals.look(load.ledger.rows, load.begin_ns, now_ns, plan)
        context.observer.mark()
        if interruption:
            verdict, reason = interruption, _REASONS[interruption]
        elif decision.settled(seen, load.ledger.request_count):
            verdict, reason = Verdict.STABLE, f"Both confidence intervals are within {plan.precision:.0%}."
        elif _is_overloaded(load, now_ns):
            verdict, reason = Verdict.OVERLOADED, _OVERLOADED
        elif decision.out_of_time(now_ns):
            verdict = Verdict.UNSTABLE
            reason = f"The confidence intervals were not within {plan.precision:.0%} after {plan.time_max_s:g} s."
        else:
            continue
        window = _used_window(context, load, seen.begin_ns, seen.end_ns)
        over = outcome.is_over([window], plan.latency_limit_ns)
        return ResultSpan(load.begin_ns, seen.begin_ns, seen.end_ns, (window,), verdict, (reason,), over)


class _Windows:
    """Measures windows of a time or a count until the last three agree."""

    def __init__(self, context: Context, load: RunningLoad) -> None:
        self._context = context
        self._load = load
        self._plan = context.settings.measure
        self._windows: list[Window] = []

    def measure(self) -> ResultSpan:
        """Measure, and return the interval of the last three windows with the verdict."""
        plan, load = self._plan, self._load
        begin_ns = load.begin_ns
        while len(self._windows) < plan.trials_max:
            load.expect(len(self._windows) + 1, self._left_s())
            end_ns, interruption = self._wait(begin_ns)
            if interruption:
                # Windows after the loss of the server are meaningless.
                while self._windows and self._windows[-1].end_ns > end_ns:
                    begin_ns = self._windows.pop().begin_ns
                if end_ns - begin_ns >= _PARTIAL_NS or not self._windows:
                    self._add(begin_ns, end_ns)
                return self._span(interruption, (_REASONS[interruption],))
            self._add(begin_ns, end_ns)
            begin_ns = end_ns
            if len(self._windows) >= outcome.LAST and (found := self._verdict()) is not None:
                return self._span(*found)
            if outcome.is_over(self._windows, plan.latency_limit_ns):
                return self._span(Verdict.UNSTABLE, ("The latency limit was reached before three windows agreed.",))
        return self._span(Verdict.UNSTABLE, (self._disagreement(),))

    def _wait(self, begin_ns: int) -> tuple[int, Verdict | None]:
        plan, load = self._plan, self._load
        if plan.mode is MeasurementMode.TIME_WINDOWS:
            end_ns = begin_ns + outcome.window_ns(plan.interval_ms)
            interruption = load.wait(end_ns)
        else:
            end_ns, interruption = begin_ns, None
            count = 0
            while not interruption and count < plan.window_request_count and end_ns - begin_ns < _COUNT_WINDOW_NS_MAX:
                end_ns += _COUNT_STEP_NS
                interruption = load.wait(end_ns)
                count = len(ended_within(load.ledger.rows, begin_ns, end_ns))
        return (_end_ns(load, interruption) if interruption else end_ns), interruption

    def _add(self, begin_ns: int, end_ns: int) -> None:
        context = self._context
        rows, percentile = self._load.ledger.rows, self._plan.percentile
        window, deviation_ns = outcome.measure(rows, begin_ns, end_ns, context.batch_size, percentile)
        self._windows.append(window)
        context.observer.mark()
        shown = relative(window, self._load.begin_ns)
        context.progress(WindowDone(self._load.level, len(self._windows), shown, deviation_ns))

    def _verdict(self) -> tuple[Verdict, tuple[str, ...]] | None:
        if _is_overloaded(self._load, self._windows[-1].end_ns):
            return Verdict.OVERLOADED, (_OVERLOADED,)
        stability = self._plan.stability
        if not outcome.differing(self._windows, stability):
            return Verdict.STABLE, (f"The last {outcome.LAST} windows agree within {stability:.0%}.",)
        return None

    def _disagreement(self) -> str:
        if len(self._windows) < outcome.LAST:
            return f"{outcome.LAST} windows are needed to compare them, and there were {len(self._windows)}."
        parts = outcome.differing(self._windows, self._plan.stability)
        return (
            f"After {len(self._windows)} windows, {' and '.join(parts)} of the last {outcome.LAST} still differed by "
            f"more than {self._plan.stability:.0%}."
        )

    def _left_s(self) -> float | None:
        if self._plan.mode is not MeasurementMode.TIME_WINDOWS:
            return None
        return (self._plan.trials_max - len(self._windows)) * outcome.window_ns(self._plan.interval_ms) / 1e9

    def _span(self, verdict: Verdict, reasons: tuple[str, ...]) -> ResultSpan:
        marked = outcome.mark_used(self._windows)
        used = [window for window in marked if window.used]
        over = outcome.is_over(self._windows, self._plan.latency_limit_ns)
        ends = used[0].begin_ns, used[-1].end_ns
        return ResultSpan(self._load.begin_ns, *ends, tuple(marked), verdict, reasons, over)


def _end_ns(load: RunningLoad, interruption: Verdict) -> int:
    """Return the end of an interrupted interval: the time after the loss of the server does not count."""
    if interruption is Verdict.SERVER_LOST and load.ledger.last_success_ns:
        return load.ledger.last_success_ns + 1
    return load.ledger.until_ns


def _used_window(context: Context, load: RunningLoad, begin_ns: int, end_ns: int) -> Window:
    percentile = context.settings.measure.percentile
    window, _ = outcome.measure(load.ledger.rows, begin_ns, end_ns, context.batch_size, percentile)
    return replace(window, used=True)


def _is_overloaded(load: RunningLoad, now_ns: int) -> bool:
    if not load.level.mode.is_rate or now_ns - load.begin_ns < _OVERLOAD_NS or load.ledger.may_be_lost:
        return False
    return level_backlog(load.ledger, load.begin_ns, now_ns).is_overload


def _judged(load: RunningLoad, span: ResultSpan) -> ResultSpan:
    """Set the verdict to overloaded even if something else ended the level."""
    unsettled = span.verdict in (Verdict.UNSTABLE, Verdict.COMPLETE)
    if (
        unsettled
        and load.level.mode.is_rate
        and level_backlog(load.ledger, load.begin_ns, span.used_end_ns).is_overload
    ):
        return replace(span, verdict=Verdict.OVERLOADED, reasons=(_OVERLOADED, *span.reasons))
    return span


def _result(context: Context, load: RunningLoad, span: ResultSpan) -> LevelResult:
    settings, observer = context.settings, context.observer
    begin_ns, end_ns = span.used_begin_ns, span.used_end_ns
    rows = load.ledger.rows
    gpus, metrics = observer.metrics(begin_ns, end_ns)
    observations = LevelObservations(
        observer.server_side(
            begin_ns, end_ns, lambda low, high: len(ended_within(rows, low, high)), load.most_in_flight
        ),
        observer.resources(begin_ns, end_ns),
        gpus,
        metrics,
        observer.machine_load(begin_ns, end_ns),
    )
    return level_result(
        load.level, span, load.ledger, settings.measure, context.batch_size, settings.target.streaming, observations
    )
