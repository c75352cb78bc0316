"""The statistical tests of canary plans: what they are worth, against exact numbers and in simulation."""

from math import comb, inf

import numpy as np
import pytest

from charonia.server.traffic import canary as judged
from charonia.server.traffic.canary import (
    EXPECTED_MIN,
    LATENCIES_MIN,
    ODDS,
    ErrorTest,
    LatencyTest,
    RateTest,
    RequestWindow,
    ShadowFigures,
    VersionFigures,
    rank_above,
    rank_below,
)


def window(requests: int, errors: int = 0, latencies: object = ()) -> RequestWindow:
    return RequestWindow(requests, errors, np.array(latencies, np.int64))


def bet(canary: int, stable: int, errors: int, canary_errors: int, odds: float) -> float:
    """What a stake becomes, by the definition: the ratio of the chances with these odds and with equal ones."""
    share = canary / (canary + stable)
    tilted = odds * share / (1 - share + odds * share)
    return float((tilted / share) ** canary_errors * ((1 - tilted) / (1 - share)) ** (errors - canary_errors))


@pytest.mark.parametrize(
    ("canary", "stable", "errors"), [((10, 3), (90, 2), 5), ((5, 5), (5, 0), 5), ((3, 0), (4, 4), 4)]
)
def test_the_bet_on_errors_is_binomial(canary: tuple[int, int], stable: tuple[int, int], errors: int) -> None:
    test = ErrorTest()

    test.add(window(*canary), window(*stable))

    expected = np.mean([bet(canary[0], stable[0], errors, canary[1], odds) for odds in ODDS])
    assert test.evidence == pytest.approx(0.5 + 0.5 * expected)  # half of the stake is bet


def test_each_window_is_a_bet_of_its_own() -> None:
    test = ErrorTest()
    for _ in range(3):
        test.add(window(10, 3), window(90, 2))

    expected = np.mean([bet(10, 90, 5, 3, odds) ** 3 for odds in ODDS])
    assert test.evidence == pytest.approx(0.5 + 0.5 * expected)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_windows_are_joined_until_enough_is_expected_of_both_versions(share: float) -> None:
    test = ErrorTest()
    test.begin(share)
    total = round(EXPECTED_MIN / 0.1)

    test.add(window(total - 2, 5), window(1))
    assert test.evidence == 1.0
    test.add(window(0), window(2))
    assert test.evidence > 1.0


def test_a_bet_has_a_mean_of_one_at_most_if_the_canary_is_as_good() -> None:
    canary, stable, errors = 8, 12, 6
    mean = 0.0
    for k in range(errors + 1):
        test = ErrorTest()
        test.add(window(canary, k), window(stable, errors - k))
        mean += comb(canary, k) * comb(stable, errors - k) / comb(canary + stable, errors) * test.evidence

    assert 0.5 < mean <= 1.0


def test_windows_without_errors_or_without_one_of_the_versions_say_nothing() -> None:
    test = ErrorTest()
    for pair in ((window(10), window(90)), (window(0), window(9, 9)), (window(9, 9), window(0))):
        test.add(*pair)

    assert test.evidence == pytest.approx(1.0)


def test_many_errors_of_a_large_window_do_not_overflow() -> None:
    test = ErrorTest()
    test.add(window(50_000, 50_000), window(50_000, 0))

    assert test.evidence == inf


def test_errors_that_all_fall_to_the_stable_version_take_what_was_bet_and_a_part_is_left() -> None:
    test = ErrorTest()
    for count in range(20):
        test.add(window(50, 0), window(50, 5))
        assert 0 < test.evidence < 1 - 0.02 * count


def test_windows_that_are_joined_are_judged_before_the_share_changes() -> None:
    test = ErrorTest()
    test.begin(0.1)
    test.add(window(5, 5), window(5))
    assert test.evidence == 1.0

    test.begin(0.5)

    assert test.evidence > 1.0


def test_requests_that_come_one_by_one_are_compared_with_each_other() -> None:
    test = ErrorTest()
    test.begin(0.5)
    for _ in range(20):
        test.add(window(1, 1), window(0))
        test.add(window(0), window(1, 0))

    assert test.evidence > 200


