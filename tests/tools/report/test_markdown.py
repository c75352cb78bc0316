"""A run as Markdown."""

from dataclasses import replace

from tests.support.runs import synthetic_run

from charonia.tools.report.document import level_columns
from charonia.tools.report.markdown import render
from charonia.tools.results.records import LoadLevel, LoadMode

RUN = synthetic_run((LoadLevel(LoadMode.CONCURRENCY, 1), LoadLevel(LoadMode.CONCURRENCY, 8)))


def test_each_level_is_a_row_of_as_many_cells_as_the_head() -> None:
    rows = [line for line in render(RUN).splitlines() if line.startswith("|")]

    assert len(rows) == 2 + len(RUN.levels)
    assert {row.count("|") for row in rows} == {len(level_columns(RUN)) + 1}
    assert [row.split("|")[1].strip() for row in rows] == ["Concurrency", "---", "1", "8"]


def test_names_and_notes_cannot_break_the_table_or_become_markup() -> None:
    text = render(replace(RUN, model=replace(RUN.model, name="a|b*c*"), notes=("Failed: p99 > 1ms: 2 ms.\n# x",)))

    assert text.startswith("## a\\|b\\*c\\*\n")
    assert "- Failed: p99 \\> 1ms: 2 ms. \\# x\n" in text
