"""The deadlock detector rejects the calls that would deadlock, and no others; compared with brute force."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.errors import Code, ServingError
from charonia.core.request import CallFrame
from charonia.server.execution.deadlock import DeadlockDetector, InstancePool, WaitingRequest


def frame(model: str, instance: int = 0, parent: CallFrame | None = None) -> CallFrame:
    return CallFrame(model, "1", f"{model}_{instance}", parent)


def test_a_model_with_one_instance_cannot_call_itself() -> None:
    detector, a = DeadlockDetector(), InstancePool("a", 1)
    caller = frame("a")
    detector.occupy(caller, a, 0)

    with pytest.raises(ServingError) as caught:
        detector.submit(caller, a)

    assert caught.value.code is Code.UNAVAILABLE
    assert "(a -> a)" in caught.value.message
    assert "more instances" in caught.value.hint


def test_a_model_with_two_instances_can_call_itself_once() -> None:
    detector, a = DeadlockDetector(), InstancePool("a", 2)
    first = frame("a", 0)
    detector.occupy(first, a, 0)
    call = detector.submit(first, a)
    detector.run(call, 1)
    second = frame("a", 1, first)
    detector.occupy(second, a, 1)

    with pytest.raises(ServingError, match=r"\(a -> a -> a\)"):
        detector.submit(second, a)

    detector.batch_ended(second)
    detector.end(call)
    detector.batch_ended(first)
    assert len(detector) == 0


def test_a_circle_over_another_model_is_refused_and_named() -> None:
    detector, a, b = DeadlockDetector(), InstancePool("a", 1), InstancePool("b", 1)
    first = frame("a")
    detector.occupy(first, a, 0)
    detector.run(detector.submit(first, b), 0)
    second = frame("b", 0, first)
    detector.occupy(second, b, 0)

    with pytest.raises(ServingError, match=r"\(a -> b -> a\)"):
        detector.submit(second, a)


def test_of_two_chains_that_meet_the_one_that_closes_the_circle_is_refused_and_the_other_goes_on() -> None:
    detector, a, b = DeadlockDetector(), InstancePool("a", 2), InstancePool("b", 2)
    outer = [frame("a", instance) for instance in range(2)]
    inner = [frame("b", instance, outer[instance]) for instance in range(2)]
    to_b = []
    for instance in range(2):
        detector.occupy(outer[instance], a, instance)
        to_b.append(detector.submit(outer[instance], b))
        detector.run(to_b[instance], instance)
    detector.occupy(inner[0], b, 0)
    waits = detector.submit(inner[0], a)
    detector.occupy(inner[1], b, 1)
    with pytest.raises(ServingError, match=r"\(a -> b -> a\)"):
        detector.submit(inner[1], a)

    detector.batch_ended(inner[1])
    detector.end(to_b[1])
    detector.batch_ended(outer[1])
    detector.run(waits, 1)
    detector.end(waits)
    detector.end(waits)


def test_a_circle_that_the_chain_itself_does_not_show_is_followed_through_the_others() -> None:
    detector, a, b = DeadlockDetector(), InstancePool("a", 1), InstancePool("b", 1)
    of_a, of_b = frame("a"), frame("b")
    detector.occupy(of_a, a, 0)
    detector.occupy(of_b, b, 0)
    detector.submit(of_b, a)

    with pytest.raises(ServingError, match=r"\(a -> b -> a\)"):
        detector.submit(of_a, b)


def test_an_ensemble_passes_on_who_waits() -> None:
    detector, a, b = DeadlockDetector(), InstancePool("a", 1), InstancePool("b", 1)
    of_a = frame("a")
    detector.occupy(of_a, a, 0)
    step = CallFrame("ensemble", "1", "", of_a)
    detector.run(detector.submit(step, b), 0)
    of_b = frame("b", 0, step)
    detector.occupy(of_b, b, 0)

    with pytest.raises(ServingError, match=r"\(a -> ensemble -> b -> a\)"):
        detector.submit(of_b, a)


def test_a_caller_that_occupies_nothing_never_closes_a_circle() -> None:
    detector, a = DeadlockDetector(), InstancePool("a", 1)
    of_a = frame("a")
    detector.occupy(of_a, a, 0)

    call = detector.submit(CallFrame("a", "1"), a)

    assert call.waiter is None
    detector.run(call, 0)
    detector.end(call)


def test_a_request_that_has_left_its_instance_open_waits_for_none() -> None:
    detector, a, b = DeadlockDetector(), InstancePool("a", 1), InstancePool("b", 1)
    of_a = frame("a")
    detector.occupy(of_a, a, 0)
    streaming = detector.submit(of_a, b)
    detector.run(streaming, 0)
    detector.leave(streaming)
    of_b = frame("b", 0)
    detector.occupy(of_b, b, 0)

    call = detector.submit(of_b, a)  # a's batch gets the rest of its responses from a thread of b

    assert call.waiter is b.busy[0]
    assert call.waiter.requests == {call}


def test_calls_of_a_batch_that_is_over_block_no_instance() -> None:
    detector, a, b = DeadlockDetector(), InstancePool("a", 1), InstancePool("b", 1)
    of_a = frame("a")
    detector.occupy(of_a, a, 0)
    left = detector.submit(of_a, b)
    detector.batch_ended(of_a)
    of_b = frame("b", 0)
    detector.occupy(of_b, b, 0)

    call = detector.submit(of_b, a)

    assert left.waiter is None
    assert call.waiter is b.busy[0]
    assert a.busy == {}
    detector.run(left, 0)
    detector.end(left)
    assert len(detector) == 1


@dataclass
class Batch:
    """A batch of one request on an instance, in the brute-force model."""

    model: int
    instance: int
    request: "Request | None"
    frame: CallFrame
    calls: list["Request"] = field(default_factory=list)
    has_called: bool = False


@dataclass
class Request:
    """A nested request; it waits for an instance until `batch` is set."""

    model: int
    caller: Batch
    call: WaitingRequest
    batch: Batch | None = None
    is_over: bool = False


class World:
    """Models, instances and first-come first-served queues, beside the detector."""

    def __init__(self, sizes: list[int]) -> None:
        self.detector = DeadlockDetector()
        self.pools = [InstancePool(f"m{index}", size) for index, size in enumerate(sizes)]
        self.instances: list[list[Batch | None]] = [[None] * size for size in sizes]
        self.queues: list[list[Request | None]] = [[] for _ in sizes]  # None: a client's request
        self.refused = 0

    def batches(self) -> list[Batch]:
        return [batch for instances in self.instances for batch in instances if batch is not None]

    def arrive(self, model: int) -> None:
        self.queues[model].append(None)
        self._dispatch(model)

    def call(self, batch: Batch, model: int) -> None:
        if not batch.has_called:
            batch.has_called = True
            self.detector.occupy(batch.frame, self.pools[batch.model], batch.instance)
        expected = self._would_be_stuck(batch, model)
        try:
            call = self.detector.submit(batch.frame, self.pools[model])
        except ServingError:
            assert expected, "refused, although it could have been answered"
            self.refused += 1
            return
        assert not expected, "accepted, although it can never be answered"
        request = Request(model, batch, call)
        batch.calls.append(request)
        self.queues[model].append(request)
        self._dispatch(model)

    def finish(self, batch: Batch) -> None:
        self.instances[batch.model][batch.instance] = None
        if batch.has_called:
            self.detector.batch_ended(batch.frame)
        if batch.request is not None:
            batch.request.is_over = True
            batch.request.caller.calls.remove(batch.request)
            self.detector.end(batch.request.call)
        self._dispatch(batch.model)

    def can_finish(self) -> list[Batch]:
        return [batch for batch in self.batches() if not batch.calls]

    def _dispatch(self, model: int) -> None:
        for instance, running in enumerate(self.instances[model]):
            if running is None and self.queues[model]:
                request = self.queues[model].pop(0)
                parent = request.caller.frame if request is not None else None
                batch = Batch(model, instance, request, frame(f"m{model}", instance, parent))
                if request is not None:
                    request.batch = batch
                    self.detector.run(request.call, instance)
                self.instances[model][instance] = batch

    def _would_be_stuck(self, caller: Batch, model: int) -> bool:
        """Let every batch that waits for nothing finish, again and again, with the new request at the queue's end."""
        busy = [list(instances) for instances in self.instances]
        queues: list[list[tuple[Batch | None, bool]]] = [
            [(request.caller if request is not None else None, False) for request in queue] for queue in self.queues
        ]
        queues[model].append((caller, True))
        open_calls = {id(batch): len(batch.calls) for batch in self.batches()}
        open_calls[id(caller)] += 1
        is_new_answered = False
        progress = True
        while progress:
            progress = False
            for index, instances in enumerate(busy):
                for instance, running in enumerate(instances):
                    if running is not None and open_calls[id(running)] == 0:
                        instances[instance] = None
                        progress = True
                        if running.request is not None:
                            open_calls[id(running.request.caller)] -= 1
                    if instances[instance] is None and queues[index]:
                        waiter, is_new = queues[index].pop(0)  # it runs, makes no calls and is over
                        progress = True
                        is_new_answered = is_new_answered or is_new
                        if waiter is not None:
                            open_calls[id(waiter)] -= 1
        return not is_new_answered


@settings(max_examples=150)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_a_call_is_refused_exactly_when_nothing_that_can_happen_would_answer_it(
    sizes: list[int], data: st.DataObject
) -> None:
    world = World(sizes)
    models = st.integers(0, len(sizes) - 1)
    for _ in range(data.draw(st.integers(1, 30))):
        batches = world.batches()
        action = data.draw(st.sampled_from(["arrive", "call", "call", "call", "finish"]))
        if action == "arrive" or not batches:
            world.arrive(data.draw(models))
        elif action == "call":
            world.call(data.draw(st.sampled_from(batches)), data.draw(models))
        elif world.can_finish():
            world.finish(data.draw(st.sampled_from(world.can_finish())))

    while world.batches():
        able = world.can_finish()
        assert able, "every batch waits for another one"
        world.finish(able[0])
    assert all(not queue for queue in world.queues)
    assert len(world.detector) == 0
