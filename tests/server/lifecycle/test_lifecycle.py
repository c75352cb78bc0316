"""Loading, reloading and unloading with a backend that does what the test says."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.closing import InLoop, close_later
from tests.support.process import until
from tests.support.recorded import RecordedScheduler

from charonia.clock import now_ns
from charonia.config.json_form import to_json
from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, invalid, unavailable
from charonia.core.metadata import ModelState, ServerMetadata
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.core.statistics import MemoryUsage, WorkerState
from charonia.core.tensor import Tensor
from charonia.server.backends.api import (
    BackendSettings,
    Completion,
    Execution,
    ModelFiles,
    Outputs,
    Placement,
)
from charonia.server.engine import ModelEngine
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.entries import ModelEntry, VersionEntry
from charonia.server.lifecycle.lifecycle import Lifecycle, LifecycleOptions
from charonia.server.lifecycle.repository.scan import ModelFolder, Scan
from charonia.server.model_options import ControlMode, ReadyWhen

CONFIG = """
backend: "fake"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""

AS_JSON = (
    '"backend": "fake", "input": {"name": "IN", "data_type": "TYPE_FP32", "dims": 1}, '
    '"output": {"name": "OUT", "data_type": "TYPE_FP32", "dims": 1}'
)
"""The same as members of a JSON document."""


class FakeInstance:
    def __init__(self, model: "FakeModel") -> None:
        self.model = model

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        self.model.backend.gate()
        value = np.array([self.model.value], "<f4")
        now = now_ns()
        return Execution([Outputs([Tensor("OUT", DataType.FP32, value)]) for _ in requests], now, now)

    def close(self) -> None:
        self.model.backend.open_instances -= 1
        if self.model.backend.close_error is not None:
            raise self.model.backend.close_error


class FakeModel:
    def __init__(self, backend: "FakeBackend", value: float) -> None:
        self.backend = backend
        self.value = value

    async def create_instance(self, placement: Placement) -> FakeInstance:
        if self.backend.instance_error is not None and placement.name.endswith("_1"):
            raise self.backend.instance_error
        self.backend.open_instances += 1
        self.backend.created.append(placement.name)
        return FakeInstance(self)

    def memory(self) -> list[MemoryUsage]:
        return []

    def workers(self) -> list[WorkerState]:
        return []

    def is_failing(self) -> bool:
        return self.backend.is_failing

    async def aclose(self) -> None:
        self.backend.open_models -= 1
        if self.backend.close_error is not None:
            raise self.backend.close_error


class FakeBackend:
    """Answers with the number in the version's `value.txt`; a model without it fails to load."""

    name = "fake"

    def __init__(self) -> None:
        self.open_models = 0
        self.open_instances = 0
        self.failures_left = 0
        self.created: list[str] = []  # names of instances, in the order in which they were created
        self.loaded: list[str] = []  # numbers of the versions, in the order of their loads
        self.instance_error: ServingError | None = None
        self.close_error: Exception | None = None  # of instances and models
        self.is_failing = False  # whether the workers of its models cannot be started again
        self.gate: Callable[[], object] = lambda: None

    def uses_gpus(self) -> bool:
        return False

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        if (files.version_dir / "corrupt").exists():
            raise SyntaxError("it cannot be read")
        if not (files.version_dir / "value.txt").exists() and "completed" in config.parameters:
            raise invalid("there is no file to complete the configuration from")
        return Completion(config)

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> FakeModel:
        if self.failures_left:
            self.failures_left -= 1
            raise invalid("not this time")
        path = files.version_dir / "value.txt"
        if not path.exists():
            raise invalid("there is no value.txt")
        self.open_models += 1
        self.loaded.append(files.version_dir.name)
        return FakeModel(self, float(path.read_text()))

    async def aclose(self) -> None:
        pass


class Harness:
    """A life cycle over one repository folder."""

    def __init__(
        self,
        repository: Path,
        mode: ControlMode = ControlMode.EXPLICIT,
        *more: Path,
        retries: int = 0,
        strict_versions: bool = False,
        readiness: ReadyWhen = ReadyWhen.ALL_MODELS,
    ) -> None:
        self.repository = repository
        self.backend = FakeBackend()
        options = LifecycleOptions(
            (repository, *more), mode, cores=2, load_retries=retries, strict_versions=strict_versions
        )
        self.lifecycle = Lifecycle(options, Backends({"fake": lambda: self.backend}, observed=RecordedScheduler))
        self.engine = ModelEngine(self.lifecycle, ServerMetadata("test", "0", ()), readiness=readiness)
        close_later(self.close)

    async def close(self) -> None:
        await self.lifecycle.drain()
        assert (self.backend.open_models, self.backend.open_instances) == (0, 0)

    async def value(self, model: str = "m", version: str = "") -> float:
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def reply(outcome: object, final: bool) -> None:
            if isinstance(outcome, InferResponse):
                future.set_result(float(outcome.outputs[0].array[0]))
            else:
                future.set_exception(outcome if isinstance(outcome, ServingError) else AssertionError(outcome))

        tensor = Tensor("IN", DataType.FP32, np.zeros(1, "<f4"))
        self.engine.infer(InferRequest(model, {"IN": tensor}, model_version=version), reply)
        return await asyncio.wait_for(future, 10)

    def states(self, model: str = "m") -> dict[str, ModelState | None]:
        return {e.version: e.state for e in self.engine.index() if e.name == model}

    def reason(self, model: str = "m") -> str:
        return next(e.reason for e in self.engine.index() if e.name == model)


