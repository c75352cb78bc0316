"""What a Python model may do with requests, responses and senders, over a host that only takes notes."""

import contextlib
import gc
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.support.fake_host import FakeHost, answer

from charonia.server.backends.python.worker import triton_python_backend_utils as unbound
from charonia.server.backends.python.worker.errors import RESCHEDULED, TritonError
from charonia.server.backends.python.worker.host import Binding, Inbox, ModelBatch
from charonia.server.backends.python.worker.requests import (
    InferenceRequest,
    InferenceResponse,
    InferenceTrace,
    PreferredMemory,
)
from charonia.server.backends.python.worker.runner import PythonModelRunner
from charonia.server.backends.python.worker.tensor import Tensor
from charonia.server.channel.datatypes import TritonModelException

HEAD = "import asyncio, gc, json, threading\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n"
FIELDS = ("id-1", 7, 3, 100, 2, '{"k": 1}', ("OUT",), '{"traceparent": "00-1"}')


class Model:
    """A model that is loaded, and what its host has noted."""

    loaded: ClassVar[list["Model"]] = []

    def __init__(self, folder: Path, code: str, *, decoupled: bool = False, name: str = "m") -> None:
        version = folder / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / "model.py").write_text(HEAD + code)
        self.host = FakeHost()
        self.runner = PythonModelRunner(self.host, shares_process=True)
        self.capabilities = self.runner.initialize(
            str(version / "model.py"), str(version), str(version.parent), {"model_name": name}, decoupled
        )
        self.batches = 0
        self.loaded.append(self)

    def run(self, *values: float) -> list[Any]:
        self.batches += 1
        self.batch = ModelBatch(self.batches, len(values))
        sent = [(FIELDS, [Tensor("IN", np.array([value], np.float32))]) for value in values]
        results, _ = self.runner.execute(self.batch, sent)
        gc.collect()
        return results

    def wait_for(self, responses: int) -> None:
        """Run the event loop of the model until its senders have sent this many responses."""
        enough: Inbox[None] = Inbox()
        respond = self.host.respond

        def watch(batch: ModelBatch, index: int, result: Any, final: bool) -> None:
            respond(batch, index, result, final)
            if len(self.host.responses) >= responses:
                enough.put(None)

        self.host.respond = watch  # type: ignore[method-assign]
        self.runner.wait(enough)


@pytest.fixture(autouse=True)
def _finalize_models() -> Iterator[None]:
    yield
    for model in Model.loaded:
        with contextlib.suppress(TritonModelException):
            model.runner.finalize()
    Model.loaded.clear()


def values_of(result: Any) -> list[float]:
    assert result[0] == -1, result
    return [float(tensor.as_numpy()[0]) for tensor in result[1]]


HELPERS = """
def answer(value, **more):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))], **more)

def call(name="other", **more):
    return pb_utils.InferenceRequest(model_name=name, requested_output_names=["OUT"], inputs=[], **more)
"""


def execute(body: str, *, is_async: bool = False) -> str:
    lines = "\n".join("        " + line for line in body.strip().splitlines())
    return f"""{HELPERS}
class TritonPythonModel:
    {"async " if is_async else ""}def execute(self, requests):
{lines}
"""


SharedObject = Callable[..., Model]


@pytest.fixture
def made(tmp_path: Path) -> SharedObject:
    """Return what makes a model whose `execute` has these lines."""
    return lambda body, *, is_async=False, **options: Model(tmp_path, execute(body, is_async=is_async), **options)


def test_every_name_of_the_module_is_documented() -> None:
    pages = Path(__file__).parents[4] / "docs"
    text = (pages / "python_models.md").read_text(encoding="utf-8")

    assert [name for name in unbound.__all__ if name not in text] == []


# Requests


def test_a_request_tells_what_it_carries(made: SharedObject) -> None:
    model = made("""
r, = requests
r.set_flags(1)
r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
seen = [r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.priority(), r.parameters(),
        r.requested_output_names(), r.trace().get_context(), r.is_cancelled(), len(r.inputs())]
return [answer(0, parameters={"seen": json.dumps(seen)})]
""")

    ((_, _, parameters),) = model.run(5)

    seen = json.loads(parameters["seen"])
    assert seen == ["id-1", 7, 1, 100, 2, '{"k": 1}', ["OUT"], '{"traceparent": "00-1"}', False, 1]
    assert model.host.polls == 1


