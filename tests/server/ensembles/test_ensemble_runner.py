"""Requests of an ensemble over models that answer when the test says so."""

import asyncio
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal, invalid, unavailable
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, Flow, InferRequest, ParameterValue, RequestedOutput
from charonia.core.response import ExecutionRecord, InferResponse, Outcome, Reply
from charonia.core.tensor import Tensor
from charonia.server.ensembles.call import EnsembleCall, EnsembleRunner
from charonia.server.ensembles.plan import EnsemblePlan
from charonia.server.metrics.model_metrics import FailureReason

Array = NDArray[np.generic]

TENSORS = """
    input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] }
    output { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] }
"""


class Ticket:
    def __init__(self, request: InferRequest, reply: Reply) -> None:
        self.request = request
        self.reply = reply
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.reply(ServingError(Code.CANCELLED, "the request was cancelled"), True)

    def answer(
        self,
        outputs: dict[str, Array],
        *,
        final: bool = True,
        parameters: dict[str, ParameterValue] | None = None,
        record: ExecutionRecord | None = None,
    ) -> None:
        tensors = [Tensor(name, DataType.FP32, array) for name, array in outputs.items()]
        request = self.request
        self.reply(InferResponse(request.model_name, "1", request.id, tensors, parameters, record), final)


class Models:
    """What runs the steps: it keeps their requests, or answers at once with what `at_once` returns."""

    def __init__(self, at_once: Callable[[InferRequest], dict[str, Array]] | None = None) -> None:
        self.at_once = at_once
        self.tickets: list[Ticket] = []

    def infer(self, request: InferRequest, reply: Reply) -> Ticket:
        ticket = Ticket(request, reply)
        self.tickets.append(ticket)
        if self.at_once is not None:
            ticket.answer(self.at_once(request))
        return ticket

    def of(self, model: str) -> list[Ticket]:
        return [ticket for ticket in self.tickets if ticket.request.model_name == model]


class Caller:
    def __init__(self) -> None:
        self.outcomes: list[tuple[Outcome, bool]] = []

    def __call__(self, outcome: Outcome, final: bool) -> None:
        self.outcomes.append((outcome, final))

    @property
    def error(self) -> ServingError:
        ((outcome, final),) = self.outcomes
        assert isinstance(outcome, ServingError)
        assert final
        return outcome

    @property
    def response(self) -> InferResponse:
        ((outcome, final),) = self.outcomes
        assert isinstance(outcome, InferResponse)
        assert final
        return outcome


def model(name: str, more: str = "", *, tensors: str = TENSORS) -> ModelConfig:
    return parse(f'name: "{name}" {tensors} {more}')


def step(name: str, inputs: dict[str, str], outputs: dict[str, str], *, version: int = -1) -> str:
    maps = "".join(f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items())
    maps += "".join(f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items())
    return f'step {{ model_name: "{name}" model_version: {version} {maps} }} '


def chain(*names: str) -> str:
    tensors = ["IN", *(f"t{number}" for number in range(1, len(names))), "OUT"]
    return "".join(step(name, {"IN": tensors[i]}, {"OUT": tensors[i + 1]}) for i, name in enumerate(names))


def plan_of(
    steps: str,
    configs: Sequence[ModelConfig],
    *,
    more: str = "",
    tensors: str = TENSORS,
    inflight: int = 0,
    labels: dict[str, tuple[str, ...]] | None = None,
) -> EnsemblePlan:
    text = (
        f'name: "e" platform: "ensemble" {tensors} {more} '
        f"ensemble_scheduling {{ {steps} max_inflight_requests: {inflight} }}"
    )
    return EnsemblePlan(parse(text), configs, labels or {})


def ensemble(models: Models, steps: str, configs: Sequence[ModelConfig], **more: Any) -> EnsembleRunner:
    return EnsembleRunner("1", plan_of(steps, configs, **more), models.infer)