def write_model(repository: Path, name: str = "m", *, config: str = CONFIG, **values: float) -> Path:
    folder = repository / name
    for version, value in (values or {"v1": 1}).items():
        (folder / version[1:]).mkdir(parents=True, exist_ok=True)
        (folder / version[1:] / "value.txt").write_text(str(value))
    (folder / "config.pbtxt").write_text(config)
    return folder


@pytest.fixture
def harness(tmp_path: Path) -> InLoop:
    return InLoop(lambda: Harness(tmp_path))


async def test_everything_is_loaded_at_start_and_a_broken_model_leaves_the_others_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "good", v1=5)
    (write_model(tmp_path, "bad") / "1" / "value.txt").unlink()
    write_model(tmp_path, "garbled", config="max_batch_size: banana")
    harness = Harness(tmp_path, ControlMode.NONE)

    failures = await harness.lifecycle.load_at_start(())
    harness.engine.started()

    assert await harness.value("good") == 5
    assert len(failures) == 2
    assert harness.states("bad") == {"1": ModelState.UNAVAILABLE}
    assert "there is no value.txt" in harness.reason("bad")
    assert harness.states("garbled") == {"": ModelState.UNAVAILABLE}
    assert not harness.engine.is_ready()
    with pytest.raises(ServingError, match="explicit model load / unload is not allowed"):
        await harness.engine.load_model("good")


async def test_explicit_mode_loads_what_it_is_asked_for(tmp_path: Path, harness: Harness) -> None:
    write_model(tmp_path, "a")
    write_model(tmp_path, "b")
    assert await harness.lifecycle.load_at_start(("a",)) == []
    harness.engine.started()

    assert harness.states("a") == {"1": ModelState.READY}
    assert harness.states("b") == {"": None}
    assert harness.engine.is_ready()
    with pytest.raises(ServingError, match="'b' is not found"):
        await harness.value("b")
    await harness.engine.load_model("b")
    assert await harness.value("b") == 1
    await harness.engine.unload_model("b")
    with pytest.raises(ServingError, match="'b' has no available versions"):
        await harness.value("b")
    await harness.lifecycle.drain()
    assert harness.reason("b") == "unloaded"
    await harness.engine.unload_model("never heard of")


async def test_a_load_whose_caller_leaves_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)
    harness, gate, create = Harness(tmp_path), asyncio.Event(), FakeModel.create_instance

    async def created(model: FakeModel, placement: Placement) -> FakeInstance:
        await gate.wait()
        return await create(model, placement)

    monkeypatch.setattr(FakeModel, "create_instance", created)
    loading = asyncio.ensure_future(harness.engine.load_model("m"))
    await until(lambda: harness.backend.open_models)
    loading.cancel()
    await asyncio.wait([loading])
    gate.set()
    await asyncio.wait([*harness.lifecycle._loads.values()])
    assert harness.states() == {"1": ModelState.READY}
    assert await harness.value() == 1


async def test_a_star_loads_everything_in_explicit_mode(tmp_path: Path, harness: Harness) -> None:
    write_model(tmp_path, "a")
    write_model(tmp_path, "b")
    await harness.lifecycle.load_at_start(("*",))
    assert await harness.value("a") == await harness.value("b") == 1


async def test_a_reload_keeps_the_old_version_answering_until_the_new_one_is_ready(
    tmp_path: Path, harness: Harness
) -> None:
    folder = write_model(tmp_path, v1=1)
    await harness.engine.load_model("m")
    (folder / "1" / "value.txt").write_text("2")

    reload = asyncio.ensure_future(harness.engine.load_model("m"))
    seen = []
    while not reload.done():
        seen.append(await harness.value())
        await asyncio.sleep(0)
    await reload

    assert seen[0] == 1
    assert sorted(seen) == seen
    assert await harness.value() == 2
    assert harness.states() == {"1": ModelState.READY}
    await until(lambda: harness.backend.open_models <= 1)


def with_instances(*counts: int, more: str = "") -> str:
    groups = "".join(f'instance_group {{ name: "g{n}" kind: KIND_CPU count: {c} }}\n' for n, c in enumerate(counts))
    return CONFIG + groups + more


SCHEDULERS = {
    "default": "",
    "dynamic": "max_batch_size: 4 dynamic_batching { }",
    "direct": "max_batch_size: 4 sequence_batching { direct { } }",
    "oldest": "max_batch_size: 4 sequence_batching { oldest { max_candidate_sequences: 4 } }",
}


async def test_a_failure_to_close_an_instance_does_not_keep_the_others_and_the_model_from_being_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, config=with_instances(3))
    harness = Harness(tmp_path)
    await harness.lifecycle.load_at_start(("m",))

    harness.backend.close_error = RuntimeError("the library is stuck")
    await harness.engine.unload_model("m")
    await harness.lifecycle.table.retired()

    assert (harness.backend.open_instances, harness.backend.open_models) == (0, 0)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "closing instance 'g0_0'", "closing instance 'g0_1'", "closing instance 'g0_2'", "closing model 'm'",
    ]  # fmt: skip


