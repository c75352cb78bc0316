"""The state of the traffic of one model. Pure.

The version of a request: the versions divide the line from 0 to 1, each with a segment as long as its share, in the
order of their numbers: the latest has the upper end. A request has a point. A sticky client always has the same point,
so when a version grows at the cost of its neighbour, clients move to it and none moves back. Other requests have evenly
spread points.
"""

from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

from charonia.config.model import ModelConfig
from charonia.config.parameters import TRAFFIC
from charonia.config.problems import Problem
from charonia.core.errors import ServingError
from charonia.server.metrics.metric_families import Family, family
from charonia.server.traffic.canary import Canary, ShadowFigures, VersionFigures
from charonia.wire.json_text import Object, parse_object
from charonia.wire.traffic import (
    BY_CORRELATION,
    BY_HEADER,
    BY_KEY,
    NO_TRAFFIC,
    CanaryState,
    TrafficSettings,
    plan_json,
    read_settings,
    settings_json,
)

HISTORY_MAX = 100
"""Latest happenings of a model that are kept."""

R = TypeVar("R")

_GOLDEN = 0.6180339887498949
"""Multiples of this number, without their whole part, are spread more evenly than multiples of any other."""

_HASH_BYTES = 8


class EvenPoints:
    """Points that are spread evenly: among any n in a row, a share w is met by n * w of them, give or take a few."""

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


class TrafficEvent(NamedTuple):
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
        before: The weights from before that plan.
        history: The events, the latest last.
        runners: Runners of the versions that are ready, by number.
        is_routed: Whether requests without a version are answered.
        figures: Figures by version.
        shadows: Figures by shadow version.
        points: Points of the requests of clients that may go to any version.
    """

    model: str
    requested: TrafficSettings | None = None
    configured: TrafficSettings | None = None
    canary: Canary | None = None
    before: Mapping[int, float] = field(default_factory=dict)
    history: deque[TrafficEvent] = field(default_factory=lambda: deque(maxlen=HISTORY_MAX))
    runners: Mapping[int, R] = field(default_factory=dict)
    is_routed: bool = False
    figures: defaultdict[int, VersionFigures] = field(default_factory=lambda: defaultdict(VersionFigures))
    shadows: defaultdict[int, ShadowFigures] = field(default_factory=lambda: defaultdict(ShadowFigures))
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

    def set_share(self, percent: float) -> None:
        """Let the canary have a percentage of the requests, and the stable version the rest."""
        assert self.canary is not None
        plan = self.canary.plan
        weights = {plan.stable: 100.0 - percent, plan.version: percent}
        self.set_weights({version: each for version, each in weights.items() if each})

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Split the requests of the canary plan by weights."""
        assert self.canary is not None
        plan = self.canary.plan
        self.requested = replace(self.settings, weights=weights)
        for version in (plan.stable, plan.version):
            self.figures[version].is_watched = not self.canary.state.is_over


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


REQUESTS = "charonia_traffic_requests_total"
ERRORS = "charonia_traffic_errors_total"
SHARE = "charonia_traffic_share"
SHADOW = "charonia_traffic_shadow_total"
CANARY = "charonia_traffic_canary_percent"


def traffic_metric_names() -> tuple[str, ...]:
    return (REQUESTS, ERRORS, SHARE, SHADOW, CANARY)


def traffic_json(traffic: ModelTraffic[R], now_ns: int) -> Object:
    """Return the settings, the figures of each version, the canary and the history."""
    source = "request" if traffic.requested is not None else "configuration" if traffic.configured is not None else ""
    return {
        "model": traffic.model,
        "source": source or "default",
        **settings_json(traffic.settings),
        "versions": [_version_json(traffic, version) for version in _shown(traffic)],
        "canary": _canary_json(traffic.canary, now_ns) if traffic.canary is not None else None,
        "history": [{"time": each.time, "text": each.text} for each in traffic.history],
    }


