"""Python models in real worker processes: what they answer, and what happens when they fail, die or hang."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.support.process import shared_memory_of, until
from tests.support.python_model import HEAD, IDENTITY, Loaded, Sink, array_of, config, error_of, load, request, write

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from charonia.config.parameters import JSON_SCHEMA
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal
from charonia.server.backends.api import BackendSettings, Outputs, Placement
from charonia.server.backends.python.backend import PythonBackend
from charonia.server.backends.workers import instance as instance_module
from charonia.server.backends.workers.instance import Batches, PythonInstance
from charonia.server.backends.workers.model import PythonModel
from charonia.server.channel.channel import INLINE_BYTES_MAX

MISCHIEF = (
    HEAD
    + """
    def initialize(self, args):
        print("this is standard output")

    def execute(self, requests):
        what = value_of(requests[0])[0].decode()
        if what == "raise":
            raise ValueError("what a pity")
        if what == "error":
            error = pb_utils.TritonError("not you", pb_utils.TritonError.NOT_FOUND)
            return [pb_utils.InferenceResponse(error=error)]
        if what == "exit":
            sys.exit("bye")
        if what == "_exit":
            print("the last words", file=sys.stderr)
            os._exit(3)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(60)
        return [answer(value_of(r)) for r in requests]
"""
)


async def killed(loaded: Loaded) -> None:
    """Kill the worker, and return when the instance knows it."""
    pid = loaded.instance.pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: loaded.instance.pid != pid)


def text(value: str) -> "np.ndarray":
    array = np.empty(1, object)
    array[0] = value.encode()
    return array


STRINGS = config(DataType.BYTES)


@pytest.mark.usefixtures("execution_mode")
@pytest.mark.parametrize("datatype", [d for d in DataType if d is not DataType.BYTES])
async def test_every_datatype_comes_back_as_it_was_sent(tmp_path: Path, datatype: DataType) -> None:
    model = (
        IDENTITY
        if datatype is not DataType.BF16
        else IDENTITY.replace("value_of(r)", "r.inputs()[0]").replace('pb_utils.Tensor("OUT", array)', "rename(array)")
        + "\ndef rename(t):\n    t._name = 'OUT'\n    return t\n"
    )

    loaded = await load(tmp_path, model, config(datatype))
    sent = np.arange(6).astype(datatype.numpy).reshape(2, 3)
    (result,) = await loaded.run([request(sent, datatype)])
    np.testing.assert_array_equal(array_of(result), sent)
    assert array_of(result).dtype == datatype.numpy


@pytest.mark.usefixtures("execution_mode")
async def test_strings_come_back_whatever_bytes_they_hold(tmp_path: Path) -> None:
    loaded = await load(tmp_path, IDENTITY, STRINGS)
    sent = np.array([b"", b"plain", b"\x00\xff\x00", "träger".encode(), b"x" * 200_000], object)
    (result,) = await loaded.run([request(sent, DataType.BYTES)])
    assert array_of(result).tolist() == sent.tolist()


@pytest.mark.usefixtures("execution_mode")
@pytest.mark.parametrize("count", [0, 1, INLINE_BYTES_MAX // 4, INLINE_BYTES_MAX // 4 + 1, 3_000_000])
async def test_tensors_of_any_size_come_back(tmp_path: Path, count: int) -> None:
    loaded = await load(tmp_path, IDENTITY)
    sent = np.random.default_rng(0).random(count, "f4")
    for _ in range(3):
        (result,) = await loaded.run([request(sent)])
        np.testing.assert_array_equal(array_of(result), sent)


@pytest.mark.usefixtures("execution_mode")
async def test_the_model_sees_what_the_request_carries(tmp_path: Path) -> None:
    model = (
        HEAD
        + """
    def initialize(self, args):
        self.args = args
    def execute(self, requests):
        (r,) = requests
        seen = {
            "id": r.request_id(), "correlation": r.correlation_id(), "flags": r.flags(), "timeout": r.timeout(),
            "priority": r.priority(), "parameters": json.loads(r.parameters()), "outputs": r.requested_output_names(),
            "cancelled": r.is_cancelled(), "args": sorted(self.args), "name": self.args["model_instance_name"],
            "dir": os.path.basename(pb_utils.get_model_dir()), "config": json.loads(self.args["model_config"])["name"],
        }
        text = np.array([json.dumps(seen)], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor(name, text) for name in ("OUT", "OUT1", "X")])]
