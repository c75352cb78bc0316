"""Who waits for whom: calls that would wait for ever are refused, and no others; shown against brute force."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.caller import CallFrame
from charonia.core.errors import Code, ServingError
from charonia.server.execution.calls import Call, CallGraph, Pool


def frame(model: str, lane: int = 0, parent: CallFrame | None = None) -> CallFrame:
    return CallFrame(model, "1", f"{model}_{lane}", parent)


def test_a_model_with_one_instance_cannot_call_itself() -> None:
    graph, a = CallGraph(), Pool("a", 1)
    caller = frame("a")
    graph.occupy(caller, a, 0)

    with pytest.raises(ServingError) as caught:
        graph.submit(caller, a)

    assert caught.value.code is Code.UNAVAILABLE
    assert "(a -> a)" in caught.value.message
    assert "more instances" in caught.value.hint


def test_a_model_with_two_instances_can_call_itself_once() -> None:
    graph, a = CallGraph(), Pool("a", 2)
    first = frame("a", 0)
    graph.occupy(first, a, 0)
    call = graph.submit(first, a)
    graph.run(call, 1)
    second = frame("a", 1, first)
    graph.occupy(second, a, 1)

    with pytest.raises(ServingError, match=r"\(a -> a -> a\)"):
        graph.submit(second, a)

    graph.vacate(second)
    graph.end(call)
    graph.vacate(first)
    assert len(graph) == 0


def test_a_circle_over_another_model_is_refused_and_named() -> None:
    graph, a, b = CallGraph(), Pool("a", 1), Pool("b", 1)
    first = frame("a")
    graph.occupy(first, a, 0)
    graph.run(graph.submit(first, b), 0)
    second = frame("b", 0, first)
    graph.occupy(second, b, 0)

    with pytest.raises(ServingError, match=r"\(a -> b -> a\)"):
        graph.submit(second, a)


def test_of_two_chains_that_meet_the_one_that_closes_the_circle_is_refused_and_the_other_goes_on() -> None:
    graph, a, b = CallGraph(), Pool("a", 2), Pool("b", 2)
    outer = [frame("a", lane) for lane in range(2)]
    inner = [frame("b", lane, outer[lane]) for lane in range(2)]
    to_b = []
    for lane in range(2):
        graph.occupy(outer[lane], a, lane)
        to_b.append(graph.submit(outer[lane], b))
        graph.run(to_b[lane], lane)
    graph.occupy(inner[0], b, 0)
    waits = graph.submit(inner[0], a)
    graph.occupy(inner[1], b, 1)
    with pytest.raises(ServingError, match=r"\(a -> b -> a\)"):
        graph.submit(inner[1], a)

    graph.vacate(inner[1])
    graph.end(to_b[1])
    graph.vacate(outer[1])
    graph.run(waits, 1)
    graph.end(waits)
    graph.end(waits)


def test_a_circle_that_the_chain_itself_does_not_show_is_followed_through_the_others() -> None:
    graph, a, b = CallGraph(), Pool("a", 1), Pool("b", 1)
    of_a, of_b = frame("a"), frame("b")
    graph.occupy(of_a, a, 0)
    graph.occupy(of_b, b, 0)
    graph.submit(of_b, a)

    with pytest.raises(ServingError, match=r"\(a -> b -> a\)"):
        graph.submit(of_a, b)


def test_an_ensemble_passes_on_who_waits() -> None:
    graph, a, b = CallGraph(), Pool("a", 1), Pool("b", 1)
    of_a = frame("a")
    graph.occupy(of_a, a, 0)
    step = CallFrame("ensemble", "1", "", of_a)
    graph.run(graph.submit(step, b), 0)
    of_b = frame("b", 0, step)
    graph.occupy(of_b, b, 0)

    with pytest.raises(ServingError, match=r"\(a -> ensemble -> b -> a\)"):
        graph.submit(of_b, a)


def test_a_caller_that_occupies_nothing_never_closes_a_circle() -> None:
    graph, a = CallGraph(), Pool("a", 1)
    of_a = frame("a")
    graph.occupy(of_a, a, 0)

    call = graph.submit(CallFrame("a", "1"), a)

    assert call.waiter is None
    graph.run(call, 0)
    graph.end(call)


def test_a_request_that_has_left_its_instance_open_waits_for_none() -> None:
    graph, a, b = CallGraph(), Pool("a", 1), Pool("b", 1)
    of_a = frame("a")
    graph.occupy(of_a, a, 0)
    streaming = graph.submit(of_a, b)
    graph.run(streaming, 0)
    graph.leave(streaming)
    of_b = frame("b", 0)
    graph.occupy(of_b, b, 0)

    graph.submit(of_b, a)  # a's batch gets the rest of its responses from a thread of b


def test_calls_of_a_batch_that_is_over_wait_on_for_nobody() -> None:
    graph, a, b = CallGraph(), Pool("a", 1), Pool("b", 1)
    of_a = frame("a")
    graph.occupy(of_a, a, 0)
    left = graph.submit(of_a, b)
    graph.vacate(of_a)
    of_b = frame("b", 0)
    graph.occupy(of_b, b, 0)

    graph.submit(of_b, a)

    graph.run(left, 0)
    graph.end(left)


@dataclass
class Batch:
    """A batch of one request on an instance, in the brute-force model."""

    model: int
    lane: int
    request: "Request | None"
    frame: CallFrame
    calls: list["Request"] = field(default_factory=list)
    has_called: bool = False


@dataclass
class Request:
    """A nested request; it waits for an instance until `batch` is set."""

    model: int
    caller: Batch
    call: Call
    batch: Batch | None = None
    is_over: bool = False


class World:
    """Models, instances and first-come first-served queues, beside the graph."""

    def __init__(self, sizes: list[int]) -> None:
        self.graph = CallGraph()
        self.pools = [Pool(f"m{index}", size) for index, size in enumerate(sizes)]
        self.lanes: list[list[Batch | None]] = [[None] * size for size in sizes]
        self.queues: list[list[Request | None]] = [[] for _ in sizes]  # None: a client's request
        self.refused = 0

    def batches(self) -> list[Batch]:
        return [batch for lanes in self.lanes for batch in lanes if batch is not None]

    def arrive(self, model: int) -> None:
        self.queues[model].append(None)
        self._dispatch(model)

    def call(self, batch: Batch, model: int) -> None:
        if not batch.has_called:
            batch.has_called = True
            self.graph.occupy(batch.frame, self.pools[batch.model], batch.lane)
        expected = self._would_be_stuck(batch, model)
        try:
            call = self.graph.submit(batch.frame, self.pools[model])
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
        self.lanes[batch.model][batch.lane] = None
        if batch.has_called:
            self.graph.vacate(batch.frame)
        if batch.request is not None:
            batch.request.is_over = True
            batch.request.caller.calls.remove(batch.request)
            self.graph.end(batch.request.call)
        self._dispatch(batch.model)

    def can_finish(self) -> list[Batch]:
        return [batch for batch in self.batches() if not batch.calls]

    def _dispatch(self, model: int) -> None:
        for lane, running in enumerate(self.lanes[model]):
            if running is None and self.queues[model]:
                request = self.queues[model].pop(0)
                parent = request.caller.frame if request is not None else None
                batch = Batch(model, lane, request, frame(f"m{model}", lane, parent))
                if request is not None:
                    request.batch = batch
                    self.graph.run(request.call, lane)
                self.lanes[model][lane] = batch

    def _would_be_stuck(self, caller: Batch, model: int) -> bool:
        """Let every batch that waits for nothing finish, again and again, with the new request at the queue's end."""
        busy = [list(lanes) for lanes in self.lanes]
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
            for index, lanes in enumerate(busy):
                for lane, running in enumerate(lanes):
                    if running is not None and open_calls[id(running)] == 0:
                        lanes[lane] = None
                        progress = True
                        if running.request is not None:
                            open_calls[id(running.request.caller)] -= 1
                    if lanes[lane] is None and queues[index]:
                        waiter, is_new = queues[index].pop(0)  # it runs, calls nobody and is over
                        progress = True
                        is_new_answered = is_new_answered or is_new
                        if waiter is not None:
                            open_calls[id(waiter)] -= 1
        return not is_new_answered


@settings(max_examples=300)
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
    assert len(world.graph) == 0
