"""Conditions of `charonia perf --fail-if`: their text, and when they are true."""

from dataclasses import replace

import pytest
from tests.support.runs import synthetic_run

from charonia.tools.report.summary import failures
from charonia.tools.results.conditions import Condition
from charonia.tools.results.records import ErrorKind, Estimate, LevelResult, PerfRun

RUN = synthetic_run()
LEVEL = replace(RUN.levels[0], throughput=Estimate(500.0, 490.0, 510.0), request_count=999, errors=())
P99_MS = LEVEL.percentile(99) / 1e6


def holds(text: str) -> bool:
    return Condition.parse(text).holds(LEVEL)


def run_of(*levels: LevelResult) -> PerfRun:
    return replace(RUN, levels=levels)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("p99 > 20ms", 20e6),
        ("p99.9>=1.5s", 1.5e9),
        ("mean < 300 us", 300e3),
        ("max > 10µs", 10e3),
        ("throughput < 500", 500.0),
        ("throughput <= 0.5 infer/s", 0.5),
        ("errors > 0.1%", 0.001),
    ],
)
def test_a_condition_names_a_figure_and_a_limit_with_its_unit(text: str, limit: float) -> None:
    condition = Condition.parse(text)

    assert condition.limit == pytest.approx(limit)
    assert condition.text == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p99 20ms", "expected FIGURE > VALUE"),
        ("p99 > 20", "'p99' takes a value in ns or us or µs or ms or s, got '20'"),
        ("p101 > 1ms", "got the figure 'p101'"),
        ("latency > 1ms", "got the figure 'latency'"),
        ("errors > 3", "'errors' takes a value in %, got '3'"),
        ("throughput < 5ms", "got '5ms'"),
        ("", "expected FIGURE > VALUE"),
    ],
)
def test_anything_else_is_refused_with_what_is_expected(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"expected|takes") as caught:
        Condition.parse(text)

    assert message in str(caught.value)


def test_a_condition_is_true_beyond_its_limit_and_at_it_only_with_an_equals_sign() -> None:
    assert holds("throughput <= 500")
    assert not holds("throughput < 500")
    assert holds("throughput > 499.9")
    assert holds(f"p99 > {P99_MS * 0.99:.6f}ms")
    assert not holds(f"p99 > {P99_MS * 1.01:.6f}ms")
    assert not holds("errors > 0%")


def test_each_condition_that_is_true_is_told_with_the_figure_and_the_level() -> None:
    broken = replace(LEVEL, errors=(ErrorKind("UNAVAILABLE", 1, ()),))
    conditions = [Condition.parse(text) for text in ("errors > 0.01%", "p99 > 99s", "throughput < 501")]

    assert failures(conditions, run_of(broken)) == (
        "errors > 0.01%: 0.100 % at concurrency 1.",
        "throughput < 501: 500 infer/s at concurrency 1.",
    )


def test_what_has_no_figures_is_no_success() -> None:
    condition = Condition.parse("p99 > 1s")

    assert failures([condition], run_of()) == ("Nothing was measured.",)
    assert failures([condition], run_of(replace(LEVEL, request_count=0))) == (
        "No request was answered at concurrency 1.",
    )
    assert failures([], run_of()) == ()
