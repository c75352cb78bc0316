"""The runner of sequence models with a scripted instance: controls, states, padding, what leaves when, hand-over."""

import asyncio
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.support.recorded import RecordedScheduler
from tests.support.scripted import ScriptedInstance, echo

from charonia.clock import now_ns
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal, unavailable
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest, RequestedOutput
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.server.backends.api import Execution, Outputs, Placement, Rescheduled
from charonia.server.execution.executor import AsyncExecutor, BlockingExecutor
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.loader import LoadedVersion
from charonia.server.scheduling.api import StopNewSequences
from charonia.server.sequences.models import hand_over, make_sequence_runner, open_sequences, sequences_of
from charonia.server.sequences.runner import SequenceRunner
from charonia.server.sequences.tensors import initial_states

CONFIG = """
name: "m" max_batch_size: 2
input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  %s
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
}
"""
STATE = "state { input_name: 'PAST' output_name: 'NEXT' data_type: TYPE_INT32 dims: [ %s ] }"


def config(batching: str = "oldest { }", more: str = "") -> ModelConfig:
    return parse(CONFIG % batching + more)


BACKENDS = Backends({}, {}, observed=RecordedScheduler)


class SequenceInstance(ScriptedInstance):
    def keep_warm(self, batches: Sequence[Sequence[InferRequest]]) -> None:
        """Nothing to warm up."""

    def when_lost(self, lost: Callable[[], None]) -> None:
        self.lost = lost

    @property
    def given(self) -> list[dict[str, Any]]:
        """The inputs of the oldest batch, as lists, by request."""
        return [{n: t.array.reshape(-1).tolist() for n, t in r.inputs.items()} for r in self.batches[0][0]]


def with_states(request: InferRequest, **states: list[int]) -> Outputs:
    return echo(request, *(Tensor(n, DataType.INT32, np.array([v], np.int32)) for n, v in states.items()))


class Bench:
    instances: list[SequenceInstance]
    runner: SequenceRunner

    def __init__(
        self, given: ModelConfig, instances: int = 1, *, version: str = "1", shares: "Bench | None" = None
    ) -> None:
        self.instances = [SequenceInstance() for _ in range(instances)] if shares is None else shares.instances
        executors = (
            list(shares.runner.instances.values())
            if shares is not None
            else [
                AsyncExecutor(each, Placement(f"m_{i}", InstanceKind.KIND_CPU)) for i, each in enumerate(self.instances)
            ]
        )
        self.runner = make_sequence_runner(
            given,
            version,
            initial_states(given, {}),
            executors=executors,
            labels={},
            shared=BACKENDS,
        )
        self.outcomes: dict[str, list[tuple[object, bool]]] = {}
        self.tickets: dict[str, Any] = {}
        self.order: list[str] = []

    @property
    def instance(self) -> SequenceInstance:
        return self.instances[0]

    def send(self, id: str, key: int | str = 1, values: Sequence[int] = (1,), *, flags: int = 0, **more: Any) -> None:
        def reply(outcome: object, final: bool) -> None:
            self.outcomes.setdefault(id, []).append((outcome, final))
            self.order.append(id)

        tensor = Tensor("IN", DataType.INT32, np.array([values], np.int32))
        request = InferRequest("m", {"IN": tensor}, id=id, correlation_id=key, flags=flags, **more)
        self.tickets[id] = self.runner.submit(request, reply)

    def code(self, id: str) -> Code:
        ((outcome, final),) = self.outcomes[id]
        assert isinstance(outcome, ServingError)
        assert final
        return outcome.code

    def is_answered(self, id: str) -> bool:
        return [isinstance(outcome, InferResponse) and final for outcome, final in self.outcomes.get(id, [])] == [True]


async def test_what_is_dropped_for_another_reason_than_load_does_not_count_as_rejected() -> None:
    bench = Bench(config())
    bench.send("stray", 7)
    bench.send("a", 1, flags=SEQUENCE_START)
    bench.send("b", 1)
    bench.send("c", 1)
    bench.tickets["b"].cancel()

    assert [bench.code(name) for name in ("stray", "b", "c")] == [
        Code.INVALID_ARG,
        Code.CANCELLED,
        Code.CANCELLED,
    ]
    counts = {reason.value: count for reason, count in bench.runner.metrics.failures.items() if count}
    assert counts == {"OTHER": 1, "CANCELED": 2}