def bound() -> tuple[Any, FakeHost, Binding]:
    host = FakeHost()
    binding = Binding(host, "/models/m/1")
    binding.is_serving = True
    return unbound.bound_to(binding), host, binding


def test_a_made_request_reaches_the_host_as_it_was_made() -> None:
    pb_utils, host, binding = bound()
    binding.running, binding.thread = 5, threading.get_ident()
    tensor = Tensor("IN", np.ones(2, np.float32))

    request = pb_utils.InferenceRequest(
        model_name=b"other",
        model_version=2,
        requested_output_names=["B", "A", "B"],
        inputs=[tensor],
        request_id="mine",
        correlation_id="sequence",
        flags=1,
        timeout=1000,
        preferred_memory=PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        trace=InferenceTrace('{"traceparent": "00-1"}'),
        parameters={"a": 1, "b": True, "c": "text"},
    )
    response = request.exec()

    (call,) = host.calls
    assert (call.batch, call.model_name, call.model_version, call.decoupled) == (5, "other", "2", False)
    assert call.fields[:5] == ("mine", "sequence", 1, 1000, 0)
    assert json.loads(call.fields[5]) == {"a": 1, "b": True, "c": "text"}
    assert call.fields[6:] == (("B", "A"), '{"traceparent": "00-1"}')
    assert call.inputs == [tensor]
    assert not response.has_error()
    assert request.trace().get_context() == '{"traceparent": "00-1"}'
    assert not request.is_cancelled()
    assert request.correlation_id() == "sequence"


GOOD: dict[str, Any] = {"model_name": "other", "requested_output_names": [], "inputs": []}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_name": None}, "argument 'model_name' is missing"),
        ({"inputs": None}, "argument 'inputs' is missing"),
        ({"requested_output_names": None}, "argument 'requested_output_names' is missing"),
        ({"model_name": 5}, "expected a string as model_name, got int"),
        ({"model_version": "1"}, "expected an integer as model_version, got str"),
        ({"model_version": -2}, "model_version -2 is not within"),
        ({"inputs": [np.ones(1)]}, "expected Tensor objects as inputs, got ndarray"),
        ({"inputs": 5}, "expected a list of inputs, got int"),
        ({"requested_output_names": "OUT"}, "expected a list as requested_output_names, got str"),
        ({"requested_output_names": [1]}, "name of a requested output, got int"),
        ({"correlation_id": 1.5}, "Correlation ID must be integer or string"),
        ({"correlation_id": -1}, "correlation_id -1 is not within"),
        ({"flags": 2**32}, "flags 4294967296 is not within"),
        ({"timeout": -1}, "timeout -1 is not within"),
        ({"timeout": True}, "expected an integer as timeout, got bool"),
        ({"preferred_memory": 1}, "expected a PreferredMemory, got int"),
        ({"trace": "x"}, "expected an InferenceTrace, got str"),
        ({"parameters": [1]}, "expected a dict as parameters, got list"),
        ({"parameters": {1: 2}}, "expected strings as names of parameters"),
        ({"parameters": {"x": 1.5}}, "must be a string, an integer or a boolean, got float"),
        ({"parameters": {"x": 2**64}}, "parameter 'x' does not fit 64 bits"),
    ],
)
def test_a_request_that_is_made_wrongly_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TritonModelException, match=message):
        InferenceRequest(**{**GOOD, **arguments})


