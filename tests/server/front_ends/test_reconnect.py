"""Requests while the engine is away: held for a time, up to a number, then refused; and sequences that are lost."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import Code
from charonia.server.front_ends import reconnect
from charonia.server.front_ends.reconnect import (
    AWAY,
    HELD_BYTES_MAX,
    HELD_MAX,
    HOLD_NS_MAX,
    Cancel,
    Connected,
    Event,
    Leave,
    Lost,
    OpenSequences,
    Reconnect,
    Refuse,
    Send,
    Submit,
    Tick,
    interrupted,
)


def away() -> Reconnect:
    machine = Reconnect()
    machine.handle(Lost(), 0)
    return machine


def refused(machine: Reconnect, event: Event, now_ns: int) -> list[int]:
    """Return the requests that are refused, all of them for a time."""
    commands = machine.handle(event, now_ns)
    for command in commands:
        assert isinstance(command, Refuse)
        assert command.error.code is Code.UNAVAILABLE
        assert command.error.message.startswith(AWAY)
    return [command.id for command in commands]


def test_requests_wait_for_the_engine_and_are_sent_in_their_order() -> None:
    machine = away()
    assert [machine.handle(Submit(number, 10), number) for number in (3, 1, 2)] == [[], [], []]

    assert machine.handle(Connected(), 5) == [Send(3), Send(1), Send(2)]
    assert not machine.is_disconnected
    assert machine.handle(Submit(4, 10), 6) == [Send(4)]
    assert machine.wake_at() is None


def test_they_are_refused_when_the_engine_stays_away() -> None:
    machine = away()
    machine.handle(Submit(1, 0), HOLD_NS_MAX - 1)
    assert machine.wake_at() == HOLD_NS_MAX

    assert refused(machine, Tick(), HOLD_NS_MAX) == [1]
    assert refused(machine, Submit(2, 0), HOLD_NS_MAX) == [2]
    assert machine.handle(Connected(), 2 * HOLD_NS_MAX) == []


def test_a_new_absence_has_its_own_time() -> None:
    machine = away()
    machine.handle(Connected(), HOLD_NS_MAX)
    machine.handle(Lost(), 2 * HOLD_NS_MAX)

    assert machine.handle(Submit(1, 0), 3 * HOLD_NS_MAX - 1) == []


def test_a_connection_that_fails_again_does_not_prolong_the_absence() -> None:
    machine = away()
    machine.handle(Lost(), HOLD_NS_MAX - 1)

    assert refused(machine, Submit(1, 0), HOLD_NS_MAX) == [1]


def test_too_many_are_refused_at_once() -> None:
    machine = away()
    for number in range(HELD_MAX):
        assert machine.handle(Submit(number, 0), 0) == []

    assert refused(machine, Submit(HELD_MAX, 0), 0) == [HELD_MAX]
    machine.handle(Cancel(0), 0)
    assert machine.handle(Submit(HELD_MAX + 1, 0), 0) == []


def test_too_many_bytes_are_refused_at_once() -> None:
    machine = away()
    assert machine.handle(Submit(1, HELD_BYTES_MAX), 0) == []

    assert refused(machine, Submit(2, 1), 0) == [2]
    machine.handle(Cancel(1), 0)
    assert machine.handle(Submit(3, HELD_BYTES_MAX), 0) == []


def test_a_request_whose_client_leaves_is_not_sent() -> None:
    machine = away()
    machine.handle(Submit(1, 0), 0)
    machine.handle(Submit(2, 0), 0)
    machine.handle(Cancel(1), 0)

    assert machine.handle(Connected(), 1) == [Send(2)]


def test_a_front_end_that_leaves_holds_nothing() -> None:
    machine = away()
    machine.handle(Submit(1, 0), 0)

    assert refused(machine, Leave(), 1) == [1]
    assert refused(machine, Submit(2, 0), 1) == [2]


def test_what_was_in_flight_is_told_that_it_may_have_run() -> None:
    assert interrupted().code is Code.UNAVAILABLE
    assert "a second time" in interrupted().hint


EVENTS = st.one_of(
    st.builds(Lost),
    st.builds(Connected),
    st.builds(Submit, st.just(0), st.integers(0, HELD_BYTES_MAX)),
    st.builds(Cancel, st.integers(0, 30)),
    st.builds(Leave),
    st.builds(Tick),
)


@dataclass
class Account:
    submitted: int = 0
    left: list[int] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)


@given(steps=st.lists(st.tuples(EVENTS, st.integers(0, HOLD_NS_MAX // 2)), max_size=40))
def test_in_any_order_every_request_is_sent_or_refused_once_unless_it_is_cancelled(
    steps: list[tuple[Event, int]],
) -> None:
    machine, account, now_ns = Reconnect(), Account(), 0
    for event, passed_ns in [*steps, (Leave(), 0)]:
        now_ns += passed_ns
        if isinstance(event, Submit):
            event = Submit(account.submitted, event.size_bytes)
            account.submitted += 1
        elif isinstance(event, Cancel) and event.id < account.submitted and event.id not in account.left:
            account.cancelled.add(event.id)
        account.left += [command.id for command in machine.handle(event, now_ns)]
        wake_at = machine.wake_at()
        assert wake_at is None or wake_at > now_ns or isinstance(event, (Cancel, Submit))

    assert sorted([*account.left, *account.cancelled]) == list(range(account.submitted))


@pytest.mark.parametrize(("starts", "is_refused"), [(False, True), (True, False)])
def test_a_sequence_that_was_lost_is_told_so_once_unless_it_begins_again(starts: bool, is_refused: bool) -> None:
    sequences = OpenSequences()
    assert sequences.sent(("m", 7), starts=True, ends=False) is None
    sequences.engine_ended()

    error = sequences.sent(("m", 7), starts=starts, ends=False)

    assert (error is not None) is is_refused
    if error is not None:
        assert error.code is Code.UNAVAILABLE
        assert error.message.startswith("sequence 7 of model 'm' was lost")
    assert sequences.sent(("m", 7), starts=False, ends=False) is None


def test_a_sequence_that_had_ended_was_not_lost() -> None:
    sequences = OpenSequences()
    sequences.sent(("m", "a"), starts=True, ends=False)
    sequences.sent(("m", "a"), starts=False, ends=True)
    sequences.engine_ended()

    assert sequences.sent(("m", "a"), starts=False, ends=False) is None


def test_the_oldest_sequences_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "SEQUENCES_MAX", 2)
    sequences = OpenSequences()
    for key in (1, 2, 3):
        sequences.sent(("m", key), starts=True, ends=False)
    sequences.engine_ended()
    sequences.sent(("m", 4), starts=True, ends=False)
    sequences.engine_ended()

    told = [key for key in (1, 2, 3, 4) if sequences.sent(("m", key), starts=False, ends=False) is not None]
    assert told == [3, 4]
