"""The runner with a scripted instance: every request gets exactly one answer, in every case."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.support.process import until
from tests.support.recorded import RecordedScheduler
from tests.support.scripted import ScriptedInstance

from charonia.clock import now_ns
from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, ModelConfig, ModelInput, ModelOutput, QueuePolicy
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal, unavailable
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.response import InferResponse, Reply
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BatchSink, Execution, Outputs, Placement
from charonia.server.execution.executor import AsyncExecutor, BlockingExecutor
from charonia.server.execution.runner import ModelRunner
from charonia.server.metrics.model_metrics import FailureReason
from charonia.server.scheduling.schedulers import make_scheduler


class EchoInstance:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        if self.error is not None:
            raise self.error
        now = now_ns()
        return Execution([Outputs([Tensor("OUT", DataType.FP32, r.inputs["IN"].array)]) for r in requests], now, now)

    def close(self) -> None:
        pass


def config(dynamic: DynamicBatching | None = None, max_batch_size: int = 0) -> ModelConfig:
    return ModelConfig(
        name="m",
        max_batch_size=max_batch_size,
        input=(ModelInput("IN", DataType.FP32, dims=(2,)),),
        output=(ModelOutput("OUT", DataType.FP32, (2,)),),
        dynamic_batching=dynamic,
    )


def request(
    id: str = "", *, batch: int = 0, outputs: tuple[RequestedOutput, ...] = (), timeout_us: int = 0
) -> InferRequest:
    shape = (batch, 2) if batch else (2,)
    array = np.arange(max(batch, 1) * 2, dtype="<f4").reshape(shape)
    return InferRequest("m", {"IN": Tensor("IN", DataType.FP32, array)}, id=id, outputs=outputs, timeout_us=timeout_us)


class Answers:
    """Collects the outcomes of requests by their id."""

    def __init__(self) -> None:
        self.of: dict[str, list[InferResponse | ServingError | None]] = {}

    def reply_to(self, id: str) -> Reply:
        def reply(outcome: InferResponse | ServingError | None, final: bool) -> None:
            assert final
            self.of.setdefault(id, []).append(outcome)

        return reply

    def code(self, id: str) -> Code:
        (outcome,) = self.of[id]
        assert isinstance(outcome, ServingError)
        return outcome.code

    def is_answered(self, id: str) -> bool:
        return len(self.of[id]) == 1 and isinstance(self.of[id][0], InferResponse)


def placement() -> Placement:
    return Placement("m_0", InstanceKind.KIND_CPU)


def runner_of(cfg: ModelConfig, *instances: ScriptedInstance) -> ModelRunner:
    return ModelRunner(
        cfg,
        "1",
        scheduler=RecordedScheduler(make_scheduler(cfg)),
        executors=[AsyncExecutor(i, placement()) for i in instances],
        labels={"OUT": ("zero", "one")},
        loop=asyncio.get_running_loop(),
    )


@pytest.mark.parametrize("gone", [0, 1, 2, 3])
async def test_a_client_that_leaves_a_running_batch_does_not_disturb_the_others(gone: int) -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(DynamicBatching(), 4), instance)
    runner.submit(request("first", batch=1), answers.reply_to("first"))
    tickets = [runner.submit(request(str(i), batch=1), answers.reply_to(str(i))) for i in range(4)]
    instance.finish()
    await asyncio.sleep(0)
    assert [r.id for r in instance.batches[0][0]] == ["0", "1", "2", "3"]

    tickets[gone].cancel()
    tickets[gone].cancel()
    assert instance.cancelled == [gone]
    assert instance.batches[0][1].is_cancelled(gone)
    instance.finish()

    assert answers.code(str(gone)) is Code.CANCELLED
    assert all(answers.is_answered(str(i)) for i in range(4) if i != gone)
    assert runner.metrics.failures[FailureReason.CANCELED] == 1
    assert runner.metrics.statistics.success.count == 4
    assert runner.metrics.statistics.execution_count == 2
    assert runner.in_flight == 0


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_a_client_that_leaves_the_queue_is_not_executed(gone: int) -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(DynamicBatching(), 4), instance)
    runner.submit(request("first", batch=1), answers.reply_to("first"))
    tickets = [runner.submit(request(str(i), batch=1), answers.reply_to(str(i))) for i in range(3)]

    tickets[gone].cancel()
    instance.finish()
    await asyncio.sleep(0)

    assert [r.id for r in instance.batches[0][0]] == [str(i) for i in range(3) if i != gone]
    assert answers.code(str(gone)) is Code.CANCELLED


async def test_a_reply_that_submits_anew_while_its_request_is_cancelled_finds_a_sound_scheduler() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("running"), answers.reply_to("running"))

    def submit_again(outcome: object, final: bool) -> None:
        runner.submit(request("again"), answers.reply_to("again"))

    ticket = runner.submit(request("queued"), submit_again)
    ticket.cancel()
    instance.finish()
    await asyncio.sleep(0)
    instance.finish()

    assert answers.is_answered("running")
    assert answers.is_answered("again")


@pytest.mark.parametrize("second_times_out", [True, False])
async def test_a_reply_may_cancel_a_request_about_which_the_scheduler_has_just_decided(
    second_times_out: bool,
) -> None:
    instance, answers = ScriptedInstance(), Answers()
    policy = QueuePolicy(allow_timeout_override=True)
    runner = runner_of(config(DynamicBatching(default_queue_policy=policy), 1), instance)
    runner.submit(request("runs", batch=1), answers.reply_to("runs"))

    def reply(outcome: InferResponse | ServingError | None, final: bool) -> None:
        answers.reply_to("first")(outcome, final)
        second.cancel()

    runner.submit(request("first", batch=1, timeout_us=50_000), reply)
    timeout_us = 50_000 if second_times_out else 0
    second = runner.submit(request("second", batch=1, timeout_us=timeout_us), answers.reply_to("second"))
    runner.submit(request("third", batch=1, timeout_us=timeout_us), answers.reply_to("third"))
    time.sleep(0.06)  # the loop learns of all of it at once
    instance.finish()
    await asyncio.sleep(0)
    runner.submit(request("last", batch=1), answers.reply_to("last"))
    for _ in range(4):
        await asyncio.sleep(0)
        if instance.batches:
            instance.finish()

    assert [answers.code(name) for name in ("first", "second")] == [Code.UNAVAILABLE, Code.CANCELLED]
    assert (answers.code("third") is Code.UNAVAILABLE) if second_times_out else answers.is_answered("third")
    assert answers.is_answered("last")
    assert runner.in_flight == 0


async def test_a_request_that_a_reply_cancels_before_its_instance_knows_of_it_is_cancelled_there_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Forgetful(ScriptedInstance):
        def cancel(self, sink: BatchSink, index: int) -> None:
            if any(sink is started for _, started in self.batches):
                super().cancel(sink, index)

    instance, answers = Forgetful(), Answers()
    policy = QueuePolicy(allow_timeout_override=True)
    runner = runner_of(config(DynamicBatching(default_queue_policy=policy), 4), instance)
    runner.submit(request("runs", batch=1), answers.reply_to("runs"))

    def reply(outcome: InferResponse | ServingError | None, final: bool) -> None:
        answers.reply_to("late")(outcome, final)
        left.cancel()

    runner.submit(request("late", batch=1, timeout_us=1_000_000_000), reply)
    runner.submit(request("stays", batch=1), answers.reply_to("stays"))
    left = runner.submit(request("left", batch=1), answers.reply_to("left"))
    monkeypatch.setattr("charonia.server.execution.runner.now_ns", lambda: now_ns() + 10**12)  # its time is over
    instance.finish()
    await asyncio.sleep(0)

    assert [answers.code(name) for name in ("late", "left")] == [Code.UNAVAILABLE, Code.CANCELLED]
    assert [each.id for each in instance.batches[0][0]] == ["stays", "left"]
    assert instance.cancelled == [1]
    assert runner.metrics.failures[FailureReason.CANCELED] == 1
    instance.finish()
    assert answers.is_answered("stays")
    assert runner.in_flight == 0


async def test_a_reply_that_fails_leaves_the_rest_of_the_batch_alone(caplog: pytest.LogCaptureFixture) -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(DynamicBatching(), 4), instance)
    runner.submit(request("first", batch=1), answers.reply_to("first"))

    def broken(outcome: object, final: bool) -> None:
        raise RuntimeError("the socket is gone")

    runner.submit(request("broken", batch=1), broken)
    runner.submit(request("mate", batch=1), answers.reply_to("mate"))
    instance.finish()
    await asyncio.sleep(0)
    instance.finish()

    assert answers.is_answered("mate")
    assert runner.in_flight == 0
    assert "the socket is gone" in caplog.text


async def test_a_failed_batch_fails_all_of_its_requests_and_the_next_one_runs() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a"), answers.reply_to("a"))
    runner.submit(request("b"), answers.reply_to("b"))

    instance.finish(error=internal("the worker died"))
    await asyncio.sleep(0)
    instance.finish()

    assert answers.code("a") is Code.INTERNAL
    assert answers.is_answered("b")
    assert runner.metrics.failures[FailureReason.BACKEND] == 1


async def test_an_unanswered_request_of_a_finished_batch_gets_an_error() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a"), answers.reply_to("a"))
    _, sink = instance.batches.pop()
    sink.finish(now_ns(), now_ns())
    assert answers.code("a") is Code.INTERNAL


async def test_the_first_response_of_an_ordinary_model_is_its_answer_and_what_follows_is_ignored() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a"), answers.reply_to("a"))
    _, sink = instance.batches.pop()
    sink.respond(0, Outputs([]), False)
    sink.respond(0, Outputs([]), False)
    sink.respond(0, None, True)
    sink.finish(now_ns(), now_ns())
    assert answers.is_answered("a")


async def test_an_ordinary_model_that_says_that_there_is_no_response_fails_the_request() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a"), answers.reply_to("a"))
    _, sink = instance.batches.pop()
    sink.respond(0, None, True)
    sink.finish(now_ns(), now_ns())
    assert answers.code("a") is Code.INTERNAL


async def test_the_queue_limit_is_exact_and_refuses_with_unavailable() -> None:
    instance, answers = ScriptedInstance(), Answers()
    policy = QueuePolicy(max_queue_size=2)
    runner = runner_of(config(DynamicBatching(default_queue_policy=policy), 1), instance)
    for name in "abcd":
        runner.submit(request(name, batch=1), answers.reply_to(name))
    assert runner.pending == 2
    assert answers.code("d") is Code.UNAVAILABLE
    assert runner.metrics.failures[FailureReason.REJECTED] == 1


async def test_a_queue_timeout_fires_while_the_instance_is_busy() -> None:
    instance, answers = ScriptedInstance(), Answers()
    policy = QueuePolicy(default_timeout_microseconds=2000)
    runner = runner_of(config(DynamicBatching(default_queue_policy=policy), 1), instance)
    started = now_ns()
    runner.submit(request("a", batch=1), answers.reply_to("a"))
    runner.submit(request("b", batch=1), answers.reply_to("b"))
    await until(lambda: "b" in answers.of)
    assert answers.code("b") is Code.UNAVAILABLE
    assert now_ns() - started >= 2_000_000
    instance.finish()
    assert answers.is_answered("a")


async def test_answers_keep_the_order_of_arrival_where_that_is_asked_for() -> None:
    first, second, answers = ScriptedInstance(), ScriptedInstance(), Answers()
    runner = runner_of(config(DynamicBatching(preserve_ordering=True), 1), first, second)
    for name in "ab":
        runner.submit(request(name, batch=1), answers.reply_to(name))
    holder = {i.batches[0][0][0].id: i for i in (first, second)}

    holder["b"].finish()
    assert answers.of == {}
    holder["a"].finish()

    assert list(answers.of) == ["a", "b"]


async def test_what_a_reply_leads_to_keeps_the_order_of_arrival_too() -> None:
    first, second, answers = ScriptedInstance(), ScriptedInstance(), Answers()
    runner = runner_of(config(DynamicBatching(preserve_ordering=True), 1), first, second)

    def reply(outcome: InferResponse | ServingError | None, final: bool) -> None:
        answers.reply_to("0")(outcome, final)
        last.cancel()

    runner.submit(request("0", batch=1), reply)
    runner.submit(request("1", batch=1), answers.reply_to("1"))
    last = runner.submit(request("2", batch=1), answers.reply_to("2"))
    one, other = (first, second) if first.batches[0][0][0].id == "1" else (second, first)
    one.finish()
    other.finish()

    assert list(answers.of) == ["0", "1", "2"]
    assert answers.code("2") is Code.CANCELLED


async def test_requested_outputs_come_in_the_order_of_the_model() -> None:
    instance, answers = ScriptedInstance(), Answers()
    outputs = tuple(ModelOutput(name, DataType.FP32, (2,)) for name in "ABC")
    runner = runner_of(replace(config(), output=outputs), instance)
    runner.submit(request("a", outputs=(RequestedOutput("C"), RequestedOutput("A"))), answers.reply_to("a"))
    _, sink = instance.batches.pop()
    array = np.zeros((1, 1), np.float32)
    sink.respond(0, Outputs([Tensor(name, DataType.FP32, array) for name in "ABC"]), True)
    sink.finish(now_ns(), now_ns())
    (outcome,) = answers.of["a"]
    assert isinstance(outcome, InferResponse)
    assert [tensor.name for tensor in outcome.outputs] == ["A", "C"]


async def test_requested_outputs_are_classified() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a", outputs=(RequestedOutput("OUT", classification=1),)), answers.reply_to("a"))
    instance.finish()
    (outcome,) = answers.of["a"]
    assert isinstance(outcome, InferResponse)
    assert outcome.outputs[0].array.tolist() == [b"1.000000:1:one"]


async def test_a_response_has_those_of_the_requested_outputs_that_the_model_returns() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    runner.submit(request("a", outputs=(RequestedOutput("OUT"),)), answers.reply_to("a"))
    _, sink = instance.batches.pop()
    sink.respond(0, Outputs([]), True)
    sink.finish(now_ns(), now_ns())
    (outcome,) = answers.of["a"]
    assert isinstance(outcome, InferResponse)
    assert outcome.outputs == []


async def test_draining_waits_for_the_queue_and_refuses_newcomers() -> None:
    instance, answers = ScriptedInstance(), Answers()
    runner = runner_of(config(), instance)
    for name in "ab":
        runner.submit(request(name), answers.reply_to(name))
    draining = asyncio.ensure_future(runner.drain())
    await asyncio.sleep(0)
    runner.submit(request("late"), answers.reply_to("late"))
    assert answers.code("late") is Code.UNAVAILABLE
    instance.finish()
    await asyncio.sleep(0)
    assert not draining.done()
    instance.finish()
    await asyncio.wait_for(draining, 60)
    await runner.aclose()
    assert instance.is_closed
    assert answers.is_answered("a")
    assert answers.is_answered("b")


@pytest.mark.parametrize("keeps_order", [False, True])
async def test_when_the_time_of_the_shutdown_is_up_each_request_is_answered_once_and_none_is_started(
    keeps_order: bool,
) -> None:
    first, second, answers = ScriptedInstance(), ScriptedInstance(), Answers()
    runner = runner_of(config(DynamicBatching(preserve_ordering=keeps_order), 1), first, second)
    for name in ("runs", "done", "waits", "waits too"):
        runner.submit(request(name, batch=1), answers.reply_to(name))
    (quick,) = [each for each in (first, second) if each.batches[0][0][0].id == "done"]
    slow = first if quick is second else second
    quick.finish()
    await asyncio.sleep(0)
    assert quick.batches[0][0][0].id == "waits"

    runner.abandon(unavailable("exit timeout expired"))
    quick.finish()
    slow.finish()
    await asyncio.sleep(0)

    assert answers.is_answered("done")
    assert [answers.code(name) for name in ("runs", "waits", "waits too")] == [Code.UNAVAILABLE] * 3
    assert runner.in_flight == 0
    assert first.batches == second.batches == []


@pytest.mark.parametrize(
    ("error", "code"), [(ServingError(Code.UNAVAILABLE, "later"), Code.UNAVAILABLE), (ValueError("bad"), Code.INTERNAL)]
)
async def test_an_exception_of_a_blocking_instance_fails_its_batch_only(error: Exception, code: Code) -> None:
    loop = asyncio.get_running_loop()
    instance, answers, cfg = EchoInstance(error), Answers(), config()
    executor = BlockingExecutor(instance, placement(), loop)
    runner = ModelRunner(
        cfg, "1", scheduler=RecordedScheduler(make_scheduler(cfg)), executors=[executor], labels={}, loop=loop
    )
    runner.submit(request("a"), answers.reply_to("a"))
    await until(lambda: not runner.in_flight)
    assert answers.code("a") is code
    instance.error = None
    for i in range(50):
        runner.submit(request(str(i)), answers.reply_to(str(i)))
    await asyncio.wait_for(runner.drain(), 60)
    await runner.aclose()
    assert all(answers.is_answered(str(i)) for i in range(50))


async def test_a_batch_that_computes_in_microseconds_moves_onto_the_loop() -> None:
    loop = asyncio.get_running_loop()
    answers, cfg = Answers(), config()
    executor = BlockingExecutor(EchoInstance(), placement(), loop)
    runner = ModelRunner(
        cfg, "1", scheduler=RecordedScheduler(make_scheduler(cfg)), executors=[executor], labels={}, loop=loop
    )
    answered_in_place = False
    for i in range(2000):
        runner.submit(request(str(i)), answers.reply_to(str(i)))
        if str(i) in answers.of:
            answered_in_place = True
            break
        while runner.in_flight:
            await asyncio.sleep(0)
    await runner.drain()
    await runner.aclose()
    assert answered_in_place