def test_a_request_that_was_made_is_not_rescheduled() -> None:
    with pytest.raises(TritonModelException, match="cannot be rescheduled"):
        InferenceRequest(**GOOD).set_release_flags(unbound.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    with pytest.raises(TritonModelException, match="unsupported flags 4"):
        InferenceRequest(**GOOD).set_release_flags(4)


AGAIN = (RESCHEDULED, "")
RESCHEDULE = "set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)"


def test_a_model_may_ask_for_requests_again(made: SharedObject) -> None:
    model = made(f"""
requests[0].{RESCHEDULE}
requests[1].{RESCHEDULE}
requests[2].{RESCHEDULE}
requests[2].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
requests[3].get_response_sender().send(answer(4))
requests[3].{RESCHEDULE}
return [None, answer(2), answer(3), None]
""")

    first, second, third, fourth = model.run(1, 2, 3, 4)

    assert first == AGAIN
    assert "must return None for such a request" in second[1]
    assert values_of(third) == [3]
    assert fourth is None


def test_a_decoupled_model_may_send_responses_and_ask_for_the_request_again(made: SharedObject) -> None:
    model = made(
        f"""
sender = requests[0].get_response_sender()
sender.send(answer(5))
requests[0].{RESCHEDULE}
requests[1].{RESCHEDULE}
requests[2].get_response_sender().send(flags=1)
requests[2].{RESCHEDULE}
try:
    sender.send(answer(6))
finally:
    self.kept = sender
""",
        decoupled=True,
    )

    assert model.run(1, 2, 3) == [AGAIN, AGAIN, None]
    assert [(index, final) for _, index, _, final in model.host.responses] == [(0, False), (2, True), (0, False)]


def test_an_async_decoupled_model_asks_when_it_is_done(made: SharedObject) -> None:
    body = f"requests[0].{RESCHEDULE}; requests[1].get_response_sender().send(flags=1); requests[1].{RESCHEDULE}"
    model = made(body, is_async=True, decoupled=True)
    model.run(1, 2)
    model.wait_for(2)

    assert model.host.responses == [(1, 1, None, True), (1, 0, AGAIN, True)]


def test_a_model_that_raises_asks_for_nothing(made: SharedObject) -> None:
    (result,) = made(f"requests[0].{RESCHEDULE}; raise ValueError('no')").run(1)

    assert "ValueError: no" in result[1]


def test_a_made_request_has_no_sender() -> None:
    with pytest.raises(TritonModelException, match="has no response sender"):
        InferenceRequest(**GOOD).get_response_sender()


def test_a_module_without_a_model_cannot_make_calls() -> None:
    for misuse in (
        lambda: unbound.InferenceRequest(**GOOD).exec(),
        lambda: unbound.is_model_ready("m"),
        lambda: unbound.load_model("m"),
    ):
        with pytest.raises(TritonModelException, match="BLS is only supported during the 'execute' function"):
            misuse()
    with pytest.raises(TritonModelException, match="only in a model that a server runs"):
        unbound.MetricFamily("n", "d", unbound.MetricFamily.GAUGE)
    unbound.Logger.log_info("to nobody")


@pytest.mark.parametrize("where", ["initialize", "finalize"])
def test_other_models_are_called_during_execute_only(tmp_path: Path, where: str) -> None:
    code = execute("return [answer(0)]") + f"\n    def {where}(self, *args):\n        call().exec()\n"

    with pytest.raises(TritonModelException, match="BLS is only supported during the 'execute' function"):
        Model(tmp_path, code).runner.finalize()


# Responses


@pytest.mark.parametrize("code", range(8))
def test_an_error_of_every_code_is_passed_on(made: SharedObject, code: int) -> None:
    model = made(f"return [pb_utils.InferenceResponse(error=pb_utils.TritonError('no', {code}))]")

    assert model.run(1) == [(code, "no")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_tensors": [1]}, "expected Tensor objects as outputs, got int"),
        ({"error": "no"}, "expected a TritonError as error, got str"),
        ({"parameters": {"x": None}}, "must be a string, an integer or a boolean, got NoneType"),
        ({"parameters": "x"}, "expected a dict as parameters, got str"),
        ({"parameters": {"x": -(2**63) - 1}}, "parameter 'x' does not fit 64 bits"),
    ],
)
def test_a_response_that_is_made_wrongly_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TritonModelException, match=message):
        InferenceResponse(**arguments)


SILENT = "class Silent(Exception):\n    def __str__(self):\n        raise RuntimeError('no text')\nraise Silent"


