"""The rules of the sequence schedulers, one at a time, and random traffic against all of them at once."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.recorded import RecordedScheduler

from charonia.server.scheduling.api import (
    EMPTY_ROW,
    Cancel,
    CloseReason,
    Command,
    Drop,
    DropReason,
    Event,
    Reschedule,
    Run,
    SetStateKey,
    SlotIdle,
    SlotRemoved,
    StateLost,
    Stop,
    StopNewSequences,
    Submit,
    Tick,
)
from charonia.server.sequences.api import EndReason, SequenceMember, SequencePolicy
from charonia.server.sequences.scheduler import Sequencer
from charonia.server.sequences.slots import STALE_TIMEOUTS_MAX

US = 1000
IDLE_NS = 1_000_000
DIRECT = SequencePolicy(idle_ns=IDLE_NS, rows=4, size_max=4)
OLDEST = SequencePolicy(idle_ns=IDLE_NS, rows=4, size_max=2, keeps_rows=False)


class Driver:
    """A sequencer whose instances are idle from the begin on."""

    def __init__(self, policy: SequencePolicy, instances: int = 1) -> None:
        self.sequencer = Sequencer(policy, instances)
        self.now_ns = 0
        self.next_id = 0
        for slot in range(instances):
            self.idle(slot)

    def do(self, event: Event) -> list[Command]:
        commands = self.sequencer.handle(event, self.now_ns)
        self.sequencer.check_invariants()
        return commands

    def send(
        self, key: int | str, *, start: bool = False, end: bool = False, shape: object = None, timeout_us: int = 0
    ) -> list[Command]:
        """Submit a request; ids are 1, 2, 3 and so on."""
        self.next_id += 1
        member = SequenceMember(key, start, end, shape)
        return self.do(Submit(self.next_id, 1, member, timeout_us=timeout_us))

    def idle(self, slot: int = 0) -> list[Command]:
        return self.do(SlotIdle(slot))

    def ended(self) -> list[tuple[int | str, EndReason]]:
        return [(each.key, each.reason) for each in self.sequencer.take_ended()]


def run(*ids: int, slot: int = 0, reason: CloseReason = CloseReason.QUEUE_EMPTY) -> Run:
    return Run(slot, ids, reason)


def test_sequences_of_an_instance_that_lost_its_state_are_over_with_one_error_each() -> None:
    driver = Driver(OLDEST, instances=2)
    driver.send("waits", start=True)
    driver.send("other", start=True)
    driver.idle()
    driver.idle(1)
    driver.send("quiet", start=True)
    driver.idle()
    driver.send("waits")
    driver.send("waits")  # while the one before runs

    assert driver.do(StateLost(0)) == [Drop(5, DropReason.STATE_LOST)]
    assert driver.send("quiet") == [Drop(6, DropReason.STATE_LOST)]
    assert driver.send("quiet") == [Drop(7, DropReason.NO_SEQUENCE)]
    assert driver.idle() == []
    assert driver.ended() == [("quiet", EndReason.LOST), ("waits", EndReason.LOST)]
    assert driver.send("waits") == [Drop(8, DropReason.NO_SEQUENCE)]
    assert driver.send("other") == [run(9, slot=1)]


def test_a_sequence_whose_first_request_has_not_run_loses_nothing() -> None:
    driver = Driver(OLDEST)
    driver.send(6, start=True)
    driver.send(7, start=True)

    assert driver.do(StateLost(0)) == []
    assert driver.idle() == [run(2)]
    driver.idle()
    assert driver.send(7) == [run(3)]


def test_a_sequence_that_gets_the_slot_of_a_lost_one_runs_at_once() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1, size_max=1, keeps_rows=False))
    driver.send(7, start=True)
    driver.idle()
    driver.do(StateLost(0))
    assert driver.send(8, start=True) == []

    assert driver.send(7) == [Drop(3, DropReason.STATE_LOST), run(2, reason=CloseReason.FULL)]


def test_a_refused_request_does_not_keep_the_slot_of_an_idle_sequence_empty() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1, size_max=1, keeps_rows=False))
    driver.send(7, start=True)
    driver.idle()
    assert driver.send(8, start=True) == []
    driver.now_ns += IDLE_NS

    assert driver.send(9) == [Drop(3, DropReason.NO_SEQUENCE), run(2, reason=CloseReason.FULL)]


def test_a_sequence_that_was_lost_may_start_again() -> None:
    driver = Driver(OLDEST)
    driver.send(7, start=True)
    driver.idle()
    driver.do(StateLost(0))

    assert driver.send(7, start=True) == [run(2)]
    driver.idle()
    assert driver.send(7) == [run(3)]


def test_a_sequence_keeps_its_row_and_rows_without_a_request_are_padded() -> None:
    driver = Driver(DIRECT)

    assert driver.send(7, start=True) == [run(1)]
    assert driver.send(8, start=True) == []
    assert driver.idle() == [run(EMPTY_ROW, 2)]
    assert driver.idle() == []
    assert driver.send(8) == [run(EMPTY_ROW, 3)]
    assert driver.send(7) == []
    assert driver.idle() == [run(4)]


def test_rows_above_the_highest_request_are_not_in_the_batch() -> None:
    driver = Driver(DIRECT)
    driver.send(7, start=True)
    driver.send(8, start=True)
    driver.send(9, start=True)
    driver.idle()
    driver.idle()

    assert driver.send(8) == [run(EMPTY_ROW, 4)]


def test_all_rows_make_a_full_batch() -> None:
    driver = Driver(DIRECT)
    driver.send(0, start=True)
    for key in "abc":
        driver.send(key, start=True)
    driver.send(0)

    assert driver.idle() == [run(5, 2, 3, 4, reason=CloseReason.FULL)]


def test_a_request_without_a_sequence_is_refused() -> None:
    driver = Driver(DIRECT)

    assert driver.send(7) == [Drop(1, DropReason.NO_SEQUENCE)]
    assert driver.send(7, end=True) == [Drop(2, DropReason.NO_SEQUENCE)]
    assert driver.sequencer.live == 0


def test_a_number_and_a_text_are_two_sequences() -> None:
    driver = Driver(DIRECT)
    driver.send(7, start=True)

    assert driver.send("7") == [Drop(2, DropReason.NO_SEQUENCE)]


def test_requests_of_a_sequence_run_one_after_the_other() -> None:
    driver = Driver(OLDEST)

    assert driver.send(7, start=True) == [run(1)]
    assert driver.send(7) == []
    assert driver.send(7, end=True) == []
    assert driver.idle() == [run(2)]
    assert driver.idle() == [run(3)]
    assert driver.ended() == []
    assert driver.idle() == []
    assert driver.ended() == [(7, EndReason.ENDED)]
    assert driver.send(7) == [Drop(4, DropReason.NO_SEQUENCE)]


def test_nothing_follows_the_end_of_a_sequence_even_while_it_waits() -> None:
    driver = Driver(OLDEST)
    driver.send(7, start=True)
    driver.send(7, end=True)

    assert driver.send(7) == [Drop(3, DropReason.NO_SEQUENCE)]


def test_sequences_go_to_the_instance_with_the_fewest() -> None:
    driver = Driver(DIRECT, instances=2)

    assert driver.send(7, start=True) == [run(1, slot=0)]
    assert driver.send(8, start=True) == [run(2, slot=1)]
    assert driver.idle(0) == []
    assert driver.idle(1) == []
    assert driver.send(8) == [run(3, slot=1)]
    assert driver.send(7) == [run(4, slot=0)]


def test_a_sequence_waits_in_the_backlog_for_a_slot_with_its_requests() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1))
    driver.send(7, start=True)
    driver.send(8, start=True)
    driver.send(9, start=True)
    driver.send(8, end=True)

    assert driver.idle() == []
    assert driver.send(7, end=True) == [run(5, reason=CloseReason.FULL)]
    assert driver.idle() == [run(2, reason=CloseReason.FULL)]
    assert driver.idle() == [run(4, reason=CloseReason.FULL)]
    assert driver.idle() == [run(3, reason=CloseReason.FULL)]


def test_an_idle_sequence_is_reaped_to_the_nanosecond_and_its_slot_goes_to_the_next() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1))
    driver.send(7, start=True)
    driver.now_ns = 400
    driver.idle()
    driver.send(8, start=True)

    assert driver.sequencer.wake_at() == 400 + IDLE_NS
    driver.now_ns = 399 + IDLE_NS
    assert driver.do(Tick()) == []
    driver.now_ns = 400 + IDLE_NS
    assert driver.do(Tick()) == [run(2, reason=CloseReason.FULL)]
    assert driver.ended() == [(7, EndReason.IDLE)]
    assert driver.send(7) == [Drop(3, DropReason.NO_SEQUENCE)]


def test_a_sequence_whose_model_computes_for_long_is_not_idle() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1))
    driver.send(7, start=True)

    assert driver.sequencer.wake_at() is None
    driver.now_ns = 10 * IDLE_NS
    driver.do(Tick())
    driver.idle()

    assert driver.send(7) == [run(2, reason=CloseReason.FULL)]


def test_a_request_starts_the_idle_time_anew() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1))
    driver.send(7, start=True)
    driver.idle()
    driver.now_ns = IDLE_NS - 1
    driver.send(7)
    driver.idle()

    assert driver.sequencer.wake_at() == 2 * IDLE_NS - 1


def test_a_sequence_in_the_backlog_leaves_when_a_queue_timeout_of_its_requests_comes() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1))
    driver.send(7, start=True)
    driver.send(8, start=True, timeout_us=9)
    driver.send(8, timeout_us=5)
    driver.send(8, timeout_us=7)
    driver.send(9, start=True)

    assert driver.sequencer.wake_at() == 5 * US
    driver.now_ns = 5 * US
    assert driver.do(Tick()) == [Drop(number, DropReason.SEQUENCE_TIMEOUT) for number in (2, 3, 4)]
    assert driver.sequencer.wake_at() is None
    assert driver.ended() == [(8, EndReason.DROPPED)]


def test_a_queue_timeout_has_no_effect_once_the_sequence_has_a_slot() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1))
    driver.send(7, start=True, end=True)
    driver.send(8, start=True, timeout_us=5)
    driver.idle()

    assert driver.sequencer.wake_at() is None
    driver.now_ns = 5 * US
    assert driver.do(Tick()) == []


def test_timeouts_without_effect_do_not_pile_up() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1))
    driver.send(0, start=True)
    driver.send(1, start=True, timeout_us=10**6)
    for index in range(500):
        driver.send(2 + index, start=True, timeout_us=10**9 - index)
        driver.do(Cancel(driver.next_id))

    assert len(driver.sequencer._table._timeouts) <= 2 * 3 + STALE_TIMEOUTS_MAX + 1
    assert driver.sequencer.wake_at() == 10**9


def test_a_cancelled_request_takes_its_sequence_along() -> None:
    driver = Driver(OLDEST)
    driver.send(7, start=True)
    driver.send(7)
    driver.send(7)
    driver.send(7, end=True)

    assert driver.do(Cancel(3)) == [Drop(2, DropReason.CANCELLED), Drop(4, DropReason.CANCELLED)]
    assert driver.send(7) == [Drop(5, DropReason.NO_SEQUENCE)]
    assert driver.idle() == []
    assert driver.ended() == [(7, EndReason.CANCELLED)]
    assert driver.sequencer.live == 0


def test_a_cancelled_sequence_in_the_backlog_is_gone_and_one_that_is_ready_too() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1))
    driver.send(7, start=True)
    driver.send(8, start=True)
    driver.do(Cancel(2))
    assert driver.ended() == [(8, EndReason.CANCELLED)]
    driver = Driver(OLDEST)
    driver.send(7, start=True)
    driver.send(8, start=True)
    driver.do(Cancel(2))

    assert driver.idle() == []
    assert driver.ended() == [(8, EndReason.CANCELLED)]


def test_a_request_that_is_cancelled_while_it_runs_ends_nothing() -> None:
    driver = Driver(OLDEST)
    driver.send(7, start=True)

    assert driver.do(Cancel(1)) == []
    driver.idle()
    assert driver.send(7) == [run(2)]


def test_a_second_start_begins_a_new_sequence_behind_the_first() -> None:
    driver = Driver(OLDEST)
    driver.send(7, start=True)
    driver.send(7)
    driver.send(7, start=True)
    driver.send(7, end=True)

    assert driver.idle() == [run(2)]
    assert driver.ended() == []
    assert driver.idle() == [run(3)]
    assert driver.ended() == [(7, EndReason.REPLACED)]
    assert driver.idle() == [run(4)]
    assert driver.sequencer.place(4).sequence == 2
    driver.idle()
    assert driver.ended() == [(7, EndReason.ENDED)]


def test_a_second_start_on_an_idle_sequence_runs_at_once() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1))
    driver.send(7, start=True)
    driver.idle()

    assert driver.send(7, start=True) == [run(2, reason=CloseReason.FULL)]
    assert driver.sequencer.place(2).is_first
    assert driver.ended() == [(7, EndReason.REPLACED)]


def test_a_second_start_does_not_pass_those_that_wait() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1))
    driver.send(7, start=True)
    driver.send(8, start=True, end=True)
    driver.send(7, start=True, end=True)

    assert driver.idle() == [run(2, reason=CloseReason.FULL)]
    assert driver.idle() == [run(3, reason=CloseReason.FULL)]


def test_three_sequences_of_one_key_follow_each_other_and_any_of_them_may_leave() -> None:
    for leaver, expected, live in ((2, [3], 1), (3, [2], 0), (None, [2, 3], 1)):
        driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=2, size_max=2))
        for _ in range(3):
            driver.send(7, start=True)
        if leaver is not None:
            driver.do(Cancel(leaver))
        runs = [command for _ in range(3) for command in driver.idle()]
        assert runs == [run(each) for each in expected]
        assert driver.sequencer.live == live


def test_a_sequence_that_takes_the_place_of_one_in_the_backlog_gets_in_line_when_that_has_left() -> None:
    driver = Driver(SequencePolicy(idle_ns=IDLE_NS, rows=1))
    driver.send(7, start=True, end=True)
    driver.send(8, start=True)
    driver.send(8, start=True, timeout_us=1)
    driver.send(9, start=True, end=True)
    driver.do(Cancel(2))

    assert driver.sequencer.holds(8)
    assert not driver.sequencer.holds(7)
    assert [driver.idle()[0].ids for _ in range(2)] == [(4,), (3,)]  # type: ignore[union-attr]


def test_the_same_key_after_its_end_waits_for_the_end() -> None:
    driver = Driver(OLDEST)
    driver.send(7, start=True)
    driver.send(7, end=True)
    driver.send(7, start=True)

    assert driver.idle() == [run(2)]
    assert driver.idle() == [run(3)]


def test_the_oldest_requests_run_first_and_as_many_as_fit() -> None:
    driver = Driver(OLDEST)
    driver.send(0, start=True)
    for key in "abc":
        driver.send(key, start=True)
    driver.send(0)

    assert driver.idle() == [run(2, 3, reason=CloseReason.FULL)]
    assert driver.idle() == [run(4, 5, reason=CloseReason.FULL)]


def test_requests_of_other_shapes_wait_for_the_next_batch() -> None:
    for policy, shapes, first, second in (
        (OLDEST, (1, 2, 1), (2, 4), (3,)),
        (DIRECT, (1, 2, 1), (EMPTY_ROW, 2, EMPTY_ROW, 4), (EMPTY_ROW, EMPTY_ROW, 3)),
        (DIRECT, (1, 2, 2), (EMPTY_ROW, 2, EMPTY_ROW, EMPTY_ROW), (EMPTY_ROW, EMPTY_ROW, 3, 4)),
    ):
        driver = Driver(policy)
        driver.send(0, start=True)
        for key, shape in zip("abc", shapes, strict=True):
            driver.send(key, start=True, shape=(shape,))
        assert driver.idle()[0][:2] == (0, first)
        assert driver.idle()[0][:2] == (0, second)


def test_sequences_whose_states_differ_do_not_share_a_batch() -> None:
    driver = Driver(OLDEST)
    driver.send(7, start=True)
    driver.do(SetStateKey(driver.sequencer.place(1).sequence, (2, 3)))
    driver.send(8, start=True)
    driver.send(7)

    assert driver.idle() == [run(2)]
    assert driver.idle() == [run(3)]


def test_a_preferred_size_is_sent_without_delay_and_the_rest_waits() -> None:
    policy = SequencePolicy(
        IDLE_NS, rows=8, size_max=8, keeps_rows=False, preferred_sizes=(2, 3), delay_ns=100, adapt_delay=False
    )
    driver = Driver(policy)

    assert driver.send(1, start=True) == []
    assert driver.sequencer.wake_at() == 100
    assert driver.send(2, start=True) == [run(1, 2, reason=CloseReason.PREFERRED)]
    for key in range(3, 8):
        driver.send(key, start=True)
    driver.now_ns = 50
    assert driver.idle() == [run(3, 4, 5, reason=CloseReason.PREFERRED)]
    driver.send(8, start=True)
    assert driver.idle() == [run(6, 7, 8, reason=CloseReason.PREFERRED)]


def test_the_delay_ends_to_the_nanosecond() -> None:
    policy = SequencePolicy(IDLE_NS, rows=4, size_max=4, keeps_rows=False, delay_ns=100, adapt_delay=False)
    driver = Driver(policy)
    driver.now_ns = 7
    driver.send(1, start=True)

    driver.now_ns = 106
    assert driver.do(Tick()) == []
    driver.now_ns = 107
    assert driver.do(Tick()) == [run(1, reason=CloseReason.DELAY)]


def test_no_request_waits_for_the_delay_when_every_sequence_has_one() -> None:
    policy = SequencePolicy(IDLE_NS, rows=4, size_max=4, keeps_rows=False, delay_ns=100)
    driver = Driver(policy)

    assert driver.send(1, start=True) == [run(1)]
    driver.send(2, start=True)
    assert driver.idle() == []
    assert driver.send(1) == [run(2, 3)]


def test_rows_wait_for_the_utilization_or_the_delay() -> None:
    policy = SequencePolicy(IDLE_NS, rows=4, size_max=4, delay_ns=100, utilization_min=0.5, adapt_delay=False)
    driver = Driver(policy)

    assert driver.send(1, start=True) == []
    assert driver.send(2, start=True) == [run(1, 2, reason=CloseReason.PREFERRED)]
    driver.idle()
    assert driver.send(2) == []
    driver.now_ns = 100
    assert driver.do(Tick()) == [run(EMPTY_ROW, 3, reason=CloseReason.DELAY)]


def test_a_request_that_runs_again_goes_behind_those_that_are_ready() -> None:
    driver = Driver(SequencePolicy(IDLE_NS, rows=4, size_max=1, keeps_rows=False))
    driver.send(7, start=True, end=True)
    driver.send(8, start=True, end=True)
    assert driver.sequencer.place(1).is_first
    driver.do(Reschedule(1))

    assert driver.idle() == [run(2, reason=CloseReason.FULL)]
    assert driver.idle() == [run(1, reason=CloseReason.FULL)]
    assert not driver.sequencer.place(1).is_first
    assert driver.idle() == []
    assert driver.ended() == [(8, EndReason.ENDED), (7, EndReason.ENDED)]


def test_a_request_that_is_to_run_again_can_be_cancelled() -> None:
    driver = Driver(OLDEST)
    driver.send(7, start=True, end=True)
    driver.do(Reschedule(1))
    driver.do(Cancel(1))

    assert driver.idle() == []
    assert driver.ended() == [(7, EndReason.CANCELLED)]


def test_the_queue_has_a_limit_and_what_is_refused_leaves_no_trace() -> None:
    driver = Driver(SequencePolicy(IDLE_NS, rows=1, queue_max=1))
    driver.send(7, start=True)
    driver.send(7)

    assert driver.send(7, end=True) == [Drop(3, DropReason.QUEUE_FULL)]
    assert driver.send(8, start=True) == [Drop(4, DropReason.QUEUE_FULL)]
    assert driver.ended() == [(8, EndReason.DROPPED)]
    driver.idle()
    assert driver.send(7) == []  # the refused end was none


def test_a_sequence_whose_only_request_was_refused_is_idle_again() -> None:
    policy = SequencePolicy(IDLE_NS, rows=2, size_max=2, queue_max=1)
    driver = Driver(policy)
    driver.send(7, start=True)
    driver.idle()
    driver.send(8, start=True)
    driver.send(8)

    assert driver.send(7) == [Drop(4, DropReason.QUEUE_FULL)]
    assert driver.sequencer.wake_at() == IDLE_NS
    driver.idle()
    assert driver.send(7) == []


def test_a_stop_ends_idle_sequences_and_lets_run_what_waits() -> None:
    driver = Driver(SequencePolicy(IDLE_NS, rows=2, size_max=2, delay_ns=100, utilization_min=1.0, adapt_delay=False))
    driver.send(1, start=True)
    driver.now_ns = 100
    driver.do(Tick())
    driver.idle()
    driver.send(2, start=True)
    driver.send(2)
    driver.send(3, start=True)

    assert driver.do(Stop()) == [run(4, 2, reason=CloseReason.FULL)]
    assert driver.ended() == [(1, EndReason.STOPPED)]
    assert driver.send(2) == [Drop(5, DropReason.STOPPING)]
    for _ in range(4):
        driver.idle()
    assert driver.sequencer.live == 0
    assert driver.sequencer.queued == 0


def test_while_no_new_ones_are_taken_sequences_go_on() -> None:
    driver = Driver(DIRECT)
    driver.send(7, start=True)
    driver.idle()
    driver.do(StopNewSequences())

    assert driver.send(8, start=True) == [Drop(2, DropReason.STOPPING)]
    assert driver.send(7, end=True) == [run(3)]


def test_a_slot_that_is_gone_ends_what_ran_and_takes_nothing() -> None:
    driver = Driver(OLDEST)
    driver.send(7, start=True)
    driver.send(7)

    assert driver.do(SlotRemoved(0)) == []
    assert not driver.sequencer.is_running(1)
    assert driver.idle() == [run(2)]


def test_a_request_without_its_sequence_is_a_fault_of_the_caller() -> None:
    driver = Driver(OLDEST)

    with pytest.raises(TypeError, match="SequenceMember"):
        driver.do(Submit(1))


def test_the_view_shows_slots_backlog_and_what_became_of_others() -> None:
    driver = Driver(SequencePolicy(IDLE_NS, rows=1))
    driver.send("a", start=True)
    driver.send("a")
    driver.now_ns = 5
    driver.send("b", start=True)
    driver.send("a", start=True)
    driver.now_ns = 9

    view = driver.sequencer.view(driver.now_ns)

    assert view.rows == 1
    ((slot,),) = view.instances
    assert (slot.key, slot.row, slot.queued, slot.is_running, slot.quiet_ns, slot.requests) == ("a", 0, 1, True, 0, 1)
    assert [(s.key, s.row, s.queued, s.quiet_ns) for s in view.backlog] == [("b", None, 1, 4), ("a", None, 1, 4)]
    assert view.ended == ()
    driver.idle()
    driver.idle()
    assert driver.sequencer.view(9).ended == ((EndReason.REPLACED, 1),)


KEYS: st.SearchStrategy[int | str] = st.sampled_from([1, 2, 3, "a"])


@dataclass
class Shadow:
    """What the rules promise, in plain lists; told everything, it raises as soon as a promise is broken."""

    policy: SequencePolicy
    instances: int
    waiting: dict[int, int | str] = field(default_factory=dict)
    order: dict[int | str, list[int]] = field(default_factory=dict)
    running: dict[int, tuple[int, ...]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    homes: dict[int, tuple[int, int]] = field(default_factory=dict)  # instance and row by number of the sequence

    def see(self, commands: list[Command], sequencer: Sequencer, spared: int = 0) -> None:
        for command in commands:
            if isinstance(command, Drop):
                self.leave(command.id)
                continue
            assert command.slot not in self.running, "a busy instance got a batch"
            ids = tuple(i for i in command.ids if i != EMPTY_ROW)
            assert ids, "a batch of padding only"
            if self.policy.keeps_rows:
                own = [row for row, i in enumerate(command.ids) if i != EMPTY_ROW]
                placed = sequencer.view(0).instances[command.slot]
                waiting = [each.row or 0 for each in placed if each.queued and not each.is_running]
                assert len(command.ids) == 1 + max(own + waiting)
            assert len(command.ids) <= self.policy.size_max
            keys = [self.waiting[i] for i in ids]
            assert len(set(keys)) == len(keys), "two requests of a sequence in one batch"
            others = [self.waiting_key(i) for batch in self.running.values() for i in batch]
            assert not set(keys) & set(others), "two requests of a sequence at a time"
            for position, i in enumerate(command.ids):
                if i == EMPTY_ROW:
                    continue
                assert self.order[self.waiting[i]][0] == i, "a request passed one of its sequence"
                number = sequencer.place(i).sequence
                home = (command.slot, position if self.policy.keeps_rows else 0)
                assert self.homes.setdefault(number, home) == home, "a sequence moved"
            self.running[command.slot] = ids

    def waiting_key(self, id: int) -> int | str:
        return self.waiting[id]

    def leave(self, id: int) -> None:
        assert id not in self.left, "a request left twice"
        self.left.add(id)
        self.order[self.waiting.pop(id)].remove(id)

    def finish(self, slot: int, again: set[int]) -> None:
        for i in self.running.pop(slot, ()):
            if i not in again:
                self.leave(i)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_traffic_breaks_no_promise_and_leaks_no_slot(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    keeps_rows = data.draw(st.booleans())
    policy = SequencePolicy(
        idle_ns=50,
        rows=rows,
        size_max=rows if keeps_rows else data.draw(st.integers(1, 3)),
        keeps_rows=keeps_rows,
        preferred_sizes=tuple(data.draw(st.sets(st.integers(1, 3)))),
        delay_ns=data.draw(st.sampled_from([0, 10])),
        utilization_min=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        queue_max=data.draw(st.sampled_from([0, 3])),
        adapt_delay=data.draw(st.booleans()),
    )
    instances = data.draw(st.integers(1, 2))
    sequencer = Sequencer(policy, instances)
    recorded = RecordedScheduler(sequencer)
    shadow = Shadow(policy, instances)
    now_ns = 0
    for slot in range(instances):
        shadow.see(recorded.handle(SlotIdle(slot), now_ns), sequencer)
    submitted = 0

    def finish(slot: int) -> None:
        shadow.finish(slot, set())
        shadow.see(recorded.handle(SlotIdle(slot), now_ns), sequencer)

    for _ in range(data.draw(st.integers(0, 40))):
        now_ns += data.draw(st.integers(0, 20))
        wake_ns = sequencer.wake_at()
        if wake_ns is not None and wake_ns <= now_ns:
            shadow.see(recorded.handle(Tick(), now_ns), sequencer)
        busy = sorted(shadow.running)
        match data.draw(st.sampled_from(["submit", "submit", "submit", "finish", "cancel", "again", "lose"])):
            case "submit":
                submitted += 1
                key = data.draw(KEYS)
                flags = [data.draw(st.booleans()) for _ in range(3)]
                shadow.waiting[submitted] = key
                shadow.order.setdefault(key, []).append(submitted)
                event = Submit(submitted, 1, SequenceMember(key, *flags), timeout_us=data.draw(st.sampled_from([0, 1])))
                shadow.see(recorded.handle(event, now_ns), sequencer)
            case "finish" if busy:
                finish(data.draw(st.sampled_from(busy)))
            case "cancel" if submitted:
                chosen = data.draw(st.integers(1, submitted))
                if chosen in shadow.waiting and not any(chosen in ids for ids in shadow.running.values()):
                    shadow.leave(chosen)
                shadow.see(recorded.handle(Cancel(chosen), now_ns), sequencer)
            case "again" if busy:
                slot = data.draw(st.sampled_from(busy))
                chosen = data.draw(st.sampled_from(shadow.running[slot]))
                shadow.see(recorded.handle(Reschedule(chosen), now_ns), sequencer)
                shadow.finish(slot, {chosen})
                shadow.see(recorded.handle(SlotIdle(slot), now_ns), sequencer)
            case "lose":
                shadow.see(recorded.handle(StateLost(data.draw(st.integers(0, instances - 1))), now_ns), sequencer)
            case _:
                pass
    while shadow.running or sequencer.wake_at() is not None:
        if shadow.running:
            finish(min(shadow.running))
        else:
            now_ns = max(now_ns, sequencer.wake_at() or 0)
            shadow.see(recorded.handle(Tick(), now_ns), sequencer)

    assert shadow.left == set(range(1, submitted + 1)), "a request never left"
    assert (sequencer.live, sequencer.queued) == (0, 0), "a slot leaked"
