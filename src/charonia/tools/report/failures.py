"""What makes a run a failure, in sentences. Pure."""

from collections.abc import Sequence

from charonia.tools.report.quantities import duration, number, percent
from charonia.tools.results.conditions import Condition
from charonia.tools.results.records import LevelResult, PerfRun


def failures(conditions: Sequence[Condition], run: PerfRun) -> tuple[str, ...]:
    """Return a sentence for each condition that is true of a level of a run, and for each level without any answer.

    A run without a level fails: what was not measured is no success.
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
