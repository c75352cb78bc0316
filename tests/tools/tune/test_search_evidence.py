"""Statistics of measurements: pooling, scores, constraints, the plateau, the limits of load, and the verdict."""

import math
from collections.abc import Callable

import pytest
from tests.support.tuning import SimulatedServer

from charonia.tools.results.records import Estimate, LoadMode
from charonia.tools.tune.api import (
    Constraint,
    Goal,
    LoadPoint,
    LoadSpace,
    Measured,
    Metric,
    ModelChange,
    ModelFacts,
    ModelGoal,
    Objective,
    Outcome,
    SearchOptions,
    SearchSpace,
    Trial,
    TrialRecord,
    Variant,
)
from charonia.tools.tune.decision import Conclusion, decide, percent
from charonia.tools.tune.objective import Evidence, gain, standard_error
from charonia.tools.tune.search import phases
from charonia.tools.tune.search.phases import Search, Steps

FACTS = ModelFacts("m", max_batch_size=8)
GOAL = Goal((ModelGoal("m"),))
DEFAULT, OTHER = Variant(), Variant((ModelChange("m", instance_count=2),))


def exact(value: float) -> Estimate:
    return Estimate(value, value, value)


def within(value: float, half: float) -> Estimate:
    return Estimate(value, value - half, value + half)


def loads(value: float, mode: LoadMode = LoadMode.CONCURRENCY) -> tuple[LoadPoint, ...]:
    return (LoadPoint("m", mode, value),)


def limited(*constraints: Constraint, objective: Metric = Metric.THROUGHPUT) -> Goal:
    return Goal((ModelGoal("m", objectives=(Objective(objective),), constraints=constraints),))


def told(
    variant: Variant, throughput: Estimate, p99: float = 1.0, at: float = 1.0, repeat: int = 0, effort: float = 1.0
) -> TrialRecord:
    trial = Trial(1, variant, loads(at), repeat, effort, "")
    return TrialRecord.of(trial, Measured({"m": {Metric.THROUGHPUT: throughput, Metric.LATENCY_P99: exact(p99)}}))


def evidence(*history: TrialRecord, goal: Goal = GOAL) -> Evidence:
    found = Evidence(goal)
    for each in history:
        found.add(each)
    return found


def test_a_value_without_an_interval_is_not_taken_for_exact() -> None:
    assert standard_error(Estimate(100, 100, 100, 0.0)) == pytest.approx(10 / 1.96, rel=1e-3)
    assert standard_error(within(100, 19.6)) == pytest.approx(10, rel=1e-3)


def test_the_scatter_of_repeats_counts_where_it_is_wider_than_their_intervals() -> None:
    found = evidence(told(DEFAULT, exact(90)), told(DEFAULT, exact(110), repeat=1))

    pooled = found.point(DEFAULT, loads(1)).metrics["m"][Metric.THROUGHPUT]  # type: ignore[union-attr]

    assert pooled.value == 100
    assert pooled.low == 0
    assert pooled.high - pooled.value == pytest.approx(12.706 * 10, rel=0.01)


def test_the_interval_of_repeats_that_agree_is_narrower_than_theirs() -> None:
    found = evidence(told(DEFAULT, within(100, 20)), told(DEFAULT, within(100, 20), repeat=1))

    pooled = found.point(DEFAULT, loads(1)).metrics["m"][Metric.THROUGHPUT]  # type: ignore[union-attr]

    assert (pooled.low, pooled.value, pooled.high) == pytest.approx((100 - 20 / 2**0.5, 100, 100 + 20 / 2**0.5))


def test_the_measurement_that_a_point_was_picked_for_does_not_count_beside_two_more() -> None:
    found = evidence(told(DEFAULT, exact(200)), *(told(DEFAULT, exact(100), repeat=each) for each in (1, 2)))

    assert found.point(DEFAULT, loads(1)).metrics["m"][Metric.THROUGHPUT].value == 100  # type: ignore[union-attr]


def test_short_measurements_do_not_count_beside_long_ones() -> None:
    found = evidence(told(DEFAULT, exact(200), effort=0.25), told(DEFAULT, exact(100)))

    assert found.point(DEFAULT, loads(1)).metrics["m"][Metric.THROUGHPUT].value == 100  # type: ignore[union-attr]


def test_who_was_repeated_comes_before_who_was_only_looked_at() -> None:
    found = evidence(
        told(OTHER, exact(100)),
        told(DEFAULT, exact(90)),
        told(Variant((ModelChange("m", max_batch_size=2),)), exact(120), effort=0.25),
    )

    assert found.ranking()[0].variant == OTHER


