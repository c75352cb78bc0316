"""The summary of a run: its best level, how far to trust it, and what makes it a failure. Pure."""

from collections.abc import Sequence

from charonia.tools.report.quantities import duration, number, percent
from charonia.tools.results.conditions import Condition
from charonia.tools.results.records import LevelResult, PerfRun, Verdict

_TRUSTED = (Verdict.STABLE, Verdict.COMPLETE)
_SUSTAINED = (*_TRUSTED, Verdict.UNSTABLE, Verdict.DISTURBED)


VERDICT_TEXTS = {verdict: verdict.text for verdict in Verdict} | {Verdict.NO_REQUESTS: "no answers"}
"""Text of the verdicts in tables."""


def is_trusted(result: LevelResult) -> bool:
    """Whether the result of a level can be trusted."""
    return result.verdict in _TRUSTED


def best_level(run: PerfRun) -> LevelResult | None:
    """Return the answer of a search, or the level with the highest throughput within the latency limit.

    Of the throughput, the lower end of its interval counts: a level that may be the best by chance is not. Levels that
    the server could not sustain count only if there are no others. None if no request was answered, or no level was
    within the limit.
    """
    if run.answer is not None:
        return next((result for result in run.levels if result.request_count and result.level == run.answer), None)
    return max(_candidates(run), key=lambda result: result.throughput.low, default=None)


def _candidates(run: PerfRun) -> list[LevelResult]:
    """Return the levels that may be the best."""
    within = [result for result in run.levels if result.request_count and not result.over_latency_limit]
    return [result for result in within if result.verdict in _SUSTAINED] or within


def headline(run: PerfRun) -> str:
    """Return the best level in one sentence; it is called the best only if no other may be as fast."""
    best = best_level(run)
    if best is None:
        if any(result.request_count for result in run.levels):
            return "No level stayed within the latency limit."
        return "No request was answered."
    limited = any(result.over_latency_limit for result in run.levels) or run.answer is not None
    within = " within the latency limit" if limited else ""
    rivals = [each for each in _candidates(run) if each is not best and each.throughput.high > best.throughput.low]
    of_several, alone = "", f"At {best.level}:"
    if len(run.levels) > 1 and (run.answer is not None or not rivals):
        of_several, alone = f"The best of {len(run.levels)} levels{within} is {best.level}:", ""
    elif rivals:
        of_several = f"{len(rivals) + 1} of {len(run.levels)} levels{within} are equally fast within their spread. "
    if best.language is not None and best.language.first_token is not None:
        first = best.language.first_token
        return (
            f"{of_several}{alone} {number(best.language.output_rate)} output tokens/s, the first token within "
            f"{duration(first.p50)} for half of the requests and within {duration(first.p99)} for 99 %."
        )
    return (
        f"{of_several}{alone} {number(best.throughput.value)} inferences/s, half of the requests within "
        f"{duration(best.percentile(50))}, 99 % within {duration(best.percentile(99))}."
    )


def is_open_loop(run: PerfRun) -> bool:
    """Whether requests were sent at scheduled times."""
    return any(result.level.mode.is_rate for result in run.levels)


def failures(conditions: Sequence[Condition], run: PerfRun) -> tuple[str, ...]:
    """Return a sentence for each condition that is true of a level of a run, and for each level without any answer.

    A run without a level fails: without a measurement there is no success.
    """
    if not conditions:
        return ()
    if not run.levels:
        return ("Nothing was measured.",)
    found = [f"No request was answered at {level.level}." for level in run.levels if not level.request_count]
    for condition in conditions:
        where = [f"{_shown(condition, level)} at {level.level}" for level in run.levels if condition.holds(level)]
        if where:
            found.append(f"{condition.text}: {', '.join(where)}.")
    return tuple(found)


def _shown(condition: Condition, level: LevelResult) -> str:
    value = condition.value(level)
    if condition.figure == "output_tokens":
        return f"{number(value)} tokens/s"
    if condition.figure == "throughput":
        return f"{number(value)} infer/s"
    return percent(value) if condition.figure == "errors" else duration(value)
