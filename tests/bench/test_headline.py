import json

import pytest
from bench.compare import RESULTS, ROOT
from bench.headline import PAGES, TABLES, Table, rewrite


def test_every_command_of_the_pages_is_repeated() -> None:
    lines = [line for page in PAGES for line in (ROOT / page).read_text().split("\n")]
    quoted = [line.strip() for line in lines if line.startswith("    python -m bench.")]

    assert set(quoted) <= {command for table in TABLES for command in table.shown()}


MEASURED = "Measured on a day by `python -m bench.headline`."
WITH_RESULTS = [table for table in TABLES if all((RESULTS / name).exists() for _, name in table.commands)]


@pytest.mark.parametrize("table", WITH_RESULTS, ids=lambda table: table.shown()[0])
def test_rows_of_results_fit_the_table_on_a_page(table: Table) -> None:
    records = [json.loads((RESULTS / name).read_text()) for _, name in table.commands]
    pages = [(ROOT / page).read_text() for page in PAGES]

    (changed,) = {rewrite(page, table, MEASURED, records) for page in pages} - set(pages)

    lines = changed.split("\n")
    above = lines[: lines.index(MEASURED)]
    last = max(number for number, line in enumerate(above) if line.startswith("|"))
    head = max(number for number, line in enumerate(above[:last]) if line.startswith("|---"))
    assert {line.count("|") for line in lines[head : last + 1]} == {lines[head].count("|")}
    assert last > head