def request(array: Array | None = None, outputs: tuple[str, ...] = (), classes: int = 0, **more: Any) -> InferRequest:
    tensor = Tensor("IN", DataType.FP32, np.zeros(2, "<f4") if array is None else array)
    made = InferRequest("e", {"IN": tensor}, id="7", outputs=tuple(RequestedOutput(o, classes) for o in outputs))
    for name, value in more.items():
        setattr(made, name, value)
    return made


ONE = np.ones(2, "<f4")
TWO = np.full(2, 2, "<f4")


def test_tensors_go_from_step_to_step_by_reference() -> None:
    models, caller = Models(), Caller()
    runner = ensemble(models, chain("a", "b"), [model("a"), model("b")])
    sent = request()

    runner.submit(sent, caller)
    models.tickets[0].answer({"OUT": ONE})
    models.tickets[1].answer({"OUT": TWO})

    first, second = (ticket.request for ticket in models.tickets)
    assert (first.model_name, second.model_name) == ("a", "b")
    assert first.inputs["IN"].array is sent.inputs["IN"].array
    assert second.inputs["IN"].array is ONE
    assert caller.response.outputs[0].array is TWO
    assert (caller.response.model_name, caller.response.id) == ("e", "7")
    assert runner.in_flight == 0


def test_a_step_is_asked_for_what_is_needed_with_everything_that_the_request_says() -> None:
    models = Models()
    two_outputs = TENSORS + 'output { name: "MORE" data_type: TYPE_FP32 dims: [ 2 ] }'
    runner = ensemble(models, step("a", {"IN": "IN"}, {"OUT": "OUT"}, version=3), [model("a", tensors=two_outputs)])

    runner.submit(
        request(
            parameters={"key": "value"},
            correlation_id=11,
            flags=SEQUENCE_START,
            priority=2,
            timeout_us=500,
            deadline_ns=10**9,
            flow=Flow("acme", 2),
        ),
        Caller(),
    )

    sent = models.tickets[0].request
    assert (sent.id, sent.model_version) == ("7", "3")
    assert (sent.parameters, sent.priority, sent.timeout_us, sent.deadline_ns) == ({"key": "value"}, 2, 500, 10**9)
    assert (sent.correlation_id, sent.flags) == (11, SEQUENCE_START)
    assert sent.flow == Flow("acme", 2)
    assert [output.name for output in sent.outputs] == ["OUT"]
    assert sent.caller is not None
    assert (sent.caller.model, sent.caller.version, sent.caller.instance, sent.caller.parent) == ("e", "1", "", None)


def test_steps_that_are_not_needed_do_not_run() -> None:
    models, caller = Models(lambda _: {"OUT": ONE}), Caller()
    tensors = TENSORS + 'output { name: "SIDE" data_type: TYPE_FP32 dims: [ 2 ] }'
    steps = step("a", {"IN": "IN"}, {"OUT": "OUT"}) + step("b", {"IN": "IN"}, {"OUT": "SIDE"})
    runner = ensemble(models, steps, [model("a"), model("b")], tensors=tensors)

    runner.submit(request(outputs=("SIDE",)), caller)

    assert [ticket.request.model_name for ticket in models.tickets] == ["b"]
    assert [tensor.name for tensor in caller.response.outputs] == ["SIDE"]
    both = Caller()
    runner.submit(request(), both)
    assert [tensor.name for tensor in both.response.outputs] == ["OUT", "SIDE"]


RESHAPED = TENSORS.replace("dims: [ 2 ]", "dims: [ 1, 2 ] reshape { shape: [ 2 ] }")