async def test_a_load_that_gets_too_few_threads_fails_and_closes_what_it_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, config=with_instances(3))
    harness = Harness(tmp_path)
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "g0_1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(ServingError, match="can't start new thread"):
        await harness.engine.load_model("m")

    assert (harness.backend.open_instances, harness.backend.open_models) == (0, 0)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("how", ["file", "override", "poll"])
async def test_a_change_of_instance_groups_creates_and_closes_only_the_difference(
    tmp_path: Path, scheduler: str, how: str
) -> None:
    more = SCHEDULERS[scheduler]

    folder = write_model(tmp_path, config=with_instances(4, 1, more=more))
    harness = Harness(tmp_path, ControlMode.POLL if how == "poll" else ControlMode.EXPLICIT)
    await harness.lifecycle.load_at_start(("m",))
    created = harness.backend.created

    async def change(*counts: int) -> None:
        if how == "override":
            groups = [{"name": f"g{n}", "kind": "KIND_CPU", "count": c} for n, c in enumerate(counts)]
            document = to_json(parse(with_instances(more=more)))
            await harness.lifecycle.load("m", json.dumps({**document, "instance_group": groups}), None)
            return
        (folder / "config.pbtxt").write_text(with_instances(*counts, more=more))
        if how == "file":
            await harness.engine.load_model("m")
        else:
            for _ in range(3):
                await harness.lifecycle.poll()

    async def open_instances(count: int) -> None:
        await until(lambda: harness.backend.open_instances == count)

    assert created == ["g0_0", "g0_1", "g0_2", "g0_3", "g1_0"]
    await change(2, 1)
    await open_instances(3)
    assert len(created) == 5
    await change(3)
    await open_instances(3)
    assert created[5:] == ["g0_2"]
    await change(1)
    await open_instances(1)
    await change(2, 2)
    await open_instances(4)
    assert created[6:] == ["g0_1", "g1_0", "g1_1"]
    assert harness.backend.loaded == ["1"]


async def test_a_changed_group_has_new_instances_of_the_same_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    harness = Harness(tmp_path, ControlMode.EXPLICIT)
    created = harness.backend.created
    for group, most, expected in (
        ("count: 2", "", ["g_0", "g_1"]),
        ("", "3", ["g_0", "g_1"]),  # the least number: one
        ("", "4", ["g_0", "g_1"]),
        ("count: 3", "", ["g_0", "g_1", "g_1", "g_2"]),
        ('count: 1 host_policy: "p"', "", ["g_0", "g_1", "g_1", "g_2", "g_0"]),
    ):
        bounds = f'parameters {{ key: "INSTANCES_MAX" value {{ string_value: "{most}" }} }}\n' if most else ""
        (folder / "config.pbtxt").write_text(f'{CONFIG}instance_group {{ name: "g" kind: KIND_CPU {group} }}\n{bounds}')
        await harness.engine.load_model("m")
        assert created == expected
    assert harness.backend.loaded == ["1"]


async def test_requests_in_flight_end_where_they_began_when_instances_change(tmp_path: Path, harness: Harness) -> None:
    folder = write_model(tmp_path, config=with_instances(2))
    await harness.engine.load_model("m")
    gate = threading.Event()
    harness.backend.gate = gate.wait
    before = [asyncio.ensure_future(harness.value()) for _ in range(6)]
    await asyncio.sleep(0)

    (folder / "config.pbtxt").write_text(with_instances(1))
    await harness.engine.load_model("m")
    after = [asyncio.ensure_future(harness.value()) for _ in range(6)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in before + after)
    gate.set()

    assert await asyncio.gather(*before, *after) == [1.0] * 12
    await until(lambda: harness.backend.open_instances <= 1)
    assert (harness.backend.loaded, harness.backend.created) == (["1"], ["g0_0", "g0_1"])


async def test_an_added_instance_that_fails_leaves_the_others_as_they_are(tmp_path: Path, harness: Harness) -> None:
    folder = write_model(tmp_path, config=with_instances(1))
    await harness.engine.load_model("m")
    harness.backend.instance_error = invalid("no room")

    (folder / "config.pbtxt").write_text(with_instances(3))
    with pytest.raises(ServingError, match="no room"):
        await harness.engine.load_model("m")

    assert await harness.value() == 1
    await until(lambda: harness.backend.open_instances <= 1)
    assert harness.backend.open_models == 1


@pytest.mark.parametrize("breakage", ["value", "config"])
async def test_a_failed_reload_keeps_the_old_version(tmp_path: Path, breakage: str, harness: Harness) -> None:
    folder = write_model(tmp_path, v1=1)
    await harness.engine.load_model("m")
    harness.engine.started()
    if breakage == "value":
        (folder / "1" / "value.txt").unlink()
    else:
        (folder / "config.pbtxt").write_text("no such field: 1")

    with pytest.raises(ServingError) as caught:
        await harness.engine.load_model("m")

    if breakage == "value":
        assert caught.value.message.startswith("load failed for model 'm'")
        assert caught.value.code is Code.INVALID_ARG
    else:
        assert caught.value.message.startswith("failed to load 'm', failed to poll from model repository: ")
        assert caught.value.code is Code.INTERNAL
    assert await harness.value() == 1
    assert harness.states() == {"1": ModelState.READY}
    assert harness.engine.is_ready()


