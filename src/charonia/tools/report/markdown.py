"""A run, or a comparison of two, as Markdown: for a comment in a review, or a page of a wiki. Pure."""

from charonia.tools.report.compare import Comparison
from charonia.tools.report.comparison import COLUMNS, NUMBERS, WORDS, cautions, criteria_text, rows_of, verdict
from charonia.tools.report.document import level_columns
from charonia.tools.report.summary import headline
from charonia.tools.results.records import PerfRun


def render(run: PerfRun) -> str:
    """Return a heading, the result in a sentence, a table of the levels, and the notes."""
    server = f"{run.server.name} {run.server.version}".strip() or "a server"
    columns = level_columns(run)
    lines = [
        f"## {_plain(run.model.name)}",
        "",
        _plain(headline(run)),
        "",
        _row([column.title for column in columns]),
        _row(["---" if column.is_text else "---:" for column in columns]),
        *(_row([column.text(result) for column in columns]) for result in run.levels),
    ]
    notes = [f"- {_plain(note)}" for note in [*run.notes, *_reasons(run)]]
    lines += ["", *notes] if notes else []
    lines += ["", f"{_plain(server)}, {run.began_at}, {run.machine.core_count} cores ({_plain(run.machine.processor)})"]
    return "\n".join(lines) + "\n"


def render_comparison(comparison: Comparison, names: tuple[str, str]) -> str:
    """Return the verdict, a table of all figures in which changes are bold, and the notes."""
    lines = [
        f"## {_plain(verdict(comparison))}",
        "",
        f"{_plain(names[0])} → {_plain(names[1])}; {criteria_text(comparison)}",
        "",
        _row([name.capitalize() or "Verdict" for name in COLUMNS]),
        _row(["---:" if place in NUMBERS else "---" for place in range(len(COLUMNS))]),
    ]
    for level in comparison.levels:
        for row, change in zip(rows_of(level), level.changes, strict=True):
            *cells, _ = map(_plain, row)
            kind, word = WORDS[change.outcome]
            lines.append(f"| {' | '.join(cells)} | {word if kind == 'plain' else f'**{word}**'} |")
    lines += ["", *(f"- {_plain(note)}" for note in cautions(comparison))]
    return "\n".join(lines).rstrip() + "\n"


def _reasons(run: PerfRun) -> list[str]:
    """Return the reasons to doubt a level."""
    loads = [(result.level, result.machine_load) for result in run.levels]
    return [f"{level}: {load.disturbance}" for level, load in loads if load is not None and load.disturbance]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _plain(text: str) -> str:
    """Return text escaped for Markdown."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in text.replace("\n", " "))
