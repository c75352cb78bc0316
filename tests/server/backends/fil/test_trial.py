import numpy as np
import pytest

from charonia.server.backends.fil import backend
from charonia.server.backends.fil.backend import (
    SAMPLE_VALUES_MAX,
    SIZES,
    Predictor,
    Rows,
    choose,
    difference,
    sample_rows,
)


class Clock:
    now_ns = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "time", CLOCK)


class Slow(Predictor):
    """Takes a time for each call and one for each row."""

    def __init__(self, name: str, call_us: float, row_us: float, answer: float = 1.0) -> None:
        self.name = name
        self.sizes: list[int] = []
        self._call_us, self._row_us = call_us, row_us
        self._answer = answer

    def scores(self, rows: Rows) -> Rows:
        self.sizes.append(len(rows))
        CLOCK.now_ns += int(1000 * (self._call_us + self._row_us * len(rows)))
        return np.full((len(rows), 1), self._answer, np.float32)


def test_one_predictor_runs_small_batches_and_another_one_large_ones() -> None:
    small, large = Slow("small", 10, 20), Slow("large", 400, 1)

    choice = choose([small, large], sample_rows(3), 512)

    assert choice.of(1) is choice.of(8) is small
    assert choice.of(64) is choice.of(512) is choice.of(100_000) is large
    assert choice.edges == (22,)  # halfway between 8 and 64, which are powers
    assert choice.of(22) is small
    assert choice.of(23) is large
    assert str(choice) == "up to 22 rows small, more large"


def test_a_predictor_that_is_always_faster_runs_everything() -> None:
    slow, fast = Slow("slow", 300, 10), Slow("fast", 20, 1)

    choice = choose([slow, fast], sample_rows(3), 64)

    assert (choice.predictors, choice.edges, str(choice)) == ((fast,), (), "fast")


def test_no_batch_is_tried_that_is_larger_than_the_model_s() -> None:
    predictor = Slow("only", 1, 0)

    choose([predictor], sample_rows(3), 20)

    assert max(predictor.sizes) == 8


def test_a_forest_that_takes_long_is_not_tried_with_larger_batches() -> None:
    predictor = Slow("only", 0, 4000)

    choice = choose([predictor], sample_rows(3), 0)

    assert max(predictor.sizes) == 8
    assert choice.part_rows == 1


def test_a_part_takes_at_least_a_millisecond() -> None:
    choice = choose([Slow("only", 0, 10)], sample_rows(3), 512)

    assert choice.part_rows == 100


def test_made_up_rows_are_the_same_each_time_and_few_where_they_are_long() -> None:
    np.testing.assert_array_equal(sample_rows(5), sample_rows(5))
    assert sample_rows(5).shape == (SIZES[-1], 5)
    assert np.isnan(sample_rows(5)).any()
    assert sample_rows(SAMPLE_VALUES_MAX // 100).shape[0] == 64
    assert sample_rows(SAMPLE_VALUES_MAX * 2).shape[0] == 1


@pytest.mark.parametrize(("answer", "agrees"), [(1.0, True), (1.00005, True), (1.001, False), (np.nan, False)])
def test_predictors_agree_within_a_tolerance(answer: float, agrees: bool) -> None:
    one, other = Slow("one", 0, 0, answer), Slow("other", 0, 0)

    assert (difference(one, other, sample_rows(2)) <= 1) is agrees
