"""The runner and requests that outlive their batch: any number of responses, calls between models, how it ends."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.recorded import RecordedScheduler
from tests.support.scripted import ScriptedInstance

from charonia.clock import now_ns
from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal
from charonia.core.request import CallFrame, InferRequest, RequestedOutput
from charonia.core.response import InferResponse, Outcome, Reply, Ticket
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BatchSink, Outputs, Placement
from charonia.server.execution import in_flight
from charonia.server.execution.deadlock import DeadlockDetector
from charonia.server.execution.executor import AsyncExecutor
from charonia.server.execution.runner import ModelRunner
from charonia.server.metrics.model_metrics import RESPONSES_COUNTED_MAX, FailureReason
from charonia.server.scheduling.schedulers import make_scheduler
from charonia.server.scheduling.slots import CAPACITY_MAX


class Answers:
    """The outcomes of each request, and whether each was said to be the last."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[Outcome, bool]]] = {}

    def reply_to(self, id: str) -> Reply:
        self.of[id] = []

        def reply(outcome: Outcome, final: bool) -> None:
            assert not any(was_final for _, was_final in self.of[id]), "an outcome after the last one"
            self.of[id].append((outcome, final))

        return reply

    def kinds(self, id: str) -> str:
        """Return a letter for each outcome, upper case for the last: response, error, nothing."""
        letters = ""
        for outcome, final in self.of[id]:
            letter = "n" if outcome is None else "e" if isinstance(outcome, ServingError) else "r"
            letters += letter.upper() if final else letter
        return letters


def config(*, decoupled: bool = True, ordered: bool = False, batch: int = 0, name: str = "m") -> ModelConfig:
    return ModelConfig(
        name=name,
        max_batch_size=batch,
        input=(ModelInput("IN", DataType.FP32, dims=(1,)),),
        output=(ModelOutput("OUT", DataType.FP32, (1,)),),
        dynamic_batching=DynamicBatching(preserve_ordering=ordered) if batch else None,
        model_transaction_policy=TransactionPolicy(decoupled=decoupled),
    )


def request(id: str = "", *, batch: int = 0, caller: CallFrame | None = None, output: str = "") -> InferRequest:
    array = np.zeros((batch, 1) if batch else (1,), "<f4")
    outputs = (RequestedOutput(output),) if output else ()
    return InferRequest("m", {"IN": Tensor("IN", DataType.FP32, array)}, id=id, outputs=outputs, caller=caller)


def out() -> Outputs:
    return Outputs([Tensor("OUT", DataType.FP32, np.ones(1, "<f4"))])


def runner_of(cfg: ModelConfig, *instances: ScriptedInstance, deadlocks: DeadlockDetector | None = None) -> ModelRunner:
    return ModelRunner(
        cfg,
        "1",
        scheduler=RecordedScheduler(make_scheduler(cfg)),
        executors=[
            AsyncExecutor(i, Placement(f"{cfg.name}_{n}", InstanceKind.KIND_CPU)) for n, i in enumerate(instances)
        ],
        labels={},
        loop=asyncio.get_running_loop(),
        deadlocks=deadlocks,
    )


async def test_a_decoupled_request_gets_any_number_of_responses_before_and_after_its_batch_is_done() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a"), answers.reply_to("a"))
    instance.batches[0][1].respond(0, out(), False)
    sink = instance.leave_open()
    sink.respond(0, out(), False)
    assert runner.in_flight == 1
    sink.respond(0, None, True)

    assert answers.kinds("a") == "rrN"
    assert runner.in_flight == 0
    statistics = runner.metrics.statistics
    assert (statistics.execution_count, statistics.inference_count, statistics.success.count) == (1, 1, 1)
    assert {index: counted.success.count for index, counted in statistics.responses.items()} == {
        "0": 1,
        "1": 1,
        "2": 0,
    }
    assert statistics.responses["2"].empty_response.count == 1
    assert runner.metrics.first_response_ns.count == 1


async def test_an_instance_takes_other_batches_while_requests_are_open() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a"), answers.reply_to("a"))
    runner.submit(request("b"), answers.reply_to("b"))
    first = instance.leave_open()
    await asyncio.sleep(0)
    second = instance.leave_open()
    second.respond(0, out(), True)
    first.respond(0, out(), False)
    first.respond(0, out(), True)

    assert (answers.kinds("a"), answers.kinds("b")) == ("rR", "R")
    assert runner.metrics.statistics.execution_count == 2


