import math

import pytest

from charonia.tools.perf import search
from charonia.tools.perf.api import LoadPlan
from charonia.tools.results.records import LoadMode


def played(plan: LoadPlan, limit: float) -> tuple[list[float], float | None]:
    """Run a search on a server that meets the latency limit up to a level."""
    levels, tried = search.levels(plan), []
    value = next(levels)
    while True:
        tried.append(value)
        try:
            value = levels.send(value <= limit)
        except StopIteration as end:
            return tried, end.value


def test_a_sweep_tries_every_level() -> None:
    plan = LoadPlan(start=1, end=8, step=3)

    assert played(plan, 99) == ([1, 4, 7], 7)
    assert search.level_count(plan) == 3


def test_a_sweep_ends_at_the_level_that_misses_the_limit() -> None:
    assert played(LoadPlan(start=1, end=8), 3) == ([1, 2, 3, 4], 3)
    assert played(LoadPlan(start=5, end=8), 3) == ([5], None)


def test_a_sweep_without_an_end_goes_on_until_the_limit() -> None:
    plan = LoadPlan(start=2, end=math.inf, step=2)

    assert played(plan, 7) == ([2, 4, 6, 8], 6)
    assert search.level_count(plan) == 0


def test_fractions_reach_the_end_of_their_range() -> None:
    plan = LoadPlan(LoadMode.REQUEST_RATE, start=0.1, end=0.3, step=0.1)

    assert len(played(plan, 1)[0]) == search.level_count(plan) == 3


@pytest.mark.parametrize("limit", range(1, 65))
def test_a_binary_search_finds_the_largest_level(limit: int) -> None:
    tried, found = played(LoadPlan(start=1, end=64, binary_search=True), limit)

    assert found == limit
    assert len(tried) <= 8


def test_a_binary_search_of_rates_has_the_step_s_precision() -> None:
    _, found = played(LoadPlan(LoadMode.REQUEST_RATE, start=100, end=1000, step=10, binary_search=True), 333.3)

    assert found is not None
    assert found <= 333.3 < found + 10


def test_a_binary_search_whose_begin_misses_the_limit_has_no_answer() -> None:
    assert played(LoadPlan(start=4, end=64, binary_search=True), 3) == ([4], None)
    assert search.level_count(LoadPlan(start=4, end=64, binary_search=True)) == 0


def test_a_binary_search_with_a_fine_step_ends() -> None:
    assert played(LoadPlan(start=1, end=4, step=0.5, binary_search=True), 2)[1] == 2
