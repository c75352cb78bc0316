from dataclasses import replace

import pytest
from tests.support.runs import FakeService, synthetic_run

from charonia.core.errors import ServingError
from charonia.core.latency import LatencyHistogram
from charonia.tools.report.compare import Comparison, Criteria, MetricChange, Outcome, compare
from charonia.tools.report.comparison import as_text, verdict
from charonia.tools.results.records import Estimate, LevelResult, LoadLevel, LoadMode, PerfRun, Verdict

ONE = (LoadLevel(LoadMode.CONCURRENCY, 4),)


def change(comparison: Comparison, figure: str) -> MetricChange:
    return next(change for change in comparison.levels[0].changes if change.figure == figure)


def with_level(run: PerfRun, **changes: object) -> PerfRun:
    level: LevelResult = replace(run.levels[0], **changes)  # type: ignore[arg-type]  # fields of the record
    return replace(run, levels=(level, *run.levels[1:]))


def test_a_run_is_the_same_as_itself() -> None:
    run = synthetic_run(ONE)

    comparison = compare(run, run)

    assert comparison.outcome is Outcome.SAME
    assert all(found.difference.value == 0 for found in comparison.levels[0].changes)
    assert comparison.setup == ()


def test_noise_is_not_a_change_even_if_every_change_is_of_interest() -> None:
    # 30 comparisons of 20 figures and more; each claims to be wrong with a probability of 5 % at most.
    wrong = sum(
        compare(synthetic_run(seed=seed), synthetic_run(seed=1000 + seed), Criteria(threshold=0)).outcome
        is not Outcome.SAME
        for seed in range(10)
    )

    assert wrong <= 2


def test_requests_that_resemble_their_neighbours_are_no_proof_of_a_change() -> None:
    # The server's mood changes every tenth of a second by 20 %: 15,000 requests are thirty moods.
    moody = FakeService(wander=0.2)

    pairs = [(synthetic_run(ONE, moody, seed=seed), synthetic_run(ONE, moody, seed=500 + seed)) for seed in range(20)]
    wrong = sum(change(compare(*pair), "p50").outcome is not Outcome.SAME for pair in pairs)

    assert wrong <= 2


@pytest.mark.parametrize(("median_ns", "outcome"), [(550_000, Outcome.WORSE), (450_000, Outcome.BETTER)])
def test_a_server_that_is_ten_percent_off_is_found_out(median_ns: int, outcome: Outcome) -> None:
    comparison = compare(synthetic_run(ONE, seed=1), synthetic_run(ONE, FakeService(median_ns=median_ns), seed=2))

    assert {name: change(comparison, name).outcome for name in ("throughput", "p50", "p90", "p95", "p99")} == {
        "throughput": outcome,
        "p50": outcome,
        "p90": outcome,
        "p95": outcome,
        "p99": outcome,
    }
    assert comparison.outcome is outcome


def test_the_interval_holds_the_true_change() -> None:
    found = change(compare(synthetic_run(ONE, seed=3), synthetic_run(ONE, FakeService(550_000), seed=4)), "p50")

    assert found.difference.low < 0.10 < found.difference.high
    assert found.difference.high - found.difference.low < 0.06


def test_a_change_below_the_threshold_does_not_count() -> None:
    runs = synthetic_run(ONE, seed=1), synthetic_run(ONE, FakeService(550_000), seed=2)

    assert change(compare(*runs, Criteria(threshold=0.2)), "p50").outcome is Outcome.SAME


def test_the_same_files_give_the_same_answer() -> None:
    runs = synthetic_run(seed=1), synthetic_run(seed=2)

    assert compare(*runs) == compare(*runs)


def test_the_figures_of_two_given_runs_stay() -> None:
    before = synthetic_run(ONE, FakeService(wander=0.1), seed=1, error_share=0.01)
    after = synthetic_run(ONE, FakeService(520_000, wander=0.1), seed=2, error_share=0.03)

    found = {each.figure: each.difference for each in compare(before, after).levels[0].changes}

    expected = {
        "throughput": (-0.0738, -0.0385, -0.0013),
        "p50": (-0.0544, 0.0104, 0.0829),
        "p90": (-0.0754, 0.0148, 0.1121),
        "p95": (-0.0967, 0.0134, 0.1376),
        "p99": (0.0166, 0.0166, 0.0166),
        "errors": (0.0153, 0.0192, 0.0233),
    }
    # The ends of an interval are those of draws.
    ends = {name: (each.low, each.value, each.high) for name, each in found.items()}
    assert ends == {
        name: pytest.approx(each, abs=0.002 + 0.03 * (each[2] - each[0])) for name, each in expected.items()
    }


def test_errors_that_were_not_there_before_are_worse_at_any_threshold() -> None:
    comparison = compare(synthetic_run(ONE, seed=1), synthetic_run(ONE, seed=2, error_share=0.005), Criteria())

    assert change(comparison, "errors").outcome is Outcome.WORSE
    assert change(comparison, "errors").difference.low > 0


