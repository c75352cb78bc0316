"""The request queue: order of service, timeouts and stale deadlines."""

import random

import pytest

from charonia.server.scheduling.api import QueueLimits, Submit
from charonia.server.scheduling.queue import STALE_MAX, RequestQueue


def test_requests_that_left_early_leave_few_deadlines_behind() -> None:
    queue = RequestQueue(QueueLimits(timeout_ns=10**12))

    for request_id in range(10_000):
        queue.add(Submit(request_id), 0, request_id)
        queue.remove(request_id)

    # The sweep comes before the push, hence one more.
    assert len(queue.deadlines) <= STALE_MAX + 1


def test_a_sweep_keeps_the_deadlines_of_those_that_wait() -> None:
    queue = RequestQueue(QueueLimits(timeout_ns=1_000_000))
    waiting = [0, 50, 190]

    for request_id in range(200):
        queue.add(Submit(request_id), 0, request_id)
        if request_id not in waiting:
            queue.remove(request_id)

    assert queue.next_deadline_ns() == 1_000_000
    assert queue.expire(1_000_049) == (0,)
    assert queue.expire(1_000_190) == (50, 190)
    assert queue.next_deadline_ns() is None


def test_a_request_that_left_twice_was_only_there_once() -> None:
    queue = RequestQueue(QueueLimits())
    queue.add(Submit(1), 0, 0)

    assert queue.remove(1)
    assert not queue.remove(1)
    assert len(queue.entries) == 0


def test_levels_and_lanes_are_served_by_rank() -> None:
    late = QueueLimits(timeout_ns=10, delay_expired=True)
    queue = RequestQueue(QueueLimits(), {1: late, 2: late})
    for request_id, level in ((1, 2), (2, 1), (3, 3)):
        queue.add(Submit(request_id), level, 0)

    assert queue.expire(10) == ()
    for request_id, level in ((4, 3), (5, 2), (6, 1)):
        queue.add(Submit(request_id), level, 11)

    assert [entry.id for entry in queue] == [6, 2, 5, 1, 3, 4]
    assert queue.first().id == 6


def test_adding_tells_whether_the_request_is_the_very_last() -> None:
    queue = RequestQueue(QueueLimits(timeout_ns=5, delay_expired=True))

    assert queue.add(Submit(1), 2, 0)[1]
    assert queue.add(Submit(2), 2, 1)[1]
    assert not queue.add(Submit(3), 1, 2)[1]
    assert queue.expire(5) == ()
    assert not queue.add(Submit(4), 2, 5)[1]


@pytest.mark.parametrize("seed", range(3))
def test_a_sweep_leaves_the_deadlines_in_order(seed: int) -> None:
    queue = RequestQueue(QueueLimits(timeout_override=True))
    asked_us = random.Random(seed).sample(range(1, 10_000), 400)
    for request_id, timeout_us in enumerate(asked_us):
        queue.add(Submit(request_id, timeout_us=timeout_us), 0, 0)
    # A heap is an array in a loose order, which taking items out of the middle can spoil.
    kept = sorted(range(400), key=asked_us.__getitem__)[200::2]
    for request_id in set(range(400)) - set(kept):
        queue.remove(request_id)
    assert len(asked_us) > 2 * len(queue.entries) + STALE_MAX

    queue.add(Submit(999, timeout_us=20_000), 0, 0)

    assert [queue.expire(asked_us[request_id] * 1000) for request_id in kept] == [(request_id,) for request_id in kept]
    assert queue.next_deadline_ns() == 20_000_000
