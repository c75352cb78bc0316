"""The figures of language models in every report."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.runs import synthetic_run

from charonia.core.latency import LatencyHistogram
from charonia.tools.report import markdown
from charonia.tools.report.compare import Outcome, compare
from charonia.tools.report.comparison import as_text
from charonia.tools.report.console import View, level_text, summary_text
from charonia.tools.report.csv import csv_files
from charonia.tools.report.html import plot_data, render
from charonia.tools.results.conditions import Condition
from charonia.tools.results.json_form import from_json, to_json
from charonia.tools.results.language import LanguageFigures, Spread, TokenCounter
from charonia.tools.results.records import LoadLevel, LoadMode, PerfRun

MS = 1_000_000
LEVELS = (LoadLevel(LoadMode.CONCURRENCY, 1), LoadLevel(LoadMode.CONCURRENCY, 8))


def figures(factor: float = 1.0, rate: float = 800.0) -> LanguageFigures:
    first = np.linspace(20, 40, 2001) * MS * factor
    inter = np.linspace(4, 6, 2001) * MS * factor
    return LanguageFigures(
        input_counted_by=TokenCounter.SERVER,
        output_counted_by=TokenCounter.PIECES,
        output_rate=rate,
        input_rate=5000.0,
        request_rate=12.5,
        first_token=Spread.of(first),
        second_token=None,
        inter_token=Spread.of(inter),
        inter_chunk=Spread.of(inter),
        latency=Spread.of(first + 63 * inter),
        user_rate=Spread.of(1e9 / inter),
        input_tokens=Spread.of(np.full(5, 100.0)),
        output_tokens=Spread.of(np.full(5, 64.0)),
        first_token_times=LatencyHistogram.of(first.astype(np.int64)),
        inter_token_times=LatencyHistogram.of(inter.astype(np.int64)),
        inter_chunk_times=LatencyHistogram.of(inter.astype(np.int64)),
    )


def language_run(factor: float = 1.0, rate: float = 800.0) -> PerfRun:
    run = synthetic_run(LEVELS)
    return replace(run, levels=tuple(replace(level, language=figures(factor, rate)) for level in run.levels))


RUN = language_run()


def test_the_text_has_a_line_for_each_figure_and_says_who_counted() -> None:
    text = level_text(RUN.levels[0], View(language=True))
    rows = {line[:44].strip(): line[44:].split() for line in text.splitlines()}

    assert rows["Time to first token (ms)"] == ["30.0", "20.0", "40.0", "30.0", "38.0", "39.0", "39.8", "5.78"]
    assert rows["Output sequence length (tokens)"][:2] == ["64.0", "64.0"]
    assert not any(name.startswith("Time to second token") for name in rows)
    assert "Output token throughput: 800 tokens/sec" in text
    assert "prompts counted by the server; of responses by pieces of the streams, each taken for one token." in text


def test_the_summary_has_a_line_for_each_level() -> None:
    head, *rows = summary_text(RUN).splitlines()[1:3] + summary_text(RUN).splitlines()[3:]

    assert head.split()[:3] == ["Concurrency", "tokens/sec", "per"]
    assert [row.split()[:2] for row in rows[:2]] == [["1", "800"], ["8", "800"]]


def test_the_csv_file_has_columns_for_each_statistic() -> None:
    ((_, text),) = csv_files(RUN, Path("r.csv")).items()
    rows = list(csv.DictReader(io.StringIO(text)))

    assert float(rows[0]["Time to first token (ms) p99"]) == pytest.approx(39.8)
    assert rows[0]["Time to second token (ms) avg"] == ""
    assert rows[0]["Output Tokens Counted By"] == "pieces"
    assert float(rows[0]["Output Tokens/Second"]) == 800


def test_the_figures_survive_the_json_form() -> None:
    assert from_json(to_json(RUN)).levels == RUN.levels


def test_the_page_has_tiles_a_table_and_distributions() -> None:
    page = render([RUN]).decode()
    level = plot_data([RUN], ["m"])["runs"][0]["levels"][0]

    assert "Time to first token" in page
    assert "800 output tokens/s, the first token within 30.0 ms for half of the requests" in page
    assert level["throughput"] == [800.0] * 3
    assert level["ttft"]["response"][0] == 20 * MS
    assert level["itl"]["response"][-1] == 6 * MS
    assert plot_data([RUN], ["m"])["work"] == "Output tokens per second"
    assert "ttft" not in plot_data([synthetic_run(LEVELS)], ["m"])["runs"][0]["levels"][0]


def test_markdown_has_as_many_cells_as_its_head() -> None:
    rows = [line for line in markdown.render(RUN).splitlines() if line.startswith("|")]

    assert len({row.count("|") for row in rows}) == 1
    assert "| 800 | 30.0 ms | 39.8 ms | 5.00 ms | 5.98 ms |" in rows[2]


def test_two_runs_are_compared_by_their_times_to_tokens() -> None:
    found = compare(RUN, language_run(1.5, 700.0))
    changes = {change.figure: change for change in found.levels[0].changes}

    assert changes["ttft p50"].difference.value == pytest.approx(0.5, abs=0.02)
    assert changes["ttft p50"].outcome is Outcome.WORSE
    assert changes["itl p50"].outcome is Outcome.WORSE
    assert changes["tokens/s"].difference.value == pytest.approx(-0.125)
    assert "700/s" in as_text(found, ("a", "b"))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("ttft.p99 > 39ms", True),
        ("ttft.p99 > 40ms", False),
        ("time_to_first_token.mean < 31ms", True),
        ("itl.max >= 6ms", True),
        ("output_tokens < 900", True),
        ("osl.min < 64", False),
        ("ttst.p50 > 0ms", False),
    ],
)
def test_conditions_take_figures_of_tokens(text: str, holds: bool) -> None:
    assert Condition.parse(text).holds(RUN.levels[0]) is holds


@pytest.mark.parametrize("text", ["ttft.p42 > 5ms", "ttft > 5ms", "output_tokens > 5ms", "osl.p50 > 5ms"])
def test_what_is_no_condition_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected FIGURE|takes a value in"):
        Condition.parse(text)


def test_a_condition_of_tokens_is_false_for_other_models() -> None:
    assert not Condition.parse("ttft.p99 > 0ms").holds(synthetic_run(LEVELS).levels[0])


def test_the_records_are_plain_json() -> None:
    level = json.loads(to_json(RUN))["levels"][0]["language"]

    assert (level["output_counted_by"], level["second_token"]) == ("pieces", None)
