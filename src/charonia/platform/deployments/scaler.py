"""Decides how many servers a deployment with bounds runs, by the rule of Kubernetes' HorizontalPodAutoscaler.

1. The number is in proportion to the busy share: how busy the instances of the busiest model were, on average over
   `AVERAGED_S`, compared with `TARGET_SHARE`. A difference below `TOLERANCE` changes nothing.
2. So it is to the time that requests waited over the time that they were computed, compared with `WAITED`, if that
   gives more. It counts up to twice `WAITED`, which doubles the servers.
3. Servers are added immediately. One is closed every `SHRINK_EVERY_S`, down to the most that were wanted at any time in
   the last `SHRINK_AFTER_S`.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from charonia.platform.deployments.figures import FiguresPoint
from charonia.platform.deployments.spec import Replicas
from charonia.platform.targets.api import DeploymentTarget, Observed, RevisionPhase

TARGET_SHARE = 0.7
WAITED = 1.0
TOLERANCE = 0.1
AVERAGED_S = 60.0

GROW_AFTER_S = 15.0
"""How long servers are observed after a change before the next one."""

SHRINK_AFTER_S = 300.0
"""How long fewer servers must suffice before one is closed."""

SHRINK_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """Activity of the servers of a deployment.

    Attributes:
        time_s: Time of the sample, on the clock of the rule.
        waited: Time in the queue over time of execution.
        busy_share: Share of the time in which the instances of the busiest model were needed, 0 to 1.
    """

    time_s: float
    waited: float
    busy_share: float


class ReplicaRule:
    """The rule for one deployment."""

    def __init__(self, bounds: Replicas) -> None:
        self.bounds = bounds
        self._samples: deque[ReplicaSample] = deque()  # since the last change
        self._taken_s = float("-inf")
        self._proposals: deque[tuple[float, int]] = deque()
        self._closed_s = float("-inf")
        self._obstacle = ""
        self._last = ""  # the last change, in words

    def wanted(self, count: int, sample: ReplicaSample | None, now_s: float, *, is_steady: bool) -> int:
        """Return the number of servers to run.

        Args:
            sample: The latest sample, None if there is none.
            is_steady: Whether that many servers run and all are ready.
        """
        within = min(max(count, self.bounds.min), self.bounds.max)
        if within != count or not is_steady:
            self._samples.clear()
            return within
        if sample is None or sample.time_s <= self._taken_s:
            return count
        self._taken_s = sample.time_s
        self._samples.append(sample)
        while self._samples[0].time_s < sample.time_s - AVERAGED_S:
            self._samples.popleft()
        if sample.time_s - self._samples[0].time_s < GROW_AFTER_S:
            return count
        return self._decided(count, now_s)

    def refused(self, reason: str) -> None:
        """Record that the target has no room for more."""
        self._obstacle, self._last = reason, ""

    def explanation(self, count: int) -> str:
        """Return the number of servers and its reason, in words."""
        text = f"{count} of {self.bounds.min} to {self.bounds.max} servers"
        if self._obstacle:
            return f"{text}; more are needed, and none is added: {self._obstacle}"
        return f"{text}; {self._last}" if self._last else text

    def _decided(self, count: int, now_s: float) -> int:
        number = len(self._samples)
        share = sum(each.busy_share for each in self._samples) / number
        waited = sum(min(each.waited, 2 * WAITED) for each in self._samples) / number
        by_share, by_waiting = (_in_proportion(count, value) for value in (share / TARGET_SHARE, waited / WAITED))
        wish = min(max(by_share, by_waiting, self.bounds.min), self.bounds.max)
        if not self._proposals:
            self._proposals.append((now_s, count))
        self._proposals.append((now_s, wish))
        while self._proposals[0][0] <= now_s - SHRINK_AFTER_S:
            self._proposals.popleft()
        most = max(each for _, each in self._proposals)
        self._obstacle = ""
        if wish > count:
            reason = "requests waited" if by_waiting >= by_share else f"instances were busy {share:.0%} of the time"
            self._last = f"the last was added because {reason}"
        elif most < count and now_s - self._closed_s >= SHRINK_EVERY_S:
            self._last = "one was closed because the others suffice"
            self._closed_s, wish = now_s, count - 1
        else:
            return count
        self._samples.clear()
        return wish


def _in_proportion(count: int, ratio: float) -> int:
    return count if abs(ratio - 1.0) <= TOLERANCE else ceil(count * ratio)


class Scaler:
    """Scales deployments. Its state can be lost: it then starts anew. Any thread may call.

    Args:
        figures: Returns the figures of a deployment, given by id, after a time in seconds since the epoch.
    """

    def __init__(self, figures: Callable[[int, float], Sequence[FiguresPoint]]) -> None:
        self._figures = figures
        self._rules: dict[int, ReplicaRule] = {}
        self._lock = threading.Lock()

    def scale(
        self,
        deployment_id: int,
        key: str,
        target: DeploymentTarget,
        seen: Observed,
        bounds: Replicas,
        now_s: float,
    ) -> str:
        """Scale a deployment; return why it has its number of servers, "" if that number is fixed."""
        if bounds.min == bounds.max:
            if not _is_settled(seen, bounds.min):
                target.scale(key, bounds.min)
            return ""
        if seen.scaled_by:
            return f"{seen.wanted_replicas} of {bounds.min} to {bounds.max} servers; {seen.scaled_by} decides"
        with self._lock:
            rule = self._rules.get(deployment_id)
            if rule is None or rule.bounds != bounds:
                rule = self._rules[deployment_id] = ReplicaRule(bounds)
        count = max(1, seen.wanted_replicas)
        is_there = len(seen.replicas) == count and all(replica.is_ready for replica in seen.replicas)
        is_steady = is_there and seen.phase is RevisionPhase.READY
        points = self._figures(deployment_id, now_s - 60.0)
        wanted = rule.wanted(count, sample_of(points[-1]) if points else None, now_s, is_steady=is_steady)
        obstacle = target.scale(key, wanted)
        if obstacle:
            rule.refused(obstacle)
        return rule.explanation(count if obstacle else wanted)


def _is_settled(seen: Observed, count: int) -> bool:
    """Whether that many servers run, nothing is under way, and the target does not scale by itself."""
    return (
        seen.phase is RevisionPhase.READY
        and not seen.scaled_by
        and seen.wanted_replicas == len(seen.replicas) == count
        and all(replica.is_ready and not replica.doing for replica in seen.replicas)
    )


def sample_of(point: FiguresPoint) -> ReplicaSample:
    """Return the activity of the servers. The busiest model decides."""
    shares = [each.busy / each.instances for each in point.versions.values() if each.instances]
    return ReplicaSample(point.time, point.all.waited, max(shares, default=0.0))
