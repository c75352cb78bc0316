"""The log of a scheduler: it replays, tells the story of a request, and finds a scheduler that breaks its rules."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.recorded import RecordedScheduler, RecordedStep, replay

from charonia.server.rate_limiter.options import ResourceLimit
from charonia.server.rate_limiter.resources import Arbiter, LimitedScheduler, Member, Need, ResourcePool
from charonia.server.scheduling.api import (
    EMPTY_ROW,
    BatchPolicy,
    Cancel,
    CloseReason,
    Command,
    Drop,
    DropReason,
    Event,
    QueueLimits,
    Reschedule,
    Run,
    Scheduler,
    SlotGone,
    SlotIdle,
    Stop,
    StopNewSequences,
    Submit,
    Tick,
)
from charonia.server.scheduling.dynamic import DynamicBatcher
from charonia.server.sequences.api import SequenceMember, SequencePolicy
from charonia.server.sequences.scheduler import Sequencer

SLOTS = 3
LIMITS = QueueLimits(size_max=4, timeout_ns=9_000, timeout_override=True)
POLICY = BatchPolicy(
    size_max=4, preferred_sizes=(3,), delay_ns=5_000, priority_levels=2, default_level=1, limits=LIMITS
)


def dynamic() -> Scheduler:
    return DynamicBatcher(POLICY)


def default() -> DynamicBatcher:
    return DynamicBatcher(BatchPolicy(limits=LIMITS))


def limited(make: Callable[[], DynamicBatcher | Sequencer]) -> Scheduler:
    pool = ResourcePool("R", 0)
    arbiter = Arbiter([ResourceLimit("R", 2, 0)])
    members = [Member("m", "1", f"m_{i}", (Need(pool, 1),), 1) for i in range(SLOTS)]
    arbiter.join(members)
    inner = make()
    wants = inner.wants if isinstance(inner, Sequencer) else None
    return LimitedScheduler(inner, dict(enumerate(members)), arbiter, wants=wants)


def sequences(*, keeps_rows: bool = True) -> Sequencer:
    policy = SequencePolicy(
        idle_ns=20_000, rows=2, size_max=2, keeps_rows=keeps_rows, delay_ns=3_000, utilization_min=0.9, queue_max=6
    )
    return Sequencer(policy, SLOTS)


PLAIN: dict[str, Callable[[], Scheduler]] = {
    "default": default,
    "dynamic": dynamic,
    "limited": lambda: limited(lambda: DynamicBatcher(POLICY)),
}
OF_SEQUENCES: dict[str, Callable[[], Scheduler]] = {
    "direct": sequences,
    "oldest": lambda: sequences(keeps_rows=False),
    "limited": lambda: limited(sequences),
}

deeds = st.lists(
    st.tuples(
        st.sampled_from([*["submit"] * 6, *["idle"] * 5, "again", "cancel", "gone", "tick", "wake", "wake", "stop"]),
        st.integers(0, 99),
        st.sampled_from([0, 0, 1, 700, 4_000, 30_000]),
    ),
    max_size=80,
)


def play(
    scheduler: RecordedScheduler, script: list[tuple[str, int, int]], part_of: Callable[[int], SequenceMember | int]
) -> None:
    """Send what a correct shell could send."""
    busy: dict[int, tuple[int, ...]] = dict.fromkeys(range(SLOTS), ())
    submitted, now_ns = 0, 1_000
    for kind, number, passes_ns in script:
        now_ns += passes_ns
        event: Event = Tick()
        match kind:
            case "submit":
                submitted += 1
                part = part_of(number)
                event = Submit(submitted, 1 + number % 2, part, number % 4, number % 3)
            case "idle" if busy:
                slot = sorted(busy)[number % len(busy)]
                del busy[slot]
                event = SlotIdle(slot, slot)
            case "gone":
                busy[number % SLOTS] = ()  # what it ran has left the scheduler
                event = SlotGone(number % SLOTS)
            case "again" if isinstance(part_of(0), SequenceMember):
                running = [each for ids in busy.values() for each in ids if each != EMPTY_ROW]
                event = Reschedule(running[number % len(running)]) if running else StopNewSequences()
            case "cancel":
                event = Cancel(number % (submitted + 1))
            case "wake":
                now_ns = max(now_ns, scheduler.wake_at() or 0)
            case "stop" if number > 95:
                event = Stop()
        busy |= {each.slot: each.ids for each in scheduler.handle(event, now_ns) if isinstance(each, Run)}


def check(
    make: Callable[[], Scheduler], script: list[tuple[str, int, int]], part_of: Callable[[int], SequenceMember | int]
) -> None:
    scheduler = RecordedScheduler(make())
    play(scheduler, script, part_of)

    assert replay(scheduler.log, make()) is None
    assert "\n" not in repr(scheduler)


@pytest.mark.parametrize("kind", PLAIN)
@settings(max_examples=60, deadline=None)
@given(script=deeds)
def test_a_log_that_is_replayed_gives_the_same_commands(kind: str, script: list[tuple[str, int, int]]) -> None:
    check(PLAIN[kind], script, lambda number: number % 5 // 4)


@pytest.mark.parametrize("kind", OF_SEQUENCES)
@settings(max_examples=60, deadline=None)
@given(script=deeds)
def test_a_log_of_sequences_replays_too(kind: str, script: list[tuple[str, int, int]]) -> None:
    check(OF_SEQUENCES[kind], script, lambda number: SequenceMember(number % 4, number % 3 == 0, number % 7 == 0))


def test_replay_stops_at_the_first_other_answer() -> None:
    scheduler = RecordedScheduler(default())
    scheduler.handle(SlotIdle(0), 0)
    scheduler.handle(Submit(1), 10)

    assert replay(scheduler.log, dynamic()) == RecordedStep(10, Submit(1), ())


def test_the_story_of_a_request_has_its_events_and_commands_and_no_others() -> None:
    scheduler = RecordedScheduler(default())
    scheduler.handle(Submit(1), 0)
    scheduler.handle(Submit(2), 5)
    scheduler.handle(SlotIdle(0), 10)
    scheduler.handle(Cancel(2), 20)

    run = Run(0, (1,), CloseReason.FULL)
    assert scheduler.story(1) == [RecordedStep(0, Submit(1), ()), RecordedStep(10, SlotIdle(0), (run,))]
    assert scheduler.story(2) == [RecordedStep(5, Submit(2), ()), RecordedStep(20, Cancel(2), ())]
    assert scheduler.story(3) == []


def test_the_log_keeps_the_last_steps() -> None:
    scheduler = RecordedScheduler(default(), limit=2)
    for at_ns in range(5):
        scheduler.handle(Tick(), at_ns)

    assert [step.at_ns for step in scheduler.log] == [3, 4]


class Faulty:
    def __init__(self, *answers: list[Command]) -> None:
        self.answers = list(answers)
        self.queued = 0

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        return self.answers.pop(0)

    def wake_at(self) -> int | None:
        return None

    def check_invariants(self) -> None:
        pass


RUN = Run(0, (1,), CloseReason.FULL)


@pytest.mark.parametrize(
    ("scheduler", "events", "complaint"),
    [
        (Faulty([RUN]), [Submit(1)], "slot 0 was handed a batch while it was not idle"),
        (Faulty([], [RUN], [RUN]), [SlotIdle(0), Submit(1), Submit(2)], "slot 0 was handed a batch while it was not"),
        (Faulty([], [RUN], [RUN]), [SlotIdle(0), Submit(1), SlotIdle(0)], "request 1 left although it did not wait"),
        (Faulty([Drop(7, DropReason.TIMEOUT)]), [Tick()], "request 7 left although it did not wait"),
        (Faulty([]), [Submit(1)], "has other requests than {1}"),
    ],
)
def test_a_scheduler_that_breaks_a_rule_is_found_out(scheduler: Faulty, events: list[Event], complaint: str) -> None:
    recorded = RecordedScheduler(scheduler)
    for event in events[:-1]:
        recorded.handle(event, 0)

    with pytest.raises(AssertionError, match=complaint):
        recorded.handle(events[-1], 0)


def test_a_scheduler_says_its_state_in_one_line() -> None:
    batcher = DynamicBatcher(BatchPolicy(size_max=4, delay_ns=5_000_000))
    for event, at_us in ((SlotIdle(0), 0), (SlotIdle(1), 0), (Submit(1), 0), (Submit(2, 4), 700), (Submit(3), 800)):
        batcher.handle(event, at_us * 1_000)

    assert repr(batcher) == "<DynamicBatcher [queued 1 | idle 0 of 2 | no timer]>"
    batcher.handle(SlotIdle(1), 1_000_000)
    assert repr(batcher) == "<DynamicBatcher [queued 1 | idle 1 of 2 | wake at +4.8 ms]>"
    assert repr(default()) == "<DynamicBatcher [queued 0 | idle 0 of 0 | no timer]>"
    assert repr(sequences()) == "<Sequencer [queued 0 | idle 0 of 3 | sequences 0 (0 wait) | no timer]>"
    assert repr(limited(default)).startswith(
        "<LimitedScheduler [idle 0 | offered 0 | wait for resources 0 | <DynamicBatcher"
    )
    assert repr(RecordedScheduler(default())).startswith("<RecordedScheduler [steps 0 | <DynamicBatcher")
