"""Records of traffic settings and canary plans. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

VERSIONS_MAX = 16
"""Most versions that have weights, and most that are shadows."""

STEPS_MAX = 32
"""Most steps of a canary plan."""

BY_KEY = "key"
"""Stickiness by API key."""

BY_CORRELATION = "correlation_id"
"""Stickiness by correlation id."""

BY_HEADER = "header:"
"""Stickiness by a header: its name follows."""

KEY_HEADERS = (b"authorization", b"x-api-key")
"""Headers that have the API key."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """How a version gets copies of requests.

    Attributes:
        share: Share of the requests that are copied, above 0 and up to 1.
        relative_tolerance: Numbers that differ by more than this share of the answer's, and by more than
            `absolute_tolerance`, are different.
        absolute_tolerance: See there.
    """

    share: float = 1.0
    relative_tolerance: float = 1e-3
    absolute_tolerance: float = 1e-5


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """How requests that name no version are split.

    Attributes:
        weights: Weight by version; none for the version that the version policy chooses.
        sticky: What keeps a client on its version: `header:NAME`, `key`, `correlation_id`; "" for nothing.
        shadow: The versions that get copies.
    """

    weights: Mapping[int, float] = field(default_factory=dict)
    sticky: str = ""
    shadow: Mapping[int, Shadow] = field(default_factory=dict)

    @property
    def headers(self) -> tuple[bytes, ...]:
        """The headers, in lower case, of which the first that a request has keeps its client on a version."""
        if self.sticky == BY_KEY:
            return KEY_HEADERS
        return (self.sticky.removeprefix(BY_HEADER).encode(),) if self.sticky.startswith(BY_HEADER) else ()


NO_TRAFFIC = TrafficSettings()
"""Nothing is split."""


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """How a version takes over the requests of another one.

    Attributes:
        version: The canary.
        stable: The version that it is compared with; 0 for the version with most of the requests.
        steps: Percentages of the requests that the canary gets, ascending.
        step_seconds: Shortest time of a step.
        samples_min: Requests that both versions, and comparisons if they count, must have in a step before the next.
        significance: Highest probability with which a canary that is as good is rolled back.
        checks_errors: Whether the canary is rolled back for an error rate above that of the stable version.
        p99_ratio_max: How many times longer its p99 latency may be; None if latency does not count.
        difference_rate_max: Share of its shadow answers that may differ; None if they do not count.
    """

    version: int
    stable: int = 0
    steps: tuple[float, ...] = (1.0, 10.0, 50.0, 100.0)
    step_seconds: float = 300.0
    samples_min: int = 200
    significance: float = 0.01
    checks_errors: bool = True
    p99_ratio_max: float | None = 1.5
    difference_rate_max: float | None = None

    @property
    def condition_count(self) -> int:
        """Number of conditions, which share the significance."""
        return self.checks_errors + (self.p99_ratio_max is not None) + (self.difference_rate_max is not None)


class CanaryState(Enum):
    """The state of a canary."""

    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    ROLLED_BACK = "rolled_back"
    ABORTED = "aborted"

    @property
    def is_over(self) -> bool:
        return self not in (CanaryState.RUNNING, CanaryState.PAUSED)


class CanaryAction(Enum):
    """What an operator may do with a canary."""

    PAUSE = "pause"
    RESUME = "resume"
    PROMOTE = "promote"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class TrafficChange:
    """The changes of a request; None leaves a part unchanged.

    Attributes:
        weights: New weights.
        sticky: New stickiness.
        shadow: New shadow versions.
        canary: A plan to begin.
        action: What to do with the present one.
    """

    weights: Mapping[int, float] | None = None
    sticky: str | None = None
    shadow: Mapping[int, Shadow] | None = None
    canary: CanaryPlan | None = None
    action: CanaryAction | None = None
