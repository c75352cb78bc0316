"""The course of a canary plan, as a state machine: events in, commands out. Pure.

A step lasts its time, and until there are enough samples. In each step, also while paused by an operator, the canary is
rolled back immediately when a statistical test fails. The step of 100 % is the end: then there is nothing left to
compare with.

Errors and differences are tested after every window, latency whenever the sample has doubled. All tests hold for any
number of looks: a canary that is as good fails each with at most the probability that the test is given.

- A bet that more than a share of the events are of one kind, at the odds of the binomial distribution, is an e-process:
  it multiplies its stake by x with probability 1/x at most, ever, if they are not.
- Differences: of the compared answers, the share that is permitted.
- Errors: of the errors in a window, the canary's share of its requests, whatever the error rate is. Drawn without
  replacement, they vary less than the binomial distribution says, so the odds are no better than fair (Hoeffding).
  Where requests are few, windows are joined until both versions can be expected to have some. That must not depend on
  which version got them: windows that end when both have some are not fair bets.
- As long as a canary is good, bets lose. A part of the stake is kept back and bet anew when the previous bet is nearly
  lost, so a canary that turns bad after a day is found as one that is bad from the beginning, only later by
  some errors.
- Latency: a bound of each p99 from the ranks of the sample, which needs no assumption on how latencies are distributed.
  The looks share the probability, 1/2, 1/6, 1/12 and so on of it.

Sources: J. Ville, Étude critique de la notion de collectif, 1939 (the limit of a fair bet); W. Hoeffding,
Probability inequalities for sums of bounded random variables, 1963, section 6 (draws without replacement); H. A. David
and H. N. Nagaraja, Order Statistics, section 7.1 (ranks as bounds of quantiles).
"""

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from math import exp, inf, log, log1p

import numpy as np
from numpy.typing import NDArray

from charonia.core.latency import LatencyHistogram
from charonia.wire.traffic import CanaryAction, CanaryPlan, CanaryState

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
        self.requests += 1
        self.in_flight += 1

    def abandoned(self, after_ns: int) -> None:
        """The client of a request has gone."""
        self.in_flight -= 1
        self._watch(after_ns)

    def answered(self, latency_ns: int) -> None:
        self.in_flight -= 1
        self._answered += 1
        self._latest.append(latency_ns)
        self._watch(latency_ns)

    def failed(self) -> None:
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
        self._latest.append(latency_ns)
        self.different += is_different
        self.same += not is_different

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


ODDS = (1.5, 2.0, 4.0, 16.0, 256.0)
"""The bets: on odds of an error, or a difference, that are this many times higher. A canary that is worse by another
factor is found, too, only later."""

EXPECTED_MIN = 4
"""Requests that the version with fewer of them has on average in a window whose errors are compared."""

LOST = 0.1
"""Bets that are worth less than this share of the next part of the stake are joined by that part."""

LATENCIES_MIN = 50
"""Smallest sample of the canary whose p99 is compared."""

_TAIL = 0.01
"""Share of a sample above its p99."""


class _Stake:
    """A stake of 1, of which parts are bet on `ODDS`, equally on each: 1/2, 1/6, 1/12 and so on."""

    def __init__(self) -> None:
        self._parts = 1
        self._bets = [log(0.5)] * len(ODDS)

    @property
    def worth(self) -> float:
        """Its present value, with the part kept back: by mere chance, x or more with probability 1/x at most."""
        return _mean(self._bets) + 1 / (self._parts + 1)

    def bet(self, count: int, hits: int, rate: float) -> None:
        """Bet that more than this share, above 0 and below 1, of `count` events were hits."""
        rates = [odds * rate / (1 - rate + odds * rate) for odds in ODDS]
        gains = [hits * log(each / rate) + (count - hits) * (log1p(-each) - log1p(-rate)) for each in rates]
        self._bets = [bet + gain for bet, gain in zip(self._bets, gains, strict=True)]
        part = 1 / ((self._parts + 1) * (self._parts + 2))
        if _mean(self._bets) < LOST * part:
            self._parts += 1
            self._bets = [float(np.logaddexp(bet, log(part))) for bet in self._bets]


