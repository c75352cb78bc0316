"""Random traffic against a slow and obvious model of the rules."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.recorded import RecordedScheduler

from charonia.core.request import NO_FLOW, Flow
from charonia.server.scheduling.api import (
    BatchPolicy,
    Cancel,
    CloseReason,
    Command,
    Drop,
    DropReason,
    Event,
    QueueLimits,
    Run,
    Scheduler,
    SlotIdle,
    SlotRemoved,
    Stop,
    Submit,
    Tick,
)
from charonia.server.scheduling.dynamic import DynamicBatcher

SLOTS = 3


@dataclass
class Waiting:
    request: Submit
    level: int
    arrived_ns: int
    deadline_ns: int | None
    late_since_ns: int | None = None


@dataclass
class Shares:
    """Self-clocked fair queueing of a level, in time or late: a tag and a number for each flow that waits."""

    tag: float = 0.0
    tags: dict[Flow, tuple[float, int]] = field(default_factory=dict)
    numbered: int = 0


@dataclass
class Model:
    """The rules with plain lists, checked after every event. It checks choices; only mandatory ones it makes itself."""

    policy: BatchPolicy
    alone: bool  # the default scheduler: each request runs alone
    waiting: list[Waiting] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    ranks: dict[tuple[int, bool], Shares] = field(default_factory=dict)
    stopping: bool = False
    left: list[int] = field(default_factory=list)  # every id that left, in order
    dropped: int = 0  # what the scheduler chose for a full queue, where several would be right

    def limits(self, level: int) -> QueueLimits:
        return dict(self.policy.level_limits).get(level, self.policy.limits)

    def in_order(self) -> list[Waiting]:
        order: list[Waiting] = []
        for rank in sorted(self.ranks):
            tags = dict(self.ranks[rank].tags)
            lanes = {flow: [one for one in self.in_rank(*rank) if one.request.flow == flow] for flow in tags}
            while tags:
                flow = min(tags, key=tags.__getitem__)
                tag, number = tags[flow]
                one = lanes[flow].pop(0)
                order.append(one)
                tags[flow] = (tag + one.request.batch_size / flow.weight, number)
                if not lanes[flow]:
                    del tags[flow]
        return order

    def in_rank(self, level: int, late: bool) -> list[Waiting]:
        found = [one for one in self.waiting if (one.level, one.late_since_ns is not None) == (level, late)]
        return sorted(found, key=lambda one: one.late_since_ns or 0)  # stable: arrival decides the rest

    def rank_of(self, one: Waiting) -> tuple[int, bool]:
        return one.level, one.late_since_ns is not None

    def joins(self, one: Waiting) -> None:
        shares = self.ranks.setdefault(self.rank_of(one), Shares())
        flow = one.request.flow
        if flow not in shares.tags:
            if len(shares.tags) == 1:
                (other,) = shares.tags
                head = next(each for each in self.in_rank(*self.rank_of(one)) if each.request.flow == other)
                shares.tags[other] = (shares.tag + head.request.batch_size / other.weight, shares.tags[other][1])
            shares.numbered += 1
            shares.tags[flow] = (shares.tag + one.request.batch_size / flow.weight, shares.numbered)

    def leaves(self, one: Waiting, *, runs: bool = False) -> None:
        """Call this after it was taken out."""
        rank = self.rank_of(one)
        shares, flow = self.ranks[rank], one.request.flow
        if runs and len(shares.tags) > 1:
            shares.tag, number = shares.tags[flow]
            shares.tags[flow] = (shares.tag + one.request.batch_size / flow.weight, number)
        if all(each is one or each.request.flow != flow for each in self.in_rank(*rank)):
            del shares.tags[flow]
        if not shares.tags:
            del self.ranks[rank]

    def expire(self, now_ns: int) -> list[Command]:
        due = [one for one in self.waiting if one.deadline_ns is not None and one.deadline_ns <= now_ns]
        drops: list[Command] = []
        for one in sorted(due, key=lambda one: (one.deadline_ns, one.request.id)):
            if self.limits(one.level).delay_expired:
                self.leaves(one)
                one.late_since_ns, one.deadline_ns = one.deadline_ns, None
                self.joins(one)
            else:
                self.remove(one)
                drops.append(Drop(one.request.id, DropReason.TIMEOUT))
        return drops

    def remove(self, one: Waiting, *, runs: bool = False) -> None:
        self.waiting.remove(one)
        self.leaves(one, runs=runs)
        self.left.append(one.request.id)

    def add(self, request: Submit, now_ns: int) -> Waiting:
        levels = self.policy.priority_levels
        level = request.priority if 1 <= request.priority <= levels else self.policy.default_level
        limits = self.limits(level)
        timeouts = [limits.timeout_ns, request.timeout_us * 1000 if limits.timeout_override else 0]
        timeout = min((ns for ns in timeouts if ns), default=None)
        one = Waiting(request, level, now_ns, None if timeout is None else now_ns + timeout)
        self.waiting.append(one)
        self.joins(one)
        return one

    def head(self, now_ns: int) -> tuple[list[Waiting], CloseReason | None]:
        """What can run together, and the reason to send it without waiting, if any."""
        order = self.in_order()
        if self.alone:
            return order[:1], CloseReason.FULL
        run = order[:1]
        cut = None
        for one in order[1:]:
            total = sum(each.request.batch_size for each in run)
            if one.request.shape_key != run[0].request.shape_key and total < self.policy.size_max:
                cut = CloseReason.SHAPE
            elif total + one.request.batch_size > self.policy.size_max:
                cut = CloseReason.FULL
            if cut is not None:
                break
            run.append(one)
        for count in range(len(run), 0, -1):
            if sum(one.request.batch_size for one in run[:count]) in self.policy.preferred_sizes:
                return run[:count], CloseReason.PREFERRED
        wanted = min(self.policy.size_max, max(self.policy.preferred_sizes, default=self.policy.size_max))
        delay_ns = self.policy.delay_ns
        if delay_ns and not self.stopping and now_ns < min(one.arrived_ns for one in run) + delay_ns:
            sizes = list(accumulate(one.request.batch_size for one in run))
            if sizes[-1] >= wanted:
                return run[: max(1, sum(size <= wanted for size in sizes))], CloseReason.FULL
        if sum(one.request.batch_size for one in run) >= self.policy.size_max:
            cut = CloseReason.FULL
        if cut is None and (self.stopping or not self.policy.delay_ns):
            cut = CloseReason.QUEUE_EMPTY
        return run, cut

    def due_ns(self, now_ns: int) -> int | None:
        """When the head is sent if nothing else happens: None if not before a slot is idle."""
        if not self.waiting or not self.idle:
            return None
        run, _ = self.head(now_ns)
        return min(one.arrived_ns for one in run) + self.policy.delay_ns

    def expected_runs(self, now_ns: int) -> list[Command]:
        """With the delay exact (`adapt_delay` off) nothing is left to choose."""
        runs: list[Command] = []
        while self.idle and self.waiting:
            run, reason = self.head(now_ns)
            if reason is None and now_ns >= min(one.arrived_ns for one in run) + self.policy.delay_ns:
                reason = CloseReason.DELAY
            if reason is None:
                break
            runs.append(self.start([one.request.id for one in run], reason))
        return runs

    def start(self, ids: Sequence[int], reason: CloseReason) -> Run:
        for one in [one for request_id in ids for one in self.waiting if one.request.id == request_id]:
            self.remove(one, runs=True)
        return Run(self.idle.pop(), tuple(ids), reason)

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        commands = self.expire(now_ns)
        newcomer = None
        match event:
            case Submit() if self.stopping:
                self.left.append(event.id)
                return [*commands, Drop(event.id, DropReason.STOPPING)]
            case Submit():
                newcomer = self.add(event, now_ns)
            case Cancel():
                for one in [one for one in self.waiting if one.request.id == event.id]:
                    self.remove(one)
            case SlotIdle():
                self.idle.append(event.slot)
            case SlotRemoved():
                self.idle = [slot for slot in self.idle if slot != event.slot]
            case Stop():
                self.stopping = True
            case Tick():
                pass
        commands += self.expected_runs(now_ns)
        if newcomer is not None and newcomer in self.waiting:
            size_max = self.limits(newcomer.level).size_max
            level = [one for one in self.in_order() if one.level == newcomer.level]
            if size_max and len(level) > size_max:
                held = Counter(one.request.flow for one in level)
                most = max(held[flow] / flow.weight for flow in held)
                loser = newcomer
                own = newcomer.request.flow
                if held[own] / own.weight < most:
                    flows = [
                        one.request.flow for one in level if held[one.request.flow] / one.request.flow.weight == most
                    ]
                    candidates = {[one for one in level if one.request.flow == flow][-1].request.id for flow in flows}
                    assert self.dropped in candidates, "another flow than one that has most lost a request"
                    loser = next(one for one in level if one.request.id == self.dropped)
                self.remove(loser)
                commands.append(Drop(loser.request.id, DropReason.QUEUE_FULL))
                commands += self.expected_runs(now_ns)
        return commands

    def wake_ns(self, now_ns: int) -> int | None:
        times = [one.deadline_ns for one in self.waiting if one.deadline_ns is not None]
        due_ns = self.due_ns(now_ns)
        return min(times if due_ns is None else [*times, due_ns], default=None)


limits_strategy = st.builds(
    QueueLimits,
    size_max=st.sampled_from([0, 0, 1, 3]),
    timeout_ns=st.sampled_from([0, 0, 3_000, 20_000]),
    timeout_override=st.booleans(),
    delay_expired=st.booleans(),
)


@st.composite
def policies(draw: st.DrawFn) -> BatchPolicy:
    levels = draw(st.sampled_from([0, 0, 3]))
    size_max = draw(st.sampled_from([4, 1, 2, 5, 6, 16]))
    return BatchPolicy(
        size_max=size_max,
        preferred_sizes=tuple(draw(st.lists(st.integers(2, 9), max_size=2))),
        delay_ns=draw(st.sampled_from([0, 1_000, 7_000, 7_000])),
        priority_levels=levels,
        default_level=min(levels, 2),
        limits=draw(limits_strategy),
        level_limits=((1, draw(limits_strategy)),) if levels else (),
        adapt_delay=False,
    )


# What happens (weighted), a number that the step uses as it likes, and how much time passes before (-1: until wake_at).
# The first of each list is what a failure shrinks to.
KINDS = ["tick", "tick", *["submit"] * 8, *["finish"] * 4, "cancel", "gone", "stop"]
steps = st.tuples(
    st.sampled_from(KINDS), st.integers(0, 99), st.sampled_from([-1, -1, 0, 0, 1, 499, 1_000, 2_500, 9_000])
)
requests = st.tuples(
    st.sampled_from([1, 1, 1, 2, 3, 7]), st.sampled_from("aaab"), st.integers(0, 4), st.sampled_from([0, 0, 2, 5, 50])
)


FLOWS = [Flow("a"), Flow("b", 3), Flow("c")]
flows = st.lists(st.sampled_from([0, 0, 1, 2]), min_size=60, max_size=60)


class Traffic:
    """Turns random steps into events that a correct shell could send."""

    def __init__(self, flows: Sequence[int] = ()) -> None:
        self.busy = list(range(SLOTS))
        self.submitted = 0
        self.flows = flows

    def event(self, kind: str, number: int, request: tuple[int, str, int, int]) -> Event:
        match kind:
            case "submit":
                self.submitted += 1
                flow = FLOWS[self.flows[self.submitted % len(self.flows)]] if self.flows else NO_FLOW
                return Submit(self.submitted, *request, flow)
            case "finish" if self.busy:
                return SlotIdle(self.busy.pop(number % len(self.busy)))
            case "cancel":
                return Cancel(number % (self.submitted + 1))
            case "gone":
                slot = number % SLOTS
                self.busy = sorted({*self.busy, slot})
                return SlotRemoved(slot)
            case "stop" if number > 90:
                return Stop()
            case _:
                return Tick()


def check(
    scheduler: Scheduler,
    model: Model,
    script: list[tuple[tuple[str, int, int], tuple[int, str, int, int]]],
    flows: Sequence[int] = (),
) -> None:
    traffic = Traffic(flows)
    now_ns = 1_000
    for (kind, number, passes_ns), request in script:
        wake_ns = scheduler.wake_at()
        now_ns = max(now_ns, wake_ns or 0) if passes_ns < 0 else now_ns + passes_ns
        event = traffic.event(kind, number, request)

        commands = scheduler.handle(event, now_ns)

        full = [each.id for each in commands if isinstance(each, Drop) and each.reason is DropReason.QUEUE_FULL]
        model.dropped = full[0] if full else 0
        assert commands == model.handle(event, now_ns)
        assert scheduler.queued == len(model.waiting)
        assert scheduler.wake_at() == model.wake_ns(now_ns)
        traffic.busy += [command.slot for command in commands if isinstance(command, Run)]
    # Empty it: the remaining requests run, and then every id has left exactly once.
    for _ in range(len(model.waiting) + 1):
        ending: list[Event] = [Stop(), *(SlotIdle(slot) for slot in traffic.busy)]
        for event in ending:
            assert scheduler.handle(event, now_ns) == model.handle(event, now_ns)
        traffic.busy = [slot for slot in range(SLOTS) if slot not in model.idle]
    assert scheduler.queued == 0
    assert scheduler.wake_at() is None
    assert sorted(model.left) == list(range(1, traffic.submitted + 1))


# Left alone, hypothesis draws five steps on average, in which little happens.
scripts = st.lists(st.tuples(steps, requests), min_size=40, max_size=60)


@settings(max_examples=100, deadline=None)
@given(policy=policies(), script=scripts)
def test_the_dynamic_batcher_does_what_the_rules_say_to_the_nanosecond(
    policy: BatchPolicy, script: list[tuple[tuple[str, int, int], tuple[int, str, int, int]]]
) -> None:
    check(RecordedScheduler(DynamicBatcher(policy)), Model(policy, alone=False), script)


@settings(max_examples=100, deadline=None)
@given(policy=policies(), script=scripts, flows=flows)
def test_flows_share_by_weight_as_the_rules_say(
    policy: BatchPolicy, script: list[tuple[tuple[str, int, int], tuple[int, str, int, int]]], flows: list[int]
) -> None:
    check(RecordedScheduler(DynamicBatcher(policy)), Model(policy, alone=False), script, flows)


@settings(max_examples=100, deadline=None)
@given(limits=limits_strategy, script=scripts)
def test_the_default_scheduler_does_what_the_rules_say_to_the_nanosecond(
    limits: QueueLimits, script: list[tuple[tuple[str, int, int], tuple[int, str, int, int]]]
) -> None:
    check(
        RecordedScheduler(DynamicBatcher(BatchPolicy(limits=limits))),
        Model(BatchPolicy(limits=limits), alone=True),
        script,
    )


@pytest.mark.parametrize("delay_ns", [1_000, 7_000])
@settings(max_examples=100, deadline=None)
@given(script=scripts)
def test_an_adapting_batcher_sends_the_same_requests_in_the_same_order_and_never_later(
    delay_ns: int, script: list[tuple[tuple[str, int, int], tuple[int, str, int, int]]]
) -> None:
    batcher = RecordedScheduler(DynamicBatcher(BatchPolicy(size_max=4, delay_ns=delay_ns)))
    waiting: dict[int, tuple[Submit, int]] = {}
    traffic = Traffic()
    idle: set[int] = set()
    now_ns = 1_000
    for (kind, number, passes_ns), request in script:
        wake_ns = batcher.wake_at()
        now_ns = max(now_ns, wake_ns or 0) if passes_ns < 0 else now_ns + passes_ns
        if wake_ns is not None and wake_ns < now_ns:
            now_ns = wake_ns  # a shell that keeps its promise
        event = traffic.event("tick" if kind == "stop" else kind, number, request)
        match event:
            case Submit():
                waiting[event.id] = (event, now_ns)
            case Cancel():
                waiting.pop(event.id, None)
            case SlotIdle():
                idle.add(event.slot)
            case SlotRemoved():
                idle.discard(event.slot)
            case _:
                pass

        for command in batcher.handle(event, now_ns):
            assert isinstance(command, Run)
            assert command.slot in idle
            idle.remove(command.slot)
            traffic.busy.append(command.slot)
            assert list(command.ids) == list(waiting)[: len(command.ids)]
            batch = [waiting.pop(request_id) for request_id in command.ids]
            assert len({one.shape_key for one, _ in batch}) == 1
            assert len(batch) == 1 or sum(one.batch_size for one, _ in batch) <= 4

        assert batcher.queued == len(waiting)
        if idle and waiting:  # no request waits longer than the delay while a slot is idle
            assert now_ns < min(arrived_ns for _, arrived_ns in waiting.values()) + delay_ns
            assert batcher.wake_at() == min(arrived_ns for _, arrived_ns in waiting.values()) + delay_ns