def test_a_canary_that_turns_bad_late_is_found_soon() -> None:
    """100 requests a second, of which 1 % fail, for an hour; then 2 % of the canary's."""
    random = np.random.default_rng(6)
    test = ErrorTest()
    test.begin(0.5)
    for second in range(3600 + 400):
        rate = 0.01 if second < 3600 else 0.02
        test.add(window(50, int(random.binomial(50, rate))), window(50, int(random.binomial(50, 0.01))))
        assert second >= 3600 or test.evidence < 20

    assert test.evidence > 200


def test_answers_that_begin_to_differ_late_are_found_soon() -> None:
    test = RateTest(0.01)
    test.add(100_000, 100)
    assert test.evidence < 1
    test.add(200, 40)

    assert test.evidence > 200


def test_each_lost_bet_is_followed_by_a_part_of_what_was_kept_back() -> None:
    test = RateTest(0.5)
    for lost in range(2, 9):
        test.add(1000, 0)
        assert test.evidence == pytest.approx(1 / lost)  # the parts are 1/2, 1/6, 1/12 and so on


def test_a_difference_is_too_many_where_none_is_permitted() -> None:
    test = RateTest(0.0)
    test.add(1000, 0)
    assert test.evidence == pytest.approx(1.0)
    test.add(1, 1)
    assert test.evidence == inf


def test_differences_are_a_bet_on_a_higher_rate() -> None:
    test = RateTest(0.1)
    test.add(10, 4)

    rates = [odds * 0.1 / (0.9 + odds * 0.1) for odds in ODDS]
    expected = np.mean([(r / 0.1) ** 4 * ((1 - r) / 0.9) ** 6 for r in rates])
    assert test.evidence == pytest.approx(0.5 + 0.5 * expected)


@pytest.mark.parametrize(("rate", "is_more"), [(0.01, False), (0.02, True), (0.5, True)])
def test_a_rate_above_the_limit_is_found(rate: float, is_more: bool) -> None:
    random = np.random.default_rng(5)
    test = RateTest(0.01)
    highest = 0.0
    for _ in range(400):
        test.add(50, int(random.binomial(50, rate)))
        highest = max(highest, test.evidence)

    assert (highest >= 100) is is_more


