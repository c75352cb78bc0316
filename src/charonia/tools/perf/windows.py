"""Windows, and whether the last ones agree by perf_analyzer's rule, so that results are comparable. Pure.

A request belongs to the window in which its last response arrived. A level is settled when each of the last three
windows had responses, and neither throughput nor latency differs among them by more than the stability.
"""

from dataclasses import dataclass, replace

import numpy as np

from charonia.tools.perf.samples import OUTCOME, Rows, ended_within, response_times, successes
from charonia.tools.results.records import Window

LAST = 3
"""Number of windows that must agree and make up the result."""

_TIME_FACTOR = 1.2


def window_ns(interval_ms: int) -> int:
    """Return the actual length of a time window: 1.2 times the requested one, in whole milliseconds."""
    return int(interval_ms * _TIME_FACTOR) * 1_000_000


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """A window and its deviation."""

    window: Window
    deviation_ns: float


def measure(rows: Rows, begin_ns: int, end_ns: int, batch_size: int, percentile: float | None) -> MeasuredWindow:
    """Measure one window.

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
    return MeasuredWindow(window, float(times.std(ddof=1)) if times.size > 1 else 0.0)


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
