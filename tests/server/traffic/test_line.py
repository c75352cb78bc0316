"""Which version a point belongs to, and who moves when weights change."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.server.traffic.state import EvenPoints, choose, point_of, shares

WEIGHTS = st.dictionaries(st.integers(1, 6), st.floats(0, 100), max_size=6).map(lambda found: sorted(found.items()))
POINTS = st.floats(0, 1, exclude_max=True)


def test_versions_lie_in_their_order_and_the_newest_has_the_upper_end() -> None:
    weights = [(1, 90.0), (2, 10.0)]

    assert [choose(weights, {1, 2}, point) for point in (0.0, 0.89, 0.9, 0.999)] == [1, 1, 2, 2]


@given(POINTS, st.floats(0, 1), st.floats(0, 1))
def test_a_growing_canary_never_gives_a_client_back(point: float, one: float, other: float) -> None:
    small, large = sorted((one, other))

    before = choose([(1, 1 - small), (2, small)], {1, 2}, point)
    after = choose([(1, 1 - large), (2, large)], {1, 2}, point)

    assert (before, after) != (2, 1)


@pytest.mark.parametrize(("before", "after"), [(0.01, 0.1), (0.1, 0.5), (0.5, 0.2)])
def test_no_more_clients_move_than_the_weights_say(before: float, after: float) -> None:
    points = [point_of("m", f"user-{number}") for number in range(20_000)]
    versions = [[choose([(1, 1 - share), (2, share)], {1, 2}, point) for point in points] for share in (before, after)]

    moved = sum(old != new for old, new in zip(*versions, strict=True)) / len(points)

    assert moved == pytest.approx(abs(after - before), abs=0.01)


@given(WEIGHTS, st.sets(st.integers(1, 6)), POINTS)
def test_a_version_is_chosen_if_it_is_ready_and_has_a_weight(
    weights: list[tuple[int, float]], ready: set[int], point: float
) -> None:
    possible = {version for version, weight in weights if weight > 0 and version in ready}

    chosen = choose(weights, ready, point)

    assert chosen in possible if possible else chosen is None


def test_only_clients_of_a_version_that_is_not_ready_are_divided_among_the_others() -> None:
    weights = [(1, 50.0), (2, 20.0), (3, 30.0)]
    points = [number / 10_000 for number in range(10_000)]
    before = [choose(weights, {1, 2, 3}, point) for point in points]
    after = [choose(weights, {1, 3}, point) for point in points]

    assert all(new == old for old, new in zip(before, after, strict=True) if old != 2)
    assert Counter(after)[1] == pytest.approx(6250, abs=2)
    assert shares(weights, {1, 3}) == pytest.approx({1: 0.625, 3: 0.375})


@pytest.mark.parametrize("share", [0.01, 0.1, 0.37, 0.5, 0.99])
def test_points_are_spread_evenly_over_any_run_of_requests(share: float) -> None:
    points = EvenPoints()
    hits = [points.next() < share for _ in range(5_000)]

    for start in range(0, 4_900, 100):
        assert sum(hits[start : start + 100]) == pytest.approx(100 * share, abs=2.5)


def test_each_of_two_clients_that_take_turns_gets_its_share_of_both_versions() -> None:
    points = EvenPoints()
    hits = [points.next() < 0.5 for _ in range(2_000)]

    assert sum(hits[::2]) == pytest.approx(500, abs=5)


def test_a_client_has_the_same_point_everywhere_and_another_one_for_another_model() -> None:
    assert point_of("m", "user-1") == 0.3371063520004953
    assert point_of("n", "user-1") != point_of("m", "user-1")
    assert 0 <= point_of("m", 17) < 1
    assert point_of("m", "\udcff") < 1  # as a header of any bytes may give