async def test_cancelling_an_open_request_reaches_the_instance_and_ends_it_at_once() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    ticket = runner.submit(request("a"), answers.reply_to("a"))
    sink = instance.leave_open()
    sink.respond(0, out(), False)
    ticket.cancel()
    ticket.cancel()
    assert sink.is_cancelled(0)
    sink.respond(0, out(), False)
    sink.respond(0, None, True)

    assert answers.kinds("a") == "rE"
    assert instance.cancelled == [0]
    assert runner.metrics.failures[FailureReason.CANCELED] == 1
    assert runner.metrics.statistics.responses["1"].cancel.count == 1
    assert runner.in_flight == 0


async def test_draining_waits_for_open_requests() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a"), answers.reply_to("a"))
    sink = instance.leave_open()
    draining = asyncio.ensure_future(runner.drain())
    await asyncio.sleep(0.01)
    assert not draining.done()
    sink.respond(0, out(), True)
    await asyncio.wait_for(draining, 60)
    await runner.aclose()


async def test_an_error_response_makes_the_request_a_failure_also_when_others_follow() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    for name in "ab":
        runner.submit(request(name), answers.reply_to(name))
        sink = instance.leave_open()
        await asyncio.sleep(0)
        sink.respond(0, internal("broken"), False)
        sink.respond(0, out() if name == "a" else None, True)

    assert (answers.kinds("a"), answers.kinds("b")) == ("eR", "eN")
    assert runner.metrics.failures[FailureReason.BACKEND] == 2
    assert runner.metrics.statistics.success.count == 0
    assert runner.metrics.statistics.responses["0"].fail.count == 2


async def test_a_response_without_the_output_asked_for_is_a_response() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a", output="OUT"), answers.reply_to("a"))
    sink = instance.leave_open()
    sink.respond(0, Outputs([]), False)
    sink.respond(0, out(), True)
    assert answers.kinds("a") == "rR"


async def test_what_says_nothing_changes_nothing() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a"), answers.reply_to("a"))
    sink = instance.leave_open()
    sink.respond(0, None, False)
    assert answers.kinds("a") == ""
    sink.respond(0, None, True)
    assert answers.kinds("a") == "N"


async def test_requests_of_a_batch_that_failed_get_its_error() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a"), answers.reply_to("a"))
    _, sink = instance.batches.pop(0)
    sink.respond(0, out(), False)
    sink.finish(now_ns(), now_ns(), internal("the worker died"))
    assert answers.kinds("a") == "rE"


async def test_an_ordinary_model_may_answer_after_its_batch_is_done() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(decoupled=False), instance)
    runner.submit(request("a"), answers.reply_to("a"))
    sink = instance.leave_open()
    assert answers.kinds("a") == ""
    sink.respond(0, out(), False)
    sink.respond(0, None, True)

    assert answers.kinds("a") == "R"
    assert runner.metrics.statistics.success.count == 1
    assert runner.metrics.statistics.responses == {}


async def test_responses_keep_the_order_of_their_requests_where_that_is_asked_for() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(ordered=True, batch=4), instance)
    runner.submit(request("first", batch=1), answers.reply_to("first"))
    for name in "abc":
        runner.submit(request(name, batch=1), answers.reply_to(name))
    instance.leave_open().respond(0, out(), True)
    await asyncio.sleep(0)
    sink = instance.leave_open()
    sink.respond(1, out(), False)
    sink.respond(2, out(), True)
    sink.respond(0, out(), False)
    assert [answers.kinds(name) for name in "abc"] == ["r", "", ""]
    sink.respond(0, None, True)
    assert [answers.kinds(name) for name in "abc"] == ["rN", "r", ""]
    sink.respond(1, out(), False)
    sink.respond(1, None, True)
    assert [answers.kinds(name) for name in "abc"] == ["rN", "rrN", "R"]
    assert runner.in_flight == 0


async def test_a_request_with_too_many_responses_out_of_turn_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "HELD_RESPONSES_MAX", 3)

    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(ordered=True, batch=2), instance)
    for name in ("first", "a", "b"):
        runner.submit(request(name, batch=1), answers.reply_to(name))
    instance.leave_open().respond(0, out(), True)
    await asyncio.sleep(0)
    sink = instance.leave_open()
    for _ in range(5):
        sink.respond(1, out(), False)
    assert instance.cancelled == [1]
    sink.respond(0, out(), True)
    assert answers.kinds("b") == "rrrE"


