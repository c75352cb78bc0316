"""The state of the traffic of one model. Pure.

The version of a request: the versions divide the line from 0 to 1, each with a segment as long as its share, in the
order of their numbers: the latest has the upper end. A request has a point. A sticky client always has the same point,
so when a version grows at the cost of its neighbour, clients move to it and none moves back. Other requests have evenly
spread points.
"""

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

from charonia.config.model import ModelConfig
from charonia.config.parameters import TRAFFIC
from charonia.config.problems import Problem
from charonia.core.errors import ServingError
from charonia.server.traffic.canary import Canary, ShadowFigures, VersionFigures
from charonia.wire.json_text import parse_object
from charonia.wire.traffic import NO_TRAFFIC, CanaryState, TrafficSettings
from charonia.wire.traffic_form import read_settings

HISTORY_MAX = 100
"""Latest happenings of a model that are kept."""

R = TypeVar("R")

_GOLDEN = 0.6180339887498949
"""Multiples of this number, without their whole part, are spread more evenly than multiples of any other."""

_HASH_BYTES = 8


class EvenPoints:
    """Points that are spread evenly: among any n in a row, a share w is met by n * w of them, give or take a few."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = 0.0

    def next(self) -> float:
        """Return the next point."""
        self._at = at = (self._at + _GOLDEN) % 1.0
        return at


def point_of(model: str, client: str | int) -> float:
    """Return the point of a client. It is the same in every server, and independent between models."""
    digest = blake2b(f"{model}\0{client}".encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def choose(weights: Sequence[tuple[int, float]], ready: Container[int], point: float) -> int | None:
    """Return the version at a point. If it is not ready, only its own segment is divided among the others.

    Args:
        weights: Versions and weights, in the order of the versions.
        ready: The versions that are ready.
        point: From 0 to below 1.

    Returns:
        The version; None if none with a weight is ready.
    """
    left = weights
    while left:
        at = point * sum([weight for _, weight in left])
        chosen = left[-1]
        for each in left:
            if at < each[1]:
                chosen = each
                break
            at -= each[1]
        version, weight = chosen
        if weight > 0 and version in ready:
            return version
        left = [each for each in left if each[0] != version]
        point = min(at / weight, 1 - 2**-53) if weight > 0 else point
    return None


def shares(weights: Sequence[tuple[int, float]], ready: Container[int]) -> dict[int, float]:
    """Return the share of the requests that each ready version gets. Arguments as for `choose`."""
    found = {version: weight for version, weight in weights if weight > 0 and version in ready}
    total = sum(found.values())
    return {version: weight / total for version, weight in found.items()}


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
        history: The events, the latest last.
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
        """Whether requests without a version may go to others than the version policy's choice."""
        return self.settings != NO_TRAFFIC

    def weights(self) -> list[tuple[int, float]]:
        return sorted(self.settings.weights.items())

    def shares(self) -> dict[int, float]:
        """Return the share of the requests of each version that is ready and gets any."""
        found = shares(self.weights(), self.runners)
        return found or ({max(self.runners): 1.0} if self.runners else {})

    def main(self) -> int | None:
        """Return the version with most of the requests, of several the latest; None if none is ready."""
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


def traffic_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield all problems of the parameter."""
    text = config.parameters.get(TRAFFIC, "")
    if not text:
        return
    try:
        settings = read_settings(parse_object(text.encode()))
    except ServingError as error:
        yield Problem(f"parameters[{TRAFFIC}]", f"must be a JSON object with weights, sticky or shadow: {error}")
        return
    reason = shadow_obstacle(config)
    if settings.shadow and reason:
        yield Problem(f"parameters[{TRAFFIC}]", reason)


def configured(config: ModelConfig) -> TrafficSettings | None:
    """Return the settings of a valid configuration, None without any."""
    text = config.parameters.get(TRAFFIC, "")
    return read_settings(parse_object(text.encode())) if text else None


def shadow_obstacle(config: ModelConfig) -> str:
    """Return why a model cannot have shadow versions, "" if it can."""
    if config.sequence_batching is not None:
        return "a model that works on sequences cannot have shadow versions: a copy would be no part of a sequence"
    if config.is_decoupled:
        return "a decoupled model cannot have shadow versions: its responses cannot be compared one by one"
    return ""


def policy_obstacle(config: ModelConfig) -> str:
    """Return how the version policy keeps a model from having several versions, "" where it does not."""
    policy = config.version_policy
    if policy is None or (policy.latest is not None and policy.latest.num_versions <= 1):
        return "the version policy of the model keeps only its latest version"
    return ""


POLICY_HINT = "'version_policy: { all { } }' in config.pbtxt keeps all versions"
