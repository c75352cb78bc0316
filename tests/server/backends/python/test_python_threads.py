"""Python models in threads of the server: what is particular to them. The rest is tested together with processes."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.closing import close_later
from tests.support.fake_engine import FakeTicket
from tests.support.process import until
from tests.support.python_model import HEAD, IDENTITY, array_of, config, error_of, request, write

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, TransactionPolicy
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, invalid
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Reply
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, Placement, Result
from charonia.server.backends.python import thread as thread_module
from charonia.server.backends.python.backend import PythonBackend
from charonia.server.backends.python.thread import ThreadInstance
from charonia.server.backends.python.worker import host
from charonia.server.metrics.custom import CustomMetrics
from charonia.testing.backend_suite import StreamSink
from charonia.testing.decoupled_suite import begin, ended

CALL = """
def call(value, **more):
    given = dict(model_name="other", requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", value)])
    return pb_utils.InferenceRequest(**{**given, **more})
"""
ONE = np.ones(1, np.float32)


def executing(body: str) -> str:
    """Return a model whose `execute` does this with each `request`."""
    lines = "\n".join(f"            {line}" for line in body.strip().split("\n"))
    return CALL + HEAD + f"    def execute(self, requests):\n        for request in requests:\n{lines}\n"


class FakeModels:
    """A model `other` that doubles its input, as often as `responses` says, and one `deaf` that never answers."""

    def __init__(self, responses: int = 1, *, is_decoupled: bool = False) -> None:
        self.requests: list[InferRequest] = []
        self.done: list[tuple[object, ...]] = []
        self._responses = responses
        self._is_decoupled = is_decoupled

    def infer(self, request: InferRequest, reply: Reply) -> FakeTicket:
        self.requests.append(request)
        ticket = FakeTicket(request, reply)
        if request.model_name == "other":
            response = InferResponse("other", "1", "", [Tensor("Y", DataType.FP32, request.inputs["X"].array * 2)], {})
            for number in range(self._responses):
                ticket.answer(response, not self._is_decoupled and number == self._responses - 1)
            if self._is_decoupled:
                ticket.answer(None)
        return ticket

    async def model_ready(self, name: str, version: str = "") -> bool:
        return name == "other"

    def is_loadable(self, name: str) -> bool:
        return False

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        if name == "missing":
            raise ServingError(Code.NOT_FOUND, "there is no model 'missing'")
        return ModelConfig(name=name, model_transaction_policy=TransactionPolicy(decoupled=self._is_decoupled))

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        await asyncio.sleep(0)
        self.done.append(("load", name, config, dict(files or {})))
        if name == "broken":
            raise invalid("it is broken")

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        self.done.append(("unload", name, unload_dependents))


def in_thread(datatype: DataType = DataType.FP32, *, decoupled: bool = False, **parameters: str) -> ModelConfig:
    cfg = replace(config(datatype), parameters={"EXECUTION_MODE": "thread", **parameters})
    return replace(cfg, model_transaction_policy=TransactionPolicy(decoupled=True)) if decoupled else cfg


async def load(
    folder: Path, code: str, cfg: ModelConfig | None = None, settings: BackendSettings | None = None
) -> ThreadInstance:
    model = await PythonBackend().load(write(folder, code), cfg or in_thread(), settings or BackendSettings())
    instance = await model.create_instance(Placement("m_0_0", InstanceKind.KIND_CPU))
    assert isinstance(instance, ThreadInstance)
    close_later(instance.aclose)
    return instance


async def run_one(instance: ThreadInstance, given: InferRequest) -> Result:
    sink = begin(instance, [given])
    await ended(sink)
    (result,) = sink.outputs[0]
    return result


# -- tensors


@pytest.mark.parametrize("datatype", [DataType.FP32, DataType.BYTES])
async def test_tensors_are_handed_over_without_a_copy(tmp_path: Path, datatype: DataType) -> None:
    instance = await load(tmp_path, IDENTITY, in_thread(datatype))
    sent = np.array([b"a", b"b"], object) if datatype is DataType.BYTES else np.ones(2, np.float32)

    result = await run_one(instance, request(sent, datatype))

    assert np.shares_memory(array_of(result), sent)


async def test_an_input_cannot_be_written_to_since_others_may_look_at_it(tmp_path: Path) -> None:
    instance = await load(tmp_path, executing("value_of(request)[0] = 7"))
    sent = np.ones(2, np.float32)

    error = error_of(await run_one(instance, request(sent)))

    assert "read-only" in error.message
    assert sent.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("np.array(['ä', b'\\xff', 7], object)", ["ä".encode(), b"\xff", b"7"]),
        ("np.array(['text'])", [b"text"]),
        ("np.array([bytearray(b'x'), None], object)[:1]", [b"x"]),
    ],
)
async def test_strings_are_sent_as_bytes(tmp_path: Path, expression: str, expected: list[bytes]) -> None:
    instance = await load(tmp_path, executing(f"return [answer({expression})]"), in_thread(DataType.BYTES))

    result = await run_one(instance, request(np.array([b""], object), DataType.BYTES))

    assert array_of(result).tolist() == expected


async def test_an_element_that_cannot_be_sent_fails_its_request_alone(tmp_path: Path) -> None:
    code = HEAD + (
        "    def execute(self, requests):\n"
        "        return [answer(np.array([self], object)), answer(np.array([b'fine'], object))]\n"
        "    def __str__(self):\n        raise ValueError('no text')\n"
    )

    instance = await load(tmp_path, code, in_thread(DataType.BYTES))
    sink = begin(instance, [request(np.array([b""], object), DataType.BYTES)] * 2)
    await ended(sink)

    assert "cannot be sent: no text" in error_of(sink.outputs[0][0]).message
    assert array_of(sink.outputs[1][0]).tolist() == [b"fine"]


async def test_outputs_come_in_c_order(tmp_path: Path) -> None:
    instance = await load(tmp_path, executing("return [answer(value_of(request)[::2])]"))

    array = array_of(await run_one(instance, request(np.arange(6, dtype=np.float32))))

    assert array.flags.c_contiguous
    assert array.tolist() == [0, 2, 4]


# -- life


@pytest.mark.parametrize("body", ["sys.exit('bye')", "raise KeyboardInterrupt('bye')", "raise GeneratorExit('bye')"])
async def test_what_would_end_a_process_fails_the_batch_and_no_more(tmp_path: Path, body: str) -> None:
    code = executing(f"if value_of(request)[0]:\n    {body}\nreturn [answer(value_of(request))]")
    instance = await load(tmp_path, code)

    assert "bye" in error_of(await run_one(instance, request(ONE))).message
    assert array_of(await run_one(instance, request(ONE * 0))).tolist() == [0]


async def test_a_finalize_that_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    instance = await load(tmp_path, IDENTITY + "    def finalize(self):\n        raise ValueError('too late')")
    await instance.aclose()
    assert "finalize of 'm_0_0' failed: ValueError: too late" in caplog.text


async def test_a_model_that_does_not_end_is_left_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thread_module, "FINALIZE_S_MAX", 0.05)

    gate = tmp_path / "gate"
    body = f"        while not os.path.exists({str(gate)!r}):\n            time.sleep(0.005)"
    instance = await load(tmp_path, IDENTITY + "    def finalize(self):\n" + body)
    await instance.aclose()
    assert "its thread goes on" in caplog.text
    gate.touch()
    await asyncio.sleep(0.1)  # it ends without a trace


async def test_models_have_modules_of_their_own_whatever_their_names(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        folder = tmp_path / name
        write(folder, "")
        (folder / "m" / "1" / "helper.py").write_text(f"LETTER = '{name}'")
        code = "import helper\n" + executing("return [answer(np.array([helper.LETTER], object))]")
        found.append(await load(folder, code, in_thread(DataType.BYTES)))
    letters = [
        array_of(await run_one(instance, request(np.array([b""], object), DataType.BYTES))).tolist()
        for instance in found
    ]
    for instance in found:
        await instance.aclose()

    assert letters == [[b"a"], [b"b"]]


# -- senders and cancellation


async def test_a_decoupled_model_answers_from_another_thread_after_execute(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        self.gate = threading.Event()
        threading.Thread(target=self.answer, args=(requests[0].get_response_sender(),)).start()

    def answer(self, sender):
        time.sleep(0.05)
        for number in range(3):
            sender.send(answer(np.array([number], np.float32)))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    )

    instance = await load(tmp_path, code, in_thread(decoupled=True))
    sink = begin(instance, [request(ONE)])
    await ended(sink)

    assert sink.finished.result(), "it is left open"
    assert [array_of(r).tolist() for r in sink.outputs[0]] == [[0], [1], [2]]


async def test_a_sender_that_is_dropped_answers_its_request(tmp_path: Path) -> None:
    instance = await load(tmp_path, executing("request.get_response_sender()"), in_thread(decoupled=True))
    assert "dropped the response sender" in error_of(await run_one(instance, request(ONE))).message


async def test_a_model_is_told_that_its_caller_has_gone(tmp_path: Path) -> None:
    body = "while not request.is_cancelled():\n    time.sleep(0.01)\nreturn [answer(value_of(request))]"

    instance = await load(tmp_path, executing(body))
    running, queued = (begin(instance, [request(ONE)]) for _ in range(2))
    queued.cancel(instance, 0)
    running.cancel(instance, 0)
    instance.cancel(StreamSink(1), 0)  # one that is not known

    await ended(running, queued)


# -- other models


async def test_a_model_calls_another_and_tensors_are_handed_over(tmp_path: Path) -> None:
    models = FakeModels()
    body = """
response = call(value_of(request), request_id="7", timeout=5_000_000, parameters={"a": True}).exec()
return [answer(pb_utils.get_output_tensor_by_name(response, "Y").as_numpy() + np.float32(1))]
"""

    instance = await load(tmp_path, executing(body), settings=BackendSettings(models=models))
    sent = np.array([3], np.float32)
    result = await run_one(instance, request(sent))
    await instance.aclose()

    assert array_of(result).tolist() == [7]
    (made,) = models.requests
    assert np.shares_memory(made.inputs["X"].array, sent)
    assert (made.id, made.parameters, [o.name for o in made.outputs]) == ("7", {"a": True}, ["Y"])
    assert made.caller is not None
    assert made.deadline_ns > 0


async def test_calls_of_an_asynchronous_execute_run_side_by_side(tmp_path: Path) -> None:
    code = (
        CALL
        + HEAD
        + """
    async def execute(self, requests):
        import asyncio
        responses = await asyncio.gather(*(call(value_of(requests[0]) * np.float32(i)).async_exec() for i in range(3)))
        return [answer(sum(pb_utils.get_output_tensor_by_name(r, "Y").as_numpy() for r in responses))]
"""
    )

    instance = await load(tmp_path, code, settings=BackendSettings(models=FakeModels()))
    assert array_of(await run_one(instance, request(ONE))).tolist() == [6]
    assert array_of(await run_one(instance, request(ONE * 2))).tolist() == [12]


async def test_a_model_takes_any_number_of_responses(tmp_path: Path) -> None:
    body = """
responses = call(value_of(request)).exec(decoupled=True)
values = [t.as_numpy()[0] for r in responses for t in r.output_tensors()]
return [answer(np.array([sum(values)], np.float32))]
"""

    models = FakeModels(responses=5, is_decoupled=True)
    instance = await load(tmp_path, executing(body), settings=BackendSettings(models=models))
    assert array_of(await run_one(instance, request(ONE))).tolist() == [10]


async def test_a_call_whose_responses_are_not_read_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "RESPONSES_UNREAD_MAX", 3)
    body = """
responses = call(value_of(request)).exec(decoupled=True)
time.sleep(0.1)
*_, last = responses
return [answer(np.array([last.error().message()], object))]
"""

    models = FakeModels(responses=10, is_decoupled=True)
    instance = await load(tmp_path, executing(body), settings=BackendSettings(models=models))
    (text,) = array_of(await run_one(instance, request(ONE))).tolist()
    assert text == b"the responses of model 'other' were not read fast enough"


async def test_a_sender_waits_while_the_event_loop_has_much_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_module, "RESPONSES_UNTAKEN_MAX", 2)
    code = (
        HEAD
        + """
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        with open(__file__ + ".sent", "w") as file:
            for number in range(20):
                sender.send(answer(np.array([number], np.float32)))
                print(number, file=file, flush=True)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    )

    instance = await load(tmp_path, code, in_thread(decoupled=True))
    sink = begin(instance, [request(ONE)])
    sent = tmp_path / "m" / "1" / "model.py.sent"
    while not sent.exists() or sent.read_text().split() != ["0", "1"]:  # the event loop is held up
        time.sleep(0.005)
    time.sleep(0.05)
    assert sent.read_text().split() == ["0", "1"]
    await ended(sink)
    assert len(sink.outputs[0]) == 20


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("model_name='missing'", "3:Failed for execute the inference request. Model 'missing' is not ready"),
        ("model_name='deaf', timeout=1000", "has not answered in time"),
    ],
)
async def test_a_call_that_fails_is_a_response_with_an_error(tmp_path: Path, arguments: str, expected: str) -> None:
    body = f"""
error = call(value_of(request), {arguments}).exec().error()
return [answer(np.array([str(error.code()) + ":" + error.message()], object))]
"""

    instance = await load(tmp_path, executing(body), in_thread(DataType.FP32), BackendSettings(models=FakeModels()))
    (text,) = array_of(await run_one(instance, request(ONE))).tolist()
    assert expected.removeprefix("3:") in text.decode()


