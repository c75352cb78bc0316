"""The figures of a language model as text and as columns. Pure."""

from collections.abc import Callable, Iterator, Sequence

from charonia.tools.report.columns import Column, text_table
from charonia.tools.report.quantities import in_columns, number
from charonia.tools.results.language import FIGURES, Figure, LanguageFigures, Spread, TokenCounter
from charonia.tools.results.records import LevelResult, PerfRun

STATISTICS = {
    "avg": "mean",
    "min": "minimum",
    "max": "maximum",
    "p50": "p50",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
    "std": "deviation",
}
"""Fields of `Spread` by the headings of their columns."""

COUNTED = {
    TokenCounter.TOKENIZER: "the tokenizer",
    TokenCounter.SERVER: "the server",
    TokenCounter.PIECES: "pieces of the streams, each taken for one token",
    TokenCounter.NOBODY: "nobody",
}
"""Who counted tokens, in words."""


def title_of(figure: Figure) -> str:
    """Return a title with its unit: `Time to first token (ms)`."""
    return f"{figure.title} ({figure.unit})"


def counted_text(figures: LanguageFigures) -> str:
    """Return who counted the tokens, as a sentence."""
    prompts, responses = COUNTED[figures.input_counted_by], COUNTED[figures.output_counted_by]
    if prompts == responses:
        return f"Tokens counted by {prompts}."
    return f"Tokens of prompts counted by {prompts}; of responses by {responses}."


def spread_rows(figures: LanguageFigures) -> Iterator[tuple[str, Spread, float]]:
    """Yield title, spread and factor of each figure that a level has."""
    for name, figure in FIGURES.items():
        spread = figures.spread(name)
        if spread is not None:
            yield title_of(figure), spread, figure.factor


def _statistic(field: str) -> Callable[[tuple[str, Spread, float]], str]:
    return lambda row: number(getattr(row[1], field) * row[2])


SPREAD_COLUMNS: tuple[Column[tuple[str, Spread, float]], ...] = (
    Column("", lambda row: row[0], "text"),
    *(Column(heading, _statistic(field)) for heading, field in STATISTICS.items()),
)
"""The table of `spread_rows`."""


def language_lines(result: LevelResult) -> Iterator[str]:
    """Yield the lines of a level: rates, and a table of the figures of requests."""
    yield f"Request count: {result.request_count}"
    figures = result.language
    if figures is None:
        return
    yield f"Request rate: {figures.request_rate:.4g} requests/sec"
    if figures.output_tokens is not None:
        yield f"Output token throughput: {figures.output_rate:.5g} tokens/sec"
    if figures.input_tokens is not None:
        yield f"Input token throughput: {figures.input_rate:.5g} tokens/sec"
    yield ""
    yield from _indented(text_table(SPREAD_COLUMNS, spread_rows(figures)))
    yield counted_text(figures)


def language_summary(run: PerfRun) -> str:
    """Return the text at the end of a run: a line for each level."""
    head = ["requests/sec" if run.levels[0].level.mode.is_rate else "Concurrency", "tokens/sec", "per user"]
    head += ["TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "latency p50", "latency p99", "errors", "verdict"]
    rows = [_summary_row(result) for result in run.levels]
    lines = [
        "Language model: output tokens/s, and times in ms",
        *_indented(in_columns([head, *rows], range(1, len(head)))),
    ]
    if run.answer is not None:
        lines += ["", f"Highest level within the latency limit: {run.answer}"]
    return "\n".join([*lines, *(f"Note: {note}" for note in run.notes)])


def _summary_row(result: LevelResult) -> list[str]:
    figures = result.language
    row = [f"{result.level.value:g}"]
    if figures is None:
        row += ["-"] * 8
    else:
        has_tokens = figures.output_tokens is not None
        row.append(number(figures.output_rate) if has_tokens else "-")
        row.append("-" if figures.user_rate is None else number(figures.user_rate.mean))
        for spread in (figures.first_token, figures.inter_token, figures.latency):
            row += ["-", "-"] if spread is None else [number(spread.p50 / 1e6), number(spread.p99 / 1e6)]
    return [*row, f"{result.error_count}", result.verdict.text]


def _indented(lines: Sequence[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def language_columns() -> dict[str, Callable[[LevelResult], str | float]]:
    """Return the values of a CSV file by the heading of their column; empty where a level lacks the figure."""
    return {
        "Output Tokens/Second": lambda level: float(level.language.output_rate) if level.language else "",
        "Input Tokens/Second": lambda level: float(level.language.input_rate) if level.language else "",
        **{
            f"{title_of(figure)} {heading}": _cell(name, field, figure.factor)
            for name, figure in FIGURES.items()
            for heading, field in STATISTICS.items()
        },
        "Output Tokens Counted By": lambda level: level.language.output_counted_by.value if level.language else "",
    }


def _cell(name: str, field: str, factor: float) -> Callable[[LevelResult], str | float]:
    def value(level: LevelResult) -> str | float:
        spread = None if level.language is None else level.language.spread(name)
        return "" if spread is None else float(getattr(spread, field)) * factor

    return value