class ErrorTest:
    """Whether requests of the canary fail more often than requests of the stable version."""

    def __init__(self) -> None:
        self._stake = _Stake()
        self._window_min = 0.0
        self._canary = self._stable = (0, 0)  # requests and errors of the windows that are joined

    @property
    def evidence(self) -> float:
        """The present value of a stake of 1: by mere chance, x or more with probability 1/x at most."""
        return self._stake.worth

    def begin(self, share: float) -> None:
        """From now on, the canary gets this share of the requests, above 0 and below 1."""
        self._judge()
        self._window_min = EXPECTED_MIN / min(share, 1 - share)

    def add(self, canary: RequestWindow, stable: RequestWindow) -> None:
        """Take in what both versions did in the same time."""
        self._canary = (self._canary[0] + canary.requests, self._canary[1] + canary.errors)
        self._stable = (self._stable[0] + stable.requests, self._stable[1] + stable.errors)
        if self._canary[0] + self._stable[0] >= self._window_min:
            self._judge()

    def _judge(self) -> None:
        (ours, failed), (theirs, also) = self._canary, self._stable
        self._canary = self._stable = (0, 0)
        if ours and theirs:
            self._stake.bet(failed + also, failed, ours / (ours + theirs))


class RateTest:
    """Whether more than a share of something is different."""

    def __init__(self, rate_max: float) -> None:
        self._rate_max = rate_max
        self._stake = _Stake()
        self._is_over = False

    @property
    def evidence(self) -> float:
        """The present value of a stake of 1, as in `ErrorTest`."""
        return inf if self._is_over else self._stake.worth

    def add(self, count: int, different: int) -> None:
        """Take in how many were compared, and how many of them were different."""
        if self._rate_max:
            self._stake.bet(count, different, self._rate_max)
        else:
            self._is_over = self._is_over or different > 0


class LatencyTest:
    """Whether the p99 latency of the canary exceeds this multiple of the stable version's.

    Attributes:
        is_judged: Whether the present samples were large enough for a look.
        ratio_min: By how much it is longer at least, by the latest look; 0 before.
    """

    def __init__(self, ratio_max: float, chance: float) -> None:
        self._ratio_max = ratio_max
        self._chance = chance
        self._looks = 0
        self.begin()

    def begin(self) -> None:
        """Begin with new samples: the load on both versions has changed."""
        self.canary, self.stable = LatencyHistogram(), LatencyHistogram()
        self.is_judged = False
        self.ratio_min = 0.0
        self._next = LATENCIES_MIN

    def add(self, canary: RequestWindow, stable: RequestWindow) -> bool:
        """Take in what both versions did in the same time; return whether the canary fails."""
        self.canary.record(canary.latencies_ns)
        self.stable.record(stable.latencies_ns)
        return self.canary.count >= self._next and self.check()

    def check(self) -> bool:
        """Return whether the canary fails with the present samples."""
        chance = self._chance / ((self._looks + 1) * (self._looks + 2)) / 2  # half for each bound
        upper = rank_above(self.stable.count, chance)
        if upper is None or self.canary.count < LATENCIES_MIN:
            return False
        self._looks += 1
        self._next = 2 * self.canary.count
        lower = rank_below(self.canary.count, chance)
        self.is_judged = True
        at_least = _at_rank(self.canary, lower) if lower is not None else 0
        self.ratio_min = at_least / max(1, _at_rank(self.stable, upper))
        return self.ratio_min > self._ratio_max


def rank_below(count: int, chance: float) -> int | None:
    """Return the highest rank, from 0, whose value lies above the p99 with at most this probability; None for none."""
    at_least = np.cumsum(_tail_chances(count)[::-1])[::-1]
    enough = int(np.argmax(at_least <= chance))  # values above the p99, this number or more
    return count - enough if enough <= count else None


def rank_above(count: int, chance: float) -> int | None:
    """Return the lowest rank, from 0, whose value lies below the p99 with at most this probability; None for none."""
    at_most = np.cumsum(_tail_chances(count))
    few = int(np.searchsorted(at_most, chance, side="right")) - 1
    return count - few - 1 if few >= 0 else None