def test_the_default_configuration_is_not_preferred_for_the_time_spent_on_it() -> None:
    found = evidence(told(DEFAULT, exact(90)), told(OTHER, exact(100), effort=0.25))

    assert found.ranking()[0].variant == OTHER


def test_a_gain_is_the_ratio_of_the_objective_whatever_its_direction() -> None:
    faster = limited(objective=Metric.LATENCY_P99)
    found = evidence(told(DEFAULT, exact(1), p99=20), told(OTHER, exact(1), p99=10), goal=faster)

    one, other = found.best(OTHER), found.best(DEFAULT)

    assert one
    assert other
    assert gain(one, other, 0.95).value == pytest.approx(1.0)
    assert gain(one, one, 0.95) == Estimate(0.0, 0.0, 0.0, 0.95)


def test_weights_of_objectives_are_relative() -> None:
    goal = Goal((ModelGoal("m", objectives=(Objective(Metric.THROUGHPUT, 30), Objective(Metric.LATENCY_P99, 10))),))
    found = evidence(told(DEFAULT, exact(100), p99=10), told(OTHER, exact(200), p99=20), goal=goal)

    one, other = found.best(OTHER), found.best(DEFAULT)

    assert one
    assert other
    assert gain(one, other, 0.95).value == pytest.approx(2**0.75 * 2**-0.25 - 1)


def test_keeping_the_constraints_comes_before_any_gain() -> None:
    goal = limited(Constraint(Metric.LATENCY_P99, maximum=10))
    found = evidence(told(DEFAULT, exact(100), p99=9), told(OTHER, exact(900), p99=20), goal=goal)

    first, last = found.ranking()

    assert first.variant.is_default
    assert (last.violation, last.surely_violates) == (1.0, True)


def test_keeping_the_constraints_comes_first_where_scores_are_below_zero() -> None:
    goal = limited(Constraint(Metric.THROUGHPUT, minimum=100), objective=Metric.LATENCY_P99)
    found = evidence(told(DEFAULT, exact(100), p99=90), told(OTHER, exact(99), p99=2), goal=goal)

    assert found.ranking()[0].variant.is_default


@pytest.mark.parametrize(
    "goal",
    [
        limited(objective=Metric.GPU_USED_MEMORY),
        limited(Constraint(Metric.GPU_USED_MEMORY, maximum=1)),
    ],
)
def test_a_measurement_without_a_metric_of_the_goal_does_not_count_and_is_named(goal: Goal) -> None:
    decision = decide(goal, [told(DEFAULT, exact(100))])

    assert decision.conclusion is Conclusion.NOTHING_MEASURED
    assert decision.sentences[-1] == "The server or the machine does not report m: gpu_used_memory."


@pytest.mark.parametrize(
    ("share", "text"),
    [
        ((0.12, 0.09, 0.15), "12 % (9 to 15 %)"),
        ((0.995, 0.5, 12.0), "99.5 % (50 to 1,200 %)"),
        ((0.12, -0.5, 9.99), "12 % (-50 to 999 %)"),
        ((0.12, 0.0, 10.0), "12 % (0 to more than 1,000 %)"),
    ],
)
def test_a_gain_in_percent_does_not_claim_to_know_what_may_be_a_loss_or_huge(
    share: tuple[float, float, float], text: str
) -> None:
    assert percent(Estimate(*share)) == text


def test_a_clear_gain_is_told_with_its_interval_and_ties_are_named() -> None:
    tie = Variant((ModelChange("m", instance_count=3),))
    history = [told(DEFAULT, within(100, 2)), told(OTHER, within(150, 2))]
    history += [told(tie, within(149, 2), repeat=repeat) for repeat in (0, 1)]

    decision = decide(GOAL, history)

    assert decision.conclusion is Conclusion.BETTER
    assert decision.sentences[0].startswith("'2 instances' is 50 % (")
    assert [each.variant for each in decision.ties] == [tie]
    assert decision.sentences[1] == "Equally good within the measurements: 3 instances."


def test_a_comparison_between_different_loads_names_both_and_says_what_it_is_worth() -> None:
    history = [told(DEFAULT, within(100, 2), at=2), told(OTHER, within(206, 2), at=64)]

    unknown = decide(GOAL, history).sentences
    known = decide(GOAL, [*history, told(DEFAULT, within(99, 2), at=64)]).sentences

    assert "(at concurrency 64 against concurrency 2)" in unknown[0]
    assert unknown[1] == (
        "The default configuration was not measured at concurrency 64: a part of the difference may be the load's."
    )
    assert known[0] == unknown[0]
    assert known[1] == (
        "Each at the load that suits it best; the default configuration does no better at concurrency 64."
    )