async def test_a_call_ends_when_nobody_waits_for_the_batch(tmp_path: Path) -> None:
    body = "call(value_of(request), model_name='deaf').exec()\nreturn [answer(value_of(request))]"

    models = FakeModels()
    instance = await load(tmp_path, executing(body), settings=BackendSettings(models=models))
    sink = begin(instance, [request(ONE)])
    await until(lambda: models.requests)
    sink.cancel(instance, 0)

    await ended(sink)


async def test_a_model_loads_unloads_and_asks_for_others(tmp_path: Path) -> None:
    body = """
pb_utils.load_model("other", config="{}", files={"file:1/x": b"content"})
pb_utils.unload_model("other", unload_dependents=True)
try:
    pb_utils.load_model("broken")
except pb_utils.TritonModelException as error:
    reason = str(error)
return [answer(np.array([reason, str(pb_utils.is_model_ready("other")), str(pb_utils.is_model_ready("x"))], object))]
"""

    models = FakeModels()
    instance = await load(tmp_path, executing(body), settings=BackendSettings(models=models))

    assert array_of(await run_one(instance, request(ONE))).tolist() == [b"it is broken", b"True", b"False"]
    assert models.done[:2] == [("load", "other", "{}", {"1/x": b"content"}), ("unload", "other", True)]


