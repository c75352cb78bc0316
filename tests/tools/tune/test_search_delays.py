"""Queue delays: tried only for the best variants, if waiting can fill batches, and as long as they gain."""

from dataclasses import replace

import pytest
from tests.support.tuning import SimulatedServer, run

from charonia.tools.tune.api import (
    Goal,
    LoadPoint,
    LoadSpace,
    Metric,
    ModelFacts,
    ModelGoal,
    SearchMode,
    SearchOptions,
    SearchSpace,
    Variant,
)
from charonia.tools.tune.decision import decide
from charonia.tools.tune.search.phases import Search
from charonia.tools.tune.space import automatic_dimensions

FACTS = ModelFacts("m", max_batch_size=8, queue_delays_us=(100, 500, 2000, 10_000))
GOAL = Goal((ModelGoal("m"),))


def space_of(facts: ModelFacts, most: int = 64) -> SearchSpace:
    dimensions = automatic_dimensions(facts, instance_counts=(1, 2), batch_sizes=(1, 8))
    return SearchSpace((facts,), dimensions, LoadSpace(maximum=most))


class BestAtHalfAMillisecond(SimulatedServer):
    """Batches are fuller with a delay, and one of 500 us is the best."""

    def truth(self, variant: Variant, load: LoadPoint) -> dict[str, float]:
        factor = {None: 1.0, 100: 1.1, 500: 1.3, 2000: 1.2, 10_000: 0.5}[variant.change("m").queue_delay_us]
        metrics = super().truth(variant, load)
        return metrics | {Metric.THROUGHPUT: metrics[Metric.THROUGHPUT] * factor}


def delays_tried(space: SearchSpace, mode: SearchMode = SearchMode.RACE) -> set[tuple[int | None, int | None]]:
    """Return the largest batch and the delay of every variant that was measured."""
    search = Search(space, GOAL, SearchOptions(mode))
    run(search, BestAtHalfAMillisecond(space))
    changes = [told.trial.variant.change("m") for told in search.history]
    return {(change.max_batch_size, change.queue_delay_us) for change in changes if change.queue_delay_us is not None}


@pytest.mark.parametrize("mode", list(SearchMode))
def test_the_best_delay_is_found(mode: SearchMode) -> None:
    space = space_of(FACTS)
    search = Search(space, GOAL, SearchOptions(mode))

    run(search, BestAtHalfAMillisecond(space))
    best = decide(GOAL, search.history).best

    assert best
    assert best.variant.change("m").queue_delay_us == 500


def test_longer_delays_are_left_out_once_they_bring_nothing() -> None:
    assert delays_tried(space_of(FACTS)) == {(8, 100), (8, 500), (8, 2000)}


def test_delays_that_are_long_beside_the_response_time_are_left_out() -> None:
    slow = SimulatedServer(space_of(FACTS)).truth(Variant(), LoadPoint("m", LoadSpace().mode, 1))

    assert slow[Metric.LATENCY_AVG] < 10
    assert all(delay is not None and delay < 10_000 for _, delay in delays_tried(space_of(FACTS)))


def test_without_batches_or_requests_for_them_no_delay_is_tried() -> None:
    assert delays_tried(space_of(FACTS, most=1)) == set()
    assert delays_tried(space_of(replace(FACTS, queue_delays_us=()))) == set()
    assert delays_tried(space_of(replace(FACTS, batching_tunable=False, max_batch_size=0))) == set()


def test_the_default_configuration_is_tried_with_a_delay_where_it_batches() -> None:
    without, batching = delays_tried(space_of(FACTS)), delays_tried(space_of(replace(FACTS, is_batching=True)))

    assert (None, 100) not in without
    assert (None, 100) in batching


def test_requests_as_large_as_the_batches_do_not_wait() -> None:
    space = space_of(FACTS)

    assert delays_tried(replace(space, load=replace(space.load, batch_sizes=(8,)))) == set()
