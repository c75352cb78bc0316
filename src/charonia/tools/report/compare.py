"""Compares two runs: significant changes, noise, and differences in the setup. Pure.

Each figure is compared as a ratio with a confidence interval. The intervals hold simultaneously (Bonferroni): with 20
figures, each has a confidence of 99.75 %, so that all of them are right with a probability of 95 %. A difference is no
change if the interval contains zero, or if it is below the smallest change of interest.

1. Throughput: the runs' own confidence intervals (batch means).
2. Percentiles: consecutive requests are correlated, so they count as fewer independent ones. The time line gives the
   factor: the variance of the percentile's rank among its intervals, relative to that of independent requests (the
   design effect of Woodruff's intervals). With the reduced number, the rank of a percentile has a beta distribution,
   and the histogram converts ranks to latencies.
3. Of language models, output tokens per second vary as the throughput does, and times to tokens as response times do.
4. Share of errors: likewise, by errors per interval of the time line.

An interval covers the variation within a run. A single run cannot show the variation between starts of a server.

Source: Woodruff (1952), Confidence Intervals for Medians and Other Position Measures.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from charonia.core.errors import invalid
from charonia.core.latency import LatencyHistogram
from charonia.tools.report.summary import is_trusted
from charonia.tools.results.language import LanguageFigures
from charonia.tools.results.records import Estimate, LevelResult, LoadLevel, PerfRun, TimeBucket, student

_FILES = ("csv", "json", "html", "profile-export-file", "verbose-csv", "verbose", "quiet", "no-progress")


def setup_differences(before: PerfRun, after: PerfRun) -> tuple[str, ...]:
    """Return the differences in server, model, machine and options, one line each: `batch size: 1 -> 8`."""
    return tuple(
        f"{name}: {first or 'none'} -> {second or 'none'}"
        for (name, first), (_, second) in zip(_facts(before), _facts(after), strict=True)
        if first != second
    ) + tuple(_option_differences(before.options, after.options))


def _facts(run: PerfRun) -> Iterator[tuple[str, str]]:
    yield "tool", run.tool
    yield "model", run.model.name
    yield "version of the model", run.model.version
    yield "platform", run.model.platform
    yield "batch size", str(run.batch_size)
    yield "protocol", run.server.protocol
    yield "server", f"{run.server.name} {run.server.version}".strip()
    yield "url", run.server.url
    yield "machine of the client", run.machine.host
    yield "processor", run.machine.processor
    yield "cores", str(run.machine.core_count)
    yield "system", run.machine.system
    yield "Python", run.machine.python


def _option_differences(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    for name in [*before, *(name for name in after if name not in before)]:
        first, second = before.get(name), after.get(name)
        if first != second and name.lstrip("-") not in _FILES:
            yield f"option {name}: {'default' if first is None else first} -> {'default' if second is None else second}"


PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9, 99.99)
"""Percentiles to compare if both runs have enough requests beyond them."""

BEYOND_MIN = 5
"""Fewest independent requests beyond a percentile that give a usable estimate."""

PIECES_MIN = 8
"""Fewest intervals of the time line that give a usable design effect."""

_DRAWS = 20_000
_CORRELATION_COUNTED_MAX = 0.9

Floats = NDArray[np.float64]


class Outcome(Enum):
    """The effect of a change on clients."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "no significant change"
    UNKNOWN = "too few requests to tell"
    MIXED = "better and worse"
    """For a whole comparison only."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """When a difference counts as a change.

    Attributes:
        threshold: Smallest change of interest, as a share; any significant change of errors is of interest.
        seed: Seed of the draws from the distributions, so that the same files give the same result.
    """

    confidence: float = 0.95
    threshold: float = 0.02
    seed: int = 0


@dataclass(frozen=True, slots=True)
class MetricChange:
    """The change of one figure at one level.

    Attributes:
        figure: `throughput`, `p50` and so on, `errors`.
        before: Inferences per second, nanoseconds, or share of failed requests.
        difference: `after / before - 1`; for errors `after - before`. The estimate is zero without an interval.
    """

    figure: str
    before: float
    after: float
    difference: Estimate
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class LevelChange:
    """The changes at one level."""

    level: LoadLevel
    changes: tuple[MetricChange, ...]
    doubts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The changes between two runs."""

    criteria: Criteria
    levels: tuple[LevelChange, ...]
    only_before: tuple[LoadLevel, ...]
    only_after: tuple[LoadLevel, ...]
    setup: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The outcome over all levels."""
        found = {change.outcome for level in self.levels for change in level.changes}
        if {Outcome.BETTER, Outcome.WORSE} <= found:
            return Outcome.MIXED
        return next(
            outcome for outcome in (Outcome.WORSE, Outcome.BETTER, Outcome.SAME, Outcome.UNKNOWN) if outcome in found
        )


def compare(
    before: PerfRun, after: PerfRun, criteria: Criteria | None = None, *, any_model: bool = False
) -> Comparison:
    """Compare two runs, level by level.

    Raises:
        ServingError: INVALID_ARG if the runs cannot be compared: different models, or no common level.
    """
    if before.model.name != after.model.name and not any_model:
        raise invalid(
            f"the runs measured different models: '{before.model.name}' and '{after.model.name}'",
            hint="compare them all the same with --any-model",
        )
    firsts, seconds = ({result.level: result for result in run.levels} for run in (before, after))
    pairs = [(firsts[level], seconds[level]) for level in firsts if level in seconds]
    if not pairs:
        raise invalid(f"the runs have no level in common: {_levels(before)} against {_levels(after)}")
    criteria = criteria or Criteria()
    return Comparison(
        criteria=criteria,
        levels=tuple(_level_changes(pairs, criteria)),
        only_before=tuple(level for level in firsts if level not in seconds),
        only_after=tuple(level for level in seconds if level not in firsts),
        setup=setup_differences(before, after),
        notes=tuple(
            f"{name} run: {note}" for name, run in (("first", before), ("second", after)) for note in run.notes
        ),
    )


def _levels(run: PerfRun) -> str:
    return ", ".join(str(result.level) for result in run.levels) or "none"


def _level_changes(pairs: list[tuple[LevelResult, LevelResult]], criteria: Criteria) -> Iterator[LevelChange]:
    generator = np.random.default_rng(criteria.seed)
    found = [list(_figures(*pair, generator)) for pair in pairs]
    known = sum(figure.draws is not None for figures in found for figure in figures)
    confidence = 1 - (1 - criteria.confidence) / max(known, 1)
    for (first, second), figures in zip(pairs, found, strict=True):
        changes = tuple(_change(figure, confidence, criteria) for figure in figures)
        yield LevelChange(first.level, changes, (*_caveats("first", first), *_caveats("second", second)))


def _caveats(which: str, result: LevelResult) -> Iterator[str]:
    if not is_trusted(result):
        yield f"the verdict of the {which} run is '{result.verdict.text}'"
    if result.server.other_traffic:
        yield f"the server of the {which} run had other traffic here"


@dataclass(frozen=True, slots=True)
class _Figure:
    name: str
    before: float
    after: float
    draws: Floats | None  # of the difference; None without an estimate
    more_is_better: bool = False
    is_share: bool = False


def _figures(first: LevelResult, second: LevelResult, generator: np.random.Generator) -> Iterator[_Figure]:
    rates = first.throughput, second.throughput
    draws = _ratio(*(_draws_of(rate, generator) for rate in rates))
    yield _Figure("throughput", rates[0].value, rates[1].value, draws, more_is_better=True)
    curves = _Percentiles(first), _Percentiles(second)
    for percent in PERCENTILES:
        if percent <= 99 or all(curve.reaches(percent) for curve in curves):
            draws = _ratio(*(curve.draws(percent, generator) for curve in curves))
            yield _Figure(f"p{percent:g}", first.percentile(percent), second.percentile(percent), draws)
    if first.language is not None and second.language is not None:
        yield from _token_figures((first, first.language), (second, second.language), generator)
    shares = [_error_draws(result, generator) for result in (first, second)]
    difference = None if shares[0] is None or shares[1] is None else shares[1] - shares[0]
    yield _Figure("errors", first.error_share, second.error_share, difference, is_share=True)


def _token_figures(
    first: tuple[LevelResult, LanguageFigures],
    second: tuple[LevelResult, LanguageFigures],
    generator: np.random.Generator,
) -> Iterator[_Figure]:
    rates = [result.token_rate for result, _ in (first, second)]
    draws = _ratio(*(_draws_of(rate, generator) for rate in rates))
    yield _Figure("tokens/s", rates[0].value, rates[1].value, draws, more_is_better=True)
    for name, field in (("ttft", "first_token_times"), ("itl", "inter_token_times")):
        times: list[LatencyHistogram] = [getattr(figures, field) for _, figures in (first, second)]
        curves = [_Percentiles(pair[0], found) for pair, found in zip((first, second), times, strict=True)]
        for percent in (50.0, 99.0) if all(found.count for found in times) else ():
            draws = _ratio(*(curve.draws(percent, generator) for curve in curves))
            values = [found.percentile(percent) for found in times]
            yield _Figure(f"{name} p{percent:g}", values[0], values[1], draws)


def _change(figure: _Figure, confidence: float, criteria: Criteria) -> MetricChange:
    if figure.is_share:
        value = figure.after - figure.before
    else:
        value = figure.after / figure.before - 1 if figure.before else 0.0
    if figure.draws is None:
        return MetricChange(figure.name, figure.before, figure.after, Estimate.exact(value), Outcome.UNKNOWN)
    tail = (1 - confidence) / 2
    low, high = (float(end) for end in np.quantile(figure.draws, [tail, 1 - tail]))
    # A histogram returns the middle of a bucket, the draws any value in it.
    estimate = Estimate(value, min(low, value), max(high, value), confidence)
    too_small = 0.0 if figure.is_share else criteria.threshold
    if estimate.low <= 0 <= estimate.high or abs(value) < too_small:
        outcome = Outcome.SAME
    else:
        outcome = Outcome.BETTER if (value > 0) == figure.more_is_better else Outcome.WORSE
    return MetricChange(figure.name, figure.before, figure.after, estimate, outcome)


def _ratio(before: Floats | None, after: Floats | None) -> Floats | None:
    if before is None or after is None or float(before.min()) <= 0:
        return None
    ratios: Floats = after / before - 1
    return ratios


def _draws_of(estimate: Estimate, generator: np.random.Generator) -> Floats | None:
    if not estimate.confidence:
        return None
    errors = student(estimate.confidence)
    drawn = generator.normal(estimate.value, (estimate.high - estimate.low) / 2 / errors, _DRAWS)
    return np.maximum(drawn, 0.0)


class _Percentiles:
    """The distributions of the percentiles of a level.

    Args:
        times: The times of its requests, None for response times. Other times of the same requests are taken to be as
            correlated as those.
    """

    def __init__(self, result: LevelResult, times: LatencyHistogram | None = None) -> None:
        self._curve = _Curve(result.response_times)
        pieces = [piece for piece in _pieces(result) if piece.completed_count]
        self._effects = {
            percent: _design_effect(self._rank_deviations(pieces, percent, value))
            if len(pieces) >= PIECES_MIN
            else None
            for percent, value in ((50.0, attrgetter("p50_ns")), (99.0, attrgetter("p99_ns")))
        }
        times = result.response_times if times is None else times
        self._count, self._curve = times.count, _Curve(times)

    def reaches(self, percent: float) -> bool:
        """Whether there are enough independent requests beyond a percentile."""
        return self._independent(percent) * (1 - percent / 100) >= BEYOND_MIN

    def draws(self, percent: float, generator: np.random.Generator) -> Floats | None:
        """Return latencies drawn from the distribution of a percentile, float64 [draws]."""
        if not self.reaches(percent):
            return None
        count = self._independent(percent)
        share = percent / 100
        return self._curve.values(generator.beta(count * share + 0.5, count * (1 - share) + 0.5, _DRAWS))

    def _independent(self, percent: float) -> float:
        effect = self._effects[50.0 if percent <= 90 else 99.0]
        return self._count / effect if effect else 0.0

    def _rank_deviations(self, pieces: list[TimeBucket], percent: float, value: Callable[[TimeBucket], int]) -> Floats:
        """Return the deviation of the rank of each interval's percentile, in standard errors."""
        counts = np.array([piece.completed_count for piece in pieces], np.float64)
        ranks = np.floor(percent / 100 * (counts - 1) + 0.5)
        # The quantile of the value of rank `r` of `n` independent ones has a beta distribution of r + 1 and n - r.
        expected = (ranks + 1) / (counts + 1)
        variances = expected * (1 - expected) / (counts + 2)
        shares = self._curve.shares(np.array([value(piece) for piece in pieces], np.float64))
        surprises: Floats = (shares - expected) / np.sqrt(variances)
        return surprises


