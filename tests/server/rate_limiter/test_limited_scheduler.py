"""A scheduler whose slots need resources."""

from charonia.server.rate_limiter.options import ResourceLimit
from charonia.server.rate_limiter.resources import Arbiter, LimitedScheduler, Member, MemberState, Need, ResourcePool
from charonia.server.scheduling.api import (
    BatchPolicy,
    Cancel,
    CloseReason,
    Command,
    Drop,
    DropReason,
    QueueLimits,
    Run,
    SlotIdle,
    SlotRemoved,
    Stop,
    Submit,
    Tick,
)
from charonia.server.scheduling.dynamic import DynamicBatcher
from charonia.server.sequences.api import SequenceMember, SequencePolicy
from charonia.server.sequences.scheduler import Sequencer

R = ResourcePool("R", 0)
MS = 1_000_000


def members(model: str, count: int, need: int = 1, priority: int = 1) -> list[Member]:
    return [Member(model, "1", f"{model}_{i}", (Need(R, need),), priority) for i in range(count)]


def limited(arbiter: Arbiter, mine: list[Member], inner: DynamicBatcher | Sequencer | None = None) -> LimitedScheduler:
    arbiter.join(mine)
    wants = inner.wants if isinstance(inner, Sequencer) else None
    scheduler = LimitedScheduler(inner or DynamicBatcher(BatchPolicy()), dict(enumerate(mine)), arbiter, wants=wants)
    for slot in range(len(mine)):
        assert scheduler.handle(SlotIdle(slot), 0) == []
    return scheduler


def runs(commands: list[Command]) -> list[tuple[int, tuple[int, ...]]]:
    return [(command.slot, command.ids) for command in commands if isinstance(command, Run)]


def test_a_request_runs_at_once_where_the_resources_are_free() -> None:
    mine = members("a", 1)
    scheduler = limited(Arbiter(), mine)

    assert runs(scheduler.handle(Submit(1), 0)) == [(0, (1,))]
    assert mine[0].state is MemberState.RUNNING


def test_an_idle_model_holds_nothing() -> None:
    arbiter, mine = Arbiter(), members("a", 2)
    scheduler = limited(arbiter, mine)
    scheduler.handle(Submit(1), 0)

    scheduler.handle(SlotIdle(0), 0)

    assert arbiter.held == {R: 0}


def test_a_request_waits_in_the_queue_for_what_another_model_holds() -> None:
    arbiter = Arbiter()
    one, two = limited(arbiter, members("a", 1)), limited(arbiter, members("b", 1))
    one.handle(Submit(1), 0)

    assert two.handle(Submit(1), 0) == []
    assert two.queued == 1
    one.handle(SlotIdle(0), 0)

    assert runs(two.handle(Tick(), 0)) == [(0, (1,))]


def test_of_two_instances_that_share_one_resource_only_one_runs_and_then_the_other() -> None:
    scheduler = limited(Arbiter([ResourceLimit("R", 1)]), members("a", 2))

    assert runs(scheduler.handle(Submit(1), 0)) == [(0, (1,))]
    assert scheduler.handle(Submit(2), 0) == []
    assert runs(scheduler.handle(SlotIdle(0), 0)) == [(1, (2,))]


def test_instances_of_a_model_take_turns_by_their_priority() -> None:
    mine = [*members("a", 1), *members("a", 1, priority=2)]
    scheduler = limited(Arbiter(), mine)
    order = []
    for number in range(6):
        ((slot, _),) = runs(scheduler.handle(Submit(number), 0))
        order.append(slot)
        scheduler.handle(SlotIdle(slot), 0)

    assert (order.count(0), order.count(1)) == (4, 2)


def test_models_under_load_share_by_priority() -> None:
    arbiter = Arbiter()
    models = [limited(arbiter, members("a", 1)), limited(arbiter, members("b", 1, priority=3))]
    counts = [0, 0]
    running: list[int] = []

    def note(model: int, commands: list[Command]) -> None:
        running.extend(model for _ in runs(commands))

    for number in range(400):
        for model in (0, 1):
            note(model, models[model].handle(Submit(number), 0))
    for _ in range(200):
        model = running.pop()
        counts[model] += 1
        note(model, models[model].handle(SlotIdle(0), 0))
        note(1 - model, models[1 - model].handle(Tick(), 0))

    assert abs(counts[0] - 3 * counts[1]) <= 4


