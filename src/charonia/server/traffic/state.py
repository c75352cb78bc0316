"""What is known of the traffic of one model. Pure."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from charonia.server.traffic.canary import Canary
from charonia.server.traffic.figures import ShadowFigures, VersionFigures
from charonia.server.traffic.line import EvenPoints, shares
from charonia.wire.traffic import NO_TRAFFIC, CanaryState, TrafficSettings

HISTORY_MAX = 100
"""Latest happenings of a model that are kept."""

R = TypeVar("R")


class Happening(NamedTuple):
    """Something that changed the traffic of a model.

    Attributes:
        time: When, as in 2026-11-23T22:48:35Z.
        text: What.
    """

    time: str
    text: str


@dataclass(slots=True)
class ModelTraffic(Generic[R]):
    """The traffic of a model.

    Attributes:
        model: Its key.
        requested: Settings of a request, None without any.
        configured: Settings of its configuration, None without any.
        canary: The latest canary plan of a request.
        history: What has happened, the latest last.
        runners: Runners of the versions that are ready, by number.
        is_routed: Whether requests without a version are answered.
        versions: Figures by version.
        shadows: Figures by shadow version.
        points: Points of the requests of clients that may go to any version.
    """

    model: str
    requested: TrafficSettings | None = None
    configured: TrafficSettings | None = None
    canary: Canary | None = None
    history: deque[Happening] = field(default_factory=lambda: deque(maxlen=HISTORY_MAX))
    runners: Mapping[int, R] = field(default_factory=dict)
    is_routed: bool = False
    versions: dict[int, VersionFigures] = field(default_factory=dict)
    shadows: dict[int, ShadowFigures] = field(default_factory=dict)
    points: EvenPoints = field(default_factory=EvenPoints)

    @property
    def settings(self) -> TrafficSettings:
        return self.requested or self.configured or NO_TRAFFIC

    @property
    def running(self) -> Canary | None:
        return self.canary if self.canary is not None and not self.canary.state.is_over else None

    @property
    def is_split(self) -> bool:
        """Whether requests without a version are not simply those of the version policy's choice."""
        return self.settings != NO_TRAFFIC

    def weights(self) -> list[tuple[int, float]]:
        return sorted(self.settings.weights.items())

    def shares(self) -> dict[int, float]:
        """Return the share of the requests of each version that is ready and gets any."""
        found = shares(self.weights(), self.runners)
        return found or ({max(self.runners): 1.0} if self.runners else {})

    def main(self) -> int | None:
        """Return the version that has most of the requests, of several the newest; None if none is ready."""
        shares = self.shares()
        return max(shares, key=lambda version: (shares[version], version), default=None)

    def figures(self, version: int) -> VersionFigures:
        """Return the figures of a version."""
        figures = self.versions.get(version)
        if figures is None:
            figures = self.versions[version] = VersionFigures()
        return figures

    def shadow_figures(self, version: int) -> ShadowFigures:
        """Return the figures of a shadow version."""
        figures = self.shadows.get(version)
        if figures is None:
            figures = self.shadows[version] = ShadowFigures()
        return figures

    def set_share(self, percent: float) -> None:
        """Let the canary have a percentage of the requests, and the stable version the rest."""
        assert self.canary is not None
        plan = self.canary.plan
        weights = {plan.stable: 100.0 - percent, plan.version: percent}
        self.requested = replace(self.settings, weights={version: each for version, each in weights.items() if each})
        for version in (plan.stable, plan.version):
            self.figures(version).is_watched = not self.canary.state.is_over


def state_text(state: CanaryState) -> str:
    return state.value.replace("_", " ")
