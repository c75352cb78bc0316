"""Decides the number of servers of deployments with bounds: feeds their rules with their figures."""

import threading
from collections.abc import Callable, Sequence

from charonia.platform.deployments.figures import FiguresPoint
from charonia.platform.deployments.replica_rule import ReplicaBounds, ReplicaRule, ReplicaSample
from charonia.platform.targets.api import DeploymentTarget, Observed, RevisionPhase


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
        bounds: ReplicaBounds,
        now_s: float,
    ) -> str:
        """Scale a deployment; return why it has its number of servers, "" if that number is fixed."""
        if bounds.least == bounds.most:
            if not _is_settled(seen, bounds.least):
                target.scale(key, bounds.least)
            return ""
        if seen.scaled_by:
            return f"{seen.wanted_replicas} of {bounds.least} to {bounds.most} servers; {seen.scaled_by} decides"
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
        return rule.story(count if obstacle else wanted)


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
