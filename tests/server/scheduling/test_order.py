"""Answers in order of arrival."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.server.scheduling.order import InOrderRelease


def test_an_answer_waits_for_those_before_it() -> None:
    order = InOrderRelease()
    for request_id in (5, 3, 9):
        order.submitted(request_id)

    assert order.done(9) == ()
    assert order.done(3) == ()
    assert len(order) == 3
    assert order.done(5) == (5, 3, 9)
    assert len(order) == 0


def test_an_answer_at_the_head_goes_out_alone() -> None:
    order = InOrderRelease()
    order.submitted(1)
    order.submitted(2)

    assert order.done(1) == (1,)
    order.submitted(3)
    assert order.done(3) == ()
    assert order.done(2) == (2, 3)


def test_an_id_that_is_unknown_or_released_is_an_error() -> None:
    order = InOrderRelease()
    order.submitted(1)
    order.done(1)

    with pytest.raises(KeyError):
        order.done(1)
    with pytest.raises(KeyError):
        order.done(2)


@given(st.permutations(range(12)))
def test_every_answer_goes_out_once_and_in_order_and_as_early_as_possible(finish: list[int]) -> None:
    order = InOrderRelease()
    for request_id in range(12):
        order.submitted(request_id)
    released: list[int] = []

    for count, request_id in enumerate(finish, 1):
        released += order.done(request_id)
        done = set(finish[:count])
        assert released == list(range(next(i for i in range(13) if i not in done)))