@pytest.mark.parametrize(("requests", "looks"), [(60, 60), (2, 400)])
def test_the_chance_that_equal_rates_look_unequal_is_within_the_limit(requests: int, looks: int) -> None:
    """Of 800 plans, 5 % at most may be wrong; the share of the canary and the rate change, as with failing parts."""
    random = np.random.default_rng(2)
    alarms = 0
    for _ in range(800):
        test = ErrorTest()
        for look in range(looks):
            share = (0.01, 0.1, 0.5)[look * 3 // looks]
            if look % (looks // 3) == 0:
                test.begin(share)
            rate = (0.02, 0.3, 1.0)[0 if look % 7 else 1 if look % 2 else 2]
            count = int(random.binomial(requests, share))
            rest = requests - count
            test.add(window(count, int(random.binomial(count, rate))), window(rest, int(random.binomial(rest, rate))))
            if test.evidence >= 20:
                alarms += 1
                break

    assert alarms <= 800 * 0.05


def exact_tail(count: int, at_least: int) -> float:
    """The chance that so many of `count` values, or more, lie above the p99."""
    return sum(comb(count, k) * 0.01**k * 0.99 ** (count - k) for k in range(at_least, count + 1))


@pytest.mark.parametrize("count", [50, 200, 1000])
@pytest.mark.parametrize("chance", [0.05, 0.001])
def test_ranks_are_bounds_of_the_p99_as_the_binomial_distribution_says(count: int, chance: float) -> None:
    below, above = rank_below(count, chance), rank_above(count, chance)

    assert below is not None
    assert exact_tail(count, count - below) <= chance < exact_tail(count, count - below - 1)
    if above is None:
        assert 0.99**count > chance  # even the largest value lies below the p99 too often
    else:
        values_above = count - 1 - above
        assert 1 - exact_tail(count, values_above + 1) <= chance
        assert 1 - exact_tail(count, values_above + 2) > chance


@pytest.mark.parametrize("count", [0, 1, 2])
def test_tiny_samples_have_no_bounds(count: int) -> None:
    assert rank_above(count, 0.01) is None
    assert rank_below(count, 0.001) in (None, 0)


def test_large_samples_have_bounds_close_to_the_p99() -> None:
    below, above = rank_below(1_000_000, 0.001), rank_above(1_000_000, 0.001)

    assert below is not None
    assert above is not None
    assert 989_500 < below < 990_000 < above < 990_500


@pytest.mark.parametrize(("times", "fails"), [(1.0, False), (1.4, False), (3.0, True)])
def test_a_p99_that_is_too_long_is_found(times: float, fails: bool) -> None:
    random = np.random.default_rng(3)
    test = LatencyTest(1.5, 0.005)
    failed = False
    for _ in range(60):
        canary, stable = random.lognormal(15, 0.4, 20) * times, random.lognormal(15, 0.4, 180)
        failed = failed or test.add(window(20, 0, canary.astype(np.int64)), window(180, 0, stable.astype(np.int64)))

    assert failed is fails
    assert test.is_judged


def test_equal_latencies_look_unequal_with_the_permitted_chance_at_most() -> None:
    random = np.random.default_rng(4)
    alarms = 0
    for _ in range(400):
        test = LatencyTest(1.0, 0.05)
        for _ in range(40):
            canary, stable = random.exponential(1e6, 50), random.exponential(1e6, 50)
            if test.add(window(50, 0, canary.astype(np.int64)), window(50, 0, stable.astype(np.int64))):
                alarms += 1
                break

    assert alarms <= 400 * 0.05


def test_too_few_samples_are_no_verdict() -> None:
    test = LatencyTest(1.5, 0.005)
    slow, fast = [1_000_000_000] * 100, [1_000_000] * 100
    assert not test.add(window(100, 0, slow), window(100, 0, fast))
    assert not test.is_judged

    assert test.add(window(0), window(900, 0, [1_000_000] * 900))
    assert test.is_judged


def test_samples_double_from_look_to_look_and_each_has_a_smaller_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    chances: list[float] = []

    def noting(count: int, chance: float) -> int | None:
        chances.append(chance)
        return rank_above(count, chance)

    monkeypatch.setattr(judged, "rank_above", noting)
    test = LatencyTest(1.5, 0.01)
    rising = [1_000_000 * (number + 1) for number in range(LATENCIES_MIN)]
    for _ in range(9):
        test.add(window(LATENCIES_MIN, 0, rising), window(2000, 0, [10**6] * 2000))

    assert chances == pytest.approx([0.005 / 2, 0.005 / 6, 0.005 / 12, 0.005 / 20])
    assert test.ratio_min == pytest.approx(48.889855)


def test_figures_of_a_version_begin_with_nothing_and_show_rounded_percentiles() -> None:
    figures = VersionFigures()
    assert (figures.take().requests, figures.latency_us()) == (0, {})
    for number in range(1, 101):
        figures.sent()
        figures.answered(number * 10_012)

    assert figures.latency_us() == {"p50": 511.0, "p90": 899.1, "p99": 989.2}


def test_requests_are_counted_by_how_they_end_and_latencies_kept_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged, "WINDOW_MAX", 2)
    figures = VersionFigures()
    for _ in range(9):
        figures.sent()
    figures.answered(5)
    assert shown(figures.take()) == (1, 0, [])

    figures.is_watched = True
    figures.answered(6)
    figures.failed()
    figures.abandoned(7)
    assert shown(figures.take()) == (2, 1, [6, 7])
    for latency in (8, 9, 10):
        figures.answered(latency)
    assert shown(figures.take()) == (3, 0, [8, 9])
    assert shown(figures.take()) == (0, 0, [])
    assert (figures.requests, figures.errors, figures.in_flight) == (9, 1, 2)


def shown(window: RequestWindow) -> tuple[int, int, list[int]]:
    return window.requests, window.errors, window.latencies_ns.tolist()


def test_copies_are_counted_by_their_outcome() -> None:
    figures = ShadowFigures()
    figures.answered(3_000, is_different=False)
    figures.answered(3_000, is_different=True)
    figures.failed += 1
    assert (figures.take(), figures.take()) == ((3, 2), (0, 0))

    figures.answered(3_000, is_different=True)
    assert (figures.take(), figures.same, figures.different) == ((1, 1), 1, 2)
    assert figures.latency_us() == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
