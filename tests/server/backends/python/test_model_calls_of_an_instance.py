"""The calls of one instance: what is refused, who is said to call, when a call is given up."""

import asyncio
from collections.abc import Mapping

import pytest
from tests.support.fake_engine import FakeTicket
from tests.support.process import until

from charonia.clock import now_ns
from charonia.config.model import ModelConfig, TransactionPolicy
from charonia.core.errors import Code, ServingError, internal, not_found
from charonia.core.request import CallFrame, Flow, InferRequest
from charonia.core.response import InferResponse, Outcome, Reply
from charonia.server.backends.workers import services as services_module
from charonia.server.backends.workers.services import ModelCalls, Work
from charonia.testing.backend_suite import StreamSink

OUTSIDE = CallFrame("caller", "1")


class Models:
    """Other models that answer when the test says so."""

    def __init__(self) -> None:
        self.configs = {
            "plain": ModelConfig("plain"),
            "many": ModelConfig("many", model_transaction_policy=TransactionPolicy(decoupled=True)),
        }
        self.tickets: list[FakeTicket] = []
        self.at_once: Outcome = None

    def infer(self, request: InferRequest, reply: Reply) -> FakeTicket:
        ticket = FakeTicket(request, reply)
        self.tickets.append(ticket)
        if self.at_once is not None:
            ticket.answer(self.at_once)
        return ticket

    async def model_ready(self, name: str, version: str = "") -> bool:
        return True

    def is_loadable(self, name: str) -> bool:
        return name == "unloaded"

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        if name not in self.configs:
            raise not_found(f"Request for unknown model: '{name}' is not found", hint="models that are ready: plain")
        return self.configs[name]

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Never asked for."""

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Never asked for."""


class Outcomes:
    def __init__(self) -> None:
        self.all: list[tuple[Outcome, bool]] = []

    def __call__(self, outcome: Outcome, final: bool) -> None:
        assert not any(was_final for _, was_final in self.all)
        self.all.append((outcome, final))

    @property
    def error(self) -> ServingError:
        ((outcome, final),) = self.all
        assert isinstance(outcome, ServingError)
        assert final
        return outcome


def request(model: str = "plain", *, timeout_us: int = 0, deadline_ns: int = 0) -> InferRequest:
    return InferRequest(model, {}, timeout_us=timeout_us, deadline_ns=deadline_ns)


def answer() -> InferResponse:
    return InferResponse("plain", "1", "", [])


async def test_a_call_is_answered_and_over() -> None:
    models, outcomes, sink, frame = Models(), Outcomes(), StreamSink(1), CallFrame("caller", "1", "caller_0")
    sink.frame = lambda: frame  # type: ignore[method-assign]
    calls = ModelCalls(models, OUTSIDE)
    made = request()
    calls.start(1, made, outcomes, work=Work(sink, [request()]))
    assert len(calls) == 1
    assert made.caller is frame
    models.tickets[0].answer(answer())
    assert [final for _, final in outcomes.all] == [True]
    assert len(calls) == 0
    calls.cancel(1)


async def test_a_call_may_be_answered_before_it_is_known() -> None:
    models, outcomes = Models(), Outcomes()
    models.at_once = answer()
    calls = ModelCalls(models, OUTSIDE)
    calls.start(1, request(), outcomes)
    assert len(outcomes.all) == 1
    assert len(calls) == 0


async def test_a_call_of_a_thread_of_the_models_own_occupies_nothing() -> None:
    models = Models()
    made = request()
    ModelCalls(models, OUTSIDE).start(1, made, Outcomes())
    assert made.caller is OUTSIDE
    assert made.deadline_ns == 0


async def test_a_call_belongs_to_the_flow_of_the_request_that_it_is_made_for() -> None:
    caused, made = request(), request()
    caused.flow = Flow("acme", 2)
    ModelCalls(Models(), OUTSIDE).start(1, made, Outcomes(), work=Work(StreamSink(1), [caused]))
    assert made.flow == caused.flow


async def test_a_model_that_is_not_ready_is_named_with_the_reason() -> None:
    outcomes = Outcomes()
    ModelCalls(Models(), OUTSIDE).start(1, request("nowhere"), outcomes)
    assert outcomes.error.code is Code.NOT_FOUND
    assert "Failed for execute the inference request. Model 'nowhere' is not ready." in outcomes.error.message
    assert outcomes.error.hint


async def test_a_model_that_is_loaded_on_demand_is_called() -> None:
    models, outcomes = Models(), Outcomes()
    ModelCalls(models, OUTSIDE).start(1, request("unloaded"), outcomes)
    models.tickets[0].answer(answer())
    assert [final for _, final in outcomes.all] == [True]


async def test_a_decoupled_model_needs_a_call_that_takes_any_number_of_responses() -> None:
    models, refused, outcomes = Models(), Outcomes(), Outcomes()
    calls = ModelCalls(models, OUTSIDE)
    calls.start(1, request("many"), refused)
    assert refused.error.code is Code.UNSUPPORTED
    assert "use 'decoupled=True' argument to the 'exec' or 'async_exec' calls" in refused.error.message
    calls.start(1, request("many"), outcomes, allows_decoupled=True)
    models.tickets[0].answer(answer(), False)
    models.tickets[0].answer(None, True)
    assert [final for _, final in outcomes.all] == [False, True]