def test_a_tie_at_another_load_says_so() -> None:
    tie = Variant((ModelChange("m", instance_count=3),))
    history = [told(DEFAULT, within(100, 2)), told(OTHER, within(150, 2))]
    history += [told(tie, within(149, 2), repeat=repeat, at=16) for repeat in (0, 1)]

    assert decide(GOAL, history).sentences[-1].endswith(": 3 instances (at concurrency 16 against concurrency 1).")


@pytest.mark.parametrize(("throughput", "p99", "repeats"), [(149, 20, 2), (146, 1, 2), (149, 1, 1)])
def test_what_misses_a_constraint_is_surely_worse_or_was_measured_one_time_is_not_named_as_equally_good(
    throughput: float, p99: float, repeats: int
) -> None:
    goal = limited(Constraint(Metric.LATENCY_P99, maximum=10))
    history = [told(DEFAULT, within(100, 2)), told(OTHER, within(150, 2))]
    close = Variant((ModelChange("m", instance_count=3),))
    history += [told(close, within(throughput, 2), p99, repeat=repeat) for repeat in range(repeats)]

    assert len(decide(goal, history).sentences) == 1


def test_a_variant_that_is_far_behind_is_never_as_good_however_uncertain_it_is() -> None:
    slow = Variant((ModelChange("m", instance_count=3),))
    history = [told(DEFAULT, within(100, 2)), told(OTHER, within(150, 2))]
    history += [told(slow, within(48, 400), repeat=repeat) for repeat in (0, 1)]

    assert decide(GOAL, history).ties == ()


def test_the_leader_has_the_best_figures_even_when_its_gain_is_not_certain() -> None:
    decision = decide(GOAL, [told(DEFAULT, within(100, 90)), told(OTHER, within(154, 90))])

    assert decision.best == decision.default
    assert decision.leader is not None
    assert decision.leader.variant == OTHER


def test_a_gain_within_the_noise_is_none() -> None:
    decision = decide(GOAL, [told(DEFAULT, within(100, 5)), told(OTHER, within(104, 5))])

    assert decision.conclusion is Conclusion.NO_GAIN
    assert decision.best == decision.default
    assert [each.variant for each in decision.ranking] == [OTHER, DEFAULT]
    assert decision.sentences[0] == "No significant gain over the default configuration: keep it."


def test_a_gain_that_may_be_large_or_chance_is_no_verdict() -> None:
    decision = decide(GOAL, [told(DEFAULT, within(100, 5)), told(OTHER, within(220, 200))])

    assert decision.conclusion is Conclusion.UNDECIDED
    assert decision.best == decision.default
    assert decision.sentences[0].startswith("Undecided: '2 instances' came to 120 % (")


def test_a_default_that_is_alone_is_not_called_the_best() -> None:
    decision = decide(GOAL, [told(DEFAULT, within(100, 5))])

    assert decision.conclusion is Conclusion.NO_OTHER
    assert decision.best == decision.default
    assert decision.sentences == ("Only the default configuration was measured: there is nothing to compare it with.",)


def test_a_default_that_could_not_be_measured_leaves_the_gain_unknown() -> None:
    decision = decide(GOAL, [told(OTHER, exact(1))])

    assert decision.conclusion is Conclusion.NO_DEFAULT
    assert decision.best
    assert decision.best.gain is None


def test_keeping_a_limit_that_the_default_misses_is_better_even_with_less_throughput() -> None:
    goal = limited(Constraint(Metric.LATENCY_P99, maximum=10))

    decision = decide(goal, [told(DEFAULT, exact(100), p99=12), told(OTHER, exact(80), p99=9)])

    assert decision.conclusion is Conclusion.BETTER
    assert decision.sentences[0] == (
        "'2 instances' meets the constraints, the default does not: p99 latency is 12 ms, the limit 10 ms, 20.0% off."
    )


def test_no_variant_reaches_the_least_throughput() -> None:
    goal = limited(Constraint(Metric.THROUGHPUT, minimum=1000), Constraint(Metric.LATENCY_P99, maximum=1))

    decision = decide(goal, [told(DEFAULT, exact(100)), told(OTHER, exact(999.5))])

    assert decision.conclusion is Conclusion.CONSTRAINTS_NOT_MET
    assert decision.sentences == (
        "No configuration meets the constraints. The closest is '2 instances': throughput is 999.5/s, "
        "the limit 1,000/s, 0.1% off.",
    )


def test_a_limit_that_is_just_kept_is_not_named_among_those_missed() -> None:
    goal = limited(Constraint(Metric.THROUGHPUT, minimum=100), Constraint(Metric.LATENCY_P99, maximum=1))

    decision = decide(goal, [told(DEFAULT, exact(100), p99=1.5)])

    assert decision.sentences[0].endswith(" 'default configuration': p99 latency is 1.5 ms, the limit 1 ms, 50.0% off.")


