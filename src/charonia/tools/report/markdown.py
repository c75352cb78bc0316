"""A run, or a comparison of two, as Markdown: for a comment in a review, or a page of a wiki. Pure."""

from charonia.tools.report.compare import Comparison, Outcome
from charonia.tools.report.compare_text import cautions, rows_of, verdict
from charonia.tools.report.quantities import duration, number, percent
from charonia.tools.report.summary import VERDICT_TEXTS, headline
from charonia.tools.results.language import LanguageFigures
from charonia.tools.results.records import LevelResult, PerfRun

_PERCENTILES = (50.0, 90.0, 99.0, 99.9)


def render(run: PerfRun) -> str:
    """Return a heading, the result in a sentence, a table of the levels, and the notes."""
    server = f"{run.server.name} {run.server.version}".strip() or "a server"
    is_language = any(result.language is not None for result in run.levels)
    tokens = ["Tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"] if is_language else []
    work = "Requests/s" if is_language else "Inferences/s"
    head = ["Level", *tokens, work, *(f"p{percent_:g}" for percent_ in _PERCENTILES), "Errors", "Verdict"]
    lines = [
        f"## {_plain(run.model.name)}",
        "",
        _plain(headline(run)),
        "",
        _row(head),
        _row(["---", *["---:"] * (len(head) - 2), "---"]),
        *(_row(_cells(result, len(tokens))) for result in run.levels),
        "",
    ]
    lines += [f"- {_plain(note)}" for note in [*run.notes, *_reasons(run)]]
    lines += ["", f"{_plain(server)}, {run.began_at}, {run.machine.core_count} cores ({_plain(run.machine.processor)})"]
    return "\n".join(lines) + "\n"


def render_comparison(comparison: Comparison, names: tuple[str, str]) -> str:
    """Return the verdict, a table of all figures in which changes are bold, and the notes.

    Args:
        names: Names of the runs, the earlier first.
    """
    lines = [
        f"## {_plain(verdict(comparison))}",
        "",
        f"{_plain(names[0])} → {_plain(names[1])}; all intervals hold with {100 * comparison.criteria.confidence:g} %, "
        f"changes below {100 * comparison.criteria.threshold:g} % do not count",
        "",
        _row(["Level", "Figure", "Before", "After", "Change", "Interval", "Verdict"]),
        _row(["---", "---", "---:", "---:", "---:", "---:", "---"]),
    ]
    for level in comparison.levels:
        for row, change in zip(rows_of(level), level.changes, strict=True):
            *cells, _ = map(_plain, row)
            lines.append(f"| {' | '.join(cells)} | {_OUTCOMES[change.outcome]} |")
    lines += ["", *(f"- {_plain(note)}" for note in cautions(comparison))]
    return "\n".join(lines).rstrip() + "\n"


_OUTCOMES = {
    Outcome.BETTER: "**better**",
    Outcome.WORSE: "**worse**",
    Outcome.MIXED: "**mixed**",
    Outcome.SAME: "no change",
    Outcome.UNKNOWN: "too few requests",
}


def _token_cells(figures: LanguageFigures | None) -> list[str]:
    if figures is None:
        return ["-"] * 5
    times = [
        "-" if spread is None else duration(value)
        for spread in (figures.first_token, figures.inter_token)
        for value in ((spread.p50, spread.p99) if spread is not None else (0.0, 0.0))
    ]
    return [number(figures.output_rate), *times]


def _cells(result: LevelResult, token_count: int) -> list[str]:
    return [
        str(result.level),
        *(_token_cells(result.language) if token_count else ()),
        number(result.throughput.value),
        *(duration(result.percentile(percent_)) if result.request_count else "-" for percent_ in _PERCENTILES),
        percent(result.error_share),
        VERDICT_TEXTS[result.verdict],
    ]


def _reasons(run: PerfRun) -> list[str]:
    """Return the reasons to doubt a level."""
    loads = [(result.level, result.machine_load) for result in run.levels]
    return [f"{level}: {load.disturbance}" for level, load in loads if load is not None and load.disturbance]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _plain(text: str) -> str:
    """Return text escaped for Markdown."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in text.replace("\n", " "))