def test_better_and_worse_at_once_is_mixed() -> None:
    faster_but_failing = synthetic_run(ONE, FakeService(400_000), seed=2, error_share=0.05)

    comparison = compare(synthetic_run(ONE, seed=1), faster_but_failing)

    assert comparison.outcome is Outcome.MIXED
    assert verdict(comparison).startswith("Worse: errors at the only level; better: throughput at the only level")


def test_high_percentiles_are_compared_only_where_enough_requests_lie_beyond() -> None:
    few, many = synthetic_run(ONE, duration_s=0.9), synthetic_run(ONE, duration_s=12.0)

    figures = [
        [found.figure for found in compare(run, run).levels[0].changes if found.figure.startswith("p")]
        for run in (few, many)
    ]

    assert figures == [["p50", "p90", "p95", "p99"], ["p50", "p90", "p95", "p99", "p99.9", "p99.99"]]


def test_without_a_time_line_and_intervals_the_outcome_is_unknown() -> None:
    run = with_level(synthetic_run(ONE), timeline=(), throughput=Estimate(5000.0, 5000.0, 5000.0, 0.0))

    comparison = compare(run, run)

    unknown = [found.figure for found in comparison.levels[0].changes if found.outcome is Outcome.UNKNOWN]
    assert unknown == ["throughput", "p50", "p90", "p95", "p99"]


def test_levels_without_any_answer_are_compared_without_a_division_by_zero() -> None:
    silent = with_level(
        synthetic_run(ONE),
        verdict=Verdict.NO_REQUESTS,
        request_count=0,
        throughput=Estimate(0.0, 0.0, 0.0, 0.0),
        response_times=LatencyHistogram(),
        timeline=(),
        windows=(),
    )

    comparison = compare(synthetic_run(ONE), silent)

    assert comparison.outcome is Outcome.UNKNOWN
    assert comparison.levels[0].doubts == ("the verdict of the second run is 'no requests'",)


def test_pieces_of_the_time_line_before_the_result_do_not_count() -> None:
    run = synthetic_run(ONE)
    windows = run.levels[0].windows
    first_used = with_level(run, windows=(windows[0], replace(windows[1], used=False), replace(windows[2], used=False)))

    # A third of the time line is ten pieces: enough, and less than all.
    assert change(compare(first_used, first_used), "p50").outcome is Outcome.SAME


def test_levels_that_only_one_run_has_are_named() -> None:
    levels = [LoadLevel(LoadMode.CONCURRENCY, value) for value in (1, 2, 3)]

    comparison = compare(synthetic_run(tuple(levels[:2])), synthetic_run(tuple(levels[1:])))

    assert [level.level for level in comparison.levels] == [levels[1]]
    assert (comparison.only_before, comparison.only_after) == ((levels[0],), (levels[2],))
    assert "only before:\n  concurrency 1\n\nonly after:\n  concurrency 3" in as_text(comparison, ("a", "b"))


def test_different_models_are_compared_only_if_wanted() -> None:
    runs = synthetic_run(ONE, model="old"), synthetic_run(ONE, model="new")

    with pytest.raises(ServingError, match="different models: 'old' and 'new'") as error:
        compare(*runs)

    assert "--any-model" in error.value.hint
    assert "model: old -> new" in compare(*runs, any_model=True).setup


def test_runs_without_a_common_level_are_refused_with_their_levels() -> None:
    runs = synthetic_run(ONE), synthetic_run((LoadLevel(LoadMode.REQUEST_RATE, 100),))

    with pytest.raises(ServingError, match="no level in common: concurrency 4 against request rate 100"):
        compare(*runs)


def test_what_was_not_the_same_around_is_listed_but_output_files_are_not() -> None:
    first = synthetic_run(ONE, options={"--measurement-interval": "5000", "--json": "a.json", "--seed": "0"})
    second = replace(first, batch_size=8, options={"--measurement-interval": "1000", "--json": "b.json"})

    assert compare(first, second).setup == (
        "batch size: 1 -> 8",
        "option --measurement-interval: 5000 -> 1000",
        "option --seed: 0 -> default",
    )


def test_a_level_that_is_not_to_be_trusted_is_doubted() -> None:
    overloaded = with_level(synthetic_run(ONE), verdict=Verdict.OVERLOADED)

    text = as_text(compare(synthetic_run(ONE), overloaded), ("a.json", "b.json"))

    assert "caution:\n  concurrency 4: the verdict of the second run is 'overloaded'" in text


def test_what_a_run_says_of_itself_is_passed_on() -> None:
    run = synthetic_run(ONE)

    text = as_text(compare(run, replace(run, notes=("It was cut off.",))), ("a", "b"))

    assert "caution:\n  second run: It was cut off." in text


def test_the_text_shows_every_figure_with_its_interval() -> None:
    runs = synthetic_run(ONE, seed=1), synthetic_run(ONE, FakeService(550_000), seed=2)

    lines = as_text(compare(*runs), ("a.json", "b.json")).splitlines()

    assert lines[:2] == ["before: a.json", "after:  b.json"]
    throughput = next(line for line in lines if "throughput" in line)
    assert throughput.split()[:2] == ["concurrency", "4"]
    assert "-9.1 %" in throughput
    assert throughput.endswith("WORSE")
    assert lines[-1].endswith("(all intervals hold with 95 %; changes below 2 % do not count)")