class _Curve:
    """The distribution function of a histogram, piecewise linear, and its inverse."""

    def __init__(self, histogram: LatencyHistogram) -> None:
        buckets = histogram.buckets()
        counts = np.array([0, *(count for _, _, count in buckets)], np.float64)
        edges = [buckets[0][0], *(upper for _, upper, _ in buckets)] if buckets else [0]
        # Extremes are exact; values within a bucket count as evenly spread.
        self._edges = np.clip(np.array(edges, np.float64), histogram.minimum, histogram.maximum)
        self._shares = np.cumsum(counts) / max(histogram.count, 1)

    def shares(self, values: Floats) -> Floats:
        return np.interp(values, self._edges, self._shares)

    def values(self, shares: Floats) -> Floats:
        return np.interp(shares, self._shares, self._edges)


def _error_draws(result: LevelResult, generator: np.random.Generator) -> Floats | None:
    ended = result.error_count + result.request_count
    if not ended:
        return None
    share = result.error_share
    effect = 1.0
    pieces = [piece for piece in _pieces(result) if piece.completed_count + piece.error_count]
    if 0 < share < 1 and len(pieces) >= PIECES_MIN:
        failed = np.array([piece.error_count for piece in pieces], np.float64)
        all_ended = failed + np.array([piece.completed_count for piece in pieces], np.float64)
        effect = _design_effect((failed - share * all_ended) / np.sqrt(all_ended * share * (1 - share)))
    count = ended / effect
    return generator.beta(count * share + 0.5, count * (1 - share) + 0.5, _DRAWS)


def _design_effect(surprises: Floats) -> float:
    """Return the number of requests that are equivalent to one independent request, at least 1.

    Args:
        surprises: Deviations of intervals in the order of time, in standard errors of independent requests.
    """
    spread = float(np.square(surprises).mean())
    if spread == 0:
        return 1.0
    next_to = float((surprises[1:] * surprises[:-1]).sum()) / float(np.square(surprises).sum())
    left = min(max(next_to, 0.0), _CORRELATION_COUNTED_MAX)
    return max(1.0, spread * (1 + left) / (1 - left))


def _pieces(result: LevelResult) -> list[TimeBucket]:
    """Return the intervals of the time line within the windows of the result."""
    used = [window for window in result.windows if window.used]
    if not used:
        return list(result.timeline)
    begin, end = used[0].begin_ns, used[-1].end_ns
    return [piece for piece in result.timeline if begin <= piece.begin_ns and piece.end_ns <= end]
