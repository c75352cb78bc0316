"""Computes the result of a level from its requests. Pure.

A request belongs to the window in which its last response arrived. As in perf_analyzer, a level is settled when each of
the last three windows had responses, and neither throughput nor latency differs among them by more than the stability.

It also detects overload of an open loop. A server that stalls occasionally builds up a backlog too, but catches up
again. Overload is sustained growth: a straight line fitted to the backlog rises by more than a few per cent of the
arrivals, and by far more than the deviation of the backlog from the line.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from charonia.core.latency import LatencyHistogram
from charonia.tools.perf import intervals
from charonia.tools.perf.api import MeasurePlan
from charonia.tools.perf.language.replies import is_good
from charonia.tools.perf.ledger import Ledger
from charonia.tools.perf.samples import (
    DONE,
    FIRST,
    INTENDED,
    OUTCOME,
    RECEIVE,
    RESPONSES,
    SEND_END,
    SENT,
    SEQUENCE,
    WIDTH,
    Rows,
    ended_within,
    response_times,
    service_times,
    successes,
)
from charonia.tools.results.records import (
    ClientTimes,
    Goodput,
    Gpu,
    LevelResult,
    LoadLevel,
    MachineLoad,
    OfferedLoad,
    Resources,
    ServerSide,
    TimeBucket,
    Verdict,
    Window,
)

LAST = 3
"""Number of windows that must agree and make up the result."""

_TIME_FACTOR = 1.2


def window_ns(interval_ms: int) -> int:
    """Return the actual length of a time window: 1.2 times the requested one, in whole milliseconds."""
    return int(interval_ms * _TIME_FACTOR) * 1_000_000


def measure(rows: Rows, begin_ns: int, end_ns: int, batch_size: int, percentile: float | None) -> tuple[Window, float]:
    """Measure one window, and return it with the standard deviation of its response times.

    Args:
        percentile: The stabilising percentile, None for the mean.
    """
    inside = ended_within(rows, begin_ns, end_ns)
    times = response_times(successes(inside))
    seconds = (end_ns - begin_ns) / 1e9
    window = Window(
        begin_ns=begin_ns,
        end_ns=end_ns,
        request_count=int(times.size),
        error_count=int(np.count_nonzero(inside[:, OUTCOME])),
        throughput=times.size * batch_size / seconds if seconds > 0 else 0.0,
        latency_ns=stabilising_latency(times, percentile),
        used=False,
    )
    return window, float(times.std(ddof=1)) if times.size > 1 else 0.0


def stabilising_latency(times: Rows, percentile: float | None) -> float:
    """Return the mean, or a percentile by the nearest rank; 0 without times."""
    if not times.size:
        return 0.0
    if percentile is None:
        return float(times.mean())
    rank = int(percentile / 100 * (times.size - 1) + 0.5)
    return float(np.partition(times, rank)[rank])


def differing(windows: list[Window], stability: float) -> list[str]:
    """Return which of throughput and latency differ among the last windows; a window without responses differs."""
    values = {
        "throughput": [window.throughput for window in windows[-LAST:]],
        "latency": [window.latency_ns for window in windows[-LAST:]],
    }
    return [name for name, found in values.items() if not _agree(found, stability)]


def is_over(windows: list[Window], latency_limit_ns: int) -> bool:
    """Whether one of the last windows reached the latency limit; in whole milliseconds, as in perf_analyzer."""
    if not latency_limit_ns:
        return False
    return any(window.latency_ns // 1_000_000 >= latency_limit_ns // 1_000_000 for window in windows[-LAST:])


def mark_used(windows: list[Window]) -> list[Window]:
    """Return the windows, with the last three marked as part of the result."""
    first = max(0, len(windows) - LAST)
    return [replace(window, used=number >= first) for number, window in enumerate(windows)]


def _agree(values: list[float], stability: float) -> bool:
    return len(values) == LAST and min(values) > 0 and max(values) <= min(values) * (1 + stability)


_POINTS = 64
_GROWTH_MIN = 0.03
_ARRIVALS_MIN = 50
_SWINGS = 3.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """The number of unanswered requests over an interval.

    Attributes:
        growth: Growth per second.
    """

    begin: int
    end: int
    growth: float
    is_overload: bool


def backlog(intended_ns: NDArray[np.int64], done_ns: NDArray[np.int64], begin_ns: int, end_ns: int) -> Backlog:
    """Return the backlog over an interval.

    Args:
        intended_ns: Intended send times of all requests of the level, ascending.
        done_ns: Completion times, ascending.
    """
    at = np.linspace(begin_ns, end_ns, _POINTS)
    waiting = np.searchsorted(intended_ns, at, side="right") - np.searchsorted(done_ns, at, side="right")
    seconds = (at - begin_ns) / 1e9
    arrived = int(np.searchsorted(intended_ns, end_ns) - np.searchsorted(intended_ns, begin_ns))
    first, last = int(waiting[0]), int(waiting[-1])
    if arrived < _ARRIVALS_MIN or end_ns <= begin_ns:
        return Backlog(first, last, 0.0, False)
    growth, base = (float(number) for number in np.polyfit(seconds, waiting, 1))
    swing = float(np.std(waiting - (growth * seconds + base)))
    risen = growth * seconds[-1]
    overload = risen > max(_GROWTH_MIN * arrived, _SWINGS * swing, 2.0)
    return Backlog(first, last, growth, bool(overload))


DELAYED_NS = 1_000_000
"""A request sent later than this after its scheduled time counts as delayed."""

TIMELINE_BUCKETS = 120
_BUCKET_MIN_NS = 100_000_000


@dataclass(frozen=True, slots=True)
class ResultSpan:
    """The interval that a result covers, and its verdict.

    Attributes:
        begin_ns: Start of the level, monotonic.
        windows: All windows, in monotonic time.
    """

    begin_ns: int
    used_begin_ns: int
    used_end_ns: int
    windows: tuple[Window, ...]
    verdict: Verdict
    reasons: tuple[str, ...]
    over_latency_limit: bool = False


@dataclass(frozen=True, slots=True)
class LevelObservations:
    """The observations of the server in that interval."""

    server: ServerSide
    resources: Resources | None
    gpus: tuple[Gpu, ...]
    metrics: dict[str, float]
    machine_load: MachineLoad | None = None


def judged(verdict: Verdict, reasons: tuple[str, ...], load: MachineLoad | None) -> tuple[Verdict, tuple[str, ...]]:
    """Return a verdict and its reasons, in view of who else used the cores."""
    disturbance = load.disturbance if load is not None else ""
    if not disturbance:
        return verdict, reasons
    if verdict is Verdict.UNSTABLE:
        return Verdict.DISTURBED, (disturbance, *reasons, "Measure again when the machine is quiet.")
    return verdict, (*reasons, disturbance)


def level_result(
    level: LoadLevel,
    span: ResultSpan,
    ledger: Ledger,
    plan: MeasurePlan,
    batch_size: int,
    streaming: bool,
    observations: LevelObservations,
) -> LevelResult:
    """Return the result of a level."""
    rows = ledger.rows
    used = ended_within(rows, span.used_begin_ns, span.used_end_ns)
    good = successes(used)
    duration_ns = max(span.used_end_ns - span.used_begin_ns, 0)
    rate = intervals.rate_interval(good[:, DONE], span.used_begin_ns, span.used_end_ns, plan.confidence)
    first = good[good[:, FIRST] > 0]
    verdict, reasons = judged(span.verdict, span.reasons, observations.machine_load)
    is_lost = span.verdict is Verdict.SERVER_LOST  # its failures follow the measured interval
    return LevelResult(
        level=level,
        verdict=verdict
        if len(good)
        else (verdict if verdict in (Verdict.INTERRUPTED, Verdict.SERVER_LOST) else Verdict.NO_REQUESTS),
        reasons=reasons if len(good) else (*reasons, "No request was answered successfully."),
        duration_ns=duration_ns,
        request_count=len(good),
        throughput=rate.scaled(batch_size),
        latency=intervals.latency_interval(good, plan),
        response_times=LatencyHistogram.of(response_times(good)),
        service_times=LatencyHistogram.of(service_times(good)),
        first_response_times=LatencyHistogram.of(first[:, FIRST] - first[:, SENT]) if streaming else None,
        response_count=int(good[:, RESPONSES].sum()),
        sequence_count=int(np.count_nonzero(good[:, SEQUENCE] & 1)),
        errors=ledger.errors(rows[rows[:, DONE] >= span.used_begin_ns] if is_lost else used),
        over_latency_limit=span.over_latency_limit,
        windows=tuple(relative(window, span.begin_ns) for window in span.windows),
        timeline=timeline(rows, ledger.sent, span.begin_ns, ledger.until_ns),
        client=client_times(good, ledger, span),
        server=observations.server,
        offered=offered(level, used, ledger, span) if level.mode.is_rate else None,
        goodput=goodput(used, plan, duration_ns) if plan.objectives else None,
        resources=observations.resources,
        gpus=observations.gpus,
        metrics=observations.metrics,
        requests=ledger.requests(span.used_begin_ns, span.used_end_ns),
        epoch_ns=ledger.epoch_ns(span.begin_ns),
        machine_load=observations.machine_load,
        language=ledger.figures(good, span.used_begin_ns, span.used_end_ns),
    )


def level_backlog(ledger: Ledger, begin_ns: int, end_ns: int) -> Backlog:
    return backlog(ledger.sent[:, 0], ledger.rows[:, DONE], begin_ns, end_ns)


def offered(level: LoadLevel, used: Rows, ledger: Ledger, span: ResultSpan) -> OfferedLoad:
    """Return the offered load of an open loop, and how much of it was achieved."""
    seconds = max(span.used_end_ns - span.used_begin_ns, 1) / 1e9
    sent = ledger.sent
    inside = sent[(sent[:, 1] >= span.used_begin_ns) & (sent[:, 1] < span.used_end_ns)]
    delays = inside[:, 1] - inside[:, 0]
    waiting = level_backlog(ledger, span.used_begin_ns, span.used_end_ns)
    return OfferedLoad(
        rate=level.value,
        sent_rate=len(inside) / seconds,
        achieved_rate=len(used) / seconds,
        delayed_share=float(np.mean(delays > DELAYED_NS)) if len(delays) else 0.0,
        delay_p99_ns=int(np.percentile(delays, 99)) if len(delays) else 0,
        backlog_begin=waiting.begin,
        backlog_end=waiting.end,
    )


def goodput(used: Rows, plan: MeasurePlan, duration_ns: int) -> Goodput:
    """Return the requests that met their objectives."""
    if used.shape[1] > WIDTH:
        good = is_good(used, [(objective.figure, objective.limit) for objective in plan.objectives])
    else:
        good = (used[:, OUTCOME] == 0) & (response_times(used) <= min(each.limit for each in plan.objectives))
    count = int(np.count_nonzero(good))
    return Goodput(
        objectives=tuple(objective.text for objective in plan.objectives),
        good_count=count,
        rate=count * 1e9 / duration_ns if duration_ns else 0.0,
        share=count / len(used) if len(used) else 0.0,
    )


def client_times(good: Rows, ledger: Ledger, span: ResultSpan) -> ClientTimes:
    """Return the times and the CPU use of the client."""
    handed_over = good[good[:, SEND_END] > 0]
    overhead, cpu_seconds = ledger.busy_share(span.used_begin_ns, span.used_end_ns)
    return ClientTimes(
        send_ns=_mean(handed_over[:, SEND_END] - handed_over[:, SENT]),
        receive_ns=_mean(good[:, RECEIVE]),
        overhead=overhead,
        cpu_seconds=cpu_seconds,
        process_count=ledger.process_count,
    )


def timeline(rows: Rows, sent: Rows, begin_ns: int, end_ns: int) -> tuple[TimeBucket, ...]:
    """Return a level in intervals of equal length, at most `TIMELINE_BUCKETS` and none shorter than 0.1 s."""
    if end_ns <= begin_ns:
        return ()
    width = max(-(-(end_ns - begin_ns) // TIMELINE_BUCKETS), _BUCKET_MIN_NS)
    edges = np.arange(begin_ns, end_ns, width)
    ends = np.append(edges[1:], end_ns)
    sends = np.sort(sent[:, 1] if len(sent) else rows[:, SENT])
    found = []
    for low, high in zip(edges.tolist(), ends.tolist(), strict=True):
        inside = rows[slice(*np.searchsorted(rows[:, DONE], (low, high)))]
        times = response_times(successes(inside))
        p50, p99 = np.percentile(times, (50, 99), method="nearest").tolist() if times.size else (0, 0)
        found.append(
            TimeBucket(
                begin_ns=low - begin_ns,
                end_ns=high - begin_ns,
                sent_count=int(np.searchsorted(sends, high) - np.searchsorted(sends, low)),
                completed_count=int(times.size),
                error_count=len(inside) - int(times.size),
                p50_ns=int(p50),
                p99_ns=int(p99),
                max_ns=int(times.max()) if times.size else 0,
            )
        )
    return tuple(found)


def relative(window: Window, begin_ns: int) -> Window:
    """Return a window with times relative to the start of its level."""
    return replace(window, begin_ns=window.begin_ns - begin_ns, end_ns=window.end_ns - begin_ns)


def clamped(rows: Rows, begin_ns: int, end_ns: int) -> tuple[int, int]:
    """Return the interval from the first send to just after the last end; unchanged without requests."""
    if not len(rows):
        return begin_ns, end_ns
    return int(rows[:, INTENDED].min()), int(rows[:, DONE].max()) + 1


def _mean(values: Rows) -> float:
    return float(values.mean()) if values.size else 0.0
