"""When requests are short, though batches may not be."""

from charonia.server.scheduling.in_place import IN_PLACE_NS_MAX, OWED_NS_MAX, OWED_NS_TOLERATED, PROBES, ShortRequests

ENOUGH = OWED_NS_MAX // IN_PLACE_NS_MAX
"""Executions that make up for whatever a model owes."""


def ran(short: ShortRequests, count: int, requests: int, took_ns: int) -> None:
    for _ in range(count):
        short.ran(requests, took_ns, took_ns)


def test_requests_are_short_after_enough_of_them() -> None:
    short = ShortRequests()
    ran(short, PROBES - 1, 1, 0)
    assert not short.are_short
    ran(short, 1, 1, 0)
    assert short.are_short


def test_a_batch_counts_as_many_requests() -> None:
    short = ShortRequests()
    ran(short, PROBES, 8, 100 * IN_PLACE_NS_MAX)  # the first ones are slow
    ran(short, ENOUGH, 8, 3 * IN_PLACE_NS_MAX)
    assert short.are_short

    long = ShortRequests()
    ran(long, ENOUGH, 8, 9 * IN_PLACE_NS_MAX)
    assert not long.are_short


def test_requests_that_become_long_are_noticed_after_a_while_and_single_ones_forgiven() -> None:
    short = ShortRequests()
    ran(short, PROBES, 1, 0)
    short.ran(1, OWED_NS_TOLERATED, OWED_NS_TOLERATED)
    assert short.are_short
    ran(short, ENOUGH, 1, 0)

    ran(short, OWED_NS_TOLERATED // IN_PLACE_NS_MAX, 8, 9 * IN_PLACE_NS_MAX)
    assert short.are_short
    ran(short, 1, 8, 9 * IN_PLACE_NS_MAX)
    assert not short.are_short


def test_waiting_is_not_short() -> None:
    short = ShortRequests()
    for _ in range(ENOUGH):
        short.ran(8, 9 * IN_PLACE_NS_MAX, 1)
    assert not short.are_short