@pytest.mark.parametrize(
    ("tensors", "size", "sizes", "shape", "shapes"),
    [
        (TENSORS, 4, (0, 4, 0), (1, 2), [(2,), (1, 2), (2,)]),
        (RESHAPED, 0, (0, 0, 0), (1, 2), [(2,), (2,), (2,)]),
        (RESHAPED, 4, (4, 4, 4), (3, 1, 2), [(3, 2), (3, 2), (3, 2)]),
        (RESHAPED, 4, (0, 4, 0), (1, 1, 2), [(2,), (1, 2), (2,)]),
        (RESHAPED.replace("2 ]", "-1 ]"), 4, (4, 4, 4), (1, 1, 5), [(1, 5), (1, 5), (1, 5)]),
    ],
)
def test_another_shape_or_a_batch_dimension_that_only_one_side_has_is_a_view(
    tensors: str, size: int, sizes: tuple[int, ...], shape: tuple[int, ...], shapes: list[tuple[int, ...]]
) -> None:
    seen: list[Array] = []

    def echo(request: InferRequest) -> dict[str, Array]:
        seen.append(request.inputs["IN"].array)
        return {"OUT": request.inputs["IN"].array}

    caller = Caller()
    sent = np.zeros(shape, "<f4")
    configs = [model(name, f"max_batch_size: {size}") for name, size in zip("abc", sizes, strict=True)]
    runner = ensemble(Models(echo), chain("a", "b", "c"), configs, more=f"max_batch_size: {size}", tensors=tensors)

    runner.submit(request(sent), caller)

    assert [array.shape for array in seen] == shapes
    assert caller.response.outputs[0].shape == shape
    assert all(np.shares_memory(array, sent) for array in (*seen, caller.response.outputs[0].array))


def test_a_shape_that_does_not_fit_is_passed_on_for_the_model_to_judge() -> None:
    models = Models()
    runner = ensemble(models, chain("a", "b", "c"), [model("a"), model("b", "max_batch_size: 4"), model("c")])
    runner.submit(request(), Caller())

    models.tickets[0].answer({"OUT": np.zeros((3, 2), "<f4")})
    models.tickets[1].answer({"OUT": np.zeros((3, 2), "<f4")})

    assert [ticket.request.inputs["IN"].shape for ticket in models.tickets] == [(2,), (3, 2), (3, 2)]


def test_a_failing_step_is_named_and_the_others_are_stopped() -> None:
    models, caller = Models(), Caller()
    steps = (
        step("a", {"IN": "IN"}, {"OUT": "x"})
        + step("b", {"IN": "IN"}, {"OUT": "y"})
        + step("c", {"IN": "x", "IN2": "y"}, {"OUT": "OUT"})
    )
    two_inputs = TENSORS + 'input { name: "IN2" data_type: TYPE_FP32 dims: [ 2 ] }'
    runner = ensemble(models, steps, [model("a"), model("b"), model("c", tensors=two_inputs)])
    runner.submit(request(), caller)
    first, second = models.tickets

    second.reply(unavailable("[request id: 7] the queue is full", hint="retry"), True)

    assert caller.error.code is Code.UNAVAILABLE
    assert str(caller.error) == "in ensemble 'e', step 'b': the queue is full (hint: retry)"
    assert first.is_cancelled
    assert len(models.tickets) == 2
    assert runner.metrics.failures[FailureReason.OTHER] == 1
    assert runner.in_flight == 0


def test_a_caller_who_leaves_stops_every_step() -> None:
    models, caller = Models(), Caller()
    runner = ensemble(models, chain("a", "b"), [model("a"), model("b")])
    ticket = runner.submit(request(), caller)
    models.tickets[0].answer({"OUT": ONE})

    ticket.cancel()
    ticket.cancel()

    assert caller.error.code is Code.CANCELLED
    assert [t.is_cancelled for t in models.tickets] == [False, True]
    assert runner.metrics.failures[FailureReason.CANCELED] == 1


def test_a_caller_who_leaves_while_a_step_is_started_stops_that_one_too() -> None:
    models, caller = Models(), Caller()
    runner = ensemble(models, chain("a", "b"), [model("a"), model("b")])
    tickets: list[EnsembleCall] = []

    def infer(sent: InferRequest, reply: Reply) -> Ticket:
        if sent.model_name == "b":
            tickets[0].cancel()
        return models.infer(sent, reply)

    runner.infer = infer
    tickets.append(runner.submit(request(), caller))
    models.tickets[0].answer({"OUT": ONE})

    assert models.tickets[1].is_cancelled
    assert caller.error.code is Code.CANCELLED