async def test_requests_in_flight_of_an_unloaded_version_finish(tmp_path: Path, harness: Harness) -> None:
    write_model(tmp_path, v1=1)
    await harness.engine.load_model("m")
    gate = threading.Event()
    harness.backend.gate = gate.wait

    values = [asyncio.ensure_future(harness.value()) for _ in range(3)]
    await asyncio.sleep(0.01)
    await harness.engine.unload_model("m")
    assert harness.states() == {"1": ModelState.UNLOADING}
    assert harness.lifecycle.table.in_flight() == 1
    with pytest.raises(ServingError) as refused:
        await harness.value("m")
    assert refused.value.hint == "version 1: is being unloaded"
    gate.set()

    assert await asyncio.gather(*values) == [1, 1, 1]
    await harness.lifecycle.drain()
    assert harness.states() == {"1": ModelState.UNAVAILABLE}
    assert harness.backend.open_models == 0


async def test_the_version_policy_decides_what_is_served_and_the_default_is_the_newest(
    tmp_path: Path, harness: Harness
) -> None:
    write_model(tmp_path, config=CONFIG + "version_policy { latest { num_versions: 2 } }", v1=1, v2=2, v10=10)
    await harness.engine.load_model("m")

    assert harness.states() == {"2": ModelState.READY, "10": ModelState.READY}
    assert await harness.value() == 10
    assert await harness.value(version="2") == 2
    assert harness.engine.model_metadata("m").versions == ("2", "10")
    assert [s.version for s in await harness.engine.model_statistics("m")] == ["2", "10"]
    with pytest.raises(ServingError, match="version 1 is not found") as caught:
        await harness.value(version="1")
    assert (caught.value.code, caught.value.hint) == (Code.NOT_FOUND, "versions that are ready: 2, 10")
    with pytest.raises(ServingError, match="failed to get model version from specified version string 'x'"):
        await harness.value(version="x")


async def test_a_version_that_is_no_longer_selected_is_unloaded_by_a_reload(tmp_path: Path, harness: Harness) -> None:
    write_model(tmp_path, v1=1)
    await harness.engine.load_model("m")
    write_model(tmp_path, v2=2)
    await harness.engine.load_model("m")
    assert await harness.value() == 2
    await until(lambda: harness.states() == {"1": ModelState.UNAVAILABLE, "2": ModelState.READY})
    harness.engine.started()
    assert harness.engine.is_ready()


@pytest.mark.parametrize("remains", [True, False], ids=["beside the old one", "in place of the old one"])
async def test_a_version_answers_until_the_newer_one_that_replaces_it_does(
    tmp_path: Path, remains: bool, harness: Harness
) -> None:
    folder = write_model(tmp_path, v1=1)
    await harness.engine.load_model("m")
    (folder / "2").mkdir()  # its file is still on the way
    if not remains:
        (folder / "1").rename(folder / "old")

    with pytest.raises(ServingError, match=r"version 2 is at UNAVAILABLE state: there is no value\.txt"):
        await harness.engine.load_model("m")

    assert await harness.value() == 1
    assert harness.states() == {"1": ModelState.READY, "2": ModelState.UNAVAILABLE}
    write_model(tmp_path, v2=2)
    await harness.engine.load_model("m")
    assert await harness.value() == 2
    await until(lambda: harness.states() == {"1": ModelState.UNAVAILABLE, "2": ModelState.READY})


async def test_of_several_new_versions_one_that_fails_leaves_the_old_ones_answering(
    tmp_path: Path, harness: Harness
) -> None:
    config = CONFIG + "version_policy { latest { num_versions: 2 } }"
    folder = write_model(tmp_path, config=config, v1=1, v2=2)
    await harness.engine.load_model("m")
    write_model(tmp_path, config=config, v3=3)
    (folder / "4").mkdir()

    with pytest.raises(ServingError, match="version 4 is at UNAVAILABLE state"):
        await harness.engine.load_model("m")

    assert [await harness.value(version=version) for version in ("1", "2", "3")] == [1, 2, 3]


async def test_with_strict_versions_all_of_a_load_answer_or_none(tmp_path: Path) -> None:
    folder = write_model(tmp_path, config=CONFIG + "version_policy { all {} }", v1=1, v2=2)
    harness = Harness(tmp_path, strict_versions=True)
    (folder / "2" / "value.txt").unlink()

    with pytest.raises(ServingError, match=r"version 2 is at UNAVAILABLE state: there is no value.txt"):
        await harness.engine.load_model("m")

    assert harness.states() == {"1": ModelState.UNAVAILABLE, "2": ModelState.UNAVAILABLE}
    assert harness.reason() == "unloaded"
    assert (harness.backend.open_models, harness.backend.open_instances) == (0, 0)
    assert not await harness.engine.model_ready("m", "1")

    write_model(tmp_path, config=CONFIG + "version_policy { all {} }", v1=3, v2=4)
    await harness.engine.load_model("m")
    assert [await harness.value(version="1"), await harness.value(version="2")] == [3, 4]

    write_model(tmp_path, config=CONFIG + "version_policy { all {} }", v1=5)
    (folder / "2" / "value.txt").unlink()
    with pytest.raises(ServingError, match="version 2 is at UNAVAILABLE state"):
        await harness.engine.load_model("m")
    assert [await harness.value(version="1"), await harness.value(version="2")] == [3, 4]