def test_an_error_takes_its_own_codes_only() -> None:
    with pytest.raises(TritonModelException, match="codes 0 to 7"):
        TritonError("x", 8)
    assert str(TritonError("x")) == "x"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return answer(1)", "Expected a list in the execute return, found type 'InferenceResponse'"),
        ("return None", "Expected a list in the execute return, found type 'NoneType'"),
        ("return []", "do not match the number of InferenceRequest"),
        ("return [1]", "Expected an 'InferenceResponse' object in the execute function return list"),
        ("return [None]", "whose response sender it has not asked for"),
        ("requests[0].exec()", "a request that the model was given cannot be executed"),
        (SILENT, "Silent, whose text cannot be had"),
        ("raise ValueError('pity')", "Failed to process the request(s) for model 'm_0_0', message: ValueError: pity"),
    ],
)
def test_what_execute_does_wrong_is_the_answer(made: SharedObject, body: str, message: str) -> None:
    model = made(body)

    ((code, text),) = model.run(1)

    assert code == TritonError.INTERNAL
    assert message in text


def test_an_exception_is_reported_with_its_traceback_and_the_requests_ids(made: SharedObject) -> None:
    model = made("raise ValueError('pity')")

    model.run(1)

    ((ids, text),) = model.host.tracebacks
    assert len(ids) == 1
    assert text.startswith("Traceback (most recent call last)")
    assert text.rstrip().endswith("ValueError: pity")


def test_outputs_that_nobody_asked_for_are_dropped(made: SharedObject) -> None:
    model = made("return [pb_utils.InferenceResponse(answer(1).output_tensors() + [pb_utils.Tensor('X', np.ones(1))])]")

    ((_, tensors, _),) = model.run(1)

    assert [tensor.name() for tensor in tensors] == ["OUT"]


def test_a_model_may_empty_the_list_of_requests(made: SharedObject) -> None:
    model = made("return [answer(requests.pop(0).inputs()[0].as_numpy()[0]) for _ in range(2)]")

    assert [values_of(r) for r in model.run(1, 2)] == [[1], [2]]


# Senders


def test_senders_of_several_requests_send_together_and_listen_for_their_callers(made: SharedObject) -> None:
    body = """
senders = [r.get_response_sender() for r in requests]
self.gone = []
senders[1].when_cancelled(lambda: self.gone.append(1))
senders[1].send(flags=1)
try:
    pb_utils.send_together([(senders[0], answer(1), 0), (senders[1], answer(2), 0), (senders[0], answer(3), 1)])
except pb_utils.TritonModelException as error:
    self.error = error
"""
    model = made(body, decoupled=True)
    model.run(1, 2)
    assert "has been closed" in str(model.runner._model.error)
    assert model.host.together == [2]
    sent = [(index, result and values_of(result), final) for _, index, result, final in model.host.responses]
    assert sent == [(1, None, True), (0, [1.0], False), (0, [3.0], True)]
    assert model.runner._model.gone == []
    model.batch.cancel(1)
    assert model.runner._model.gone == [1]


def test_an_ordinary_model_may_answer_through_the_sender(made: SharedObject) -> None:
    model = made("""
sender = requests[0].get_response_sender()
assert sender is requests[0].get_response_sender()
sender.send(answer(5))
sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
return [None, answer(6)]
""")

    first, second = model.run(1, 2)

    ((number, index, result, final),) = model.host.responses
    assert (number, index, final) == (1, 0, True)
    assert values_of(result) == [5]
    assert first is None
    assert values_of(second) == [6]


def test_an_ordinary_model_may_return_nothing_where_it_sends_everything(made: SharedObject) -> None:
    model = made("for r in requests: r.get_response_sender().send(answer(1), 1)")

    assert model.run(1, 2) == [None, None]
    assert [index for _, index, _, _ in model.host.responses] == [0, 1]


def test_a_response_after_the_senders_is_dropped_and_logged(made: SharedObject) -> None:
    model = made("requests[0].get_response_sender().send(answer(1)); return [answer(2)]")

    assert model.run(1) == [None]
    assert "response for request 'id-1', which its response sender had answered" in model.host.logged[0][1]


def test_an_unused_sender_does_not_keep_the_returned_response(made: SharedObject) -> None:
    model = made("requests[0].get_response_sender(); return [answer(2)]")

    assert values_of(model.run(1)[0]) == [2]
    assert model.host.responses == []