def test_a_refused_request_has_its_id_in_front() -> None:
    caller = Caller()
    runner = ensemble(Models(), chain("a"), [model("a")])

    runner.submit(request(np.zeros(3, "<f4")), caller)

    assert str(caller.error).startswith("[request id: 7] unexpected shape for input 'IN' for model 'e'")


def test_an_output_without_its_optional_input_is_refused_and_the_other_is_answered() -> None:
    models = Models(lambda _: {"OUT": ONE})
    tensors = TENSORS + (
        'input { name: "MAYBE" data_type: TYPE_FP32 dims: [ 2 ] optional: true }'
        'output { name: "SIDE" data_type: TYPE_FP32 dims: [ 2 ] }'
    )
    steps = step("a", {"IN": "IN"}, {"OUT": "OUT"}) + step("b", {"IN": "MAYBE"}, {"OUT": "SIDE"})
    runner = ensemble(models, steps, [model("a"), model("b")], tensors=tensors)
    refused, answered = Caller(), Caller()

    runner.submit(request(), refused)
    runner.submit(request(outputs=("OUT",)), answered)

    assert "[request id: 7] output 'SIDE' cannot be computed without the input(s) 'MAYBE'" in str(refused.error)
    assert refused.error.code is Code.INVALID_ARG
    assert len(answered.response.outputs) == 1


def test_an_optional_input_that_is_not_given_stays_absent() -> None:
    models, caller = Models(), Caller()
    optional = TENSORS + 'input { name: "MAYBE" data_type: TYPE_FP32 dims: [ 2 ] optional: true }'
    steps = step("a", {"IN": "IN", "MAYBE": "MAYBE"}, {"OUT": "OUT"})
    runner = ensemble(models, steps, [model("a", tensors=optional)], tensors=optional)

    runner.submit(request(), caller)

    assert list(models.tickets[0].request.inputs) == ["IN"]


def test_hundreds_of_steps_that_answer_at_once_do_not_pile_up() -> None:
    names = [f"m{number}" for number in range(600)]
    caller = Caller()
    runner = ensemble(Models(lambda _: {"OUT": ONE}), chain(*names), [model(name) for name in names])

    runner.submit(request(), caller)

    assert caller.response.outputs[0].array is ONE


def test_responses_of_a_decoupled_step_stream_to_the_caller() -> None:
    models, caller = Models(), Caller()
    configs = [model("a", "model_transaction_policy { decoupled: true }"), model("b")]
    runner = ensemble(models, chain("a", "b"), configs)
    assert runner.config.is_decoupled
    runner.submit(request(), caller)
    (source,) = models.of("a")

    source.answer({"OUT": ONE}, final=False)
    source.answer({"OUT": TWO}, final=False)
    models.of("b")[1].answer({"OUT": TWO})
    assert caller.outcomes == []
    models.of("b")[0].answer({"OUT": ONE})
    source.reply(None, True)

    values = [outcome.outputs[0].array for outcome, _ in caller.outcomes if isinstance(outcome, InferResponse)]
    assert [list(value) for value in values] == [[1, 1], [2, 2]]
    assert [final for _, final in caller.outcomes] == [False, False, True]
    assert caller.outcomes[-1] == (None, True)
    statistics = runner.metrics.statistics
    assert (statistics.success.count, statistics.inference_count) == (1, 1)
    assert [statistics.responses[key].success.count for key in "012"] == [1, 1, 0]


def test_the_last_response_is_final_where_the_step_has_ended_before() -> None:
    models, caller = Models(), Caller()
    configs = [model("a", "model_transaction_policy { decoupled: true }"), model("b")]
    runner = ensemble(models, chain("a", "b"), configs)
    runner.submit(request(), caller)
    models.of("a")[0].answer({"OUT": ONE})

    models.of("b")[0].answer({"OUT": TWO})

    assert list(caller.response.outputs[0].array) == [2, 2]