def test_a_request_that_is_cancelled_or_times_out_while_it_waits_for_resources_frees_the_place() -> None:
    arbiter = Arbiter()
    one = limited(arbiter, members("a", 1))
    waiting = members("b", 1)
    two = limited(arbiter, waiting, DynamicBatcher(BatchPolicy(limits=QueueLimits(timeout_ns=MS))))
    one.handle(Submit(1), 0)
    two.handle(Submit(1), 0)
    assert two.wake_at() == MS

    two.handle(Cancel(1), 0)
    assert waiting[0].state is MemberState.IDLE
    two.handle(Submit(2), 0)

    assert two.handle(Tick(), MS) == [Drop(2, DropReason.TIMEOUT)]
    assert waiting[0].state is MemberState.IDLE


def test_a_batch_grows_while_it_waits_for_resources() -> None:
    arbiter = Arbiter()
    one = limited(arbiter, members("a", 1))
    two = limited(arbiter, members("b", 1), DynamicBatcher(BatchPolicy(size_max=8)))
    one.handle(Submit(1), 0)
    for number in range(3):
        two.handle(Submit(number), 0)
    one.handle(SlotIdle(0), 0)

    assert two.handle(Tick(), 0) == [Run(0, (0, 1, 2), CloseReason.QUEUE_EMPTY)]


def test_a_slot_that_is_offered_while_a_batch_waits_for_others_is_used_when_its_time_has_come() -> None:
    arbiter, mine = Arbiter(), members("b", 3)
    scheduler = limited(arbiter, mine, DynamicBatcher(BatchPolicy(size_max=8, delay_ns=MS, adapt_delay=False)))

    assert scheduler.handle(Submit(1), 0) == []
    assert scheduler.handle(Submit(2), 0) == []
    assert [m.state for m in mine] == [MemberState.RUNNING, MemberState.IDLE, MemberState.IDLE]

    assert scheduler.handle(Tick(), MS) == [Run(0, (1, 2), CloseReason.DELAY)]


def test_a_slot_that_was_offered_and_is_not_needed_any_more_gives_its_resources_back() -> None:
    arbiter, mine = Arbiter(), members("b", 1)
    scheduler = limited(arbiter, mine, DynamicBatcher(BatchPolicy(size_max=8, delay_ns=MS, adapt_delay=False)))
    scheduler.handle(Submit(1), 0)
    assert arbiter.held == {R: 1}

    scheduler.handle(Cancel(1), 0)

    assert arbiter.held == {R: 0}
    assert mine[0].executions == 0


def test_what_waits_when_the_model_stops_still_runs() -> None:
    arbiter = Arbiter()
    one, two = limited(arbiter, members("a", 1)), limited(arbiter, members("b", 1))
    one.handle(Submit(1), 0)
    two.handle(Submit(1), 0)

    assert two.handle(Stop(), 0) == []
    assert two.handle(Submit(2), 0) == [Drop(2, DropReason.STOPPING)]
    one.handle(SlotIdle(0), 0)

    assert runs(two.handle(Tick(), 0)) == [(0, (1,))]


def test_a_slot_that_goes_gives_up_what_it_holds_or_waits_for() -> None:
    arbiter = Arbiter()
    mine, theirs = members("a", 1), members("b", 1)
    one, two = limited(arbiter, mine), limited(arbiter, theirs)
    one.handle(Submit(1), 0)
    two.handle(Submit(1), 0)

    two.handle(SlotRemoved(0), 0)
    one.handle(SlotRemoved(0), 0)

    assert (mine[0].state, theirs[0].state) == (MemberState.IDLE, MemberState.IDLE)
    assert arbiter.held == {R: 0}
    assert one.handle(Submit(2), 0) == []


