"""The verdict of a search: the recommendation, how certain it is, and which variants are equally good. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from charonia.tools.results.records import Estimate
from charonia.tools.tune.api import Constraint, Goal, LoadPoint, SearchOptions, TrialFailed, TrialRecord, Variant
from charonia.tools.tune.objective import Evidence, Point, confidence_of_looks, gain

_TIES_NAMED_MAX = 3
_USUAL = SearchOptions()


@dataclass(frozen=True, slots=True)
class Ranked:
    """A variant under one load, all its measurements together.

    Attributes:
        violation: How far the constraints are missed: sum of the relative distances, 0 where they are kept.
        gain: Relative gain over the default configuration's best, with its interval (0.1: 10 % better);
            None where the default configuration was not measured.
        base_loads: The loads of the default configuration's best, which the gain is over.
    """

    variant: Variant
    loads: tuple[LoadPoint, ...]
    metrics: Mapping[str, Mapping[str, Estimate]]
    trial_numbers: tuple[int, ...]
    keeps_constraints: bool
    violation: float
    gain: Estimate | None = None
    base_loads: tuple[LoadPoint, ...] = ()

    @property
    def between_loads(self) -> str:
        """Which loads the gain is between, "" if both are the same: `at concurrency 64 against concurrency 2`."""
        return between_loads(self.loads, self.base_loads) if self.base_loads else ""


class Conclusion(StrEnum):
    """The conclusion of a search."""

    BETTER = "better"
    """The best variant is significantly better than the default configuration."""
    UNDECIDED = "undecided"
    """A variant may be clearly better than the default configuration, or have been lucky."""
    NO_GAIN = "no_gain"
    """No significant gain over the default configuration."""
    NO_OTHER = "no_other"
    """Only the default configuration was measured."""
    NO_DEFAULT = "no_default"
    """There is a best variant, but the default configuration could not be measured."""
    CONSTRAINTS_NOT_MET = "constraints_not_met"
    """No variant keeps the constraints; the best is the closest one."""
    NOTHING_MEASURED = "nothing_measured"
    """Every trial failed, or there was none."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The verdict.

    Attributes:
        best: The recommended variant under its best load; the default one on `NO_GAIN`, `UNDECIDED` and
            `NO_OTHER`.
        ties: Variants that are close to the best one and not significantly worse, without it.
        leader: The variant with the best figures so far, certain or not.
        sentences: The verdict and its reasons for people, the verdict first.
    """

    conclusion: Conclusion
    best: Ranked | None
    default: Ranked | None
    ranking: tuple[Ranked, ...]
    ties: tuple[Ranked, ...]
    sentences: tuple[str, ...]
    leader: Ranked | None = None


def decide(goal: Goal, history: Sequence[TrialRecord], options: SearchOptions = _USUAL) -> Decision:
    """Return the verdict on the measurements.

    Args:
        options: Of the search: the more finalists and repeats, the more chances for a lucky one to look better.
    """
    evidence = Evidence(goal)
    for told in history:
        evidence.add(told)
    points = evidence.ranking()
    if not points:
        return Decision(Conclusion.NOTHING_MEASURED, None, None, (), (), _nothing(goal, history))
    level = confidence_of_looks(goal, options)
    default = evidence.best(Variant())
    # Repeated points decide. A point measured once that seems better was not repeated only for lack of time.
    ranking = tuple(_ranked(point, default, level) for point in points)
    conclusion, best = _conclude(points, default, level)
    rival = _open_rival(ranking) if conclusion is Conclusion.NO_GAIN else None
    conclusion = conclusion if rival is None else Conclusion.UNDECIDED
    tied = [point for point in points if point.variant != best.variant and _is_tie(point, best, level)]
    ties = tuple(_ranked(point, default, level) for point in tied)
    chosen, base = _ranked(best, default, level), _ranked(default, default, level) if default else None
    sentences = (*_verdict(conclusion, chosen, base, goal, rival), *_load_sentences(evidence, chosen, base))
    sentences += _tie_sentences(ties, chosen)
    leader = _ranked(max(points, key=lambda point: point.order), default, level)
    return Decision(conclusion, chosen, base, ranking, ties, sentences, leader)


def _conclude(points: Sequence[Point], default: Point | None, level: float) -> tuple[Conclusion, Point]:
    first = points[0]
    if first.violation:
        return Conclusion.CONSTRAINTS_NOT_MET, first
    if default is None:
        return Conclusion.NO_DEFAULT, first
    if default.violation:
        return Conclusion.BETTER, first
    if gain(first, default, level).low > 0:
        return Conclusion.BETTER, first
    is_alone = all(point.variant.is_default for point in points)
    return Conclusion.NO_OTHER if is_alone else Conclusion.NO_GAIN, default


def _is_tie(point: Point, best: Point, level: float) -> bool:
    if best.violation or point.violation:
        return False
    difference = gain(point, best, level)
    return difference.high >= 0 and difference.value > -OPEN


def _ranked(point: Point, default: Point | None, level: float) -> Ranked:
    return Ranked(
        point.variant,
        point.loads,
        point.metrics,
        point.trial_numbers,
        not point.violation,
        point.violation,
        gain(point, default, level) if default else None,
        default.loads if default else (),
    )


OPEN = 0.05
"""A gain beyond this that may be chance leaves the verdict open: it is not the same as no gain."""


def _open_rival(ranking: Sequence[Ranked]) -> tuple[Variant, Estimate] | None:
    """Return the variant, with its gain, that may be clearly better than the default although that is not certain."""
    rivals = [
        (each.variant, each.gain) for each in ranking if each.gain and each.gain.value > OPEN and each.keeps_constraints
    ]
    return max(rivals, key=lambda rival: rival[1].value, default=None)


def _verdict(
    conclusion: Conclusion, best: Ranked, default: Ranked | None, goal: Goal, rival: tuple[Variant, Estimate] | None
) -> tuple[str, ...]:
    if conclusion is Conclusion.CONSTRAINTS_NOT_MET:
        missed = missed_constraints(best, goal)
        return (f"No configuration meets the constraints. The closest is '{best.variant}': {'; '.join(missed)}.",)
    if conclusion is Conclusion.NO_DEFAULT:
        return (f"Best is '{best.variant}'. The default configuration could not be measured, so the gain is unknown.",)
    if conclusion is Conclusion.NO_OTHER:
        return ("Only the default configuration was measured: there is nothing to compare it with.",)
    if rival is not None:
        return (
            f"Undecided: '{rival[0]}' came to {percent(rival[1])} over the default configuration, "
            "which may be chance. More time, or a quieter machine, would tell.",
        )
    if conclusion is Conclusion.NO_GAIN or best.gain is None:
        return ("No significant gain over the default configuration: keep it.",)
    if default and not default.keeps_constraints:
        missed = missed_constraints(default, goal)
        return (f"'{best.variant}' meets the constraints, the default does not: {'; '.join(missed)}.",)
    loads = f" ({best.between_loads})" if best.between_loads else ""
    return (f"'{best.variant}' is {percent(best.gain)} better than the default configuration{loads}.",)


def loads_text(loads: Sequence[LoadPoint]) -> str:
    """Return the loads of all models in words: `concurrency 8`."""
    return "; ".join(dict.fromkeys(map(str, loads)))


def between_loads(loads: Sequence[LoadPoint], others: Sequence[LoadPoint]) -> str:
    """Return which loads a comparison is between, "" if both are the same."""
    return "" if tuple(loads) == tuple(others) else f"at {loads_text(loads)} against {loads_text(others)}"


def _load_sentences(evidence: Evidence, best: Ranked, default: Ranked | None) -> tuple[str, ...]:
    """Qualify a comparison between different loads."""
    if default is None or not best.between_loads:
        return ()
    text = loads_text(best.loads)
    same = evidence.point(default.variant, best.loads)
    if same is None:
        return (f"The default configuration was not measured at {text}: a part of the difference may be the load's.",)
    return (f"Each at the load that suits it best; the default configuration does no better at {text}.",)


def _tie_sentences(ties: Sequence[Ranked], best: Ranked) -> tuple[str, ...]:
    others = [
        f"{tie.variant} ({between})" if (between := between_loads(tie.loads, best.loads)) else str(tie.variant)
        for tie in ties
        if len(tie.trial_numbers) > 1
    ][:_TIES_NAMED_MAX]
    return (f"Equally good within the measurements: {'; '.join(others)}.",) if others else ()


def _nothing(goal: Goal, history: Sequence[TrialRecord]) -> tuple[str, ...]:
    reasons = dict.fromkeys(told.outcome.reason for told in history if isinstance(told.outcome, TrialFailed))
    missing = dict.fromkeys(
        name
        for told in history
        if not isinstance(told.outcome, TrialFailed)
        for name in Evidence(goal).lacks(told.outcome)
    )
    lines = [f"Nothing was measured: {len(history)} measurements, none of which counts."]
    lines += [f"Failed: {reason}" for reason in list(reasons)[:_TIES_NAMED_MAX]]
    if missing:
        lines.append(f"The server or the machine does not report {', '.join(missing)}.")
    return tuple(lines)


def missed_constraints(ranked: Ranked, goal: Goal) -> list[str]:
    """Return each constraint that a variant misses, with its value and how far off that is."""
    lines = []
    for model in goal.models:
        for constraint in model.constraints:
            estimate = ranked.metrics[model.model][constraint.metric]
            limit = _missed(constraint, estimate)
            if limit is not None:
                off = f", {abs(estimate.value - limit) / abs(limit):.1%} off" if limit else ""
                text = constraint.metric.text
                value, bound = (f"{_figure(number)}{text.unit}" for number in (estimate.value, limit))
                lines.append(f"{text.name} is {value}, the limit {bound}{off}")
    return lines or ["the server does not keep up with the offered rate"]


def _figure(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def _missed(constraint: Constraint, estimate: Estimate) -> float | None:
    if constraint.maximum is not None and estimate.value > constraint.maximum:
        return constraint.maximum
    if constraint.minimum is not None and estimate.value < constraint.minimum:
        return constraint.minimum
    return None


GAIN_MAX = 10.0
"""An interval from a loss to beyond this gain means that the result is unknown."""


def percent(share: Estimate) -> str:
    """Return a gain in percent, with its interval: `12 % (9 to 15 %)`."""
    value, low = (_three_digits(bound * 100) for bound in (share.value, share.low))
    is_known = share.high < GAIN_MAX or share.low > 0
    high = _three_digits(share.high * 100) if is_known else f"more than {_three_digits(GAIN_MAX * 100)}"
    return f"{value} % ({low} to {high} %)"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