async def test_versions_that_have_not_changed_are_not_loaded_again(tmp_path: Path, harness: Harness) -> None:
    every = CONFIG + "version_policy { all {} }"

    folder = write_model(tmp_path, config=every, v1=1, v2=2)
    loaded = harness.backend.loaded

    async def load(config: str | None = None) -> list[str]:
        loaded.clear()
        await harness.engine.load_model("m", config)
        return sorted(loaded)

    assert await load() == ["1", "2"]
    assert await load() == []
    write_model(tmp_path, config=every, v3=3)
    assert await load() == ["3"]
    (folder / "2" / "value.txt").write_text("20")
    assert await load() == ["2"]
    (folder / "config.pbtxt").write_text(every + "# nothing else")
    assert await load() == []
    (folder / "labels.txt").write_text("shared by all versions")
    assert await load() == ["1", "2", "3"]
    assert await load('{"max_batch_size": 4, ' + AS_JSON + "}") == ["3"]
    (folder / "config.pbtxt").write_text(every + 'parameters { key: "a" value { string_value: "b" } }')
    assert await load() == ["1", "2", "3"]
    await harness.engine.unload_model("m")
    assert await load() == ["1", "2", "3"]

    assert [await harness.value(version=v) for v in ("1", "2", "3")] == [1, 20, 3]


async def test_an_override_of_the_configuration_holds_until_the_folder_changes_or_the_model_is_unloaded(
    tmp_path: Path, harness: Harness
) -> None:
    folder = write_model(tmp_path)

    async def load(config: str | None = None, files: dict[str, bytes] | None = None) -> int:
        await harness.engine.load_model("m", config, files)
        return harness.engine.model_config("m").max_batch_size

    override = '{"max_batch_size": 4, ' + AS_JSON + "}"
    assert await load(override) == 4
    assert await load() == 4
    with pytest.raises(ServingError, match="failed to poll"):
        await load('{"max_batch_size": "many"}')
    assert await load() == 4
    (folder / "1" / "value.txt").write_text("2")
    assert await load() == 0
    assert await load() == 0

    assert await load(override) == 4
    await harness.engine.unload_model("m")
    assert await load() == 0

    assert await load(override) == 4
    assert await load(override.replace("4", "5"), {"1/value.txt": b"3"}) == 5
    assert await load() == 0


async def test_a_load_request_that_cannot_begin_leaves_readiness_and_index_as_they_are(
    tmp_path: Path, harness: Harness
) -> None:
    write_model(tmp_path)
    write_model(tmp_path, "garbled", config="max_batch_size: banana")
    harness.engine.started()
    await harness.engine.load_model("m")

    with pytest.raises(ServingError, match="failed to poll"):
        await harness.engine.load_model("garbled")
    assert harness.engine.is_ready()
    assert harness.states("garbled") == {"": ModelState.UNAVAILABLE}
    assert "banana" in harness.reason("garbled")

    await harness.engine.unload_model("m")
    await harness.lifecycle.table.retired()
    with pytest.raises(ServingError, match="failed to poll"):
        await harness.engine.load_model("m", '{"max_batch_size": -1, ' + AS_JSON + "}")
    assert harness.engine.is_ready()
    assert (harness.states(), harness.reason()) == ({"1": ModelState.UNAVAILABLE}, "unloaded")

    with pytest.raises(ServingError, match="load failed for model 'm'"):
        await harness.engine.load_model("m", "{" + AS_JSON.replace("fake", "none") + "}")
    assert not harness.engine.is_ready()
    assert harness.states() == {"1": ModelState.UNAVAILABLE}
    assert "unable to find backend 'none'" in harness.reason()

    await harness.engine.load_model("m")
    assert harness.engine.is_ready()


@pytest.mark.parametrize(
    ("state", "is_ready"), [(ModelState.UNLOADING, True), (ModelState.LOADING, False), (ModelState.UNAVAILABLE, False)]
)
def test_a_version_that_is_being_unloaded_is_not_waited_for(state: ModelState, is_ready: bool) -> None:
    assert ModelEntry("m", versions={1: VersionEntry(state)}).is_ready == is_ready


@pytest.mark.parametrize("cause", ["missing", "configuration", "ensemble", "version", "ambiguous"])
async def test_a_model_that_fails_to_load_has_one_line_of_level_error_with_its_name_and_the_reason(
    tmp_path: Path, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path / "one", "bert")
    harness = Harness(tmp_path / "one", ControlMode.EXPLICIT, *([tmp_path / "two"] if cause == "ambiguous" else []))
    if cause == "ambiguous":
        write_model(tmp_path / "two", "bert")
    elif cause == "missing":
        folder.rename(tmp_path / "moved")
    elif cause == "configuration":
        (folder / "config.pbtxt").write_text("max_batch_size: -1" + CONFIG)
    elif cause == "ensemble":  # a fault of its tensors alone
        step = 'step { model_name: "m" input_map { key: "I" value: "IN" } output_map { key: "O" value: "OUT" } }'
        given, got, unwritten = (f'{{ name: "{name}" data_type: TYPE_FP32 dims: 1 }}' for name in ("IN", "OUT", "X"))
        text = f'platform: "ensemble" input {given} output [ {got}, {unwritten} ] ensemble_scheduling {{ {step} }}'
        (folder / "config.pbtxt").write_text(text)
    else:
        (folder / "1" / "value.txt").unlink()

    with pytest.raises(ServingError) as caught:
        await harness.engine.load_model("bert")

    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == str(caught.value)
    assert "'bert'" in caught.value.message
    polled = caught.value.message.startswith("failed to load 'bert', failed to poll from model repository: ")
    assert polled == (cause != "version")
    assert caught.value.code is (Code.INVALID_ARG if cause == "version" else Code.INTERNAL)


