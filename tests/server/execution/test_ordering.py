"""Outcomes in order of arrival."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import internal
from charonia.core.response import Outcome
from charonia.server.execution.in_flight import OrderedOutcomes

PART = internal("a response that is not the last")


class Bench:
    """Outcomes of requests that are known by their id."""

    def __init__(self, *ids: int) -> None:
        self.order: OrderedOutcomes[int] = OrderedOutcomes()
        self.delivered: list[tuple[int, bool]] = []
        for request_id in ids:
            self.order.submitted(request_id, request_id)

    def deliver(self, request_id: int, outcome: Outcome, final: bool) -> None:
        self.delivered.append((request_id, final))

    def done(self, request_id: int) -> list[int]:
        """Pass on a final outcome; return the requests that are over thereby."""
        before = len(self.delivered)
        self.order.pass_on(request_id, None, True, self.deliver)
        return [each for each, final in self.delivered[before:] if final]


def test_an_outcome_waits_for_those_of_earlier_requests() -> None:
    bench = Bench(5, 3, 9)

    assert bench.done(9) == []
    assert bench.done(3) == []
    assert all(map(bench.order.holds, (5, 3, 9)))
    assert bench.done(5) == [5, 3, 9]
    assert not any(map(bench.order.holds, (5, 3, 9)))


def test_the_outcome_of_the_oldest_request_is_passed_on_alone() -> None:
    bench = Bench(1, 2)

    assert bench.done(1) == [1]
    bench.order.submitted(3, 3)
    assert bench.done(3) == []
    assert bench.done(2) == [2, 3]


def test_responses_of_the_oldest_request_are_passed_on_at_once() -> None:
    bench = Bench(1, 2, 3)

    bench.order.pass_on(1, PART, False, bench.deliver)
    bench.order.pass_on(2, PART, False, bench.deliver)
    assert bench.delivered == [(1, False)]
    assert bench.done(1) == [1]
    assert bench.delivered == [(1, False), (1, True), (2, False)]
    bench.order.pass_on(2, PART, False, bench.deliver)
    assert bench.done(2) == [2]
    assert bench.delivered[3:] == [(2, False), (2, True)]
    assert bench.order.holds(3)


def test_a_request_that_did_not_arrive_or_is_over_is_an_error() -> None:
    bench = Bench(1)
    bench.done(1)

    with pytest.raises(KeyError):
        bench.done(1)
    with pytest.raises(KeyError):
        bench.done(2)


@given(st.permutations(range(12)))
def test_every_outcome_is_passed_on_once_and_in_order_and_as_early_as_possible(finish: list[int]) -> None:
    bench = Bench(*range(12))
    released: list[int] = []

    for count, request_id in enumerate(finish, 1):
        released += bench.done(request_id)
        done = set(finish[:count])
        assert released == list(range(next(i for i in range(13) if i not in done)))
