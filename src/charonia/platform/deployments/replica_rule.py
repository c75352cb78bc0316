"""Decides when a deployment needs one server more or fewer. Pure.

Its input is the activity of the servers since the last sample. It changes their number by one at most:

1. One is added when requests waited in every sample of the last `GROW_AFTER_S`, unless another one is starting or
   the target has no room.
2. One is closed when, in every sample of the last `idle_for_s`, nothing waited, and one fewer would have sufficed: its
   instances would have been busy for less than `SPARE_SHARE` of the time.
3. If one is added within `idle_for_s` after one was closed, that was too early: the time doubles, up to
   `SHRINK_AFTER_S_MAX`. It is reset after load has been steady for `STEADY_FACTOR` times as long.
"""

from dataclasses import dataclass

GROW_AFTER_S = 15.0
"""How long requests must wait before a server is added."""

SHRINK_AFTER_S = 120.0
"""How long one server fewer must suffice before one is closed."""

SHRINK_AFTER_S_MAX = 3600.0
SPARE_SHARE = 0.6
STEADY_FACTOR = 4


@dataclass(frozen=True, slots=True)
class ReplicaBounds:
    """Minimum and maximum number of servers."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """Activity of the servers of a deployment.

    Attributes:
        time_s: Time of the sample, on the clock of the rule.
        pending: Requests that waited.
        busy_share: Share of the time in which the instances of the busiest model were busy, 0 to 1.
    """

    time_s: float
    pending: float
    busy_share: float


class ReplicaRule:
    """The rule for one deployment.

    Args:
        bounds: The bounds.

    Attributes:
        idle_for_s: How long one server fewer must suffice before one is closed.
    """

    def __init__(self, bounds: ReplicaBounds) -> None:
        self.bounds = bounds
        self.idle_for_s = SHRINK_AFTER_S
        self._sampled_s = float("-inf")
        self._waiting_since_s: float | None = None
        self._spare_since_s: float | None = None
        self._closed_s: float | None = None
        self._obstacle = ""
        self._last = ""  # the last change, in words

    def wanted(self, count: int, sample: ReplicaSample | None, now_s: float, *, is_steady: bool) -> int:
        """Return the number of servers to run.

        Args:
            count: The current target number.
            sample: The latest sample, None if there is none.
            now_s: The time.
            is_steady: Whether that many servers run and all are ready.
        """
        within = min(max(count, self.bounds.least), self.bounds.most)
        if within != count or not is_steady:
            self._waiting_since_s = self._spare_since_s = None
            return within
        if sample is None or sample.time_s <= self._sampled_s:
            return count
        self._sampled_s = sample.time_s
        self._note(count, sample)
        if self._waiting_since_s is not None and now_s - self._waiting_since_s >= GROW_AFTER_S:
            return self._grown(count, now_s)
        self._obstacle = ""
        if self._spare_since_s is not None and now_s - self._spare_since_s >= self.idle_for_s:
            return self._shrunk(count, now_s)
        return count

    def refused(self, reason: str) -> None:
        """Record that the target has no room for one more."""
        self._obstacle, self._last = reason, ""

    def story(self, count: int) -> str:
        """Return the number of servers and its reason, in words."""
        text = f"{count} of {self.bounds.least} to {self.bounds.most} servers"
        if self._obstacle:
            return f"{text}; requests wait, and none is added: {self._obstacle}"
        return f"{text}; {self._last}" if self._last else text

    def _note(self, count: int, sample: ReplicaSample) -> None:
        would_be = sample.busy_share * count / (count - 1) if count > self.bounds.least else 1.0
        if not sample.pending:
            self._waiting_since_s = None
        elif self._waiting_since_s is None:
            self._waiting_since_s = sample.time_s
        if sample.pending or would_be >= SPARE_SHARE:
            self._spare_since_s = None
        elif self._spare_since_s is None:
            self._spare_since_s = sample.time_s

    def _grown(self, count: int, now_s: float) -> int:
        if count >= self.bounds.most:
            return count
        if self._closed_s is not None and now_s - self._closed_s < self.idle_for_s:
            self.idle_for_s = min(2 * self.idle_for_s, SHRINK_AFTER_S_MAX)
        self._closed_s = None
        self._obstacle = ""
        self._last = "the last was added because requests waited"
        self._waiting_since_s = None
        return count + 1

    def _shrunk(self, count: int, now_s: float) -> int:
        if self._closed_s is not None and now_s - self._closed_s > STEADY_FACTOR * self.idle_for_s:
            self.idle_for_s = SHRINK_AFTER_S
        self._last = "one was closed because the others suffice"
        self._closed_s, self._spare_since_s = now_s, None
        return count - 1
