"""A run as Markdown."""

from dataclasses import replace

from tests.support.runs import synthetic_run

from charonia.tools.report.markdown import render
from charonia.tools.results.records import LoadLevel, LoadMode

RUN = synthetic_run((LoadLevel(LoadMode.CONCURRENCY, 1), LoadLevel(LoadMode.CONCURRENCY, 8)))


def test_a_run_is_a_heading_a_sentence_a_table_and_what_was_measured() -> None:
    assert render(RUN).splitlines() == [
        "## identity",
        "",
        "The best of 2 levels is concurrency 8: 6,203 inferences/s, half of the requests within 1.29 ms, 99 % within "
        "2.32 ms.",
        "",
        "| Concurrency | Verdict | Inferences/s | p50 | p90 | p95 | p99 | p99.9 | p99.99 | Slowest | Errors |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1 | stable | 2,585 | 503 µs | 686 µs | 752 µs | 891 µs | 1.06 ms | - | 1.34 ms | 0 % |",
        "| 8 | stable | 6,203 | 1.29 ms | 1.77 ms | 1.94 ms | 2.32 ms | 2.76 ms | 3.42 ms | 4.21 ms | 0 % |",
        "",
        "charonia 0.1.0, 2026-01-02T03:04:05+00:00, 4 cores (A processor)",
    ]


def test_names_and_notes_cannot_break_the_table_or_become_markup() -> None:
    text = render(replace(RUN, model=replace(RUN.model, name="a|b*c*"), notes=("Failed: p99 > 1ms: 2 ms.\n# x",)))

    assert text.startswith("## a\\|b\\*c\\*\n")
    assert "- Failed: p99 \\> 1ms: 2 ms. \\# x\n" in text