async def settle() -> None:
    """Let what was put off happen: a slot of a batching model is offered on the next turn of the loop."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_controls_go_with_requests_and_padding_with_rows() -> None:
    bench = Bench(config("direct { }"))
    bench.send("a", 1, [5, 6], flags=SEQUENCE_START)
    bench.send("b", "two", [7, 8], flags=SEQUENCE_START)
    assert bench.instance.given == [{"IN": [5, 6], "START": [1], "READY": [True]}]
    bench.instance.finish()
    await settle()

    assert bench.instance.given == [
        {"IN": [0, 0], "START": [0], "READY": [False]},
        {"IN": [7, 8], "START": [1], "READY": [True]},
    ]
    sink = bench.instance.batches[0][1]
    assert sink.is_cancelled(0)
    assert not sink.is_cancelled(1)
    bench.instance.finish()
    assert bench.is_answered("a")
    assert bench.is_answered("b")
    assert bench.runner.metrics.statistics.inference_count == 2
    assert bench.runner.metrics.statistics.execution_count == 2


async def test_a_state_goes_from_request_to_request_also_when_the_client_has_gone() -> None:
    bench = Bench(config("oldest { } " + STATE % 2))
    bench.send("a", flags=SEQUENCE_START)
    requests, _ = bench.instance.batches[0]
    assert [output.name for output in requests[0].outputs] == ["OUT", "NEXT"]
    bench.tickets["a"].cancel()
    assert bench.code("a") is Code.CANCELLED
    bench.instance.finish(with_states(requests[0], NEXT=[3, 4]))
    await settle()
    bench.send("b", outputs=(RequestedOutput("OUT"),))

    assert bench.instance.given[0]["PAST"] == [3, 4]
    bench.instance.finish(with_states(bench.instance.batches[0][0][0], NEXT=[5, 6]))
    ((outcome, _),) = bench.outcomes["b"]
    assert isinstance(outcome, InferResponse)
    assert [tensor.name for tensor in outcome.outputs] == ["OUT"]


async def test_a_request_that_fails_leaves_the_state_as_it_was() -> None:
    bench = Bench(config("oldest { } " + STATE % 1))
    bench.send("a", flags=SEQUENCE_START)
    bench.instance.finish(with_states(bench.instance.batches[0][0][0], NEXT=[9]))
    await settle()
    bench.send("b")
    bench.instance.finish(internal("no"))
    await settle()
    bench.send("c")

    assert bench.instance.given[0]["PAST"] == [9]
    bench.instance.finish(error=unavailable("the worker has gone"))
    assert (bench.code("b"), bench.code("c")) == (Code.INTERNAL, Code.UNAVAILABLE)


async def test_states_of_sequences_that_are_over_are_forgotten_and_are_no_views() -> None:
    bench = Bench(config("oldest { } " + STATE % 1))
    bench.send("a", flags=SEQUENCE_START)
    whole = np.arange(10, dtype=np.int32)
    outputs = with_states(bench.instance.batches[0][0][0])
    outputs.tensors.append(Tensor("NEXT", DataType.INT32, whole[3:4].reshape(1, 1)))
    bench.instance.finish(outputs)
    await settle()
    ((kept,),) = [states.values() for states in bench.runner._states.values()]
    assert kept.tolist() == [[3]]
    assert kept.base is None
    bench.send("b", flags=SEQUENCE_END)
    bench.instance.finish()
    await settle()

    assert bench.runner._states == {}


async def test_states_of_different_sizes_do_not_share_a_batch() -> None:
    bench = Bench(config("oldest { } " + STATE % -1))
    bench.send("a", 1, flags=SEQUENCE_START)
    bench.instance.finish(with_states(bench.instance.batches[0][0][0], NEXT=[1, 2, 3]))
    await settle()
    bench.send("x", 9, flags=SEQUENCE_START)
    bench.send("b", 1)
    bench.send("c", 2, flags=SEQUENCE_START)
    bench.instance.finish(with_states(bench.instance.batches[0][0][0], NEXT=[1]))
    await settle()

    assert [given["PAST"] for given in bench.instance.given] == [[1, 2, 3]]


async def test_a_cancelled_request_takes_those_that_wait_along() -> None:
    bench = Bench(config())
    bench.send("a", flags=SEQUENCE_START)
    bench.send("b")
    bench.send("c")
    bench.tickets["b"].cancel()
    assert (bench.code("b"), bench.code("c")) == (Code.CANCELLED, Code.CANCELLED)
    bench.instance.finish()
    await settle()
    bench.send("d")

    assert bench.is_answered("a")
    assert bench.code("d") is Code.INVALID_ARG
    assert sequences_of(bench.runner, "m").ended == {"cancelled": 1}
    assert bench.runner.in_flight == 0


async def test_a_sequence_whose_process_has_ended_ends_with_an_error_that_says_so() -> None:
    bench = Bench(config())
    bench.send("a", flags=SEQUENCE_START)
    bench.instance.finish()
    await settle()
    bench.instance.lost()

    bench.send("b")
    bench.send("c")
    bench.send("d", flags=SEQUENCE_START)
    bench.instance.finish()

    ((error, _),) = bench.outcomes["b"]
    assert str(error).startswith("[request id: b] sequence 1 of model 'm' is over: the process that remembered it")
    assert (bench.code("b"), bench.code("c")) == (Code.INTERNAL, Code.INVALID_ARG)
    assert bench.is_answered("d")
    assert sequences_of(bench.runner, "m").ended == {"lost": 1}


SURVIVES = "parameters { key: 'SEQUENCES_SURVIVE_RESTART' value { string_value: '%s' } }"


@pytest.mark.parametrize(("batching", "more"), [(STATE % "1", ""), ("oldest { }", SURVIVES % "yes")])
async def test_a_sequence_that_its_process_need_not_remember_goes_on(batching: str, more: str) -> None:
    bench = Bench(config(batching, more))
    assert not hasattr(bench.instance, "lost")


async def test_runners_that_share_an_instance_do_not_share_its_rows() -> None:
    before = Bench(config("direct { }"))
    before.send("a", 1, flags=SEQUENCE_START)
    before.instance.finish()
    await settle()
    after = Bench(config("direct { }"), shares=before)
    after.runner.follow(before.runner)

    for key in (2, 3):
        after.send(f"start{key}", key, [key], flags=SEQUENCE_START)
    assert [each["READY"] for each in after.instance.given] == [[False], [True]]  # the first row is sequence 1's
    after.instance.finish()
    await settle()
    assert not after.is_answered("start3")
    after.send("end", 1, flags=SEQUENCE_END)  # goes to the runner where it began
    after.instance.finish()
    await settle()

    assert before.runner.live == 0
    assert [each["IN"] for each in after.instance.given] == [[3]]
    after.instance.finish()
    assert after.is_answered("start3")
    assert after.runner.live == 2


async def test_the_parameter_of_sequences_that_survive_is_yes_or_no() -> None:
    with pytest.raises(ServingError, match="parameter SEQUENCES_SURVIVE_RESTART: expected yes or no, got 'maybe'"):
        Bench(config(more=SURVIVES % "maybe"))


async def test_the_reasons_of_refusals_have_their_codes() -> None:
    bench = Bench(parse("name: 'm' input { name: 'IN' data_type: TYPE_INT32 dims: [ 1, -1 ] } sequence_batching { }"))
    bench.send("a", 1, flags=SEQUENCE_START)
    bench.send("late", 2, flags=SEQUENCE_START, timeout_us=1)
    await asyncio.sleep(0.02)
    assert bench.code("late") is Code.UNAVAILABLE
    bench.send("none", 0, flags=SEQUENCE_START)
    assert bench.code("none") is Code.INVALID_ARG
    bench.runner._handle(StopNewSequences(), now_ns())
    bench.send("new", 3, flags=SEQUENCE_START)
    assert bench.code("new") is Code.UNAVAILABLE


async def test_with_preserve_ordering_answers_leave_in_the_order_in_which_requests_ran() -> None:
    bench = Bench(config("oldest { preserve_ordering: true }"), instances=2)
    for number in range(2):
        bench.send(f"start{number}", number + 1, flags=SEQUENCE_START)
    bench.instances[1].finish()
    assert bench.order == []
    bench.instances[0].finish()
    assert bench.order == ["start0", "start1"]
    await settle()
    bench.send("first", 1)
    bench.send("second", 2)
    bench.send("third", 2)
    bench.tickets["third"].cancel()
    bench.instances[1].finish()
    assert bench.order[2:] == ["third"]  # it never ran
    bench.tickets["first"].cancel()
    assert bench.order[3:] == ["first", "second"]


async def test_with_preserve_ordering_streams_wait_for_their_turn() -> None:
    decoupled = "model_transaction_policy { decoupled: true }"
    bench = Bench(config("oldest { preserve_ordering: true }", decoupled), instances=2)
    for number in range(2):
        bench.send(str(number), number + 1, flags=SEQUENCE_START)
    (first, sink0), (second, sink1) = bench.instances[0].batches[0], bench.instances[1].batches[0]
    sink1.respond(0, with_states(second[0]), False)
    assert bench.order == []
    sink0.respond(0, with_states(first[0]), False)
    sink0.respond(0, None, True)
    assert bench.order == ["0", "0", "1"]
    for _ in range(2000):
        sink1.respond(0, with_states(second[0]), False)
    sink1.respond(0, None, True)
    assert len(bench.outcomes["1"]) == 2002


async def test_a_stream_that_waits_for_too_long_is_given_up() -> None:
    decoupled = "model_transaction_policy { decoupled: true }"
    bench = Bench(config("oldest { preserve_ordering: true }", decoupled), instances=2)
    for number in range(2):
        bench.send(str(number), number + 1, flags=SEQUENCE_START)
    requests, sink = bench.instances[1].batches[0]
    for _ in range(1025):
        sink.respond(0, with_states(requests[0]), False)
    assert bench.instances[1].cancelled == [0]
    bench.instances[0].finish()
    outcome, final = bench.outcomes["1"][-1]
    assert isinstance(outcome, ServingError)
    assert final


ITERATIVE = "iterative_sequence: true oldest { } "


async def test_an_iterative_request_runs_until_it_is_answered() -> None:
    bench = Bench(config(ITERATIVE + STATE % 1))
    bench.send("a", 0)
    bench.send("b", 0)
    assert bench.instance.given == [{"IN": [1], "START": [1], "READY": [True], "PAST": [0]}]
    assert bench.instance.batches[0][0][0].flags == SEQUENCE_START
    bench.instance.finish(Rescheduled())
    await settle()
    assert [given["START"] for given in bench.instance.given] == [[1], [0]]
    ids = [request.correlation_id for request in bench.instance.batches[0][0]]
    assert len(set(ids)) == 2
    assert 0 not in ids
    bench.instance.finish(with_states(bench.instance.batches[0][0][0], NEXT=[1]), Rescheduled())
    await settle()
    assert bench.is_answered("b")
    bench.instance.finish()
    assert bench.is_answered("a")
    await settle()
    assert bench.runner.in_flight == 0
    assert sequences_of(bench.runner, "m").ended == {"ended": 2}


@pytest.mark.parametrize("strategy", ["oldest", "direct"])
async def test_later_executions_of_an_iterative_request_are_given_the_same_and_nothing_of_it_is_kept(
    strategy: str,
) -> None:
    bench = Bench(config(f"iterative_sequence: true {strategy} {{ }}"))
    bench.send("a", 0, [7])
    bench.send("b", 0, [8])
    bench.instance.finish(Rescheduled())
    await settle()
    array = weakref.ref(bench.instance.batches[0][0][0].inputs["IN"].array)
    for expected in ([0, 1], [0, 0], [0, 0]):
        given = sorted((each["IN"][0], each["START"][0], each["READY"][0]) for each in bench.instance.given)
        assert given == [(7, expected[0], True), (8, expected[1], True)]
        bench.instance.finish(Rescheduled(), Rescheduled())
        await settle()
    bench.instance.finish()
    await settle()
    assert bench.is_answered("a")
    assert bench.is_answered("b")
    bench.outcomes.clear()
    bench.tickets.clear()

    assert array() is None


async def test_an_iterative_request_can_be_cancelled_while_it_waits_to_run_again_and_while_it_runs() -> None:
    for finish_first in (True, False):
        bench = Bench(config(ITERATIVE))
        bench.send("a", 0)
        if finish_first:
            bench.instance.finish(Rescheduled())
            bench.tickets["a"].cancel()
        else:
            bench.tickets["a"].cancel()
            bench.instance.finish(Rescheduled())
        await settle()
        assert bench.code("a") is Code.CANCELLED
        assert bench.instance.batches == []
        assert bench.runner.in_flight == 0
        assert sequences_of(bench.runner, "m").instances["m_0"] == []


async def test_made_up_ids_are_not_those_of_others() -> None:
    bench = Bench(config(ITERATIVE.replace("}", "max_candidate_sequences: 4 }")))
    bench.send("mine", 1)
    # An iterative sequence takes no second request, so only one that is open counts as taken.
    bench.runner._admission._is_taken = {1, 2}.__contains__  # type: ignore[attr-defined]
    bench.send("made up", 0)
    bench.instance.finish()
    await settle()

    assert bench.instance.batches[0][0][0].correlation_id == 3


async def test_only_an_iterative_model_may_reschedule_and_only_while_it_runs() -> None:
    bench = Bench(config())
    bench.send("a", flags=SEQUENCE_START)
    bench.instance.finish(Rescheduled())
    assert bench.code("a") is Code.INVALID_ARG
    bench = Bench(config(ITERATIVE, "model_transaction_policy { decoupled: true }"))
    bench.send("b", 0)
    _, sink = bench.instance.batches[0]
    sink.finish(now_ns(), now_ns(), leaves_open=True)
    await settle()
    sink.respond(0, Rescheduled(), True)
    assert bench.code("b") is Code.INVALID_ARG


async def test_a_blocking_instance_keeps_states_too() -> None:
    class Adder:
        def execute(self, requests: Sequence[InferRequest]) -> Execution:
            now = now_ns()
            total = [np.add(r.inputs["IN"].array, r.inputs["PAST"].array) for r in requests]
            return Execution([Outputs([_named("OUT", t), _named("NEXT", t)]) for t in total], now, now)

        def close(self) -> None:
            """Nothing to give back."""

    given = config("direct { } " + STATE % 1)
    executor = BlockingExecutor(Adder(), Placement("m_0", InstanceKind.KIND_CPU), asyncio.get_running_loop())
    runner = make_sequence_runner(
        given,
        "1",
        initial_states(given, {}),
        executors=[executor],
        labels={},
        shared=BACKENDS,
    )
    for number in range(20):
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        request = InferRequest(
            "m", {"IN": _named("IN", np.array([[2]], np.int32))}, correlation_id=1, flags=int(number == 0)
        )
        runner.submit(request, lambda outcome, final, answer=answer: answer.set_result(outcome))  # type: ignore[misc]
        outcome = await answer
        assert isinstance(outcome, InferResponse)
        assert [(t.name, t.array.tolist()) for t in outcome.outputs] == [("OUT", [[2 * number + 2]])]
    await runner.drain()
    await runner.aclose()


def _named(name: str, array: Any) -> Tensor:
    return Tensor(name, DataType.INT32, array)


async def answer_all(bench: Bench) -> None:
    while True:
        for instance in bench.instances:
            while instance.batches:
                instance.finish()
        await asyncio.sleep(0.001)


def taking_over() -> tuple[Bench, Bench]:
    old, new = Bench(config()), Bench(config())
    old.send("begun", 1, flags=SEQUENCE_START)
    old.instance.finish()
    hand_over({("m", ""): old.runner, ("m", "1"): old.runner}, {("m", ""): new.runner, ("m", "1"): new.runner})
    return old, new


async def test_a_version_is_busy_while_a_sequence_goes_on_in_the_one_that_it_replaced() -> None:
    old, new = taking_over()
    assert LoadedVersion(new.runner, None).is_busy
    assert open_sequences({("m", ""): new.runner}) == {("m", 1)}
    await settle()
    old.send("ends", 1, flags=SEQUENCE_END)
    old.instance.finish()
    await settle()
    assert not LoadedVersion(new.runner, None).is_busy


async def test_sequences_end_where_they_began() -> None:
    old, new = taking_over()
    await settle()
    draining = asyncio.create_task(old.runner.drain())
    await settle()
    new.send("more", 1)
    new.send("other", 2)
    assert new.code("other") is Code.INVALID_ARG
    assert len(old.instance.batches) == 1
    old.instance.finish()
    await settle()
    assert new.is_answered("more")
    assert not draining.done()
    new.send("end", 1, flags=SEQUENCE_END)
    old.instance.finish()
    await asyncio.wait_for(draining, 60)
    await old.runner.aclose()
    new.send("late", 1)
    assert new.code("late") is Code.INVALID_ARG
    assert new.runner._predecessors == []


async def test_a_start_goes_to_the_new_version_even_for_an_id_that_lives_in_the_old_one() -> None:
    old, new = taking_over()
    await settle()
    new.send("again", 1, flags=SEQUENCE_START)
    new.send("more", 1)

    assert len(new.instance.batches) == 1
    assert old.instance.batches == []


async def test_a_version_that_goes_itself_does_not_wait_for_the_sequences_of_another() -> None:
    old, new = taking_over()
    await settle()
    old_drains = asyncio.create_task(old.runner.drain())
    await settle()
    assert not old_drains.done()
    await asyncio.wait_for(new.runner.drain(), 60)
    await asyncio.wait_for(old_drains, 60)

    assert sequences_of(old.runner, "m").ended == {"stopped": 1}


async def test_a_version_that_is_loaded_again_leaves_the_sequences_of_another_alone() -> None:
    one, two, again = Bench(config()), Bench(config(), version="2"), Bench(config(), version="2")
    one.send("begun", 1, flags=SEQUENCE_START)
    one.instance.finish()
    hand_over({("m", ""): one.runner}, {("m", ""): two.runner, ("m", "1"): one.runner, ("m", "2"): two.runner})
    hand_over({("m", "2"): two.runner}, {("m", "2"): again.runner})
    one_drains = asyncio.create_task(one.runner.drain())
    await settle()

    await asyncio.wait_for(two.runner.drain(), 60)
    await settle()
    assert not one_drains.done()
    one.send("end", 1, flags=SEQUENCE_END)
    one.instance.finish()
    await asyncio.wait_for(one_drains, 60)
    assert one.is_answered("end")


async def test_three_versions_in_a_row_pass_requests_on() -> None:
    old, new = taking_over()
    newest = Bench(config())
    hand_over({("m", ""): new.runner}, {("m", ""): newest.runner, ("x", ""): object()})
    await settle()
    newest.send("more", 1)

    assert len(old.instance.batches) == 1


async def test_draining_answers_what_is_in_flight_and_waits_for_no_idle_sequence() -> None:
    bench = Bench(config())
    bench.send("a", 1, flags=SEQUENCE_START)
    bench.send("b", 1)
    draining = asyncio.create_task(bench.runner.drain())
    await settle()
    bench.send("c", 1)
    assert bench.code("c") is Code.UNAVAILABLE
    for _ in range(2):
        bench.instance.finish()
        await settle()
    await asyncio.wait_for(draining, 60)
    assert bench.is_answered("a")
    assert bench.is_answered("b")


async def test_a_version_is_busy_while_a_sequence_may_come_back_to_it() -> None:
    bench = Bench(config())
    loaded = LoadedVersion(bench.runner, None)
    assert not loaded.is_busy
    bench.send("a", 1, flags=SEQUENCE_START)
    bench.instance.finish()
    await settle()
    assert bench.runner.in_flight == 0
    assert loaded.is_busy
    bench.send("b", 1, flags=SEQUENCE_END)
    assert loaded.is_busy
    bench.instance.finish()
    await settle()
    assert not loaded.is_busy


async def test_when_the_time_of_the_shutdown_is_up_every_request_of_a_sequence_has_the_same_reason() -> None:
    bench = Bench(config())
    bench.send("begins", flags=SEQUENCE_START)
    for name in ("waits", "waits too"):
        bench.send(name)

    bench.runner.abandon(unavailable("exit timeout expired"))
    bench.instance.finish()
    await settle()

    assert [bench.code(name) for name in ("begins", "waits", "waits too")] == [Code.UNAVAILABLE] * 3
    assert not bench.instance.batches


def test_only_models_that_work_on_sequences_have_some() -> None:
    with pytest.raises(ServingError, match="does not work on sequences"):
        sequences_of(object(), "m")


async def test_random_clients_leave_nothing_behind() -> None:
    random = np.random.default_rng(5)
    bench = Bench(config("direct { } " + STATE % 1), instances=2)
    worker = asyncio.create_task(answer_all(bench))
    for number in range(600):
        flags = int(random.choice([0, SEQUENCE_START, SEQUENCE_START | SEQUENCE_END, SEQUENCE_END]))
        bench.send(str(number), int(random.integers(1, 7)), flags=flags)
        if random.random() < 0.2:
            bench.tickets[str(random.integers(0, number + 1))].cancel()
        if random.random() < 0.3:
            await asyncio.sleep(0)
    await asyncio.wait_for(bench.runner.drain(), 20)
    worker.cancel()
    await settle()

    assert all(sum(final for _, final in outcomes) == 1 for outcomes in bench.outcomes.values())
    assert len(bench.outcomes) == 600
    assert bench.runner._states == {}
    assert isinstance(bench.runner, SequenceRunner)