async def test_a_load_scans_for_its_model_alone_and_knows_where_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_model(here, v1=1)
    write_model(there, "other")
    harness = Harness(here, ControlMode.EXPLICIT, there)
    await harness.lifecycle.load_at_start(())
    with monkeypatch.context() as patch:
        patch.setattr(harness.lifecycle.sources, "scan_all", None)
        await harness.engine.load_model("m")
        write_model(there, v1=2)
        with pytest.raises(ServingError, match="two or more repositories"):
            await harness.engine.load_model("m")
        assert await harness.value("m") == 1
        shutil.rmtree(here / "m")
        await harness.engine.load_model("m")
    assert await harness.value("m") == 2
    shutil.rmtree(there / "m")
    with pytest.raises(ServingError, match=r"no such model folder.*models there: other"):
        await harness.engine.load_model("m")


async def test_a_server_whose_repository_is_not_there_is_not_live_until_it_is(tmp_path: Path) -> None:
    harness = Harness(tmp_path / "later", ControlMode.POLL)
    with pytest.raises(ServingError, match="no such file or directory"):
        await harness.lifecycle.load_at_start(())
    harness.engine.started()

    assert (harness.engine.is_live(), harness.engine.is_ready()) == (False, False)
    assert harness.engine.server_metadata().name == "test"
    for ask in (harness.engine.repository_index, harness.engine.model_statistics):
        with pytest.raises(ServingError, match=r"^Server not ready") as caught:
            await ask()
        assert caught.value.code is Code.UNAVAILABLE
    with pytest.raises(ServingError, match=r"^Server not ready"):
        await harness.engine.model_ready("m")

    write_model(tmp_path / "later")
    while not harness.engine.is_live() or harness.states() != {"1": ModelState.READY}:
        await harness.lifecycle.poll()
    assert harness.engine.is_ready()


@pytest.mark.parametrize(
    ("mode", "names"), [(ControlMode.NONE, ()), (ControlMode.EXPLICIT, ("m", "later")), (ControlMode.EXPLICIT, ("*",))]
)
async def test_a_server_is_not_ready_before_it_has_the_models_of_a_store_that_was_down_and_loads_no_other_again(
    tmp_path: Path, mode: ControlMode, names: tuple[str, ...]
) -> None:
    write_model(tmp_path)
    write_model(tmp_path, "later", v1=2)
    harness = Harness(tmp_path, mode)
    look = harness.lifecycle.sources.scan_all
    harness.lifecycle.sources.scan_all = lambda **_: without(look(), "later", "the store is down")  # type: ignore[method-assign]
    await harness.lifecycle.load_at_start(names)
    harness.engine.started()
    assert (harness.engine.is_live(), harness.engine.is_ready()) == (True, False)
    assert await harness.value("m") == 1.0

    harness.lifecycle.sources.scan_all = look  # type: ignore[method-assign]
    await harness.lifecycle.load_at_start(names)

    assert harness.engine.is_ready()
    assert await harness.value("later") == 2.0
    assert harness.backend.loaded == ["1", "1"]


async def test_a_server_that_polls_is_ready_once_the_models_of_the_store_are(tmp_path: Path) -> None:
    write_model(tmp_path)
    harness = Harness(tmp_path, ControlMode.POLL)
    look = harness.lifecycle.sources.scan_all
    harness.lifecycle.sources.scan_all = lambda **_: without(look(), "m", "the store is down")  # type: ignore[method-assign]
    await harness.lifecycle.load_at_start(())
    harness.engine.started()
    await harness.lifecycle.poll()
    assert not harness.engine.is_ready()

    harness.lifecycle.sources.scan_all = look  # type: ignore[method-assign]
    while not harness.engine.is_ready():
        await harness.lifecycle.poll()

    assert harness.states() == {"1": ModelState.READY}


async def test_what_could_not_be_fetched_at_the_start_is_tried_again(tmp_path: Path) -> None:
    write_model(tmp_path)
    harness = Harness(tmp_path, ControlMode.NONE)
    sources = harness.lifecycle.sources
    look, failures = sources.scan_all, [unavailable("the store is down")]

    def fetch(folder: ModelFolder) -> tuple[ModelFolder, None]:
        if failures:
            raise failures.pop()
        return folder, None

    def from_store(**_: bool) -> Scan:
        found = look()
        return replace(found, models={k: replace(m, origin="s3://bucket") for k, m in found.models.items()})

    sources.scan_all, sources.fetch = from_store, fetch  # type: ignore[method-assign]
    await harness.lifecycle.load_at_start(())
    harness.engine.started()
    assert not harness.lifecycle.is_complete
    assert not harness.engine.is_ready()

    await harness.lifecycle.load_at_start(())

    assert harness.lifecycle.is_complete
    assert harness.engine.is_ready()
    assert await harness.value("m") == 1.0


def without(found: Scan, name: str, reason: str) -> Scan:
    """What a scan sees while the store of a model is down."""
    return replace(found, models={k: m for k, m in found.models.items() if k != name}, unread=(reason,))