"""
    )

    loaded = await load(tmp_path, model, config(DataType.BYTES, outputs=2))
    sent = request(
        text("x"),
        DataType.BYTES,
        "OUT1",
        id="r",
        correlation_id=7,
        flags=1,
        timeout_us=5,
        priority=2,
        parameters={"a": 1.5},
    )
    (result,) = await loaded.run([sent])
    assert json.loads(array_of(result)[0]) == {
        "id": "r",
        "correlation": 7,
        "flags": 1,
        "timeout": 5,
        "priority": 2,
        "parameters": {"a": 1.5},
        "outputs": ["OUT1"],
        "cancelled": False,
        "args": [
            "model_config",
            "model_instance_device_id",
            "model_instance_kind",
            "model_instance_name",
            "model_name",
            "model_repository",
            "model_version",
        ],
        "name": "m_0_0",
        "dir": "1",
        "config": "m",
    }


@pytest.mark.usefixtures("execution_mode")
@pytest.mark.parametrize("decoupled", [False, True])
async def test_tasks_of_an_asynchronous_execute_answer_later(tmp_path: Path, decoupled: bool) -> None:
    code = f"""
import asyncio
{HEAD}    async def execute(self, requests):
        for request in requests:
            asyncio.create_task(self.later(request))
            request.get_response_sender()

    async def later(self, request):
        await asyncio.sleep(0.01)
        request.get_response_sender().send(answer(value_of(request)), flags=1)
"""
    cfg = replace(config(), model_transaction_policy=TransactionPolicy(decoupled=decoupled))

    loaded = await load(tmp_path, code, cfg)
    sinks = [Sink(2), Sink(1)]
    loaded.start([request(np.array([i], "<f4")) for i in (1, 2)], sinks[0])
    loaded.start([request(np.array([3], "<f4"))], sinks[1])
    await until(lambda: not any(None in sink.results for sink in sinks))
    assert [array_of(r).tolist() for sink in sinks for r in sink.results if r is not None] == [[1], [2], [3]]


@pytest.mark.usefixtures("execution_mode")
@pytest.mark.loop_faults
async def test_a_task_that_exits_ends_its_request(tmp_path: Path) -> None:
    code = f"""
import asyncio
{HEAD}    async def execute(self, requests):
        if value_of(requests[0])[0] < 0:
            asyncio.create_task(self.exit(requests[0].get_response_sender()))
            return None
        return [answer(value_of(r)) for r in requests]

    async def exit(self, sender):
        await asyncio.sleep(0)
        sys.exit("bye")
"""

    loaded = await load(tmp_path, code)
    sink = Sink(1)
    loaded.start([request(np.array([-1], "<f4"))], sink)
    await until(lambda: sink.results[0] is not None)
    assert isinstance(sink.results[0], ServingError)
    (result,) = await loaded.run([request(np.array([5], "<f4"))])
    assert array_of(result).tolist() == [5]


@pytest.mark.usefixtures("execution_mode")
@pytest.mark.parametrize("how", ["return [answer]", "requests[0].get_response_sender().send(answer, flags=1)"])
async def test_a_model_may_leave_out_an_output_that_was_asked_for(tmp_path: Path, how: str) -> None:
    code = f"""{HEAD}    def execute(self, requests):
        answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT1", np.ones(1, np.float32))])
        {how}