async def test_a_nested_request_does_not_wait_for_the_order_that_its_caller_holds_up() -> None:
    first, second, answers = ScriptedInstance(), ScriptedInstance(), Answers()
    runner = runner_of(config(decoupled=False, ordered=True, batch=1), first, second)
    runner.submit(request("outer", batch=1), answers.reply_to("outer"))
    await asyncio.sleep(0)
    holder = first if first.batches else second
    other = second if holder is first else first
    frame = holder.batches[0][1].frame()
    runner.submit(request("inner", batch=1, caller=frame), answers.reply_to("inner"))
    await asyncio.sleep(0)
    other.batches[0][1].respond(0, out(), True)
    assert (answers.kinds("inner"), answers.kinds("outer")) == ("R", "")


async def test_the_responses_that_are_counted_by_index_have_a_limit() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a"), answers.reply_to("a"))
    sink = instance.leave_open()
    for _ in range(RESPONSES_COUNTED_MAX + 5):
        sink.respond(0, out(), False)
    sink.respond(0, None, True)
    responses = runner.metrics.statistics.responses
    assert len(responses) == RESPONSES_COUNTED_MAX
    assert responses[str(RESPONSES_COUNTED_MAX - 1)].success.count == 6


async def test_a_call_that_would_wait_for_its_own_caller_is_refused_and_later_ones_are_not() -> None:
    detector, answers = DeadlockDetector(), Answers()
    a, b = ScriptedInstance(), ScriptedInstance()
    of_a = runner_of(config(decoupled=False, name="a"), a, deadlocks=detector)
    of_b = runner_of(config(decoupled=False, name="b"), b, deadlocks=detector)
    of_a.submit(request("outer"), answers.reply_to("outer"))
    outer = a.batches[0][1].frame()
    of_b.submit(request("middle", caller=outer), answers.reply_to("middle"))
    middle = b.batches[0][1].frame()
    assert middle.parent is outer

    of_a.submit(request("inner", caller=middle), answers.reply_to("inner"))

    ((error, _),) = answers.of["inner"]
    assert isinstance(error, ServingError)
    assert error.code is Code.UNAVAILABLE
    assert "[request id: inner]" in error.message
    assert "(a -> b -> a)" in error.message
    for instance in (b, a):
        _, sink = instance.batches.pop(0)
        sink.respond(0, out(), True)
        sink.finish(now_ns(), now_ns())
    assert (answers.kinds("middle"), answers.kinds("outer")) == ("R", "R")
    assert len(detector) == 0
    assert of_a.in_flight == of_b.in_flight == 0
    of_a.submit(request("next"), answers.reply_to("next"))
    assert len(a.batches) == 1


async def test_a_frame_is_the_same_every_time_and_occupies_nothing_once_the_batch_is_over() -> None:
    detector, instance, answers = DeadlockDetector(), ScriptedInstance(), Answers()
    runner = runner_of(config(), instance, deadlocks=detector)
    parent = CallFrame("x", "1")
    runner.submit(request("a", caller=parent), answers.reply_to("a"))
    runner.submit(request("b"), answers.reply_to("b"))
    sink = instance.batches[0][1]
    frame = sink.frame()
    assert frame is sink.frame()
    assert (frame.model, frame.version, frame.instance, frame.parent) == ("m", "1", "m_0", parent)
    instance.leave_open()
    await asyncio.sleep(0)
    late = instance.leave_open()
    assert late.frame().instance == ""
    assert len(detector) == 0


async def test_a_model_that_calls_another_one_has_nothing_waiting_in_its_instances_line() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(decoupled=False), instance)
    for number in range(60):
        runner.submit(request(str(number)), answers.reply_to(str(number)))
        _, sink = instance.batches.pop(0)
        sink.respond(0, out(), True)
        sink.finish(1000, 2000)
        await asyncio.sleep(0)
    for number in range(CAPACITY_MAX):
        runner.submit(request(f"ahead {number}"), answers.reply_to(f"ahead {number}"))
    assert len(instance.batches) == CAPACITY_MAX

    instance.batches[0][1].frame()
    for _ in range(CAPACITY_MAX):
        _, sink = instance.batches.pop(0)
        sink.respond(0, out(), True)
        sink.finish(1000, 2000)
        await asyncio.sleep(0)
    for number in range(60):
        runner.submit(request(f"later {number}"), answers.reply_to(f"later {number}"))
    assert len(instance.batches) == 1
    while instance.batches:
        _, sink = instance.batches.pop(0)
        sink.respond(0, out(), True)
        sink.finish(1000, 2000)
        await asyncio.sleep(0)
    assert all(answers.kinds(name) == "R" for name in answers.of)


