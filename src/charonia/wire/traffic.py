"""Traffic settings, canary plans and changes as JSON objects, from clients, configurations and the disk. Pure."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import pairwise

from charonia.core.errors import invalid
from charonia.wire.json_text import Object, kind_of

REPLACE, BESIDE, CANARY = STRATEGIES = ("replace", "beside", "canary")
"""How new versions of a model get requests: all of them when they are ready, none yet, or step by step."""

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


STICKY_FORMS = f"'{BY_HEADER}NAME', '{BY_KEY}', '{BY_CORRELATION}' or ''"

_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,256}")
SETTINGS = ("weights", "sticky", "shadow")
"""Members of traffic settings."""

_CHANGE = (*SETTINGS, "canary", "action")
_VERSION_MAX = 2**63 - 1


def read_change(document: Object) -> TrafficChange:
    """Return the change that a client requests. A member that is null is reset.

    Raises:
        ServingError: INVALID_ARG.
    """
    _check_names("", document, _CHANGE)
    canary, action = document.get("canary"), document.get("action")
    change = TrafficChange(
        weights=_weights(document["weights"]) if "weights" in document else None,
        sticky=_sticky(document["sticky"]) if "sticky" in document else None,
        shadow=_shadows(document["shadow"]) if "shadow" in document else None,
        canary=read_plan(_object("canary", canary)) if canary is not None else None,
        action=_action(action) if action is not None else None,
    )
    if change == TrafficChange():
        raise invalid("the traffic is not changed", hint=f"give one of {', '.join(_CHANGE)}")
    if change.canary is not None and (change.weights is not None or change.action is not None):
        raise invalid("canary: the plan sets the weights itself", hint="leave out 'weights' and 'action'")
    return change


def read_settings(document: Object) -> TrafficSettings:
    """Return settings. Raises as `read_change`."""
    _check_names("", document, SETTINGS)
    return TrafficSettings(
        _weights(document.get("weights")), _sticky(document.get("sticky")), _shadows(document.get("shadow"))
    )


def settings_json(settings: TrafficSettings) -> Object:
    """Return settings as `read_settings` takes them."""
    return {
        "weights": {str(version): weight for version, weight in sorted(settings.weights.items())},
        "sticky": settings.sticky,
        "shadow": {str(version): asdict(shadow) for version, shadow in sorted(settings.shadow.items())},
    }


def read_plan(document: Object) -> CanaryPlan:
    """Return a canary plan. Raises as `read_change`."""
    members: dict[str, Callable[[str, object], object]] = {
        "version": _version,
        "stable": _version,
        "steps": _steps,
        "step_seconds": lambda name, value: _number(name, value, 0, 30 * 24 * 3600),
        "samples_min": lambda name, value: int(_number(name, value, 0, 10**9, whole=True)),
        "significance": lambda name, value: _number(name, value, 1e-9, 0.5),
        "checks_errors": _boolean,
        "p99_ratio_max": lambda name, value: _number(name, value, 1, 1e6),
        "difference_rate_max": lambda name, value: _number(name, value, 0, 0.999),
    }
    _check_names("canary.", document, tuple(members))
    if "version" not in document:
        raise invalid("canary.version: expected the version that takes over, got none")
    may_be_null = {"p99_ratio_max", "difference_rate_max"}
    values = {
        name: None if value is None and name in may_be_null else members[name](f"canary.{name}", value)
        for name, value in document.items()
        if value is not None or name in may_be_null
    }
    plan = CanaryPlan(**{"version": 0, **values})  # type: ignore[arg-type]
    if plan.version == plan.stable:
        raise invalid(f"canary.stable: version {plan.version} cannot be compared with itself")
    return plan


def plan_json(plan: CanaryPlan) -> Object:
    """Return a plan as `read_plan` takes it."""
    return {**asdict(plan), "steps": list(plan.steps)}


def _weights(value: object) -> Mapping[int, float]:
    document = _versions("weights", value)
    weights = {version: _number(f"weights.{version}", each, 0, 1e12) for version, each in document.items()}
    if weights and not any(weights.values()):
        raise invalid("weights: expected a weight above 0, got none", hint="null resets the weights")
    return weights


def _sticky(value: object) -> str:
    if value is None or value in ("", BY_KEY, BY_CORRELATION):
        return str(value or "")
    text = value.lower() if isinstance(value, str) else ""
    if not text.startswith(BY_HEADER) or not _HEADER.fullmatch(text.removeprefix(BY_HEADER)):
        shown = f"'{value:.80}'" if isinstance(value, str) else kind_of(value)
        raise invalid(f"sticky: expected {STICKY_FORMS}, got {shown}")
    return text


def _shadows(value: object) -> Mapping[int, Shadow]:
    found: dict[int, Shadow] = {}
    for version, each in _versions("shadow", value).items():
        name = f"shadow.{version}"
        if isinstance(each, dict):
            _check_names(f"{name}.", each, ("share", "relative_tolerance", "absolute_tolerance"))
            values = {key: _number(f"{name}.{key}", number, 0, 1e12) for key, number in each.items()}
            shadow = Shadow(**values)
        else:
            shadow = Shadow(_number(name, each, 0, 1))
        if not 0 < shadow.share <= 1:
            raise invalid(f"{name}.share: expected a share above 0 and up to 1, got {shadow.share:g}")
        found[version] = shadow
    return found


def _versions(name: str, value: object) -> Mapping[int, object]:
    document = _object(name, value if value is not None else {})
    if len(document) > VERSIONS_MAX:
        raise invalid(f"{name}: expected at most {VERSIONS_MAX} versions, got {len(document)}")
    return {_version(name, key): each for key, each in document.items()}


def _version(name: str, value: object) -> int:
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()) or not 0 < int(text[:20]) <= _VERSION_MAX:
        raise invalid(f"{name}: expected the number of a version, got '{text:.40}'")
    return int(text)


def _steps(name: str, value: object) -> tuple[float, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= STEPS_MAX:
        raise invalid(f"{name}: expected a list of 1 to {STEPS_MAX} percentages, got {kind_of(value)}")
    steps = tuple(_number(name, each, 0, 100) for each in value)
    if not steps[0] or any(before >= after for before, after in pairwise(steps)):
        raise invalid(f"{name}: expected percentages above 0 that grow, got {', '.join(f'{each:g}' for each in steps)}")
    return steps


def _action(value: object) -> CanaryAction:
    try:
        return CanaryAction(value)
    except ValueError:
        known = ", ".join(each.value for each in CanaryAction)
        raise invalid(f"action: expected one of {known}, got '{value!s:.40}'") from None


def _number(name: str, value: object, lowest: float, highest: float, *, whole: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not is_number
        or not lowest <= value <= highest  # type: ignore[operator]  # NaN is in no range
        or (whole and value != int(value))  # type: ignore[call-overload]
    ):
        kind = "a whole number" if whole else "a number"
        shown = (f"{value:g}" if isinstance(value, float) else str(value)) if is_number else kind_of(value)
        raise invalid(f"{name}: expected {kind} from {lowest:g} to {highest:g}, got {shown}")
    return float(value)  # type: ignore[arg-type]


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise invalid(f"{name}: expected true or false, got {kind_of(value)}")
    return value


def _object(name: str, value: object) -> Object:
    if not isinstance(value, dict):
        raise invalid(f"{name}: expected an object, got {kind_of(value)}")
    return value


def _check_names(path: str, document: Object, known: tuple[str, ...]) -> None:
    wrong = next((name for name in document if name not in known), None)
    if wrong is not None:
        raise invalid(f"there is no traffic setting '{path}{wrong:.80}'", hint=f"known are {', '.join(known)}")
