"""A comparison of two runs as text, as JSON, and as one HTML file.

The page has the verdict and every change, then both runs with their plots.
"""

import json
from collections.abc import Iterator, Sequence
from html import escape

from charonia.tools.report.compare import Comparison, LevelChange, MetricChange, Outcome
from charonia.tools.report.document import table_markup, to_know
from charonia.tools.report.html import render
from charonia.tools.report.quantities import duration, in_columns, number, percent, signed_percent
from charonia.tools.results.records import PerfRun

COLUMNS = ("level", "figure", "before", "after", "change", "interval", "")
NUMBERS = range(2, 6)
"""The columns of numbers."""

_MARKS = {Outcome.BETTER: "better", Outcome.WORSE: "WORSE", Outcome.SAME: "~", Outcome.UNKNOWN: "? too few requests"}

WORDS = {
    Outcome.BETTER: ("good", "better"),
    Outcome.WORSE: ("bad", "worse"),
    Outcome.MIXED: ("bad", "mixed"),
    Outcome.SAME: ("plain", "no change"),
    Outcome.UNKNOWN: ("plain", "too few requests"),
}
"""Kind of the badge, and word, of an outcome."""


def as_text(comparison: Comparison, names: tuple[str, str]) -> str:
    """Return a table of all figures, the differences in the setup, and the verdict."""
    rows = [row for level in comparison.levels for row in rows_of(level)]
    return "\n".join(
        [
            f"before: {names[0]}",
            f"after:  {names[1]}",
            *_section("differences in the setup", comparison.setup),
            "",
            *_table([COLUMNS, *rows]),
            *_section("caution", [*comparison.notes, *_doubts(comparison)]),
            *_section("only before", [str(level) for level in comparison.only_before]),
            *_section("only after", [str(level) for level in comparison.only_after]),
            "",
            f"{verdict(comparison)} ({criteria_text(comparison)})",
        ]
    )


def criteria_text(comparison: Comparison) -> str:
    """Return when a difference counts."""
    criteria = comparison.criteria
    return (
        f"all intervals hold with {100 * criteria.confidence:g} %; "
        f"changes below {100 * criteria.threshold:g} % do not count"
    )


def _doubts(comparison: Comparison) -> list[str]:
    return [f"{level.level}: {doubt}" for level in comparison.levels for doubt in level.doubts]


def cautions(comparison: Comparison) -> list[str]:
    """Return everything that a reader has to know beside the figures, a sentence each."""
    only = [f"{level}: only in the run before." for level in comparison.only_before]
    only += [f"{level}: only in the run after." for level in comparison.only_after]
    return [*comparison.setup, *comparison.notes, *_doubts(comparison), *only]


def verdict(comparison: Comparison) -> str:
    """Return the outcome as a sentence without a full stop."""
    match comparison.outcome:
        case Outcome.BETTER:
            return f"Better: {_counted(comparison, Outcome.BETTER)}"
        case Outcome.WORSE:
            return f"Worse: {_counted(comparison, Outcome.WORSE)}"
        case Outcome.MIXED:
            return f"Worse: {_counted(comparison, Outcome.WORSE)}; better: {_counted(comparison, Outcome.BETTER)}"
        case Outcome.SAME:
            return "No significant change"
        case Outcome.UNKNOWN:
            return "Too few requests to tell"