SENDER_MISUSE = [
    (False, "s.send()", "Inference Response object must be provided when the response flags is set to zero"),
    (False, "s.send(answer(1), flags=2)", "Unable to send response. Unsupported flag provided"),
    (False, "s.send(1)", "Expected an InferenceResponse, got int"),
    (False, "s.send(flags=1)", "Non-decoupled model cannot send complete final before sending a response"),
    (False, "s.send(answer(1)); s.send(answer(1))", "Non-decoupled model cannot send more than one response"),
    (False, "s.send(answer(1), 1); s.send(answer(1))", "Response sender has been closed"),
    (True, "s.send(flags=1); s.send(answer(1))", "Response sender has been closed"),
    (True, "s.send(flags=1); s.send(flags=1)", "Response sender has been closed"),
    (True, "s.send()", "Inference Response object must be provided"),
]


@pytest.mark.parametrize(("decoupled", "body", "message"), SENDER_MISUSE)
def test_wrong_use_of_a_sender_is_refused(made: SharedObject, decoupled: bool, body: str, message: str) -> None:
    model = made(
        f"""
s = requests[0].get_response_sender()
try:
    {body}
except pb_utils.TritonModelException as error:
    pb_utils.Logger.log_error(error)
s._is_closed = True
""",
        decoupled=decoupled,
    )
    model.run(1)

    (logged,) = model.host.logged
    assert message in logged[1]


