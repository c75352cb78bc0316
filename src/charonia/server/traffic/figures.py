"""Counters of each version of a model with traffic. Pure."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from charonia.core.latency import LatencyHistogram

LATENCIES_MAX = 10_000
"""Latest latencies of a version of which percentiles are shown."""

WINDOW_MAX = 100_000
"""Latencies that are kept between two looks of a canary plan; those beyond it are counted, not measured."""


@dataclass(frozen=True, slots=True)
class RequestWindow:
    """The traffic since the last check.

    Attributes:
        requests: Requests that were answered.
        errors: Failed requests.
        latencies_ns: Times of requests without an error: from arrival to the last response, or until clients left.
    """

    requests: int = 0
    errors: int = 0
    latencies_ns: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


class VersionFigures:
    """Counters of the requests that traffic sent to a version.

    A request that its client abandoned is not an error, but its latency is known to be longer than that time: this
    detects a canary that hangs.

    Attributes:
        requests: Requests that were sent to it.
        errors: Requests that were answered with an error.
        in_flight: Requests that are not answered.
        is_watched: Whether a canary plan evaluates windows.
    """

    __slots__ = ("_answered", "_errors", "_latest", "_window", "errors", "in_flight", "is_watched", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0
        self.in_flight = 0
        self.is_watched = False
        self._latest: deque[int] = deque(maxlen=LATENCIES_MAX)
        self._window: list[int] = []
        self._answered = 0
        self._errors = 0

    def sent(self) -> None:
        """A request was sent."""
        self.requests += 1
        self.in_flight += 1

    def given_up(self, after_ns: int) -> None:
        """The client of a request has gone."""
        self.in_flight -= 1
        self._watch(after_ns)

    def answered(self, latency_ns: int) -> None:
        """A request was answered."""
        self.in_flight -= 1
        self._answered += 1
        self._latest.append(latency_ns)
        self._watch(latency_ns)

    def failed(self) -> None:
        """A request was answered with an error."""
        self.in_flight -= 1
        self.errors += 1
        self._answered += 1
        self._errors += 1

    def latency_us(self) -> dict[str, float]:
        """Return the percentiles of the latest latencies in us; none where there are none."""
        return percentiles_us(self._latest)

    def take(self) -> RequestWindow:
        """Return the traffic since the last call."""
        window = RequestWindow(self._answered, self._errors, np.array(self._window, np.int64))
        self._answered = self._errors = 0
        self._window = []
        return window

    def _watch(self, latency_ns: int) -> None:
        if self.is_watched and len(self._window) < WINDOW_MAX:
            self._window.append(latency_ns)


class ShadowFigures:
    """What came of the copies that a shadow version got.

    Attributes:
        sent: Copies that were sent.
        same: Answers that were the same.
        different: Answers that were different.
        failed: Copies that were answered with an error.
        dropped: Copies that were not sent, because too many were under way.
    """

    __slots__ = ("_latest", "_taken", "different", "dropped", "failed", "same", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.same = 0
        self.different = 0
        self.failed = 0
        self.dropped = 0
        self._latest: deque[int] = deque(maxlen=LATENCIES_MAX)
        self._taken = (0, 0)

    @property
    def compared(self) -> int:
        """Copies whose outcome was compared: an error in place of an answer is a difference."""
        return self.same + self.different + self.failed

    @property
    def unlike(self) -> int:
        """Copies that were answered differently, or with an error."""
        return self.different + self.failed

    def answered(self, latency_ns: int, *, is_different: bool) -> None:
        """A copy was answered."""
        self._latest.append(latency_ns)
        if is_different:
            self.different += 1
        else:
            self.same += 1

    def latency_us(self) -> dict[str, float]:
        return percentiles_us(self._latest)

    def take(self) -> tuple[int, int]:
        """Return how many copies were compared since the last call, and how many of them were different."""
        before, self._taken = self._taken, (self.compared, self.unlike)
        return self.compared - before[0], self.unlike - before[1]


def percentiles_us(latencies_ns: "deque[int]") -> dict[str, float]:
    """Return p50, p90 and p99 in us, by name; none of nothing."""
    if not latencies_ns:
        return {}
    histogram = LatencyHistogram.of(np.array(latencies_ns, np.int64))
    return {f"p{percent}": round(histogram.percentile(percent) / 1e3, 1) for percent in (50, 90, 99)}