def test_an_error_after_a_response_ends_the_stream() -> None:
    models, caller = Models(), Caller()
    runner = ensemble(models, chain("a"), [model("a", "model_transaction_policy { decoupled: true }")])
    runner.submit(request(), caller)

    models.tickets[0].answer({"OUT": ONE}, final=False)
    models.tickets[0].reply(internal("out of ideas"), False)

    assert [final for _, final in caller.outcomes] == [False, True]
    assert str(caller.outcomes[1][0]) == "in ensemble 'e', step 'a': out of ideas"
    assert models.tickets[0].is_cancelled
    assert runner.metrics.statistics.responses["1"].fail.count == 1


def test_no_more_responses_than_allowed_are_worked_on_at_once() -> None:
    models, caller = Models(), Caller()
    configs = [model("a", "model_transaction_policy { decoupled: true }"), model("b")]
    runner = ensemble(models, chain("a", "b"), configs, inflight=2)
    runner.submit(request(), caller)

    for _ in range(5):
        models.of("a")[0].answer({"OUT": ONE}, final=False)
    assert len(models.of("b")) == 2
    models.of("b")[0].answer({"OUT": ONE})
    assert len(models.of("b")) == 3


def test_more_responses_than_can_be_held_back_end_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.server.ensembles.flow.HELD_RESPONSES_MAX", 1)
    models, caller = Models(), Caller()
    configs = [model("a", "model_transaction_policy { decoupled: true }"), model("b")]
    runner = ensemble(models, chain("a", "b"), configs, inflight=1)
    runner.submit(request(), caller)

    for _ in range(3):
        models.of("a")[0].answer({"OUT": ONE}, final=False)

    assert caller.error.code is Code.UNAVAILABLE
    assert "step 'a'" in caller.error.message
    assert all(ticket.is_cancelled for ticket in models.tickets)


def test_a_response_has_the_outputs_that_are_there_each_in_its_form() -> None:
    models, caller = Models(lambda _: {"OUT1": ONE}), Caller()
    tensors = TENSORS + 'output { name: "OUT1" data_type: TYPE_FP32 dims: [ 2 ] }'
    steps = step("a", {"IN": "IN"}, {"OUT": "OUT", "OUT1": "OUT1"})
    runner = ensemble(models, steps, [model("a", tensors=tensors)], tensors=tensors)
    asked = request()
    asked.outputs = (RequestedOutput("OUT"), RequestedOutput("OUT1", 1))

    runner.submit(asked, caller)

    (output,) = caller.response.outputs
    assert (output.name, output.array.tolist()) == ("OUT1", [b"1.000000:0"])


def test_a_step_whose_model_gets_less_than_it_needs_says_so_itself() -> None:
    models, caller = Models(), Caller()
    runner = ensemble(models, chain("a", "b"), [model("a"), model("b")])

    runner.submit(request(), caller)
    models.of("a")[0].answer({})
    (second,) = models.of("b")
    second.reply(invalid("expected 1 inputs but got 0 inputs for model 'b'"), True)

    assert second.request.inputs == {}
    assert (caller.error.code, str(caller.error)) == (
        Code.INVALID_ARG,
        "in ensemble 'e', expected 1 inputs but got 0 inputs for model 'b'",
    )


def test_a_model_that_was_not_decoupled_may_not_send_a_part() -> None:
    models, caller = Models(), Caller()
    runner = ensemble(models, chain("a"), [model("a")])
    runner.submit(request(), caller)

    models.tickets[0].answer({"OUT": ONE}, final=False)

    assert "partial response" in caller.error.message