def test_a_slot_that_goes_while_it_is_offered_gives_its_resources_back() -> None:
    arbiter, mine = Arbiter(), members("b", 1)
    scheduler = limited(arbiter, mine, DynamicBatcher(BatchPolicy(size_max=8, delay_ns=MS, adapt_delay=False)))
    scheduler.handle(Submit(1), 0)

    scheduler.handle(SlotRemoved(0), 0)

    assert arbiter.held == {R: 0}
    assert scheduler.queued == 1


def sequences(instances: int) -> Sequencer:
    return Sequencer(SequencePolicy(idle_ns=1000 * MS, rows=1), instances)


def part(key: int, *, start: bool = False, end: bool = False) -> SequenceMember:
    return SequenceMember(key, start, end)


def test_where_requests_are_bound_to_slots_only_those_with_requests_are_offered() -> None:
    arbiter, mine = Arbiter([ResourceLimit("R", 1)]), members("s", 2)
    scheduler = limited(arbiter, mine, sequences(2))

    assert runs(scheduler.handle(Submit(1, 1, part(1, start=True)), 0)) == [(0, (1,))]
    assert scheduler.handle(Submit(2, 1, part(2, start=True)), 0) == []
    assert (mine[0].state, mine[1].state) == (MemberState.RUNNING, MemberState.WAITING)
    assert scheduler.handle(Submit(3, 1, part(1)), 0) == []
    done = scheduler.handle(SlotIdle(0), 0) + scheduler.handle(Tick(), 0)
    assert runs(done) == [(1, (2,))]
    done = scheduler.handle(SlotIdle(1), 0) + scheduler.handle(Tick(), 0)
    assert runs(done) == [(0, (3,))]
    scheduler.handle(SlotIdle(0), 0)

    assert arbiter.held == {R: 0}
    assert [member.state for member in mine] == [MemberState.IDLE, MemberState.IDLE]


def test_a_bound_slot_whose_only_request_is_cancelled_gives_its_resources_back() -> None:
    arbiter, mine = Arbiter([ResourceLimit("R", 1)]), members("s", 2)
    inner = Sequencer(
        SequencePolicy(idle_ns=1000 * MS, rows=2, size_max=2, keeps_rows=False, delay_ns=MS, adapt_delay=False), 2
    )
    scheduler = limited(arbiter, mine, inner)
    scheduler.handle(Submit(1, 1, part(1, start=True)), 0)  # is offered a slot and waits for others there
    scheduler.handle(Submit(2, 1, part(2, start=True)), 0)  # waits for what the first holds
    assert [member.state for member in mine] == [MemberState.RUNNING, MemberState.WAITING]

    scheduler.handle(Cancel(1), 0)
    assert [member.state for member in mine] == [MemberState.IDLE, MemberState.RUNNING]
    assert runs(scheduler.handle(Tick(), MS)) == [(1, (2,))]
    scheduler.handle(SlotIdle(1), MS)
    assert arbiter.held == {R: 0}


def test_a_bound_slot_that_waits_in_vain_stops_waiting() -> None:
    arbiter, mine, other = Arbiter([ResourceLimit("R", 1)]), members("s", 1), members("o", 1)
    taker = limited(arbiter, other)
    taker.handle(Submit(1), 0)
    scheduler = limited(arbiter, mine, sequences(1))
    scheduler.handle(Submit(1, 1, part(1, start=True)), 0)
    assert [member.state for member in mine] == [MemberState.WAITING]

    scheduler.handle(Cancel(1), 0)

    assert [member.state for member in mine] == [MemberState.IDLE]


def test_the_time_in_which_requests_wait_for_resources_is_counted_and_that_for_an_instance_is_not() -> None:
    arbiter, mine, others = Arbiter(), members("a", 1), members("b", 1)
    first, second = limited(arbiter, mine), limited(arbiter, others)
    first.handle(Submit(1), 1 * MS)
    first.handle(Submit(2), 2 * MS)
    second.handle(Submit(1), 3 * MS)
    second.handle(Submit(2), 4 * MS)

    assert (first.short_ns(5 * MS), second.short_ns(5 * MS)) == (0, 2 * MS)

    first.handle(SlotIdle(0), 10 * MS)  # now it is the other one's turn
    second.handle(Tick(), 10 * MS)

    assert (first.short_ns(14 * MS), second.short_ns(14 * MS)) == (4 * MS, 7 * MS)