"""

    loaded = await load(tmp_path, code, config(outputs=2))
    (result,) = await loaded.run([request(np.zeros(1, "<f4"))])
    assert isinstance(result, Outputs)
    assert [tensor.name for tensor in result.tensors] == ["OUT1"]


@pytest.mark.usefixtures("execution_mode")
@pytest.mark.parametrize(
    ("what", "code", "expected"),
    [
        ("raise", Code.INTERNAL, "ValueError: what a pity"),
        ("raise", Code.INTERNAL, "model.py("),
        ("error", Code.NOT_FOUND, "not you"),
    ],
)
async def test_a_model_that_fails_answers_with_the_reason_and_goes_on(
    tmp_path: Path, what: str, code: Code, expected: str
) -> None:
    loaded = await load(tmp_path, MISCHIEF, STRINGS)
    (failed,) = await loaded.run([request(text(what), DataType.BYTES)])
    assert error_of(failed).code is code
    assert expected in str(failed)
    (result,) = await loaded.run([request(text("fine"), DataType.BYTES)])
    assert array_of(result).tolist() == [b"fine"]


@pytest.mark.usefixtures("execution_mode")
@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("decoupled", [False, True])
async def test_an_exception_is_in_the_log_however_the_model_executes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, decoupled: bool
) -> None:
    body = f"    {kind} execute(self, requests):\n        raise ValueError('a pity')\n"
    code = HEAD + body
    cfg = replace(config(), model_transaction_policy=TransactionPolicy(decoupled=decoupled))

    loaded = await load(tmp_path, code, cfg)
    await loaded.run([request(np.ones(1, "<f4"), id="seven")])
    await until(lambda: caplog.records)  # a coroutine of a decoupled model goes on after its batch
    await loaded.close()

    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    first, *_, last = record.getMessage().splitlines()
    assert first == "model 'm' version 1, instance 'm_0_0', request 'seven': execute raised an exception"
    assert last == "ValueError: a pity"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("exit", "exited with status 1"),
        ("_exit", "exited with status 3"),
        ("_exit", "the last words"),
        ("kill", "SIGKILL"),
        ("hang", "did not finish within 0.5 s"),
    ],
)
async def test_a_worker_that_dies_or_hangs_fails_its_batch_and_comes_back(
    tmp_path: Path, what: str, expected: str
) -> None:
    loaded = await load(tmp_path, MISCHIEF, config(DataType.BYTES, EXECUTE_TIMEOUT_SECONDS="0.5"))
    pid = loaded.instance.pid
    (failed,) = await loaded.run([request(text(what), DataType.BYTES)])
    assert expected in str(error_of(failed))
    (result,) = await loaded.run([request(text("fine"), DataType.BYTES)])
    assert array_of(result).tolist() == [b"fine"]
    assert loaded.instance.pid != pid


async def test_a_worker_that_is_killed_between_batches_comes_back(tmp_path: Path) -> None:
    loaded = await load(tmp_path, IDENTITY)
    for _ in range(2):
        await killed(loaded)
        (result,) = await loaded.run([request(np.ones(1, "<f4"))])
        assert array_of(result).tolist() == [1]


async def test_it_is_said_that_a_worker_forgot_before_its_batch_fails(tmp_path: Path) -> None:
    loaded = await load(tmp_path, IDENTITY)
    events: list[str] = []
    sink = Sink(1)
    sink.done.add_done_callback(lambda _: events.append("failed"))
    loaded.instance.when_lost(lambda: events.append("lost"))
    psutil.Process(loaded.instance.pid).kill()
    loaded.start([request(np.ones(1, "<f4"))], sink)
    await sink.done
    await asyncio.sleep(0)
    assert events == ["lost", "failed"]


async def test_a_batch_that_no_worker_got_fails_only_where_the_next_one_cannot_run_it() -> None:
    batches = Batches("m_0_0", output_names=("OUT",), execute_s_max=0, is_decoupled=False, busy_poll=None)
    sink = Sink(1)
    batches.add(sink, [request(np.ones(1, "<f4"))])
    batches.worker_ended(internal("it has ended"), fails_unsent=False)
    assert not sink.done.done()
    batches.worker_ended(internal("it has ended"), fails_unsent=True)
    assert str(sink.done.result()) == "it has ended"


async def test_a_worker_that_does_not_come_back_fails_the_batch_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_module, "RESTART_WAIT_S_MAX", 0.3)
    monkeypatch.setattr(instance_module, "RESTART_DELAY_S", 600.0)

    loaded = await load(tmp_path, IDENTITY)
    await killed(loaded)
    (failed,) = await loaded.run([request(np.ones(1, "<f4"))])
    assert error_of(failed).code is Code.UNAVAILABLE


@pytest.mark.usefixtures("execution_mode")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        ("def broken(:", "SyntaxError"),
        ("class Other: pass", "TritonPythonModel"),
        ("class TritonPythonModel: pass", "has no method 'execute'"),
        (IDENTITY + "    def initialize(self, args):\n        raise RuntimeError('no weights')", "no weights"),
        (IDENTITY + "    def initialize(self, args):\n        sys.exit('bye')", "bye"),
    ],
)
async def test_a_model_that_cannot_be_initialized_says_why(tmp_path: Path, code: str, expected: str) -> None:
    with pytest.raises(ServingError, match="instance 'm_0_0' failed to start") as caught:
        await load(tmp_path, code)
    assert expected in str(caught.value)


async def test_a_worker_that_ends_before_it_is_ready_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="exited with status 7"):
        await load(tmp_path, IDENTITY + "    def initialize(self, args):\n        os._exit(7)")


@pytest.mark.usefixtures("execution_mode")
async def test_initialize_has_a_time_limit_after_which_nobody_waits(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    body = f"        while not os.path.exists({str(gate)!r}):\n            time.sleep(0.005)"
    with pytest.raises(ServingError, match=r"did not initialize within 0\.3 s"):
        await load(
            tmp_path, f"{IDENTITY}    def initialize(self, args):\n{body}", config(INITIALIZE_TIMEOUT_SECONDS="0.3")
        )
    gate.touch()


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (config(EXECUTE_TIMEOUT_SECONDS="soon"), "expected a number of at least 0, got 'soon'"),
        (config(EXECUTE_TIMEOUT_SECONDS="-1"), "expected a number of at least 0, got '-1'"),
    ],
)
async def test_settings_that_cannot_be_met_are_refused(tmp_path: Path, cfg: ModelConfig, expected: str) -> None:
    with pytest.raises(ServingError, match=expected):
        await load(tmp_path, IDENTITY, cfg)


@pytest.mark.usefixtures("execution_mode")
async def test_sibling_modules_of_version_and_model_folder_are_imported(tmp_path: Path) -> None:
    write(tmp_path, "")
    (tmp_path / "m" / "1" / "near.py").write_text("FACTOR = 3")
    (tmp_path / "m" / "far.py").write_text("SUMMAND = 4")
    code = "import near, far\nfrom .near import FACTOR\n" + IDENTITY.replace(
        "answer(value_of(r))", "answer(value_of(r) * np.float32(FACTOR) + np.float32(far.SUMMAND))"
    )
    loaded = await load(tmp_path, code)
    (result,) = await loaded.run([request(np.ones(1, "<f4"))])
    assert array_of(result).tolist() == [7]


async def test_finalize_runs_and_the_process_ends(tmp_path: Path, execution_mode: str) -> None:
    loaded = await load(tmp_path, IDENTITY + "    def finalize(self):\n        open(__file__ + '.done', 'w').close()")
    pids = [loaded.instance.pid] if execution_mode == "process" else []
    await loaded.run([request(np.ones(1, "<f4"))])
    await loaded.close()
    assert (tmp_path / "m" / "1" / "model.py.done").exists()
    assert not any(map(psutil.pid_exists, pids))
    (failed,) = await loaded.run([request(np.ones(1, "<f4"))])
    assert error_of(failed).code is Code.UNAVAILABLE


async def test_what_a_model_prints_and_logs_reaches_the_servers_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, execution_mode: str
) -> None:
    caplog.set_level("INFO")
    code = IDENTITY + (
        "    def initialize(self, args):\n        print('on standard output')\n"
        "        pb_utils.Logger.log_warn('mind the gap')\n"
        "    def finalize(self):\n        print('the last word')\n"
    )
    loaded = await load(tmp_path, code)
    await loaded.run([request(np.ones(1, "<f4"))])
    await loaded.close()

    if execution_mode == "process":
        assert "[m_0_0] on standard output" in caplog.text
        assert "[m_0_0] the last word" in caplog.text
    (warning,) = [each for each in caplog.records if "mind the gap" in each.getMessage()]
    assert warning.levelname == "WARNING"
    assert "model.py:" in warning.getMessage()


def test_a_thousand_batches_leave_descriptors_and_shared_memory_as_they_were(tmp_path: Path) -> None:
    async def scenario() -> None:
        loaded = await load(tmp_path, IDENTITY)
        worker = psutil.Process(loaded.instance.pid)
        rng = np.random.default_rng(2)

        async def batches(count: int) -> None:
            for _ in range(count):
                await loaded.run([request(rng.random(int(rng.integers(1, 80_000)), "f4"))])

        await batches(100)
        ours, theirs = psutil.Process().num_fds(), worker.num_fds()
        await batches(1000)
        assert abs(psutil.Process().num_fds() - ours) <= 2
        assert abs(worker.num_fds() - theirs) <= 2
        assert shared_memory_of(worker.pid) == set()
        await loaded.close()

    before = shared_memory_of(os.getpid())
    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert shared_memory_of(os.getpid()) == before


AUTO_COMPLETE = (
    IDENTITY
    + """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(16)
        config.set_dynamic_batching()
        return config