def test_a_sequence_that_a_response_sets_goes_on_with_its_tensors() -> None:
    models = Models()
    runner = ensemble(models, chain("a", "b", "c"), [model("a"), model("b"), model("c")])
    runner.submit(request(correlation_id=1, flags=SEQUENCE_START), Caller())

    models.tickets[0].answer(
        {"OUT": ONE}, parameters={"sequence_id": 42, "sequence_start": False, "sequence_end": True, "other": 1}
    )
    models.tickets[1].answer({"OUT": ONE})

    assert [(t.request.correlation_id, t.request.flags) for t in models.tickets] == [
        (1, SEQUENCE_START),
        (42, SEQUENCE_END),
        (42, SEQUENCE_END),
    ]


def test_a_response_says_to_which_sequence_it_belongs() -> None:
    models, caller, alone = Models(lambda request: {"OUT": request.inputs["IN"].array}), Caller(), Caller()
    runner = ensemble(models, chain("a"), [model("a")])

    runner.submit(request(correlation_id="talk", flags=SEQUENCE_START | SEQUENCE_END), caller)
    runner.submit(request(), alone)

    assert caller.response.parameters == {"sequence_id": "talk", "sequence_start": True, "sequence_end": True}
    assert alone.response.parameters == {"sequence_id": 0, "sequence_start": False, "sequence_end": False}


def test_a_response_belongs_to_the_sequence_that_a_step_has_set() -> None:
    models, caller = Models(), Caller()
    runner = ensemble(models, chain("a", "b"), [model("a"), model("b")])
    runner.submit(request(correlation_id=1, flags=SEQUENCE_START), caller)

    models.tickets[0].answer({"OUT": ONE}, parameters={"sequence_id": 42, "other": "x"})
    models.tickets[1].answer({"OUT": ONE})

    assert caller.response.parameters == {"sequence_id": 42, "sequence_start": True, "sequence_end": False}


def test_parameters_of_a_response_that_say_nothing_of_sequences_change_nothing() -> None:
    models = Models()
    runner = ensemble(models, chain("a", "b"), [model("a"), model("b")])
    runner.submit(request(correlation_id="dialogue"), Caller())

    models.tickets[0].answer({"OUT": ONE}, parameters={"sequence_id": 1.5, "x": "y"})

    assert models.tickets[1].request.correlation_id == "dialogue"


def test_outputs_are_classified_with_labels() -> None:
    caller = Caller()
    models = Models(lambda _: {"OUT": np.array([0.25, 0.75], "<f4")})
    runner = ensemble(models, chain("a"), [model("a")], labels={"OUT": ("cat", "dog")})

    runner.submit(request(outputs=("OUT",), classes=1), caller)

    assert caller.response.outputs[0].array.tolist() == [b"0.750000:1:dog"]
    assert models.tickets[0].request.outputs == ()


def test_an_output_that_cannot_be_classified_is_refused() -> None:
    caller = Caller()
    strings = TENSORS.replace("TYPE_FP32", "TYPE_STRING")
    models = Models()
    runner = ensemble(models, chain("a"), [model("a", tensors=strings)], tensors=strings)
    sent = request(outputs=("OUT",), classes=1)
    sent.inputs["IN"] = Tensor("IN", DataType.BYTES, np.array([b"x", b"y"], object))

    runner.submit(sent, caller)
    tensor = Tensor("OUT", DataType.BYTES, np.array([b"x", b"y"], object))
    models.tickets[0].reply(InferResponse("a", "1", "7", [tensor]), True)

    assert caller.error.code is Code.INVALID_ARG
    assert caller.error.message.startswith("class result not available for output due to unsupported type ")
    assert caller.error.message.endswith("of 'OUT'")