async def test_metrics_of_a_model_last_as_long_as_it(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def initialize(self, args):
        self.family = pb_utils.MetricFamily("seen_total", "Requests seen", pb_utils.MetricFamily.COUNTER)
        self.metric = self.family.Metric(labels={"a": "b"})
        try:
            pb_utils.MetricFamily("seen_total", "Requests seen", pb_utils.MetricFamily.GAUGE)
        except pb_utils.TritonModelException as error:
            self.refusal = str(error)

    def execute(self, requests):
        self.metric.increment(len(requests))
        return [answer(np.array([self.refusal], object)) for _ in requests]
"""
    )

    metrics = CustomMetrics()
    instance = await load(tmp_path, code, settings=BackendSettings(metrics=metrics))

    (text,) = array_of(await run_one(instance, request(ONE))).tolist()

    assert b"'seen_total' exists with kind counter" in text
    (family,) = metrics.families()
    (metric,) = family.metrics.values()
    assert (metric.labels, metric.value) == ((("a", "b"),), 1)
    await instance.aclose()
    assert list(metrics.families()) == []


@pytest.mark.parametrize(
    ("body", "expected", "logged"),
    [
        ("", True, ""),
        ("def is_ready(self): return True", True, ""),
        ("async def is_ready(self): return False", False, ""),
        ("def is_ready(self): sys.exit(3)", False, "SystemExit: 3"),
    ],
)
async def test_a_model_says_whether_it_is_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, body: str, expected: bool, logged: str
) -> None:
    instance = await load(tmp_path, f"{IDENTITY}    {body}\n")
    assert await instance.is_ready() is expected
    assert array_of(await run_one(instance, request(ONE))).tolist() == [1]
    await instance.aclose()
    assert not await instance.is_ready()

    assert logged in caplog.text


async def test_a_thread_that_computes_does_not_hold_up_who_asks_others(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    body = f"while not os.path.exists({str(gate)!r}):\n    time.sleep(0.005)\nreturn [answer(value_of(request))]"
    code = executing(body) + "    def is_ready(self): return True\n"

    instance = await load(tmp_path, code)
    sink = begin(instance, [request(ONE)])
    asking = asyncio.ensure_future(instance.is_ready())
    await asyncio.sleep(0.05)
    assert not asking.done()
    gate.touch()
    assert await asking
    assert sink.finished.done()


# -- what cannot be


@pytest.mark.parametrize(
    ("parameters", "code", "expected"),
    [
        ({"EXECUTION_MODE": "fiber"}, Code.INVALID_ARG, "expected one of process, thread, got 'fiber'"),
        (
            {"EXECUTION_ENV_PATH": "env"},
            Code.UNSUPPORTED,
            "EXECUTION_ENV_PATH cannot be met with EXECUTION_MODE thread",
        ),
        ({"EXECUTE_TIMEOUT_SECONDS": "1"}, Code.UNSUPPORTED, "EXECUTE_TIMEOUT_SECONDS cannot be met with"),
    ],
)
def test_what_a_thread_cannot_have_is_refused(
    tmp_path: Path, parameters: dict[str, str], code: Code, expected: str
) -> None:
    cfg = ModelConfig(name="m", backend="python", parameters={"EXECUTION_MODE": "thread", **parameters})
    files = write(tmp_path, IDENTITY)

    for action in (PythonBackend().load, PythonBackend().complete):
        with pytest.raises(ServingError) as caught:
            asyncio.run(action(files, cfg, BackendSettings()))
        assert caught.value.code is code
        assert expected in caught.value.message


def test_requirements_are_refused_unless_they_are_to_be_ignored(tmp_path: Path) -> None:
    files = write(tmp_path, IDENTITY)
    (files.model_dir / "requirements.txt").write_text("tiny\n")

    with pytest.raises(ServingError, match=r"requirements\.txt cannot be met with EXECUTION_MODE thread"):
        asyncio.run(PythonBackend().load(files, in_thread(), BackendSettings()))
    asyncio.run(PythonBackend().load(files, in_thread(), BackendSettings({"environment-builder": "none"})))


def test_auto_complete_config_runs_in_a_process(tmp_path: Path) -> None:
    code = IDENTITY + (
        "    @staticmethod\n    def auto_complete_config(config):\n"
        "        config.set_max_batch_size(16)\n        return config\n"
    )

    completion = asyncio.run(PythonBackend().complete(write(tmp_path, code), in_thread(), BackendSettings()))

    assert completion.config.max_batch_size == 16