def _tail_chances(count: int) -> NDArray[np.float64]:
    """Return how probable each number of values above the p99 is, up to numbers that hardly ever occur."""
    most = min(count, int(count * _TAIL + 12 * (count * _TAIL) ** 0.5 + 40))
    numbers = np.arange(most, dtype=np.float64)
    steps = np.log((count - numbers) / (numbers + 1)) + (log(_TAIL) - log1p(-_TAIL))
    chances = np.exp(count * log1p(-_TAIL) + np.concatenate(([0.0], np.cumsum(steps))))
    return np.append(chances, 0.0)


def _at_rank(histogram: LatencyHistogram, rank: int) -> int:
    return histogram.percentile(100 * rank / max(1, histogram.count - 1))


def _mean(logarithms: Sequence[float]) -> float:
    """Return the mean of numbers, given their logarithms; one that is too large for a float is infinite."""
    top = max(logarithms)
    mean = top + log(sum(exp(each - top) for each in logarithms) / len(logarithms))
    return exp(mean) if mean < 700 else inf


EVIDENCE_MIN = 2.0
"""Less evidence is not worth mentioning."""

LOOK_NS = 1_000_000_000
"""Time between two looks."""

ENDS_MAX = 2
"""Engines that may have ended during a plan before it is rolled back, this one included."""

_S = 1_000_000_000
_WHOLE = 100.0


@dataclass(frozen=True, slots=True)
class ObservedTraffic:
    """The traffic since the last check.

    Attributes:
        canary: Requests of the canary.
        stable: Requests of the stable version.
        compared: Copies whose answers were compared.
        different: Copies with different answers.
    """

    canary: RequestWindow = field(default_factory=RequestWindow)
    stable: RequestWindow = field(default_factory=RequestWindow)
    compared: int = 0
    different: int = 0


@dataclass(frozen=True, slots=True)
class ReadyVersions:
    """The versions that are ready, or are being loaded, have changed. Without any, the model is unloaded."""

    versions: Set[int]


@dataclass(frozen=True, slots=True)
class Replaced:
    """A version was reloaded from other files: earlier observations of it no longer apply."""

    version: int


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The previous engine has crashed, or was killed: the canary may be the cause."""


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """An operator does something."""

    action: CanaryAction


@dataclass(frozen=True, slots=True)
class SetShare:
    """Let the canary have a percentage of the requests, and the stable version the rest."""

    percent: float


@dataclass(frozen=True, slots=True)
class RestoreSplit:
    """Split the requests as before the plan."""


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Log an event."""

    text: str


CanaryEvent = ObservedTraffic | ReadyVersions | Replaced | EngineEnded | OperatorAction
CanaryCommand = SetShare | RestoreSplit | LogEvent