def test_a_decoupled_model_sends_any_number_of_responses(made: SharedObject) -> None:
    model = made(
        """
for request in requests:
    sender = request.get_response_sender()
    for i in range(int(request.inputs()[0].as_numpy()[0])):
        sender.send(answer(i))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
        decoupled=True,
    )

    assert model.run(0, 2) == [None, None]

    seen = [(index, result and values_of(result), final) for _, index, result, final in model.host.responses]
    assert seen == [(0, None, True), (1, [0], False), (1, [1], False), (1, None, True)]


def test_a_decoupled_response_may_leave_outputs_out(made: SharedObject) -> None:
    model = made("requests[0].get_response_sender().send(pb_utils.InferenceResponse([]), 1)", decoupled=True)

    model.run(1)

    assert model.host.responses == [(1, 0, (-1, [], {}), True)]


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ("return [answer(1), answer(2)]", "is using the decoupled mode and the execute function must return None"),
        ("raise KeyError('x')", "KeyError"),
    ],
)
def test_what_a_decoupled_model_returns_or_raises_ends_the_requests_that_are_open(
    made: SharedObject, ends: str, text: str
) -> None:
    model = made(f"requests[0].get_response_sender().send(answer(1), 1)\n{ends}", decoupled=True)

    first, second = model.run(1, 2)

    assert first is None
    assert text in second[1]


def test_requests_that_a_decoupled_model_forgets_are_answered(made: SharedObject) -> None:
    model = made("requests[1].get_response_sender().send(answer(1))", decoupled=True)

    assert model.run(1, 2) == [None, None]

    assert len(model.host.responses) == 3
    for _, _, result, final in model.host.responses[1:]:
        assert result[0] == TritonError.INTERNAL
        assert "without a final response" in result[1]
        assert final


def test_a_request_that_is_kept_stays_open(made: SharedObject) -> None:
    model = made("TritonPythonModel.kept = requests[0]", decoupled=True)
    model.run(1)
    assert model.host.responses == []

    kept = type(model.runner._model).kept
    assert kept.inputs()[0].as_numpy()[0] == 1
    kept.get_response_sender().send(flags=1)

    assert model.host.responses == [(1, 0, None, True)]


def test_threads_may_send_after_execute_has_returned(made: SharedObject) -> None:
    model = made(
        """
senders = [request.get_response_sender() for request in requests]
self.go = threading.Event()
def work(sender):
    self.go.wait(200)
    for i in range(50):
        sender.send(answer(i))
    sender.send(flags=1)
self.threads = [threading.Thread(target=work, args=(sender,)) for sender in senders]
for thread in self.threads:
    thread.start()
""",
        decoupled=True,
    )
    model.run(*range(8))
    assert model.host.responses == []

    model.runner._model.go.set()
    for thread in model.runner._model.threads:
        thread.join(200)

    for i in range(8):
        own = [(result, final) for _, index, result, final in model.host.responses if index == i]
        assert [values_of(result)[0] for result, _ in own[:-1]] == list(range(50))
        assert own[-1] == (None, True)


def test_cancellation_is_seen_by_request_and_sender(made: SharedObject) -> None:
    model = made("TritonPythonModel.kept = requests", decoupled=True)
    model.run(1, 2)
    first, second = type(model.runner._model).kept

    model.batch.cancelled.add(1)

    assert not first.is_cancelled()
    assert second.is_cancelled()
    assert second.get_response_sender().is_cancelled()
    for request in (first, second):
        request.get_response_sender().send(flags=1)


# async


def test_an_async_model_waits_for_several_calls_at_once(made: SharedObject) -> None:
    model = made(
        """
a, b = await asyncio.gather(call("a").async_exec(), call("b").async_exec())
c = call("c").exec()
return [answer(sum(r.output_tensors()[0].as_numpy()[0] for r in (a, b, c)))]
""",
        is_async=True,
    )

    assert values_of(model.run(1)[0]) == [3]
    assert values_of(model.run(1)[0]) == [3]
    assert [call.model_name for call in model.host.calls[:3]] == ["a", "b", "c"]


def test_async_exec_starts_at_once(made: SharedObject) -> None:
    model = made(
        """
started = [call("a").async_exec(), call("b").async_exec()]
self.count = len(pb_utils.InferenceRequest._binding.host.calls)
for each in started:
    await each
return [answer(self.count)]
""",
        is_async=True,
    )

    assert values_of(model.run(1)[0]) == [2]


def test_async_exec_needs_an_event_loop(made: SharedObject) -> None:
    model = made("call().async_exec()")

    assert "async_exec needs a running event loop" in model.run(1)[0][1]
    assert model.host.calls == []


def test_a_cancelled_task_gives_its_call_up(made: SharedObject) -> None:
    model = made(
        """
tasks = [call().async_exec(), call(timeout=5).async_exec()]
tasks[0].cancel()
try:
    await asyncio.wait_for(tasks[1], 0.01)
except asyncio.TimeoutError:
    pass
await asyncio.gather(*tasks, return_exceptions=True)
return [answer(1)]
""",
        is_async=True,
    )
    model.host.outcomes = lambda call: []

    assert values_of(model.run(1)[0]) == [1]
    assert sorted(model.host.ended) == [1, 2]


def test_an_async_model_that_is_cancelled_or_raises_says_so(made: SharedObject) -> None:
    model = made("raise asyncio.CancelledError('gone')", is_async=True)

    assert "CancelledError: gone" in model.run(1)[0][1]


def test_batches_of_a_decoupled_async_model_run_side_by_side(tmp_path: Path) -> None:
    model = Model(
        tmp_path,
        """
class TritonPythonModel:
    def initialize(self, args):
        self.both = None
        self.seen = 0

    async def execute(self, requests):
        if self.both is None:
            self.both = asyncio.Event()
        self.seen += 1
        if self.seen == 2:
            self.both.set()
        await self.both.wait()
        value = requests[0].inputs()[0].as_numpy()[0]
        if value == 3:
            raise ValueError("three")
        requests[0].get_response_sender().send(flags=1)
        return 1 if value == 2 else None
""",
        decoupled=True,
    )
    notes = model.host.responses

    assert model.run(1) == [None]
    assert notes == []
    assert model.run(2) == [None]
    assert model.run(3) == [None]

    model.wait_for(3)
    by_batch = {number: result for number, _, result, final in notes if final}
    assert by_batch[1] is None
    assert by_batch[2] is None
    assert "ValueError: three" in by_batch[3][1]


LATER = """
class TritonPythonModel:
    async def execute(self, requests):
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # pytest's log would keep the exception
        for request in requests:
            asyncio.create_task(self.later(request.get_response_sender(), request.inputs()[0].as_numpy()[0]))

    async def later(self, sender, value):
        await asyncio.sleep(0.01)
        if value == 3:
            raise ValueError("three")
        response = await call().async_exec()
        sender.send(answer(response.output_tensors()[0].as_numpy()[0] + value), flags=1)
"""


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.loop_faults
def test_the_tasks_of_an_async_model_answer_after_its_execute_has_returned(tmp_path: Path, decoupled: bool) -> None:
    model = Model(tmp_path, HELPERS + LATER, decoupled=decoupled)

    assert model.run(1, 2) == [None, None]
    assert model.run(3) == [None]
    assert model.host.responses == []

    model.wait_for(3)
    first, second, third = sorted(model.host.responses, key=lambda each: each[:2])
    assert [values_of(first[2]), values_of(second[2])] == [[2], [3]]
    assert third[2][1] == "the model dropped the response sender of the request without a final response"


def test_the_calls_of_a_task_belong_to_the_batch_that_created_it(made: SharedObject) -> None:
    body = """
async def later(sender):
    await asyncio.sleep(0.001)
    await call().async_exec()
    sender.send(answer(1))

asyncio.create_task(later(requests[0].get_response_sender()))
await call().async_exec()
"""
    model = made(body, is_async=True)

    for _ in range(3):
        model.run(1)
    model.wait_for(3)

    assert sorted(call.batch for call in model.host.calls) == [1, 1, 2, 2, 3, 3]


def test_finalize_may_use_the_event_loop_and_ends_what_is_left_in_it(tmp_path: Path) -> None:
    model = Model(
        tmp_path,
        """
class TritonPythonModel:
    async def execute(self, requests):
        self.loop = asyncio.get_running_loop()
        self.left = asyncio.create_task(asyncio.sleep(3600))

    async def close(self):
        await asyncio.sleep(0)
        return not self.left.done()

    def finalize(self):
        self.was_left = asyncio.run_coroutine_threadsafe(self.close(), self.loop).result()
""",
    )
    model.run(1)
    python_model = model.runner._model
    model.runner.finalize()
    Model.loaded.clear()

    assert python_model.was_left
    assert python_model.left.cancelled()
    assert python_model.loop.is_closed()


# Calls of other models


def test_a_failed_call_is_a_response_with_an_error(made: SharedObject) -> None:
    model = made("r = call().exec(); return [pb_utils.InferenceResponse(error=r.error())]")
    failure = InferenceResponse(error=TritonError("Model 'other' is not ready", TritonError.UNAVAILABLE))
    model.host.outcomes = lambda call: [(failure, True)]

    assert model.run(1) == [(TritonError.UNAVAILABLE, "Model 'other' is not ready")]


def test_a_call_that_gets_no_response_is_an_error(tmp_path: Path) -> None:
    for is_async in (False, True):
        get = "await call().async_exec()" if is_async else "call().exec()"
        code = execute(f"return [pb_utils.InferenceResponse(error=({get}).error())]", is_async=is_async)
        model = Model(tmp_path, code)
        model.host.outcomes = lambda call: [(None, True)]

        assert model.run(1) == [(TritonError.INTERNAL, "model 'other' sent no response")]


def test_an_iterator_gives_the_responses_in_order(made: SharedObject) -> None:
    stream = [(answer(1), False), (answer(2), False), (answer(3), True)]
    for outcomes in (stream, [*[(r, False) for r, _ in stream], (None, True)]):
        for body, is_async in (
            ("got = list(call().exec(decoupled=True))", False),
            ("got = list(await call().async_exec(decoupled=True))", True),
            ("got = [r async for r in await call().async_exec(decoupled=True)]", True),
        ):
            check = f"\nassert len(got) == {len(outcomes)}"  # the news of the end is an empty response
            total = body + check + "\nreturn [answer(sum(t.as_numpy()[0] for r in got for t in r.output_tensors()))]"
            model = made(total, is_async=is_async)
            model.host.outcomes = lambda call, o=outcomes: list(o)  # type: ignore[misc]

            assert values_of(model.run(1)[0]) == [6]
            assert model.host.calls[0].decoupled
            assert model.host.ended == []


def test_an_iterator_that_is_cancelled_yields_what_the_model_still_sends(made: SharedObject) -> None:
    for body, is_async in (
        ("i = call().exec(decoupled=True)\nfirst = next(i)\ni.cancel()\ni.cancel()\nrest = list(i)", False),
        (
            "i = await call().async_exec(decoupled=True)\nfirst = next(i)\ni.cancel()\nrest = [r async for r in i]",
            True,
        ),
    ):
        check = "\nassert len(rest) == 2 and list(i) == []\nreturn [pb_utils.InferenceResponse(error=rest[1].error())]"
        model = made(body + check, is_async=is_async)
        end = InferenceResponse(error=TritonError("stopped", TritonError.CANCELLED))
        model.host.outcomes = lambda call, end=end: [(answer(1), False), (answer(2), False), (end, True)]  # type: ignore[misc]

        assert model.run(1) == [(TritonError.CANCELLED, "stopped")]
        assert model.host.asked_to_stop == [1]
        assert model.host.ended == []


def test_an_iterator_that_is_dropped_gives_the_call_up(made: SharedObject) -> None:
    model = made("next(call().exec(decoupled=True)); gc.collect(); return [answer(1)]")
    model.host.outcomes = lambda call: [(answer(1), False)]

    assert values_of(model.run(1)[0]) == [1]
    assert model.host.ended == [1]


def test_a_call_is_made_for_the_batch_that_waits_for_it(made: SharedObject) -> None:
    body = """
thread = threading.Thread(target=lambda: call("thread").exec())
thread.start()
thread.join()
call("main").exec()
"""
    ordinary = made(body + "return [answer(1)]")
    ordinary.run(1)
    decoupled = made(body + "requests[0].get_response_sender().send(flags=1)", decoupled=True)
    decoupled.run(1)

    assert [(call.model_name, call.batch) for call in ordinary.host.calls] == [("thread", 1), ("main", 1)]
    assert [(call.model_name, call.batch) for call in decoupled.host.calls] == [("thread", 0), ("main", 1)]


# Control of other models


def test_models_are_controlled_in_the_words_of_the_host() -> None:
    pb_utils, host, _ = bound()

    pb_utils.load_model("m", config='{"backend": "python"}', files={"file:1/model.py": bytearray(b"x")})
    pb_utils.unload_model(model_name="m", unload_dependents=True)
    ready = pb_utils.is_model_ready("m", model_version="2")

    assert ready is True
    assert [(action, name) for action, name, _ in host.asked] == [("load", "m"), ("unload", "m"), ("ready", "m")]
    load, unload, question = (options for _, _, options in host.asked)
    assert load["config"] == '{"backend": "python"}'
    assert load["files"] == {"1/model.py": b"x"}
    assert unload["unload_dependents"] is True
    assert question["version"] == "2"
    assert question["config"] is None
    assert pb_utils.get_model_dir() == "/models/m/1"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda p: p.load_model(5), "expected a string as model_name"),
        (lambda p: p.load_model("m", config={}), "expected a string as config"),
        (lambda p: p.load_model("m", files={"1/model.py": b""}), "expected 'file:<path>' as key"),
        (lambda p: p.load_model("m", files={"file:1/model.py": "x"}), "expected bytes as content"),
        (lambda p: p.is_model_ready("m", model_version=1), "expected a string as model_version"),
    ],
)
def test_wrong_control_of_models_is_refused(use: Callable[[Any], object], message: str) -> None:
    with pytest.raises(TritonModelException, match=message):
        use(bound()[0])


def test_what_the_server_refuses_is_raised() -> None:
    pb_utils, host, _ = bound()
    host.refusal = "explicit mode only"

    with pytest.raises(TritonModelException, match="explicit mode only"):
        pb_utils.load_model("m")


# Log


def test_the_log_gets_levels_and_places(made: SharedObject) -> None:
    body = "log = pb_utils.Logger\nlog.log('a')\nlog.log('b', log.ERROR)\nlog.log_info(1)\nlog.log_warn('w')\n"
    model = made(body + "log.log_error('e')\nlog.log_verbose('v')\nreturn [answer(1)]")

    model.run(1)

    assert model.host.logged == [(0, "a"), (2, "b"), (0, "1"), (1, "w"), (2, "e"), (3, "v")]
    with pytest.raises(TritonModelException, match="expected one of its levels"):
        unbound.Logger.log("x", 4)


# Readiness


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", True),
        ("def is_ready(self): return False", False),
        ("async def is_ready(self): return True", True),
        ("def is_ready(self): return 1", "is_ready must return a bool, got int"),
        ("def is_ready(self): raise ValueError('not yet')", "ValueError: not yet"),
    ],
)
def test_a_model_may_say_whether_it_is_ready(tmp_path: Path, body: str, expected: bool | str) -> None:
    model = Model(tmp_path, execute("return [answer(1)]") + f"\n    {body}\n")

    readiness = model.runner.readiness()

    assert model.capabilities == {"has_is_ready": bool(body)}
    assert (isinstance(expected, bool) and readiness is expected) or str(readiness).startswith(str(expected))