"""
)


def complete(tmp_path: Path, code: str, cfg: ModelConfig) -> ModelConfig:
    return asyncio.run(PythonBackend().complete(write(tmp_path, code), cfg, BackendSettings())).config


def test_auto_complete_config_fills_in_the_configuration(tmp_path: Path) -> None:
    completed = complete(tmp_path, AUTO_COMPLETE, ModelConfig(name="m", backend="python"))
    assert completed.max_batch_size == 16
    assert completed.dynamic_batching is not None
    assert [(i.name, i.data_type, i.dims) for i in completed.input] == [("IN", DataType.FP32, (4,))]


@pytest.mark.parametrize("code", [IDENTITY, AUTO_COMPLETE])
async def test_a_model_that_nobody_gave_tensors_is_noted(tmp_path: Path, code: str) -> None:
    files = write(tmp_path, code)
    notes = (await PythonBackend().complete(files, ModelConfig(name="m", backend="python"), BackendSettings())).notes
    assert ("no input and no output" in " ".join(notes)) == (code is IDENTITY)


def test_auto_complete_config_fills_in_tensors_that_the_configuration_begins(tmp_path: Path) -> None:
    begun = ModelConfig(
        name="m", backend="python", input=(ModelInput("IN", dims=(4,)),), output=(ModelOutput("OUT", DataType.FP32),)
    )

    completed = complete(tmp_path, AUTO_COMPLETE, begun)

    assert (completed.input, completed.output) == (
        (ModelInput("IN", DataType.FP32, dims=(4,)),),
        (ModelOutput("OUT", DataType.FP32, dims=(4,)),),
    )


def test_a_model_without_auto_complete_config_leaves_the_configuration_alone(tmp_path: Path) -> None:
    assert complete(tmp_path, IDENTITY, config()) == config()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return None", "must return a valid pb.ModelConfig object"),
        ("raise RuntimeError('cannot say')", "cannot say"),
        ("config.add_input({'name': 'IN', 'dims': [1]}); return config", "is missing 'data_type' property"),
        (
            "config.add_input({'name': 'IN', 'data_type': 'TYPE_FP32', 'dims': [1], 'x': 1}); return config",
            "contains property other than",
        ),
        ("config.set_max_batch_size(2); return config", "specified max_batch_size 2"),
        ("import os; os._exit(5)", "exited with status 5"),
    ],
)
def test_a_wrong_auto_complete_config_is_explained(tmp_path: Path, body: str, expected: str) -> None:
    code = IDENTITY + f"\n    @staticmethod\n    def auto_complete_config(config):\n        {body}\n"
    with pytest.raises(ServingError, match=expected):
        complete(tmp_path, code, ModelConfig(name="m", backend="python", max_batch_size=4))


async def test_a_function_without_parameters_needs_no_inputs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    described = replace(config(), input=(), parameters={JSON_SCHEMA: '{"inputs": {}, "outputs": {}}'})
    files = write(tmp_path, "import charonia\n\n@charonia.model\ndef m() -> int:\n    return 1\n")

    model = await PythonBackend().load(files, described, BackendSettings())

    await model.aclose()
    assert "has no inputs" not in caplog.text


async def test_several_instances_start_side_by_side_and_report_their_memory(tmp_path: Path) -> None:
    model = await PythonBackend().load(write(tmp_path, IDENTITY), config(), BackendSettings())
    assert isinstance(model, PythonModel)
    placements = [Placement(f"m_0_{i}", InstanceKind.KIND_CPU) for i in range(2)]
    instances = await asyncio.gather(*(model.create_instance(p) for p in placements))
    assert len({i.pid for i in instances if isinstance(i, PythonInstance)}) == 2
    (usage,) = model.memory()
    assert usage.byte_size > 10_000_000
    for each in instances:
        await each.aclose()
    await model.aclose()


@pytest.mark.usefixtures("execution_mode")
async def test_values_that_only_look_plain_are_sent_as_plain_ones(tmp_path: Path) -> None:
    code = IDENTITY.replace(
        "[answer(value_of(r)) for r in requests]",
        "[pb_utils.InferenceResponse([pb_utils.Tensor(np.str_('OUT'), value_of(r))], "
        "parameters={np.str_('unit'): np.str_('mm'), 'sure': True, 'count': Level.TWO}) for r in requests]",
    )
    loaded = await load(tmp_path, "import enum\nclass Level(enum.IntEnum):\n    TWO = 2\n" + code)
    (result,) = await loaded.run([request(np.ones(1, "<f4"))])
    assert array_of(result).tolist() == [1]
    assert isinstance(result, Outputs)
    assert result.parameters == {"unit": "mm", "sure": True, "count": 2}
