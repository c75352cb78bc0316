"""The tables of capacities, from a record of measurements."""

from typing import Any

import pytest
from bench.capacity import Costs
from bench.capacity_report import (
    CHECK,
    LIMITS,
    MACHINES,
    PAGE,
    Measured,
    check_rows,
    limit_row,
    machine_row,
    measured,
    rewrite,
)


def run(rate_per_s: float, **cpu_us: float) -> dict[str, Any]:
    return {"rate_per_s": rate_per_s, "cpu_us_by_process": {name.replace("_", " "): us for name, us in cpu_us.items()}}


RECORD: dict[str, Any] = {
    "date": "2026-01-01",
    "machine": {"cores": 2},
    "http-64": {
        "0": [run(r, server=50.0 + r / 1000, client=9.0) for r in (9_000, 10_000, 11_000)],
        "1": [run(8_000, server=0.0, engine=20.0, front_ends=70.0, client=10.0)],
    },
    "grpc-16": {"0": [run(1, server=1.0, client=1.0)]},
}


def test_costs_are_medians_of_the_runs_with_one_front_end_and_without() -> None:
    (found,) = measured(RECORD)

    costs = Costs(front_end_us=70.0, engine_us=20.0, one_process_us=60.0, client_us=10.0)
    assert found == Measured("http-64", costs, {0: 10_000, 1: 8_000})


def test_the_engine_is_the_limit_when_as_many_cores_are_busy_as_its_share_says() -> None:
    (found,) = measured(RECORD)

    assert limit_row("identity", found) == "| identity | HTTP, 64 | 60.0 | 70.0 | 20.0 | 1.50 | 50,000 | 4.5 |"


def test_the_check_has_the_client_on_the_same_cores() -> None:
    (found,) = measured(RECORD)

    alone, apart = [row.split(" | ") for row in check_rows("identity", found, cores=2)]

    assert alone[:6] == ["| identity", "HTTP, 64", "0", "60", "10", "10,000"]
    assert float(alone[6].replace(",", "")) == pytest.approx(1e6 / 60, rel=0.05)
    assert float(apart[6].replace(",", "")) == pytest.approx(1e6 / 70, rel=0.05)  # the front end's share


def test_larger_machines_have_no_client_of_their_own() -> None:
    (found,) = measured(RECORD)

    row = machine_row("engine_identity", found, cores=16).split(" | ")

    assert row[0] == "| engine_identity"
    assert float(row[4].replace(",", "")) == pytest.approx(50_000, rel=0.05)
    assert row[5].startswith("engine")
    assert float(row[8].removesuffix(" |")) == pytest.approx(50_000 * 64 * 8 / 1e9, abs=0.05)


def test_beside_the_best_number_stands_the_one_that_auto_chooses() -> None:
    (found,) = measured(RECORD)

    stays, in_front = [machine_row(model, found, cores=8).split(" | ") for model in ("engine_image", "image")]

    assert (stays[6], in_front[6]) == ("4", "8")
    assert float(stays[7].replace(",", "")) <= 1.03 * float(stays[4].replace(",", ""))


@pytest.mark.parametrize("head", [LIMITS, CHECK, MACHINES])
def test_the_rows_of_a_table_of_the_page_are_replaced(head: str) -> None:
    page = PAGE.read_text(encoding="utf-8")

    changed = rewrite(page, head, ["| row |"])

    assert f"{head}\n|---" in changed
    assert changed.count("| row |\n\n") == 1
    assert 0 < len(page.split("\n")) - len(changed.split("\n")) < 100