def as_json(comparison: Comparison, names: tuple[str, str]) -> str:
    """Return the comparison as JSON text: shares of 1, inferences per second, nanoseconds."""
    document = {
        "format": "charonia-perf-comparison",
        "version": 1,
        "before": names[0],
        "after": names[1],
        "verdict": comparison.outcome.name.lower(),
        "confidence": comparison.criteria.confidence,
        "threshold": comparison.criteria.threshold,
        "setup": list(comparison.setup),
        "notes": list(comparison.notes),
        "levels": [
            {
                "mode": level.level.mode.value,
                "value": level.level.value,
                "doubts": list(level.doubts),
                "changes": [_change(change) for change in level.changes],
            }
            for level in comparison.levels
        ],
        "only_before": [str(level) for level in comparison.only_before],
        "only_after": [str(level) for level in comparison.only_after],
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _change(change: MetricChange) -> dict[str, object]:
    known = change.outcome is not Outcome.UNKNOWN
    return {
        "figure": change.figure,
        "before": change.before,
        "after": change.after,
        "difference": change.difference.value,
        "low": change.difference.low if known else None,
        "high": change.difference.high if known else None,
        "verdict": change.outcome.name.lower(),
    }


def _counted(comparison: Comparison, outcome: Outcome) -> str:
    """Return the figures with an outcome, and the number of levels of each."""
    found = [change.figure for level in comparison.levels for change in level.changes if change.outcome is outcome]
    counts = {figure: found.count(figure) for figure in found}
    total = len(comparison.levels)
    return ", ".join(f"{name} at {_of(count, total)}" for name, count in counts.items())


def _of(count: int, total: int) -> str:
    if total == 1:
        return "the only level"
    return f"all {total} levels" if count == total else f"{count} of {total} levels"


def rows_of(level: LevelChange) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each figure: level (only of the first), figure, values, change, interval, effect."""
    for place, change in enumerate(level.changes):
        low, high = (_difference(change, end) for end in (change.difference.low, change.difference.high))
        known = change.outcome is not Outcome.UNKNOWN
        yield (
            "" if place else str(level.level),
            change.figure,
            _value(change, change.before),
            _value(change, change.after),
            _difference(change, change.difference.value),
            f"{low} .. {high}" if known else "",
            _MARKS[change.outcome],
        )


def _value(change: MetricChange, value: float) -> str:
    match change.figure:
        case "throughput" | "tokens/s":
            return f"{number(value)}/s"
        case "errors":
            return percent(value)
        case _:
            return duration(value)


def _difference(change: MetricChange, value: float) -> str:
    return f"{100 * value:+.2f} pp" if change.figure == "errors" else signed_percent(value)


def _section(title: str, lines: tuple[str, ...] | list[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    lines = in_columns(rows, NUMBERS)
    for place, (row, line) in enumerate(zip(rows, lines, strict=True)):
        if row[0] and place > 1:
            yield ""  # between levels
        yield line


def comparison_page(comparison: Comparison, runs: tuple[PerfRun, PerfRun], names: tuple[str, str]) -> bytes:
    """Return the page as UTF-8."""
    shown = (f"before: {names[0]}", f"after: {names[1]}")
    return render(runs, names=shown, lead=tuple(_lead(comparison, names)))


def _lead(comparison: Comparison, names: tuple[str, str]) -> Iterator[str]:
    kind, word = WORDS[comparison.outcome]
    between = f"{escape(names[0])} → {escape(names[1])}"
    yield f"<header><h1>Comparison of two runs</h1><p class='about'>{between}</p></header>"
    yield '<section class="summary"><p class="headline">'
    text = verdict(comparison)
    if comparison.outcome in (Outcome.BETTER, Outcome.WORSE):
        text = text.partition(": ")[2]  # the badge says it
    yield f'<span class="badge {kind}">{word}</span> {escape(text[:1].upper() + text[1:])}.</p>'
    yield to_know([escape(note) for note in cautions(comparison)])
    about = criteria_text(comparison).capitalize()
    yield f'</section><section><h2>Changes</h2><p class="about">{about}.</p>'
    heads = [(name.capitalize(), "" if place in NUMBERS else "text") for place, name in enumerate(COLUMNS)]
    rows = [
        _row(cells, change.outcome)
        for level in comparison.levels
        for cells, change in zip(rows_of(level), level.changes, strict=True)
    ]
    yield table_markup(heads, rows) + "</section>"


def _row(cells: Sequence[str], outcome: Outcome) -> str:
    level, figure, *values, _ = map(escape, cells)
    kind, word = WORDS[outcome]
    badge = f"<span class='badge {kind}'>{word}</span>" if outcome is not Outcome.SAME else ""
    shown = "".join(f"<td>{value}</td>" for value in values)
    return f"<tr><th scope='row'>{level}</th><td class='text'>{figure}</td>{shown}<td class='text'>{badge}</td></tr>"
