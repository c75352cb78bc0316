"""A comparison of two runs as text, as JSON, and as one HTML file.

The page has the verdict and every change, then both runs with their plots.
"""

import json
from collections.abc import Iterator
from html import escape

from charonia.tools.report.columns import Column, markup_table, text_table
from charonia.tools.report.compare import Comparison, MetricChange, Outcome
from charonia.tools.report.document import notes_markup
from charonia.tools.report.html import render
from charonia.tools.report.quantities import duration, number, percent, signed_percent
from charonia.tools.results.records import PerfRun

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
    return "\n".join(
        [
            f"before: {names[0]}",
            f"after:  {names[1]}",
            *_section("differences in the setup", comparison.setup),
            "",
            *_table(comparison),
            *_section("caution", [*comparison.notes, *_caveats(comparison)]),
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


def _caveats(comparison: Comparison) -> list[str]:
    return [f"{level.level}: {doubt}" for level in comparison.levels for doubt in level.doubts]


def cautions(comparison: Comparison) -> list[str]:
    """Return everything that a reader has to know beside the figures, a sentence each."""
    only = [f"{level}: only in the run before." for level in comparison.only_before]
    only += [f"{level}: only in the run after." for level in comparison.only_after]
    return [*comparison.setup, *comparison.notes, *_caveats(comparison), *only]


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


Change = tuple[str, MetricChange]
"""A row of the table: the level, "" after its first figure, and a figure."""


def changes(comparison: Comparison) -> list[Change]:
    """Return the rows of the table."""
    return [
        ("" if place else str(level.level), change)
        for level in comparison.levels
        for place, change in enumerate(level.changes)
    ]


def _interval(change: MetricChange) -> str:
    if change.outcome is Outcome.UNKNOWN:
        return ""
    return " .. ".join(_difference(change, end) for end in (change.difference.low, change.difference.high))


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


COLUMNS: tuple[Column[Change], ...] = (
    Column("Level", lambda row: row[0], "text"),
    Column("Figure", lambda row: row[1].figure, "text"),
    Column("Before", lambda row: _value(row[1], row[1].before)),
    Column("After", lambda row: _value(row[1], row[1].after)),
    Column("Change", lambda row: _difference(row[1], row[1].difference.value)),
    Column("Interval", lambda row: _interval(row[1])),
    Column("", lambda row: _MARKS[row[1].outcome], "text", lambda row: _badge(row[1].outcome)),
)


def _table(comparison: Comparison) -> Iterator[str]:
    rows = changes(comparison)
    head, *lines = text_table(COLUMNS, rows)
    yield head.lower()
    for place, ((level, _), line) in enumerate(zip(rows, lines, strict=True)):
        if level and place:
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
    yield notes_markup([escape(note) for note in cautions(comparison)])
    about = criteria_text(comparison).capitalize()
    yield f'</section><section><h2>Changes</h2><p class="about">{about}.</p>'
    yield markup_table(COLUMNS, changes(comparison)) + "</section>"


def _badge(outcome: Outcome) -> str:
    kind, word = WORDS[outcome]
    return f"<span class='badge {kind}'>{word}</span>" if outcome is not Outcome.SAME else ""