class Canary:
    """A canary plan that is carried out.

    Args:
        plan: The plan, with its stable version.
        now_ns: The time.
        step: The step to begin with, from 0.
        ends: Engines that have ended during the plan.

    Attributes:
        step: The present step.
        ends: Engines that have ended during the plan.
        reason: Why it is in this state.
    """

    def __init__(self, plan: CanaryPlan, now_ns: int, step: int = 0, ends: int = 0) -> None:
        self.plan = plan
        self.state = CanaryState.RUNNING
        self.step = step
        self.ends = ends
        self.reason = ""
        self._chance = plan.significance / max(1, plan.condition_count)
        self._enough = 1 / self._chance
        self._checked_ns = now_ns
        self._begin_tests(now_ns)

    @property
    def percent(self) -> float:
        return self.plan.steps[self.step]

    def start(self) -> list[CanaryCommand]:
        """Return the commands with which the present step begins."""
        plan = self.plan
        text = f"version {plan.version} gets {self.percent:g} % of the requests, version {plan.stable} the rest"
        if self.percent >= _WHOLE:
            return self._end(CanaryState.FINISHED, _WHOLE, f"version {plan.version} gets all requests")
        self.reason = text
        return [SetShare(self.percent), LogEvent(text)]

    def wake_at(self) -> int | None:
        return None if self.state.is_over else self._checked_ns + LOOK_NS

    def handle(self, event: CanaryEvent, now_ns: int) -> list[CanaryCommand]:
        """Take in an event and return what to do."""
        if self.state.is_over:
            return []
        if isinstance(event, OperatorAction):
            return self._act(event.action, now_ns)
        if isinstance(event, ReadyVersions):
            return self._follow(event.versions)
        if isinstance(event, Replaced):
            self._begin_tests(now_ns)
            self.reason = f"version {event.version} was loaded again: the step of {self.percent:g} % begins again"
            return [LogEvent(self.reason)]
        if isinstance(event, EngineEnded):
            return self._engine_ended()
        self._checked_ns = now_ns
        if failure := self._take(event):
            return self._roll_back(f"{failure}; version {self.plan.stable} gets all requests")
        if self.state is CanaryState.PAUSED or now_ns < self._due_ns or self.missing():
            return []
        if self._latency is not None and self._latency.check():
            return self._roll_back(f"{self._latency_text()}; version {self.plan.stable} gets all requests")
        return self._go_on(now_ns)

    def missing(self) -> str:
        """Return the missing condition of the present step besides its time, "" for none."""
        wanted, plan = self.plan.samples_min, self.plan
        counts = [
            (self._step_canary, f"requests of version {plan.version}"),
            (self._step_stable, f"requests of version {plan.stable}"),
        ]
        if self._differences is not None:
            counts.append((self._step_compared, "compared answers"))
        few = [f"{wanted} {what} (has {count})" for count, what in counts if count < wanted]
        if not few and self._latency is not None and not self._latency.is_judged:
            is_ours = self._latency.canary.count < LATENCIES_MIN
            count = self._latency.canary.count if is_ours else self._latency.stable.count
            version = plan.version if is_ours else plan.stable
            few = [f"more requests to compare p99: {count} of version {version} without an error are too few"]
        return ", ".join(few)

    def waits_for(self, now_ns: int) -> str:
        """Return the missing condition of the present step, "" if it is over."""
        if self.state is CanaryState.PAUSED:
            return "an operator, who resumes, promotes or aborts it"
        if self.state is not CanaryState.RUNNING:
            return ""
        left = max(0, self._due_ns - now_ns) / _S
        parts = [f"{left:.0f} s until the end of this step"] if left else []
        return ", ".join([*parts, *filter(None, [self.missing()])]) or "the next look"

    def checks(self) -> dict[str, str]:
        """Return how each condition stands, in words."""
        found = {}
        if self._errors is not None:
            found["errors"] = f"{self._error_text()}; {self._weight(self._errors.evidence)}"
        if self._latency is not None:
            found["p99"] = self._latency_text()
        if self._differences is not None:
            found["differences"] = f"{self._difference_text()}; {self._weight(self._differences.evidence)}"
        return found

    # Inside.

    def _begin_tests(self, now_ns: int) -> None:
        plan, chance = self.plan, self._chance
        self._errors = ErrorTest() if plan.checks_errors else None
        self._latency = LatencyTest(plan.p99_ratio_max, chance) if plan.p99_ratio_max is not None else None
        self._differences = RateTest(plan.difference_rate_max) if plan.difference_rate_max is not None else None
        self._canary = self._stable = (0, 0)  # requests and errors since then
        self._compared = self._different = 0
        self._begin_step(now_ns)

    def _begin_step(self, now_ns: int) -> None:
        self._due_ns = now_ns + round(self.plan.step_seconds * _S)
        self._step_canary = self._step_stable = self._step_compared = 0
        if self._errors is not None and self.percent < _WHOLE:
            self._errors.begin(self.percent / _WHOLE)
        if self._latency is not None:
            self._latency.begin()

    def _take(self, seen: ObservedTraffic) -> str:
        """Take in windows; return why the canary fails, "" if it does not."""
        canary, stable = seen.canary, seen.stable
        self._step_canary += canary.requests
        self._step_stable += stable.requests
        self._step_compared += seen.compared
        self._canary = (self._canary[0] + canary.requests, self._canary[1] + canary.errors)
        self._stable = (self._stable[0] + stable.requests, self._stable[1] + stable.errors)
        self._compared += seen.compared
        self._different += seen.different
        if self._errors is not None:
            self._errors.add(canary, stable)
            if self._errors.evidence >= self._enough:
                return self._error_text()
        if self._differences is not None:
            self._differences.add(seen.compared, seen.different)
            if self._differences.evidence >= self._enough:
                return self._difference_text()
        if self._latency is not None and self._latency.add(canary, stable):
            return self._latency_text()
        return ""

    def _go_on(self, now_ns: int) -> list[CanaryCommand]:
        plan = self.plan
        passed = f"{self.percent:g} % went well"
        if self.step + 1 == len(plan.steps):
            return self._end(CanaryState.FINISHED, self.percent, f"{passed}: version {plan.version} keeps this share")
        self.step += 1
        if self.percent >= _WHOLE:
            return self._end(CanaryState.FINISHED, _WHOLE, f"{passed}: version {plan.version} gets all requests")
        self._begin_step(now_ns)
        self.reason = f"{passed}: version {plan.version} gets {self.percent:g} % of the requests"
        return [SetShare(self.percent), LogEvent(self.reason)]

    def _act(self, action: CanaryAction, now_ns: int) -> list[CanaryCommand]:
        plan = self.plan
        match action:
            case CanaryAction.PAUSE:
                return self._pause(f"paused at {self.percent:g} % by an operator")
            case CanaryAction.RESUME:
                self.state, self.reason = CanaryState.RUNNING, f"resumed at {self.percent:g} % by an operator"
                return [LogEvent(self.reason)]
            case CanaryAction.PROMOTE:
                text = f"promoted at {self.percent:g} % by an operator: version {plan.version} gets all requests"
                return self._end(CanaryState.FINISHED, _WHOLE, text)
        self.state = CanaryState.ABORTED
        self.reason = f"aborted at {self.percent:g} % by an operator: requests are split as before the plan"
        return [RestoreSplit(), LogEvent(self.reason)]

    def _follow(self, versions: Set[int]) -> list[CanaryCommand]:
        plan = self.plan
        if not versions:  # no client gets a wrong answer: the plan continues when the model is back
            return []
        if plan.version not in versions:
            return self._roll_back(f"version {plan.version} is not ready any more")
        if plan.stable not in versions and self.state is CanaryState.RUNNING:
            return self._pause(
                f"paused at {self.percent:g} %: version {plan.stable} is not ready any more, so version {plan.version} "
                "has nothing to be compared with"
            )
        return []

    def _engine_ended(self) -> list[CanaryCommand]:
        self.ends += 1
        if self.ends < ENDS_MAX:
            self.reason = f"the engine ended at {self.percent:g} %: the step begins again"
            return [LogEvent(self.reason)]
        return self._roll_back(
            f"the engine has ended {self.ends} times during this plan; version {self.plan.stable} gets all requests"
        )

    def _pause(self, text: str) -> list[CanaryCommand]:
        self.state, self.reason = CanaryState.PAUSED, text
        return [LogEvent(text)]

    def _roll_back(self, reason: str) -> list[CanaryCommand]:
        return self._end(CanaryState.ROLLED_BACK, 0.0, f"rolled back at {self.percent:g} %: {reason}")

    def _end(self, state: CanaryState, percent: float, text: str) -> list[CanaryCommand]:
        self.state, self.reason = state, text
        return [SetShare(percent), LogEvent(text)]

    def _error_text(self) -> str:
        plan, (canary, failed), (stable, also) = self.plan, self._canary, self._stable
        return (
            f"{failed} of {canary} requests failed with version {plan.version}, "
            f"{also} of {stable} with version {plan.stable}"
        )

    def _difference_text(self) -> str:
        limit = self.plan.difference_rate_max or 0.0
        return f"{self._different} of {self._compared} answers differ from those given, {limit:.2%} may"

    def _latency_text(self) -> str:
        plan, test = self.plan, self._latency
        assert test is not None
        if not test.canary.count or not test.stable.count:
            return "p99: no data yet"
        ours, theirs = (each.percentile(99) for each in (test.canary, test.stable))
        text = f"p99 is {_ms(ours)} with version {plan.version}, {_ms(theirs)} with version {plan.stable}"
        shown = f"at least {test.ratio_min:.2f} times as long" if test.is_judged else "too few to compare"
        return f"{text}: {shown}, {plan.p99_ratio_max:g} times is permitted"

    def _weight(self, evidence: float) -> str:
        if evidence < EVIDENCE_MIN:
            return "no evidence of a regression so far"
        return f"evidence {evidence:.3g} of {self._enough:.3g} to roll back"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3g} ms" if ns < 999_500_000 else f"{ns / 1e6:.0f} ms"
