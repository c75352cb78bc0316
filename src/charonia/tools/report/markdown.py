"""A run, or a comparison of two, as Markdown: for a comment in a review, or a page of a wiki. Pure."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from charonia.tools.report.columns import Column, R
from charonia.tools.report.compare import Comparison
from charonia.tools.report.comparison import COLUMNS, WORDS, Change, cautions, changes, criteria_text, verdict
from charonia.tools.report.document import level_columns
from charonia.tools.report.summary import headline
from charonia.tools.results.records import PerfRun


def render(run: PerfRun) -> str:
    """Return a heading, the result in a sentence, a table of the levels, and the notes."""
    server = f"{run.server.name} {run.server.version}".strip() or "a server"
    lines = [
        f"## {_plain(run.model.name)}",
        "",
        _plain(headline(run)),
        "",
        *_table(level_columns(run), run.levels),
    ]
    notes = [f"- {_plain(note)}" for note in [*run.notes, *_reasons(run)]]
    lines += ["", *notes] if notes else []
    lines += ["", f"{_plain(server)}, {run.began_at}, {run.machine.core_count} cores ({_plain(run.machine.processor)})"]
    return "\n".join(lines) + "\n"


def render_comparison(comparison: Comparison, names: tuple[str, str]) -> str:
    """Return the verdict, a table of all figures in which changes are bold, and the notes."""
    rows = changes(comparison)
    lines = [
        f"## {_plain(verdict(comparison))}",
        "",
        f"{_plain(names[0])} → {_plain(names[1])}; {criteria_text(comparison)}",
        "",
        *_table([*COLUMNS[:-1], _VERDICT], rows, [row for row in rows if WORDS[row[1].outcome][0] != "plain"]),
    ]
    lines += ["", *(f"- {_plain(note)}" for note in cautions(comparison))]
    return "\n".join(lines).rstrip() + "\n"


def _reasons(run: PerfRun) -> list[str]:
    """Return the reasons to doubt a level."""
    loads = [(result.level, result.machine_load) for result in run.levels]
    return [f"{level}: {load.disturbance}" for level, load in loads if load is not None and load.disturbance]


_VERDICT: Column[Change] = Column("Verdict", lambda row: WORDS[row[1].outcome][1], "text")


def _table(columns: Sequence[Column[R]], rows: Iterable[R], bold: Collection[R] = ()) -> Iterator[str]:
    """Yield the lines of a table; the last cell of some rows is bold."""
    yield f"| {' | '.join(_plain(column.title) for column in columns)} |"
    yield f"| {' | '.join('---' if column.kind else '---:' for column in columns)} |"
    for row in rows:
        *cells, final = (_plain(column.text(row)) for column in columns)
        yield f"| {' | '.join([*cells, f'**{final}**' if row in bold else final])} |"


def _plain(text: str) -> str:
    """Return text escaped for Markdown."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in text.replace("\n", " "))
