"""A comparison as one HTML file: the verdict and every change, then both runs with their plots."""

from collections.abc import Iterator, Sequence
from html import escape

from charonia.tools.report.compare import Comparison, LevelChange, Outcome
from charonia.tools.report.compare_text import cautions, rows_of, verdict
from charonia.tools.report.document import scrolling
from charonia.tools.report.html import render
from charonia.tools.results.records import PerfRun

_BADGES = {
    Outcome.BETTER: ("good", "better"),
    Outcome.WORSE: ("bad", "worse"),
    Outcome.MIXED: ("bad", "mixed"),
    Outcome.SAME: ("plain", "no change"),
    Outcome.UNKNOWN: ("plain", "too few requests"),
}
_TITLES = ("Level", "Figure", "Before", "After", "Change", "Interval", "")


def comparison_page(comparison: Comparison, runs: tuple[PerfRun, PerfRun], names: tuple[str, str]) -> bytes:
    """Return the page as UTF-8.

    Args:
        runs: The runs, the earlier first.
        names: Their names.
    """
    shown = (f"before: {names[0]}", f"after: {names[1]}")
    return render(runs, names=shown, lead=tuple(_lead(comparison, names)))


def _lead(comparison: Comparison, names: tuple[str, str]) -> Iterator[str]:
    kind, word = _BADGES[comparison.outcome]
    criteria = comparison.criteria
    between = f"{escape(names[0])} → {escape(names[1])}"
    yield f"<header><h1>Comparison of two runs</h1><p class='about'>{between}</p></header>"
    yield '<section class="summary"><p class="headline">'
    text = verdict(comparison)
    if comparison.outcome in (Outcome.BETTER, Outcome.WORSE):
        text = text.partition(": ")[2]  # the badge says it
    yield f'<span class="badge {kind}">{word}</span> {escape(text[:1].upper() + text[1:])}.</p>'
    notes = cautions(comparison)
    if notes:
        yield f'<div class="cautions"><h3>To know</h3>{_list(notes)}</div>'
    yield (
        f'</section><section><h2>Changes</h2><p class="about">All intervals hold with {100 * criteria.confidence:g} %; '
        f"changes below {100 * criteria.threshold:g} % do not count.</p>"
    )
    head = "".join(f"<th scope='col'{_text(place)}>{title}</th>" for place, title in enumerate(_TITLES))
    body = "".join(_row(*pair) for level in comparison.levels for pair in _pairs(level))
    yield scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>") + "</section>"


def _pairs(level: LevelChange) -> Iterator[tuple[Sequence[str], Outcome]]:
    yield from zip(rows_of(level), (change.outcome for change in level.changes), strict=True)


def _row(cells: Sequence[str], outcome: Outcome) -> str:
    level, *values, _ = cells
    kind, word = _BADGES[outcome]
    badge = f"<span class='badge {kind}'>{word}</span>" if outcome is not Outcome.SAME else ""
    shown = "".join(f"<td{_text(place)}>{escape(value)}</td>" for place, value in enumerate(values, 1))
    return f"<tr><th scope='row'>{escape(level)}</th>{shown}<td class='text'>{badge}</td></tr>"


def _text(place: int) -> str:
    return " class='text'" if place < 2 or place == len(_TITLES) - 1 else ""


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