@pytest.mark.parametrize("name", ["m", "unknown", ""])
async def test_a_model_that_is_not_loaded_is_not_ready(tmp_path: Path, name: str, harness: Harness) -> None:
    write_model(tmp_path)

    assert not await harness.engine.model_ready(name)
    assert not await harness.engine.model_ready(name, "1")
    with pytest.raises(ServingError, match="failed to get model version"):
        await harness.engine.model_ready(name, "x")


async def test_an_override_of_configuration_and_files_replaces_the_folder(tmp_path: Path, harness: Harness) -> None:
    write_model(tmp_path, v1=1)
    config = {
        "backend": "fake",
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}],
    }
    with pytest.raises(ServingError, match="'config' must be specified"):
        await harness.engine.load_model("m", files={"1/value.txt": b"9"})
    with pytest.raises(ServingError, match="must stay within model directory"):
        await harness.engine.load_model("m", json.dumps(config), {"../1/value.txt": b"9"})

    await harness.engine.load_model("m", json.dumps(config), {"7/value.txt": b"9"})

    assert await harness.value() == 9
    assert harness.states() == {"7": ModelState.READY}
    await harness.engine.load_model("m")
    assert await harness.value() == 1


async def test_files_of_a_version_that_could_not_be_replaced_stay_while_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models"
    write_model(repository, v1=1)
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(private))
    harness = Harness(repository)
    config = json.dumps(
        {
            "backend": "fake",
            "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [1]}],
            "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [1]}],
            "version_policy": {"all": {}},
        }
    )
    await harness.engine.load_model("m", config, {"1/value.txt": b"1", "2/value.txt": b"2"})

    with pytest.raises(ServingError, match="version 2 is at UNAVAILABLE state"):
        await harness.engine.load_model("m", config, {"1/value.txt": b"3", "2/other.txt": b""})

    assert [await harness.value(version="1"), await harness.value(version="2")] == [3, 2]
    assert len(list(private.iterdir())) == 2
    with pytest.raises(ServingError, match="version 2 is at UNAVAILABLE state"):
        await harness.engine.load_model("m", config, {"1/value.txt": b"4", "2/other.txt": b""})
    assert [await harness.value(version="1"), await harness.value(version="2")] == [4, 2]
    assert len(list(private.iterdir())) == 2
    await harness.engine.load_model("m", config, {"1/value.txt": b"5", "2/value.txt": b"6"})
    assert len(list(private.iterdir())) == 1
    await harness.lifecycle.drain()
    assert list(private.iterdir()) == []


@pytest.mark.parametrize("name", ["", "a/b"])
async def test_names_that_are_no_folder_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ServingError) as caught:
        await Harness(tmp_path).engine.load_model(name)
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message.startswith(f"failed to load '{name}', failed to poll from model repository: ")


async def test_a_model_that_is_not_there_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="failed to poll from model repository") as caught:
        await Harness(tmp_path).engine.load_model("nothing")
    assert caught.value.code is Code.INTERNAL


