"""Each search mode finds the known optimum of a simulated server, and behaves when things go wrong."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tuning import SimulatedServer, best_throughput, run, trial_key

from charonia.core.errors import ServingError
from charonia.tools.results.records import LoadMode
from charonia.tools.tune.api import (
    Constraint,
    Dimension,
    Goal,
    LoadPoint,
    LoadSpace,
    MemoryLimit,
    Metric,
    ModelFacts,
    ModelGoal,
    Objective,
    Outcome,
    SearchMode,
    SearchOptions,
    SearchSpace,
    Setting,
    Trial,
    TrialFailed,
    Variant,
)
from charonia.tools.tune.decision import Conclusion, decide
from charonia.tools.tune.search.phases import CLEAR, FAILURES_MAX, USUAL, Search
from charonia.tools.tune.space import Grid, automatic_dimensions, load_values

FACTS = ModelFacts("m", max_batch_size=8, threads_tunable=True)
SPACE = SearchSpace((FACTS,), automatic_dimensions(FACTS, core_count=4), LoadSpace(maximum=64), core_count=4)
SMALL = SearchSpace(
    (FACTS,), automatic_dimensions(FACTS, instance_counts=(1, 2, 3), batch_sizes=(1, 4, 8)), LoadSpace(maximum=8)
)
THROUGHPUT = Goal((ModelGoal("m"),))
MODES = list(SearchMode)


def p99_goal(limit_ms: float) -> Goal:
    return Goal((ModelGoal("m", constraints=(Constraint(Metric.LATENCY_P99, maximum=limit_ms),)),))


def true_best(server: SimulatedServer, values: Sequence[float], p99_max: float = float("inf")) -> float:
    grid = Grid(server.space)
    variants = [Variant(), *map(grid.variant, grid.coordinates())]
    loads = [(LoadPoint("m", LoadMode.CONCURRENCY, float(value)),) for value in values]
    return max(
        best_throughput(server, variant, loads, lambda metrics: metrics[Metric.LATENCY_P99] <= p99_max)
        for variant in variants
        if not grid.misfit(variant)
    )


def recommended(server: SimulatedServer, goal: Goal, options: SearchOptions) -> dict[str, float]:
    search = Search(server.space, goal, options)
    run(search, server)
    best = decide(goal, search.history, options).best
    assert best is not None
    return server.truth(best.variant, best.loads[0])


@pytest.mark.parametrize("mode", MODES)
def test_without_noise_each_mode_finds_the_optimum_exactly(mode: SearchMode) -> None:
    server = SimulatedServer(SPACE)

    found = recommended(server, THROUGHPUT, SearchOptions(mode))

    assert found[Metric.THROUGHPUT] == pytest.approx(true_best(server, load_values(SPACE.load)))


@pytest.mark.parametrize("mode", MODES)
def test_without_noise_each_mode_finds_the_best_within_a_latency_limit(mode: SearchMode) -> None:
    server = SimulatedServer(SPACE)

    found = recommended(server, p99_goal(40), SearchOptions(mode))

    assert found[Metric.LATENCY_P99] <= 40
    assert found[Metric.THROUGHPUT] >= 0.99 * true_best(server, range(1, 65), 40)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_with_noise_each_mode_comes_close_to_the_optimum(mode: SearchMode, seed: int) -> None:
    server = SimulatedServer(SPACE, noise=0.05, seed=seed)

    found = recommended(server, THROUGHPUT, SearchOptions(mode, seed=seed))

    assert found[Metric.THROUGHPUT] >= 0.92 * true_best(server, load_values(SPACE.load))


def test_racing_finds_the_optimum_of_a_space_too_large_to_look_at_all_of_it() -> None:
    delays = Dimension("m", Setting.QUEUE_DELAY, tuple(range(0, 600, 100)))
    dimensions = (*automatic_dimensions(FACTS, instance_counts=range(1, 17), core_count=16), delays)
    space = SearchSpace((FACTS,), dimensions, LoadSpace(maximum=256), core_count=16)
    server = SimulatedServer(space, core_count=16, thread_gain=0.3)
    search = Search(space, THROUGHPUT, SearchOptions(finalist_count=5))

    count = run(search, server)
    best = decide(THROUGHPUT, search.history).best

    assert count < 600
    assert best
    found = server.truth(best.variant, best.loads[0])[Metric.THROUGHPUT]
    assert found >= 0.97 * true_best(server, load_values(space.load))
    grid = Grid(space)
    measured = {told.trial.variant.key for told in search.history} | {each.variant.key for each in search.skipped}
    coordinates = {grid.variant(each).key: each for each in grid.coordinates()}
    assert {grid.variant(each).key for each in grid.neighbours(coordinates[best.variant.key])} <= measured


def test_racing_measures_for_less_time_than_brute_force() -> None:
    server = SimulatedServer(SPACE, noise=0.03)
    spent = {}
    for mode in (SearchMode.RACE, SearchMode.BRUTE):
        search = Search(SPACE, THROUGHPUT, SearchOptions(mode))
        run(search, server)
        spent[mode] = sum(told.outcome.elapsed_s for told in search.history)

    assert spent[SearchMode.RACE] < spent[SearchMode.BRUTE] / 2


SEVERAL = SearchSpace(
    (FACTS,), automatic_dimensions(FACTS, instance_counts=(1, 2, 3), batch_sizes=(1, 4, 8)), LoadSpace(maximum=32)
)
# Mode, space and goal of a search; the effort, purpose, variant and loads of its trials; and the verdict.
SEARCHES = [
    (
        SearchMode.RACE,
        SEVERAL,
        p99_goal(15),
        """
        0.5 default configuration: default configuration: 1 2 4 8
        0.25 first look: 1 instance, batch 4: 8 4 2
        0.25 first look: 2 instances, batch 8: 32 16 8 4
        0.25 first look: 3 instances, batch 1: 8 16 4
        0.25 first look: 1 instance, batch 1: 2
        0.25 first look: 3 instances, batch 8: 32 16 8
        0.25 first look: 2 instances, batch 4: 16
        0.25 first look: 3 instances, batch 4: 32 16 8
        0.25 first look: 1 instance, batch 8: 16
        0.25 first look: 2 instances, batch 1: 4
        0.5 second look: 3 instances, batch 4: 16
        0.5 second look: 3 instances, batch 8: 16
        0.5 loads of the best variants: 3 instances, batch 8: 1 2 4 8 32
        0.5 loads of the best variants: 3 instances, batch 4: 1 2 4 8 32
        0.5 edge of the constraints: default configuration: 6 7
        0.5 edge of the constraints: 3 instances, batch 8: 24 20 18 19
        1 repeat of the best: 3 instances, batch 8: 16
        1 repeat of the best: 3 instances, batch 4: 16
        1 repeat of the best: 2 instances, batch 8: 8
        1 repeat of the best: default configuration: 6 16
        1 repeat of the best: 3 instances, batch 8: 16
        1 repeat of the best: 3 instances, batch 4: 16
        1 repeat of the best: 2 instances, batch 8: 8
        1 repeat of the best: default configuration: 6 16
        1 repeat of the best: 3 instances, batch 8: 16
        1 repeat of the best: 3 instances, batch 4: 16
        """,
        "'3 instances, batch 8' is 190 % (155 to 231 %) better",
    ),
    (
        SearchMode.BRUTE,
        SEVERAL,
        THROUGHPUT,
        """
        0.5 default configuration: default configuration: 1 2 4 8 16 32
        0.5 brute search: 1 instance, batch 1: 1 2 4 8
        0.5 whether this is the plateau: 1 instance, batch 1: 1 4
        0.5 brute search: 1 instance, batch 4: 1 2 4 8 16 32
        0.5 whether this is the plateau: 1 instance, batch 4: 4 32
        0.5 brute search: 1 instance, batch 8: 1 2 4 8 16 32
        0.5 brute search: 2 instances, batch 1: 1 2 4 8 16
        0.5 whether this is the plateau: 2 instances, batch 1: 2 8
        0.5 brute search: 2 instances, batch 4: 1 2 4 8 16 32
        0.5 brute search: 2 instances, batch 8: 1 2 4 8 16 32
        0.5 brute search: 3 instances, batch 1: 1 2 4 8 16 32
        0.5 brute search: 3 instances, batch 4: 1 2 4 8 16 32
        0.5 brute search: 3 instances, batch 8: 1 2 4 8 16 32
        1 repeat of the best: 3 instances, batch 8: 32
        1 repeat of the best: 3 instances, batch 4: 16
        1 repeat of the best: 2 instances, batch 8: 16
        1 repeat of the best: default configuration: 16 32
        1 repeat of the best: 3 instances, batch 8: 32
        1 repeat of the best: 3 instances, batch 4: 16
        1 repeat of the best: 2 instances, batch 8: 16
        1 repeat of the best: default configuration: 16 32
        1 repeat of the best: 3 instances, batch 8: 32
        1 repeat of the best: 3 instances, batch 4: 16
        1 repeat of the best: 3 instances, batch 8: 32
        1 repeat of the best: 3 instances, batch 4: 16
        """,
        "'3 instances, batch 8' is 198 % (178 to 219 %) better",
    ),
    (
        SearchMode.RACE,
        replace(SEVERAL, load=LoadSpace(LoadMode.REQUEST_RATE, minimum=64, maximum=2048)),
        p99_goal(15),
        """
        0.5 default configuration: default configuration: 64 128 256
        0.25 first look: 1 instance, batch 4: 128
        0.25 first look: 2 instances, batch 8: 128 256 512
        0.25 first look: 3 instances, batch 1: 128
        0.25 first look: 1 instance, batch 1: 128
        0.25 first look: 3 instances, batch 8: 128
        0.25 first look: 2 instances, batch 4: 128
        0.25 first look: 3 instances, batch 4: 128
        0.25 first look: 1 instance, batch 8: 128
        0.25 first look: 2 instances, batch 1: 128
        0.5 second look: 2 instances, batch 8: 256
        0.5 loads of the best variants: 3 instances, batch 4: 64 128 256 512 1024
        0.5 loads of the best variants: 3 instances, batch 1: 64 128 256 512 1024
        0.5 edge of the constraints: default configuration: 192 224 240 232 228
        0.5 edge of the constraints: 3 instances, batch 4: 768 640 704 672 688
        0.5 edge of the constraints: 3 instances, batch 1: 768 640 576 608 624
        1 repeat of the best: 3 instances, batch 4: 672
        1 repeat of the best: 3 instances, batch 1: 624
        1 repeat of the best: 2 instances, batch 1: 128
        1 repeat of the best: default configuration: 228 672
        1 repeat of the best: 3 instances, batch 4: 672
        1 repeat of the best: 3 instances, batch 1: 624
        1 repeat of the best: 2 instances, batch 1: 128
        1 repeat of the best: default configuration: 228 672
        """,
        "'3 instances, batch 4' is 192 % (134 to 263 %) better",
    ),
    (
        SearchMode.RACE,
        replace(SEVERAL, load=LoadSpace(maximum=64, formula=True, batch_sizes=(1, 2))),
        THROUGHPUT,
        """
        0.5 default configuration: default configuration: 16 16
        0.25 first look: 1 instance, batch 4: 8 8
        0.25 first look: 2 instances, batch 8: 32 32
        0.25 first look: 3 instances, batch 1: 6 6
        0.25 first look: 1 instance, batch 1: 2 2
        0.25 first look: 3 instances, batch 8: 48 48
        0.25 first look: 2 instances, batch 4: 16 16
        0.25 first look: 3 instances, batch 4: 24 24
        0.25 first look: 1 instance, batch 8: 16 16
        0.25 first look: 2 instances, batch 1: 4 4
        0.5 second look: 3 instances, batch 8: 48
        0.5 loads of the best variants: 3 instances, batch 8: 48
        0.5 loads of the best variants: 3 instances, batch 4: 24 24
        1 repeat of the best: 3 instances, batch 8: 48
        1 repeat of the best: 3 instances, batch 4: 24
        1 repeat of the best: 2 instances, batch 8: 32
        1 repeat of the best: default configuration: 16 48
        1 repeat of the best: 3 instances, batch 8: 48
        1 repeat of the best: 3 instances, batch 4: 24
        1 repeat of the best: 2 instances, batch 8: 32
        1 repeat of the best: default configuration: 16 48
        1 repeat of the best: 3 instances, batch 8: 48
        1 repeat of the best: 3 instances, batch 4: 24
        """,
        "'3 instances, batch 8' is 187 % (158 to 220 %) better",
    ),
]


@pytest.mark.parametrize(("mode", "space", "goal", "trials", "verdict"), SEARCHES)
def test_a_search_of_a_server_with_noise_goes_as_it_always_did(
    mode: SearchMode, space: SearchSpace, goal: Goal, trials: str, verdict: str
) -> None:
    search = Search(space, goal, SearchOptions(mode, seed=3))

    run(search, SimulatedServer(space, noise=0.03, seed=1))

    made = [told.trial for told in search.history]
    runs = groupby(made, key=lambda trial: f"{trial.effort:g} {trial.purpose}: {trial.variant}")
    lines = [f"{head}: {' '.join(f'{trial.loads[0].value:g}' for trial in found)}" for head, found in runs]
    assert lines == [line.strip() for line in trials.strip().splitlines()]
    assert decide(goal, search.history).sentences[0].startswith(verdict)


class EqualVariants(SimulatedServer):
    def truth(self, variant: Variant, load: LoadPoint) -> dict[str, float]:
        return super().truth(Variant(), load)


@pytest.mark.parametrize("mode", MODES)
def test_noise_alone_is_rarely_taken_for_a_gain_over_the_default(mode: SearchMode) -> None:
    gains = 0
    for seed in range(10):
        search = Search(SMALL, THROUGHPUT, SearchOptions(mode, seed=seed))
        run(search, EqualVariants(SMALL, noise=0.1, seed=seed))
        gains += decide(THROUGHPUT, search.history).conclusion is Conclusion.BETTER

    assert gains <= 1


@pytest.mark.parametrize("mode", MODES)
def test_the_default_configuration_is_measured_first(mode: SearchMode) -> None:
    trial = Search(SMALL, THROUGHPUT, SearchOptions(mode)).ask()

    assert trial
    assert trial.variant.is_default


@pytest.mark.parametrize("mode", MODES)
def test_a_search_without_dimensions_still_measures_the_default(mode: SearchMode) -> None:
    space = SearchSpace((FACTS,), (), LoadSpace(maximum=8))
    search = Search(space, THROUGHPUT, SearchOptions(mode))

    run(search, SimulatedServer(space))

    assert decide(THROUGHPUT, search.history).conclusion is Conclusion.NO_OTHER


class LuckyLooks(SimulatedServer):
    """Brief measurements of some variants say twice what is true."""

    def outcome(self, trial: Trial) -> Outcome:
        if trial.effort < USUAL and (trial.variant.changes[0].max_batch_size or 0) >= 8:
            return replace(self, item_ms=self.item_ms / 2, fixed_ms=self.fixed_ms / 2).outcome(
                replace(trial, effort=1.0)
            )
        return super().outcome(trial)


def test_what_looks_clearly_better_than_the_verdict_is_measured_again() -> None:
    server = LuckyLooks(SPACE, noise=0.01)
    search = Search(SPACE, THROUGHPUT, SearchOptions())

    run(search, server)
    decision = decide(THROUGHPUT, search.history)

    assert decision.best
    best = decision.best.metrics["m"][Metric.THROUGHPUT].value
    for ranked in decision.ranking:
        assert ranked.metrics["m"][Metric.THROUGHPUT].value <= best * (1 + CLEAR)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("values", [(2.0,), (3.0, 12.0)])
@pytest.mark.parametrize("by", list(LoadMode)[:2])
def test_loads_that_are_given_are_the_only_ones_measured(
    mode: SearchMode, values: tuple[float, ...], by: LoadMode
) -> None:
    space = replace(SMALL, load=LoadSpace(by, values=values))
    search = Search(space, THROUGHPUT, SearchOptions(mode))

    run(search, SimulatedServer(space))

    measured = {load.value for told in search.history for load in told.trial.loads}
    assert measured == set(values)
    best = decide(THROUGHPUT, search.history).best
    assert best
    assert best.loads[0].value in values


@pytest.mark.parametrize("mode", MODES)
def test_a_limit_that_no_variant_keeps_gives_the_closest_and_by_how_much(mode: SearchMode) -> None:
    goal = p99_goal(1)
    server = SimulatedServer(SMALL)
    search = Search(SMALL, goal, SearchOptions(mode))

    run(search, server)
    decision = decide(goal, search.history)

    assert decision.conclusion is Conclusion.CONSTRAINTS_NOT_MET
    assert "p99 latency is" in decision.sentences[0]
    assert "off" in decision.sentences[0]


@pytest.mark.parametrize("mode", MODES)
def test_variants_that_do_not_load_are_told_once_and_left_out(mode: SearchMode) -> None:
    server = SimulatedServer(
        SMALL, refuses=lambda variant: "no room" if (variant.changes and variant.changes[0].instance_count == 2) else ""
    )
    search = Search(SMALL, THROUGHPUT, SearchOptions(mode))

    run(search, server)

    refused = [told.trial.variant.key for told in search.history if isinstance(told.outcome, TrialFailed)]
    assert len(refused) == len(set(refused))
    assert {skipped.variant.key for skipped in search.skipped} == set(refused)
    best = decide(THROUGHPUT, search.history).best
    assert best
    assert best.variant.changes[0].instance_count == 3


def test_a_search_gives_up_where_nothing_can_be_measured() -> None:
    search = Search(SMALL, THROUGHPUT, SearchOptions())

    count = run(search, SimulatedServer(SMALL, refuses=lambda variant: "the file is broken"))
    decision = decide(THROUGHPUT, search.history)

    assert count == FAILURES_MAX
    assert decision.conclusion is Conclusion.NOTHING_MEASURED
    assert any("the file is broken" in sentence for sentence in decision.sentences)
    assert any("the file is broken" in note for note in search.notes)


@pytest.mark.parametrize("mode", MODES)
def test_the_time_budget_is_kept_and_the_finalists_still_repeated(mode: SearchMode) -> None:
    server = SimulatedServer(SPACE, noise=0.03)
    search = Search(SPACE, THROUGHPUT, replace(SearchOptions(mode), time_budget_s=45))

    run(search, server)

    assert sum(told.outcome.elapsed_s for told in search.history) <= 45
    assert search.history[-1].trial.effort == 1
    assert search.trials_left == 0


def test_variants_beyond_the_memory_are_skipped_with_the_reason() -> None:
    space = replace(SMALL, memory=MemoryLimit(Metric.CPU_USED_RAM, limit_mb=220))
    search = Search(space, THROUGHPUT, SearchOptions(SearchMode.BRUTE))

    run(search, SimulatedServer(space))

    assert {skipped.variant.changes[0].instance_count for skipped in search.skipped} == {3}
    assert all("MB of memory" in skipped.reason for skipped in search.skipped)


def test_instances_that_need_more_memory_than_there_is_are_known_beforehand() -> None:
    facts = replace(FACTS, instance_memory_mb=80)
    space = replace(SMALL, models=(facts,), memory=MemoryLimit(Metric.CPU_USED_RAM, limit_mb=220, base_mb=100))
    search = Search(space, THROUGHPUT, SearchOptions(SearchMode.BRUTE))

    run(search, SimulatedServer(space))

    assert {skipped.reason for skipped in search.skipped} == {
        "needs at least 260 MB of memory by what one instance takes, there are 220 MB",
    }


def test_more_threads_than_cores_are_skipped_with_the_reason() -> None:
    search = Search(SPACE, THROUGHPUT, SearchOptions(SearchMode.BRUTE))

    run(search, SimulatedServer(SPACE))

    assert "m: 2 instances x 4 threads are more than 4 cores" in {skipped.reason for skipped in search.skipped}


def test_a_request_rate_search_ends_where_the_server_just_keeps_up() -> None:
    load = LoadSpace(LoadMode.REQUEST_RATE, minimum=16, maximum=8192)
    space = replace(SMALL, load=load)
    server = SimulatedServer(space)
    search = Search(space, THROUGHPUT, SearchOptions())

    run(search, server)
    best = decide(THROUGHPUT, search.history).best

    assert best
    assert best.keeps_constraints
    capacity = server.truth(best.variant, LoadPoint("m", LoadMode.REQUEST_RATE, 1e9))[Metric.THROUGHPUT]
    assert 0.9 * capacity < best.loads[0].value < capacity / 0.95


@pytest.mark.parametrize("mode", MODES)
def test_two_models_are_searched_together_under_load_on_both(mode: SearchMode) -> None:
    models = tuple(ModelFacts(name, max_batch_size=4) for name in ("a", "b"))
    dimensions = [
        each for facts in models for each in automatic_dimensions(facts, instance_counts=(1, 2), batch_sizes=(1, 4))
    ]
    space = SearchSpace(models, tuple(dimensions), LoadSpace(maximum=8))
    goal = Goal((ModelGoal("a", weight=3), ModelGoal("b")))
    search = Search(space, goal, SearchOptions(mode))

    run(search, SimulatedServer(space))
    best = decide(goal, search.history).best

    assert best
    assert [load.model for load in best.loads] == ["a", "b"]
    assert [best.variant.change(name).instance_count for name in ("a", "b")] == [2, 2]


def test_latency_as_the_objective_leads_to_the_least_load() -> None:
    goal = Goal((ModelGoal("m", objectives=(Objective(Metric.LATENCY_P99),)),))
    server = SimulatedServer(SPACE)

    found = recommended(server, goal, SearchOptions())

    assert found[Metric.LATENCY_P99] == pytest.approx(1.5 * (2 + 1 / 2.5 + 0.02))


def test_an_outcome_without_a_trial_is_refused() -> None:
    search = Search(SMALL, THROUGHPUT, SearchOptions())

    with pytest.raises(ServingError, match="no trial"):
        search.tell(TrialFailed("x"))


@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    noise=st.sampled_from([0.0, 0.05, 0.4]),
    seed=st.integers(0, 10_000),
    trials_max=st.integers(1, 150),
    failing=st.integers(0, 3),
    limit=st.sampled_from([1e9, 20.0, 5.0]),
)
def test_whatever_is_told_trials_stay_in_the_space_and_come_to_an_end(
    mode: SearchMode, noise: float, seed: int, trials_max: int, failing: int, limit: float
) -> None:
    server = SimulatedServer(SMALL, noise=noise, seed=seed)
    grid = Grid(SMALL)
    allowed = {Variant().key} | {grid.variant(coordinate).key for coordinate in grid.coordinates()}
    search = Search(SMALL, p99_goal(limit), SearchOptions(mode, seed=seed, trials_max=trials_max))

    count, at_most = 0, search.trials_left
    while trial := search.ask():
        count += 1
        assert search.ask() is trial
        assert trial.number == count <= at_most <= trials_max
        assert trial.variant.key in allowed
        assert all(1 <= load.value <= 8 for load in trial.loads)
        broken = failing and (count * 7 + seed) % 4 < failing
        search.tell(TrialFailed("lost", loading=count % 2 == 0) if broken else server.outcome(trial))

    assert search.trials_left == 0
    assert decide(p99_goal(limit), search.history).sentences


@settings(max_examples=12, deadline=None)
@given(mode=st.sampled_from(MODES), seed=st.integers(0, 100), prefix=st.integers(0, 60))
def test_a_search_resumed_from_any_prefix_goes_on_as_the_first_one_did(
    mode: SearchMode, seed: int, prefix: int
) -> None:
    server = SimulatedServer(SMALL, noise=0.1, seed=seed)
    first = Search(SMALL, THROUGHPUT, SearchOptions(mode, seed=seed))
    run(first, server)
    journal = {trial_key(told.trial): told.outcome for told in first.history[:prefix]}

    resumed = Search(SMALL, THROUGHPUT, SearchOptions(mode, seed=seed))
    while trial := resumed.ask():
        resumed.tell(journal.get(trial_key(trial)) or server.outcome(trial))

    assert resumed.history == first.history
