"""The dynamic batcher with a batching strategy of the model's own."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.server.scheduling.api import (
    BatchPolicy,
    Cancel,
    CloseReason,
    Command,
    Drop,
    DropReason,
    Run,
    SlotIdle,
    Stop,
    Submit,
    Tick,
)
from charonia.server.scheduling.dynamic import DynamicBatcher, JoinDecision, all_of

MS = 1_000_000


class Recorder:
    """A strategy that decides by a function of the ids in the batch and the next one; it counts begins and ends."""

    def __init__(self, decide: Callable[[list[int], int], JoinDecision]) -> None:
        self.decide = decide
        self.begun: list[Recorded] = []

    def __call__(self) -> "Recorded":
        self.begun.append(Recorded(self))
        return self.begun[-1]


class Recorded:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.ids: list[int] = []
        self.ends = 0

    def take(self, request_id: int) -> JoinDecision:
        assert not self.ends
        verdict = self.recorder.decide(self.ids, request_id)
        if verdict is JoinDecision.JOINS or not self.ids:
            self.ids.append(request_id)
        return verdict

    def end(self) -> None:
        self.ends += 1


def same_parity(ids: list[int], request_id: int) -> JoinDecision:
    return JoinDecision.JOINS if all(other % 2 == request_id % 2 for other in ids) else JoinDecision.STAYS_OUT


def batcher(strategy: Recorder, delay_ms: int = 5) -> DynamicBatcher:
    policy = BatchPolicy(size_max=4, delay_ns=delay_ms * MS, adapt_delay=False)
    return DynamicBatcher(policy, strategy)


def run_of(commands: list[Command]) -> list[tuple[tuple[int, ...], CloseReason]]:
    return [(command.ids, command.reason) for command in commands if isinstance(command, Run)]


def test_a_request_that_the_strategy_keeps_out_closes_the_batch() -> None:
    strategy = Recorder(same_parity)
    of = batcher(strategy)
    of.handle(SlotIdle(0), 0)
    of.handle(Submit(2), 0)
    of.handle(Submit(4), 0)

    assert run_of(of.handle(Submit(5), 0)) == [((2, 4), CloseReason.STRATEGY)]
    assert run_of(of.handle(SlotIdle(0), 0)) == []  # 5 waits for others
    assert run_of(of.handle(Tick(), 5 * MS)) == [((5,), CloseReason.DELAY)]


def test_the_first_request_joins_the_batch_regardless_of_the_strategy() -> None:
    of = batcher(Recorder(lambda ids, request_id: JoinDecision.STAYS_OUT), delay_ms=0)
    of.handle(SlotIdle(0), 0)

    assert run_of(of.handle(Submit(1), 0)) == [((1,), CloseReason.QUEUE_EMPTY)]


def test_a_request_on_which_the_strategy_fails_is_dropped_and_the_others_run() -> None:
    strategy = Recorder(lambda ids, request_id: JoinDecision.FAILED if request_id == 2 else JoinDecision.JOINS)
    of = batcher(strategy, delay_ms=0)
    for request_id in (1, 2, 3):
        assert of.handle(Submit(request_id), 0) == []

    commands = of.handle(SlotIdle(0), 0)

    assert commands == [Drop(2, DropReason.STRATEGY_FAILED), Run(0, (1, 3), CloseReason.QUEUE_EMPTY)]
    assert of.queued == 0


def test_a_lone_request_on_which_the_strategy_fails_is_dropped() -> None:
    of = batcher(Recorder(lambda ids, request_id: JoinDecision.FAILED))
    of.handle(SlotIdle(0), 0)

    assert of.handle(Submit(1), 0) == [Drop(1, DropReason.STRATEGY_FAILED)]
    assert of.wake_at() is None


def test_the_batch_is_ended_when_it_is_sent_and_when_it_is_gathered_anew() -> None:
    strategy = Recorder(same_parity)
    of = batcher(strategy)
    of.handle(SlotIdle(0), 0)
    of.handle(Submit(2), 0)
    of.handle(Submit(4), 0)
    of.handle(Cancel(2), 0)
    of.handle(Stop(), 0)

    assert [(each.ids, each.ends) for each in strategy.begun] == [([2, 4], 1), ([4], 1)]


EVENTS = st.lists(st.sampled_from(["submit", "idle", "cancel", "tick"]), max_size=60)


@settings(max_examples=150)
@given(EVENTS, st.integers(1, 7), st.sampled_from([0, 2]))
def test_every_request_leaves_once_and_every_gathering_ends_once(names: list[str], modulus: int, delay_ms: int) -> None:
    def decide(ids: list[int], request_id: int) -> JoinDecision:
        if request_id % 5 == 4:
            return JoinDecision.FAILED
        return JoinDecision.JOINS if not ids or request_id % modulus == ids[0] % modulus else JoinDecision.STAYS_OUT

    strategy = Recorder(decide)
    of = batcher(strategy, delay_ms)
    left: list[int] = []
    idle: set[int] = set()
    sent = now = 0

    def note(commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Run):
                assert all(request_id % modulus == command.ids[0] % modulus for request_id in command.ids)
                idle.discard(command.slot)
                left.extend(command.ids)
            else:
                assert command.id % 5 == 4
                left.append(command.id)

    for name in [*names, "idle", "stop", "idle"] + ["idle"] * len(names):
        now += MS
        if name == "submit":
            sent += 1
            note(of.handle(Submit(sent), now))
        elif name == "idle":
            if 0 not in idle:
                idle.add(0)
                note(of.handle(SlotIdle(0), now))
        elif name == "cancel" and sent and sent not in left:
            left.append(sent)
            note(of.handle(Cancel(sent), now))
        elif name == "stop":
            note(of.handle(Stop(), now))
        else:
            note(of.handle(Tick(), now))

    assert sorted(left) == list(range(1, sent + 1))
    assert all(each.ends == 1 for each in strategy.begun)


def test_a_request_joins_where_all_of_several_strategies_let_it() -> None:
    small = Recorder(lambda ids, new: JoinDecision.JOINS if len(ids) < 2 else JoinDecision.STAYS_OUT)
    both = all_of([Recorder(same_parity), small])
    assert both is not None

    gathering = both()

    assert [gathering.take(new) for new in (2, 3, 4)] == [
        JoinDecision.JOINS,
        JoinDecision.STAYS_OUT,
        JoinDecision.JOINS,
    ]
    gathering.end()
    assert small.begun[0].ends == 1
    assert all_of([]) is None
    assert all_of([small]) is small