class Play:
    """Random deeds of callers and instances, as far as they are allowed, and what must be true at every moment."""

    def __init__(self, cfg: ModelConfig, instances: int) -> None:
        self.answers = Answers()
        self.instances = [ScriptedInstance() for _ in range(instances)]
        self.runner = runner_of(cfg, *self.instances)
        self.tickets: list[Ticket] = []
        self.open: list[tuple[BatchSink, list[int]]] = []  # batches that are done, and their requests that are not

    def do(self, deed: str, number: int) -> None:
        """Do one thing, if there is something to do it with."""
        running = [instance for instance in self.instances if instance.batches]
        if deed == "submit":
            name = str(len(self.tickets))
            self.tickets.append(self.runner.submit(request(name, batch=1), self.answers.reply_to(name)))
        elif deed == "cancel" and self.tickets:
            self.tickets[number % len(self.tickets)].cancel()
        elif deed in ("partial", "final") and running:
            requests, sink = running[number % len(running)].batches[0]
            sink.respond(number % len(requests), out() if number % 3 else None, deed == "final")
        elif deed in ("late partial", "late final") and self.open:
            sink, indices = self.open[number % len(self.open)]
            sink.respond(indices[number % len(indices)], out() if number % 3 else internal("x"), deed == "late final")
        elif deed in ("finish", "fail", "leave") and running:
            requests, sink = running[number % len(running)].batches.pop(0)
            if deed == "leave":
                self.open.append((sink, list(range(len(requests)))))
            sink.finish(now_ns(), now_ns(), internal("failed") if deed == "fail" else None, leaves_open=deed == "leave")

    def end(self) -> None:
        """Let everything end."""
        for instance in self.instances:
            while instance.batches:
                instance.batches.pop(0)[1].finish(now_ns(), now_ns())
        for sink, indices in self.open:
            for index in indices:
                sink.respond(index, None, True)


@settings(max_examples=150, deadline=None)
@given(
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
    st.lists(
        st.tuples(
            st.sampled_from(
                ["submit"] * 4
                + [
                    "cancel",
                    "partial",
                    "final",
                    "late partial",
                    "late final",
                    "finish",
                    "fail",
                    "leave",
                    "leave",
                    "turn",
                ]
            ),
            st.integers(0, 20),
        ),
        max_size=60,
    ),
)
def test_every_request_has_exactly_one_final_outcome_and_none_after_it(
    decoupled: bool, ordered: bool, instances: int, deeds: list[tuple[str, int]]
) -> None:
    async def scenario() -> None:
        play = Play(config(decoupled=decoupled, ordered=ordered, batch=4), instances)
        for deed, number in deeds:
            play.do(deed, number)
            if deed == "turn":
                await asyncio.sleep(0)
            assert all(len(instance.batches) <= CAPACITY_MAX for instance in play.instances)
        for _ in range(len(deeds) + 2):
            play.end()
            await asyncio.sleep(0)

        assert all(len([1 for _, final in outcomes if final]) == 1 for outcomes in play.answers.of.values())
        if not decoupled:
            assert all(len(outcomes) == 1 for outcomes in play.answers.of.values())
        assert play.runner.in_flight == 0
        statistics = play.runner.metrics.statistics
        assert statistics.success.count + statistics.fail.count == len(play.tickets)
        assert statistics.success.count == statistics.queue.count == statistics.compute_infer.count
        assert statistics.success.count == sum(
            isinstance(outcome, InferResponse) or outcome is None
            for outcomes in play.answers.of.values()
            for outcome, final in outcomes
            if final and not any(isinstance(o, ServingError) for o, _ in outcomes)
        )
        await asyncio.wait_for(play.runner.drain(), 60)
        await play.runner.aclose()

    asyncio.run(scenario())
