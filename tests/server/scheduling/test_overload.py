"""What a queue learns from clients that leave."""

import pytest

from charonia.core.request import NO_FLOW, Flow
from charonia.server.scheduling.queue import (
    BAD_SLICES,
    FLOWS_MAX,
    PATIENCE_MIN_NS,
    QUIET,
    SERVED_PER_LOST,
    SLICE_MIN_NS,
    Overload,
    ServiceRate,
)

MS = 1_000_000
SECOND_NS = 1_000 * MS


def lose(overload: Overload, slices: int, waited_ns: int = SECOND_NS, start_ns: int = 0) -> int:
    """Lose a request in each of so many slices; return when the next one begins."""
    step_ns = max(SLICE_MIN_NS, waited_ns // 32)
    for n in range(slices):
        overload.lost(NO_FLOW, waited_ns, start_ns + n * step_ns)
    return start_ns + slices * step_ns


def test_it_sheds_after_enough_bad_slices() -> None:
    overload = Overload()

    lose(overload, BAD_SLICES)
    assert not overload.sheds(ServiceRate(1))
    lose(overload, 2, start_ns=2 * SECOND_NS)

    assert overload.sheds(ServiceRate(1))
    assert overload.patience_ns == SECOND_NS


def test_any_number_of_losses_at_one_time_is_one_bad_slice() -> None:
    overload = Overload()

    for n in range(10_000):
        overload.lost(NO_FLOW, 3 * SECOND_NS, n)

    assert not overload.sheds(ServiceRate(1))


def test_a_slice_in_which_many_run_for_each_one_that_is_lost_is_good() -> None:
    overload = Overload()

    now_ns = 0
    for _ in range(10 * BAD_SLICES):
        overload.lost(NO_FLOW, SECOND_NS, now_ns)
        for _ in range(SERVED_PER_LOST):
            overload.served(MS, now_ns)
        now_ns += SECOND_NS

    assert not overload.sheds(ServiceRate(1))


def test_a_slice_in_which_more_run_after_a_longer_wait_is_good() -> None:
    overload = Overload()

    for n in range(10 * BAD_SLICES):
        overload.lost(NO_FLOW, 50 * MS, n * 100 * MS)
        overload.served(200 * MS, n * 100 * MS + 1)

    assert not overload.sheds(ServiceRate(1))


def test_it_is_over_when_there_was_no_reason_for_a_while() -> None:
    overload = Overload()
    last_ns = lose(overload, 2 * BAD_SLICES) - SECOND_NS // 32

    assert not overload.is_over(last_ns + QUIET * SECOND_NS)
    overload.refused(last_ns + SECOND_NS)
    assert not overload.is_over(last_ns + (QUIET + 1) * SECOND_NS)
    assert overload.is_over(last_ns + (QUIET + 1) * SECOND_NS + 1)


def test_it_tells_a_limited_number_of_flows_apart() -> None:
    overload = Overload()

    for n in range(2 * FLOWS_MAX):
        overload.lost(Flow(str(n)), SECOND_NS, n)

    assert len(overload.losses) == FLOWS_MAX


def busy(took_ns: int, batch: int = 1) -> ServiceRate:
    pace = ServiceRate(batch)
    for n in range(40):
        pace.started(0, batch, 100, n * took_ns)
        pace.ended(0, (n + 1) * took_ns)
    return pace


@pytest.mark.parametrize(("took_ns", "batch"), [(2 * MS, 1), (200 * MS, 32)])
def test_the_wait_follows_from_the_batches_ahead(took_ns: int, batch: int) -> None:
    pace = busy(took_ns, batch)
    last_ns = 39 * took_ns

    assert pace.service_ns == took_ns
    assert pace.wait_ns(0, last_ns) == took_ns
    assert pace.wait_ns(batch, last_ns) == 2 * took_ns
    assert pace.wait_ns(10 * batch, last_ns + took_ns // 2) == 10.5 * took_ns


def test_a_batch_that_had_not_waited_says_nothing_of_the_pace() -> None:
    pace = ServiceRate(1)
    pace.started(0, 1, -1, MS)
    pace.started(1, 1, -1, 900 * MS)

    assert pace.run_ns == 0


def test_a_client_that_waits_less_than_the_model_takes_is_no_reason_to_shed() -> None:
    overload = Overload()
    lose(overload, 2 * BAD_SLICES, 100 * MS)

    assert overload.sheds(busy(MS))
    assert not overload.sheds(busy(200 * MS))


def test_what_may_wait_takes_an_eighth_of_the_patience_or_is_a_batch_or_a_few_requests() -> None:
    overload = Overload()
    lose(overload, 2 * BAD_SLICES)

    assert not overload.is_too_long(busy(MS), 120 * MS, 0)
    assert overload.is_too_long(busy(MS), 126 * MS, 0)
    assert not overload.is_too_long(busy(20 * MS), 320 * MS, 0)  # 16 requests
    assert overload.is_too_long(busy(20 * MS), 321 * MS, 0)
    assert not overload.is_too_long(busy(200 * MS, 32), 200 * MS, 0)  # a batch
    assert overload.is_too_long(busy(200 * MS, 32), 201 * MS, 0)
    assert overload.is_too_long(busy(400 * MS), 400 * MS, 0)  # 5/8 of what remains


def test_a_known_deadline_counts_where_it_is_shorter() -> None:
    overload = Overload()
    lose(overload, 2 * BAD_SLICES)

    assert overload.is_too_long(busy(MS), 100 * MS, 200 * MS)
    assert not overload.is_too_long(busy(MS), 100 * MS, 5 * SECOND_NS)
    assert overload.is_too_long(busy(MS), 130 * MS, 5 * SECOND_NS)


def test_a_request_is_hopeless_near_the_patience_and_no_longer_if_it_stays_much_longer() -> None:
    overload = Overload()
    lose(overload, 2 * BAD_SLICES)
    pace = busy(100 * MS)

    waits = (780 * MS, 800 * MS, 1_999 * MS, 2_000 * MS)
    assert [overload.should_shed(pace, each) for each in waits] == [False, True, True, False]


def test_patience_below_the_minimum_means_nothing() -> None:
    overload = Overload()
    lose(overload, 2 * BAD_SLICES, PATIENCE_MIN_NS - 1)

    assert not overload.sheds(ServiceRate(1))