def test_statistics_add_up_what_the_steps_took() -> None:
    models, caller = Models(), Caller()
    batching = model("a", "max_batch_size: 8"), model("b", "max_batch_size: 8")
    runner = ensemble(models, chain("a", "b"), batching, more="max_batch_size: 8")
    array = np.zeros((3, 2), "<f4")
    runner.submit(request(array), caller)

    models.tickets[0].answer({"OUT": array}, record=ExecutionRecord("a_0", 3, 100, 1000))
    models.tickets[1].answer({"OUT": array}, record=ExecutionRecord("b_0", 3, 20, 500))

    statistics = runner.metrics.statistics
    assert (statistics.name, statistics.version) == ("e", "1")
    assert (statistics.inference_count, statistics.execution_count) == (3, 1)
    assert (statistics.queue.ns, statistics.compute_infer.ns) == (120, 1500)
    assert (statistics.success.count, statistics.queue.count, statistics.compute_output.count) == (1, 1, 1)
    assert list(statistics.batches) == [3]
    batch = statistics.batches[3]
    assert (batch.compute_infer.count, batch.compute_infer.ns) == (1, 1500)
    assert (batch.compute_input.count, batch.compute_output.count) == (1, 1)
    assert runner.metrics.request_ns.count == 1
    record = caller.response.execution
    assert record is not None
    assert (record.batch_size, record.queue_ns, record.compute_ns) == (3, 120, 1500)


def test_a_reply_that_fails_is_the_front_ends_own_affair(caplog: pytest.LogCaptureFixture) -> None:
    runner = ensemble(Models(lambda _: {"OUT": ONE}), chain("a"), [model("a")])

    def reply(outcome: Outcome, final: bool) -> None:
        raise ValueError("the socket is gone")

    runner.submit(request(), reply)

    assert "the socket is gone" in caplog.text
    assert runner.in_flight == 0


def test_an_exception_of_the_engine_ends_the_request(caplog: pytest.LogCaptureFixture) -> None:
    models, caller = Models(), Caller()
    runner = ensemble(models, chain("a"), [model("a")])

    def infer(sent: InferRequest, reply: Reply) -> Ticket:
        raise ValueError("a mistake")

    runner.infer = infer
    runner.submit(request(), caller)

    assert caller.error.code is Code.INTERNAL
    assert "a mistake" in caplog.text
    assert "a mistake" not in caller.error.message


async def test_draining_waits_for_what_is_in_flight_and_refuses_the_rest() -> None:
    models, caller, late = Models(), Caller(), Caller()
    runner = ensemble(models, chain("a"), [model("a")])
    runner.submit(request(), caller)
    draining = asyncio.ensure_future(runner.drain())
    await asyncio.sleep(0)
    assert not draining.done()

    runner.submit(request(), late)
    models.tickets[0].answer({"OUT": ONE})
    await draining
    await runner.aclose()

    assert caller.response.outputs[0].array is ONE
    assert late.error.code is Code.UNAVAILABLE


def test_what_is_in_flight_when_the_time_is_up_gets_the_reason() -> None:
    models, caller = Models(), Caller()
    runner = ensemble(models, chain("a"), [model("a")])
    runner.submit(request(), caller)

    runner.abandon(unavailable("exit timeout expired"))

    assert caller.error.message == "exit timeout expired"
    assert models.tickets[0].is_cancelled


def test_what_is_over_is_freed_without_the_collector() -> None:
    models = Models(lambda _: {"OUT": np.ones(2, "<f4")})
    runner = ensemble(models, chain("a", "b"), [model("a"), model("b")])
    caller = Caller()
    gc.collect()
    gc.disable()
    try:
        runner.submit(request(), caller)
        seen = weakref.ref(models.tickets[1].request.inputs["IN"].array)
        models.tickets.clear()
        assert seen() is None
    finally:
        gc.enable()


def test_new_models_are_for_new_requests() -> None:
    models, before, after = Models(), Caller(), Caller()
    runner = ensemble(models, chain("a"), [model("a")])
    runner.submit(request(), before)

    decoupled = model("a", "model_transaction_policy { decoupled: true }")
    runner.replace_plan(plan_of(chain("a"), [decoupled]))
    runner.submit(request(), after)
    models.tickets[1].answer({"OUT": ONE}, final=False)
    models.tickets[0].answer({"OUT": TWO})

    assert before.response.outputs[0].array is TWO
    assert [final for _, final in after.outcomes] == [False]
    assert runner.config.is_decoupled