async def test_without_other_models_there_is_nothing_to_call() -> None:
    outcomes = Outcomes()
    ModelCalls(None, OUTSIDE).start(1, request(), outcomes)
    assert outcomes.error.code is Code.UNSUPPORTED


async def test_open_calls_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services_module, "CALLS_OPEN_MAX", 2)

    models, outcomes = Models(), [Outcomes() for _ in range(4)]
    calls = ModelCalls(models, OUTSIDE)
    for key in range(3):
        calls.start(key, request(), outcomes[key])
    assert outcomes[2].error.code is Code.UNAVAILABLE
    models.tickets[0].answer(answer())
    calls.start(3, request(), outcomes[3])
    assert outcomes[3].all == []


async def test_a_call_that_takes_too_long_fails_as_timed_out_and_is_cancelled() -> None:
    models, outcomes = Models(), Outcomes()
    ModelCalls(models, OUTSIDE).start(1, request(timeout_us=20_000), outcomes)
    await until(lambda: outcomes.all)
    assert outcomes.error.code is Code.UNAVAILABLE
    assert "Request timeout expired" in outcomes.error.message
    assert models.tickets[0].cancelled


@pytest.mark.parametrize(
    ("deadlines_s", "timeout_s", "expected_s"),
    [([5, 9], 0, 9), ([5, 0], 0, 0), ([5], 2, 2), ([5], 60, 5), ([0], 2, 2)],
)
async def test_a_call_ends_when_nobody_waits_for_its_batch_any_more_or_its_own_time_is_up(
    deadlines_s: list[int], timeout_s: int, expected_s: int
) -> None:
    start = now_ns()
    batch = [request(deadline_ns=start + s * 10**9 if s else 0) for s in deadlines_s]
    made = request(timeout_us=timeout_s * 10**6)
    calls = ModelCalls(Models(), OUTSIDE)
    calls.start(1, made, Outcomes(), work=Work(StreamSink(1), batch))
    if expected_s:
        assert abs(made.deadline_ns - start - expected_s * 10**9) < 10**9
    else:
        assert made.deadline_ns == 0
    calls.cancel_all()


async def test_a_call_is_not_over_before_the_caller_of_its_batch_was_told_that_time_is_up() -> None:
    models, outcomes, sink = Models(), Outcomes(), StreamSink(1)
    calls = ModelCalls(models, OUTSIDE)
    work = Work(sink, [request(deadline_ns=now_ns() + 10**6)])
    calls.start(1, request(), outcomes, work=work)
    await asyncio.sleep(0.05)
    assert (outcomes.all, models.tickets[0].cancelled) == ([], False)
    calls.cancel_batch(sink)
    assert outcomes.error.code is Code.CANCELLED


async def test_calls_are_given_up_alone_with_their_batch_or_all_at_once() -> None:
    models, sinks = Models(), [StreamSink(1), StreamSink(1)]
    calls = ModelCalls(models, OUTSIDE)
    outcomes = [Outcomes() for _ in range(5)]
    works = [Work(sinks[0], [request()]), Work(sinks[0], [request()]), Work(sinks[1], [request()]), None, None]
    for key, work in enumerate(works):
        calls.start(key, request(), outcomes[key], work=work)
    calls.cancel(0)
    assert [t.cancelled for t in models.tickets] == [True, False, False, False, False]
    calls.cancel_batch(sinks[0])
    assert [t.cancelled for t in models.tickets] == [True, True, False, False, False]
    calls.cancel_all()
    assert all(o.error.code is Code.CANCELLED for o in outcomes)
    assert len(calls) == 0


async def test_a_call_that_is_given_up_ends_with_the_reason() -> None:
    models, outcomes = Models(), Outcomes()
    calls = ModelCalls(models, OUTSIDE)
    calls.start(1, request("many"), outcomes, allows_decoupled=True)
    calls.cancel(1, internal("too fast"))
    calls.cancel(1, internal("over"))
    assert outcomes.error.message == "too fast"
    assert models.tickets[0].cancelled


async def test_a_call_may_be_given_up_in_the_middle_of_its_first_response() -> None:
    models = Models()
    calls = ModelCalls(models, OUTSIDE)
    came: list[tuple[Outcome, bool]] = []

    def reply(outcome: Outcome, final: bool) -> None:
        came.append((outcome, final))
        if not final:
            calls.cancel(1, internal("too fast"))

    def infer(request: InferRequest, reply: Reply) -> FakeTicket:
        ticket = FakeTicket(request, reply)
        ticket.answer(answer(), False)
        return ticket

    models.infer = infer  # type: ignore[method-assign] # this model answers at once
    calls.start(1, request("many"), reply, allows_decoupled=True)
    assert [final for _, final in came] == [False, True]
    assert len(calls) == 0
