"""Whether more measurements can still tell two variants apart, and that searches of equal variants end early by it."""

import math
from statistics import median

import pytest
from tests.support.tuning import SimulatedServer, run

from charonia.tools.results.records import Estimate, LoadMode
from charonia.tools.tune.api import (
    Goal,
    LoadPoint,
    LoadSpace,
    ModelFacts,
    ModelGoal,
    SearchOptions,
    SearchSpace,
    Variant,
)
from charonia.tools.tune.decision import Conclusion, decide, percent
from charonia.tools.tune.objective import Point, Score
from charonia.tools.tune.search.phases import Search, may_decide
from charonia.tools.tune.space import automatic_dimensions

FACTS = ModelFacts("m", max_batch_size=8)
SPACE = SearchSpace(
    (FACTS,), automatic_dimensions(FACTS, instance_counts=(1, 2), batch_sizes=(1, 2)), LoadSpace(maximum=2)
)
GOAL = Goal((ModelGoal("m"),))
OPTIONS = SearchOptions(repeats_max=3)


def point(value: float, error: float, count: int = 2, violation: float = 0.0, freedom: float = 8.0) -> Point:
    loads = (LoadPoint("m", LoadMode.CONCURRENCY, 1),)
    return Point(Variant(), loads, {}, (1,), Score(value, error, freedom), violation, False, 1.0, count)


@pytest.mark.parametrize(
    ("difference", "left", "expected"),
    [
        (0.0, 2, False),  # equal: the next two will not show a difference of their noise
        (0.01, 2, False),
        (0.05, 2, True),  # two and a half standard errors: likely to be shown by two more
        (-0.05, 2, True),
        (0.05, 0, False),  # nothing is to come
    ],
)
def test_it_goes_on_while_a_difference_may_still_be_shown(difference: float, left: int, expected: bool) -> None:
    assert may_decide(point(1 + difference, 0.014), point(1, 0.014), 0.95, left) is expected


def test_many_measurements_to_come_may_show_what_few_cannot() -> None:
    one, other = point(1.012, 0.01), point(1, 0.01)

    assert not may_decide(one, other, 0.99, 1)
    assert may_decide(one, other, 0.99, 20)


def test_without_noise_every_difference_is_told() -> None:
    assert may_decide(point(1.001, 0.0, freedom=math.inf), point(1, 0.0, freedom=math.inf), 0.95, 1)
    assert not may_decide(point(1, 0.0), point(1, 0.0), 0.95, 1)


def test_where_constraints_are_missed_it_goes_on() -> None:
    assert may_decide(point(1, 0.01, violation=0.5), point(1, 0.01), 0.95, 1)


class EqualVariants(SimulatedServer):
    def truth(self, variant: Variant, load: LoadPoint) -> dict[str, float]:
        return super().truth(Variant(), load)


def test_a_small_space_of_equal_variants_needs_few_measurements() -> None:
    counts = []
    for seed in range(20):
        search = Search(SPACE, GOAL, OPTIONS)
        counts.append(run(search, EqualVariants(SPACE, noise=0.03, seed=seed)))

    # Five configurations under two loads, and each of four once more.
    assert median(counts) <= 16
    # What seems clearly better by chance is measured again, three times with the default one.
    assert max(counts) <= 24 + 2 * OPTIONS.repeats_max


def test_large_gains_are_written_out() -> None:
    assert percent(Estimate(18.6, 9.96, 34.1)) == "1,860 % (996 to 3,410 %)"
    assert percent(Estimate(0.1234, -0.0123, 0.5)) == "12.3 % (-1.23 to 50 %)"


def test_an_interval_that_says_nothing_is_cut() -> None:
    assert percent(Estimate(0.1, -1.0, 75_401_916.99)) == "10 % (-100 to more than 1,000 %)"


def test_the_default_configuration_is_not_named_as_good_as_itself() -> None:
    search = Search(SPACE, GOAL, OPTIONS)

    run(search, EqualVariants(SPACE, noise=0.03))
    decision = decide(GOAL, search.history, OPTIONS)

    assert decision.conclusion is Conclusion.NO_GAIN
    assert decision.ties
    assert not any(tie.variant.is_default for tie in decision.ties)


def test_a_gain_in_a_small_space_is_claimed_after_two_repeats_only() -> None:
    search = Search(SPACE, GOAL, OPTIONS)

    run(search, SimulatedServer(SPACE, noise=0.01))
    decision = decide(GOAL, search.history, OPTIONS)

    assert decision.conclusion is Conclusion.BETTER
    assert decision.best
    assert len(decision.best.trial_numbers) >= 3


def test_a_real_gain_is_still_found_in_a_small_space() -> None:
    found = []
    for seed in range(10):
        search = Search(SPACE, GOAL, OPTIONS)
        run(search, SimulatedServer(SPACE, noise=0.03, seed=seed))
        found.append(decide(GOAL, search.history, OPTIONS).conclusion)

    assert found == [Conclusion.BETTER] * 10