def traffic_words(traffic: ModelTraffic[R], now_ns: int) -> list[str]:
    """Return the traffic in sentences; none without traffic."""
    if not traffic.is_split:
        return []
    parts = [f"{share:.1%} to version {version}" for version, share in sorted(traffic.shares().items())]
    lines = [f"Requests without a version go {', '.join(parts) or 'nowhere: no version is ready'}"]
    sticky = traffic.settings.sticky
    if sticky:
        what = {BY_KEY: "API key", BY_CORRELATION: "correlation id"}.get(sticky)
        lines[0] += f"; by {what or 'header ' + sticky.removeprefix(BY_HEADER)}"
    for version, weight in traffic.weights():
        if weight and version not in traffic.runners:
            lines.append(f"Version {version} has a weight and is not ready: the others get its share")
    for version, shadow in sorted(traffic.settings.shadow.items()):
        figures = traffic.shadows[version]
        differ = f"{figures.unlike} of {figures.compared} answers differ"
        lines.append(f"Version {version} gets copies of {shadow.share:.1%}: {differ}")
    canary = traffic.canary
    if canary is not None:
        lines.append(f"Canary of version {canary.plan.version}, {state_text(canary.state)}: {canary.reason}")
        waits = canary.waits_for(now_ns)
        if waits:
            lines[-1] += f"; it waits for {waits}"
    return lines


def traffic_families(models: Iterable[ModelTraffic[R]]) -> list[Family]:
    """Return the metrics of models with traffic; none where there are none."""
    shown = [each for each in models if each.is_split]
    if not shown:
        return []
    rows = [(each, version, _labels(each, version)) for each in shown for version in _shown(each)]
    results = [
        (getattr(each.shadows[version], result), {**_labels(each, version), "result": result})
        for each in shown
        for version in sorted(each.shadows)
        for result in ("same", "different", "failed", "dropped")
    ]
    canaries = [(each.running.percent, _labels(each, each.running.plan.version)) for each in shown if each.running]
    return [
        family(
            REQUESTS, "counter", "Requests without a version that traffic sent to a version",
            *((each.figures[version].requests, labels) for each, version, labels in rows),
        ),
        family(
            ERRORS, "counter", "Requests that were answered with an error",
            *((each.figures[version].errors, labels) for each, version, labels in rows),
        ),
        family(
            SHARE, "gauge", "Share of the requests without a version that a version gets",
            *((round(each.shares().get(version, 0.0), 6), labels) for each, version, labels in rows),
        ),
        family(SHADOW, "counter", "Copies of requests for a shadow version, by what came of them", *results),
        family(CANARY, "gauge", "Percentage that a canary plan gives to its version now", *canaries),
    ]  # fmt: skip


def _labels(traffic: ModelTraffic[R], version: int) -> dict[str, str]:
    return {"model": traffic.model, "version": str(version)}


def _shown(traffic: ModelTraffic[R]) -> list[int]:
    """Return the versions to show: ready ones, and all with a weight or requests."""
    settings = traffic.settings
    return sorted({*traffic.runners, *settings.weights, *settings.shadow, *traffic.figures, *traffic.shadows})


def _version_json(traffic: ModelTraffic[R], version: int) -> Object:
    figures, settings = traffic.figures[version], traffic.settings
    return {
        "version": str(version),
        "is_ready": version in traffic.runners,
        "weight": settings.weights.get(version, 0.0),
        "share": round(traffic.shares().get(version, 0.0), 6),
        "requests": figures.requests,
        "errors": figures.errors,
        "in_flight": figures.in_flight,
        "latency_us": figures.latency_us(),
        "shadow": _shadow_json(traffic.shadows[version]) if version in settings.shadow else None,
    }


def _shadow_json(figures: ShadowFigures) -> Object:
    return {
        **{name: getattr(figures, name) for name in ("sent", "compared", "different", "failed", "dropped")},
        "difference_rate": round(figures.unlike / figures.compared, 6) if figures.compared else 0.0,
        "latency_us": figures.latency_us(),
    }


def _canary_json(canary: Canary, now_ns: int) -> Object:
    return {
        "plan": plan_json(canary.plan),
        "state": canary.state.value,
        "step": canary.step,
        "percent": canary.percent,
        "reason": canary.reason,
        "waits_for": canary.waits_for(now_ns),
        "checks": canary.checks(),
    }