async def test_a_name_in_two_repositories_is_served_by_neither(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    write_model(tmp_path / "two")
    harness = Harness(tmp_path / "one", ControlMode.NONE, tmp_path / "two")
    (failure,) = await harness.lifecycle.load_at_start(())
    assert "two or more repositories" in failure
    assert harness.states() == {"": ModelState.UNAVAILABLE}


async def test_loads_are_tried_again_as_often_as_asked(tmp_path: Path) -> None:
    write_model(tmp_path, v1=1)
    harness = Harness(tmp_path, retries=2)
    harness.backend.failures_left = 2
    await harness.engine.load_model("m")
    assert await harness.value() == 1


async def test_an_instance_that_cannot_be_made_takes_its_siblings_down_again(tmp_path: Path, harness: Harness) -> None:
    write_model(tmp_path, config=CONFIG + "instance_group { count: 3 kind: KIND_CPU }")
    harness.backend.instance_error = invalid("no memory for a second one")
    with pytest.raises(ServingError, match="no memory for a second one"):
        await harness.engine.load_model("m")
    assert (harness.backend.open_models, harness.backend.open_instances) == (0, 0)


async def test_polling_follows_added_changed_and_removed_models_once_they_have_settled(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", v1=1)
    harness = Harness(tmp_path, ControlMode.POLL)
    await harness.lifecycle.load_at_start(())
    write_model(tmp_path, "added", v1=3)
    (folder / "1" / "value.txt").write_text("22")
    await harness.lifecycle.poll()
    await harness.lifecycle.poll()
    assert await harness.value("added") == 3
    assert await harness.value("m") == 22
    shutil.rmtree(tmp_path / "added")
    await harness.lifecycle.poll()
    await harness.lifecycle.poll()
    await harness.lifecycle.table.retired()
    with pytest.raises(ServingError, match="Request for unknown model: 'added' is not found"):
        await harness.value("added")
    assert [entry.name for entry in harness.engine.index()] == ["m"]


async def test_nothing_is_taken_in_from_the_moment_the_server_exits(tmp_path: Path, harness: Harness) -> None:
    write_model(tmp_path)
    await harness.engine.load_model("m")
    harness.engine.started()
    assert harness.engine.is_ready()
    assert await harness.engine.model_ready("m")
    harness.engine.begin_exit()
    assert not harness.engine.is_ready()
    assert not await harness.engine.model_ready("m")
    with pytest.raises(ServingError, match="Server is stopping") as caught:
        await harness.value()
    assert caught.value.code is Code.UNAVAILABLE


COMPLETED = CONFIG + 'parameters { key: "completed" value { string_value: "yes" } }'
"""The fake backend completes it from the files of a version."""


def break_version(folder: Path, number: int, breakage: str) -> str:
    """Make a version that cannot be loaded, and return the reason."""
    version = folder / str(number)
    version.mkdir()
    if breakage == "empty":
        return "there is no file to complete the configuration from"
    (version / "value.txt").write_text("3")
    if breakage == "unreadable":
        (version / "corrupt").touch()
        return "SyntaxError: it cannot be read"
    (version / "value.txt").unlink()
    (folder / "config.pbtxt").write_text(CONFIG)
    return "there is no value.txt"


BREAKAGES = pytest.mark.parametrize("breakage", ["empty", "unreadable", "fails to load"])


@BREAKAGES
async def test_a_new_version_that_cannot_be_loaded_is_shown_and_the_old_one_serves(
    tmp_path: Path, breakage: str
) -> None:
    folder = write_model(tmp_path, config=COMPLETED, v1=1)
    harness = Harness(tmp_path, ControlMode.POLL)
    await harness.lifecycle.load_at_start(())
    harness.engine.started()
    assert harness.engine.is_ready()

    reason = break_version(folder, 2, breakage)
    await harness.lifecycle.poll()
    await harness.lifecycle.poll()

    assert await harness.value() == 1
    assert harness.states() == {"1": ModelState.READY, "2": ModelState.UNAVAILABLE}
    assert {e.version: e.reason for e in harness.engine.index()} == {"1": "", "2": reason}
    assert not harness.engine.is_ready()
    assert not await harness.engine.model_ready("m", "2")
    with pytest.raises(ServingError) as refused:
        await harness.value(version="2")
    assert refused.value.code is Code.UNAVAILABLE

    (folder / "2" / "corrupt").unlink(missing_ok=True)
    (folder / "2" / "value.txt").write_text("2")
    await harness.lifecycle.poll()
    await harness.lifecycle.poll()
    assert await harness.value() == 2
    assert harness.states()["2"] is ModelState.READY
    assert harness.engine.is_ready()


@BREAKAGES
async def test_at_the_start_a_version_that_cannot_be_loaded_does_not_keep_the_others_from_serving(
    tmp_path: Path, breakage: str
) -> None:
    folder = write_model(tmp_path, config=COMPLETED, v1=1)
    reason = break_version(folder, 2, breakage)
    config = folder / "config.pbtxt"
    config.write_text(config.read_text() + "version_policy { all { } }")
    harness = Harness(tmp_path, ControlMode.NONE)

    failures = await harness.lifecycle.load_at_start(())
    harness.engine.started()

    assert failures == [f"load failed for model 'm': version 2 is at UNAVAILABLE state: {reason};"]
    assert await harness.value() == 1
    assert harness.states() == {"1": ModelState.READY, "2": ModelState.UNAVAILABLE}
    assert not harness.engine.is_ready()


@BREAKAGES
async def test_a_model_whose_only_version_cannot_be_loaded_is_shown_with_its_version(
    tmp_path: Path, breakage: str, harness: Harness
) -> None:
    folder = write_model(tmp_path, config=COMPLETED)
    (folder / "1" / "value.txt").unlink()
    (folder / "1").rmdir()
    reason = break_version(folder, 1, breakage)
    with pytest.raises(ServingError, match="load failed for model 'm'"):
        await harness.engine.load_model("m")
    harness.engine.started()

    assert harness.states() == {"1": ModelState.UNAVAILABLE}
    assert harness.reason() == reason
    assert not harness.engine.is_ready()


async def test_a_server_whose_model_cannot_start_its_workers_again_is_not_ready(tmp_path: Path) -> None:
    write_model(tmp_path)
    harness = Harness(tmp_path, ControlMode.NONE)
    await harness.lifecycle.load_at_start(())
    harness.engine.started()
    found = []
    for is_failing in (False, True, False):
        harness.backend.is_failing = is_failing
        found.append(harness.engine.is_ready())
    await harness.lifecycle.drain()

    assert found == [True, False, True]


async def test_with_readiness_of_the_start_only_its_models_count_until_they_have_been_ready(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "first", config=COMPLETED)
    (folder / "1" / "corrupt").touch()
    harness = Harness(tmp_path, ControlMode.POLL, readiness=ReadyWhen.AT_START)
    await harness.lifecycle.load_at_start(())
    harness.engine.started()
    (write_model(tmp_path, "later", config=COMPLETED) / "1" / "corrupt").touch()
    for _ in range(2):
        await harness.lifecycle.poll()
    assert not harness.engine.is_ready()

    (folder / "1" / "corrupt").unlink()
    for _ in range(2):
        await harness.lifecycle.poll()
    assert harness.engine.is_ready()
    harness.backend.is_failing = True
    assert harness.engine.is_ready()
    assert harness.states("later") == {"1": ModelState.UNAVAILABLE}


async def test_several_reasons_of_a_failed_load_are_on_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path, config=CONFIG + "max_batch_size: -1 instance_group { count: -1 }")
    with pytest.raises(ServingError):
        await Harness(tmp_path).engine.load_model("m")

    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "\n" not in line
    assert "failed to poll from model repository: model 'm': 2 problems in the model configuration: " in line
    assert "max_batch_size" in line.split("; ")[0]
    assert "instance_group" in line.split("; ")[1]