def driver_of(space: LoadSpace, goal: Goal = GOAL) -> Search:
    return Search(SearchSpace((FACTS,), (), space), goal, SearchOptions())


def play(steps: Steps[None], answer: Callable[[Trial], Outcome]) -> list[float]:
    """Run steps to their end and return the loads that they measured."""
    asked = []
    try:
        trial = next(steps)
        while True:
            asked.append(trial.loads[0].value)
            trial = steps.send(answer(trial))
    except StopIteration:
        return asked


def answer(
    throughput: Callable[[float], float], p99: Callable[[float], float] = lambda value: 1.0, half: float = 0.0
) -> Callable[[Trial], Outcome]:
    def measured(trial: Trial) -> Outcome:
        value = trial.loads[0].value
        return Measured(
            {"m": {Metric.THROUGHPUT: within(throughput(value), half), Metric.LATENCY_P99: exact(p99(value))}}
        )

    return measured


def test_a_sweep_ends_three_loads_after_the_peak() -> None:
    driver = driver_of(LoadSpace(maximum=1024))

    asked = play(phases.sweep(driver, DEFAULT, 1.0, ""), answer(lambda value: min(value, 8)))

    assert asked == [1, 2, 4, 8, 16, 32, 64]


def test_a_sweep_goes_on_while_a_constraint_is_missed_by_less_and_less() -> None:
    limits = (Constraint(Metric.THROUGHPUT, minimum=1e6),)
    driver = driver_of(LoadSpace(maximum=1024), Goal((ModelGoal("m", constraints=limits),)))

    asked = play(phases.sweep(driver, DEFAULT, 1.0, ""), answer(lambda value: 1e5 * min(value, 8)))

    assert asked == [1, 2, 4, 8, 16]


def test_a_lucky_load_does_not_end_the_sweep() -> None:
    driver = driver_of(LoadSpace(maximum=1024))
    lucky = iter([45.0])

    def noisy(value: float) -> float:
        return next(lucky, 11.0) if value == 2 else 10 * math.log2(value) + 1

    asked = play(phases.sweep(driver, DEFAULT, 1.0, ""), answer(noisy, half=60))

    assert 1024 in asked
    assert asked.count(2) == 2


def test_loads_that_the_user_gave_are_all_measured() -> None:
    driver = driver_of(LoadSpace(values=(8, 9, 10, 11, 12, 13)))

    assert play(phases.sweep(driver, DEFAULT, 1.0, ""), answer(lambda value: 1.0)) == [8, 9, 10, 11, 12, 13]


def test_a_sweep_ends_where_the_latency_limit_is_surely_missed_and_its_edge_is_searched() -> None:
    goal = limited(Constraint(Metric.LATENCY_P99, maximum=11))
    driver = driver_of(LoadSpace(maximum=1024), goal)
    linear = answer(lambda value: value, p99=lambda value: value)

    swept = play(phases.sweep(driver, DEFAULT, 1.0, ""), linear)
    edge = play(phases.approach_edges(driver, DEFAULT, 1.0), linear)

    assert swept == [1, 2, 4, 8, 16]
    assert edge == [12, 10, 11]


def test_the_edge_between_the_first_two_loads_is_searched_too() -> None:
    goal = limited(Constraint(Metric.THROUGHPUT, minimum=5))
    driver = driver_of(LoadSpace(values=(), minimum=2, maximum=8), goal)
    linear = answer(lambda value: value)

    play(phases.sweep(driver, DEFAULT, 1.0, ""), linear)
    edge = play(phases.approach_edges(driver, DEFAULT, 1.0), linear)

    assert edge == [6, 5]


def test_a_two_point_sweep_whose_first_point_misses_the_limit_ends_well() -> None:
    goal = limited(Constraint(Metric.THROUGHPUT, minimum=1e6))
    driver = driver_of(LoadSpace(maximum=2), goal)

    play(phases.sweep(driver, DEFAULT, 1.0, ""), answer(lambda value: value))

    assert play(phases.approach_edges(driver, DEFAULT, 1.0), answer(lambda value: value)) == []


def test_the_formula_keeps_to_the_bounds_for_the_default_too() -> None:
    driver = driver_of(LoadSpace(maximum=10, formula=True, batch_sizes=(1, 4)))

    assert play(phases.sweep(driver, DEFAULT, 1.0, ""), answer(lambda value: value)) == [10, 10]


def test_the_simulated_server_answers_the_same_trial_the_same() -> None:
    server = SimulatedServer(SearchSpace((FACTS,), ()), noise=0.1)
    trial = Trial(1, DEFAULT, loads(4), 0, 1.0, "")

    assert server.outcome(trial) == server.outcome(trial)
