"""Models that are loaded when they are needed, with a backend that does what the test says."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.closing import InLoop, close_later
from tests.support.models import chain_pbtxt
from tests.support.process import until
from tests.support.recorded import RecordedScheduler

from charonia.clock import now_ns
from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, invalid
from charonia.core.metadata import ModelState, ServerMetadata
from charonia.core.request import CallFrame, InferRequest
from charonia.core.response import InferResponse, Outcome
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, Completion, Execution, ModelFiles, Outputs, Placement
from charonia.server.engine import ModelEngine
from charonia.server.lifecycle import on_demand as demand_module
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.lifecycle import Lifecycle, LifecycleOptions
from charonia.server.lifecycle.on_demand import DemandOptions
from charonia.server.model_options import AutoOptions, ControlMode

MODEL = """
backend: "fake"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""

KB = 1000


def ensemble(*steps: str) -> str:
    return chain_pbtxt(*steps, given="IN", wanted="OUT", dims=(1,), max_batch_size=0)


class FakeModel:
    """Takes as much memory as its file has."""

    def __init__(self, backend: "FakeBackend", size: int) -> None:
        self.backend = backend
        self.size = size

    async def create_instance(self, placement: Placement) -> "FakeModel":
        return self

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        self.backend.gate()
        now = now_ns()
        return Execution([Outputs([Tensor("OUT", DataType.FP32, r.inputs["IN"].array)]) for r in requests], now, now)

    def close(self) -> None:
        pass

    def memory(self) -> list[MemoryUsage]:
        return [MemoryUsage("CPU", 0, self.size)]

    async def aclose(self) -> None:
        self.backend.loaded -= 1


class FakeBackend:
    name = "fake"

    def __init__(self) -> None:
        self.loaded = 0
        self.loads: list[str] = []
        self.failing: set[str] = set()
        self.opened = asyncio.Event()
        self.opened.set()
        self.slow: dict[int, asyncio.Event] = {}  # by version
        self.gate: Callable[[], object] = lambda: None

    def uses_gpus(self) -> bool:
        return False

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        return Completion(config)

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> FakeModel:
        await self.slow.get(files.version, self.opened).wait()
        self.loads.append(config.name)
        if config.name in self.failing:
            raise invalid("this one is broken")
        self.loaded += 1
        return FakeModel(self, (files.version_dir / "weights").stat().st_size)

    async def aclose(self) -> None:
        pass


class Harness:
    """An engine over one repository, with a budget in KB."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        budget: int = 250,
        pinned: str = "",
        mode: ControlMode = ControlMode.AUTO,
        **limits: Any,
    ) -> None:
        monkeypatch.setattr(demand_module, "tree_bytes", lambda: 0)
        self.folder = folder
        self.backend = FakeBackend()
        options = LifecycleOptions((folder,), mode, cores=2)
        self.lifecycle = Lifecycle(options, Backends({"fake": lambda: self.backend}, observed=RecordedScheduler))
        auto = AutoOptions(pinned=(pinned,) if pinned else (), **{"waiting_max": 100, "wait_secs": 10, **limits})
        demand = DemandOptions(auto, budget * KB, loads_all=mode is ControlMode.AUTO)
        self.engine = ModelEngine(self.lifecycle, ServerMetadata("test", "0", ()), demand=demand)
        assert self.engine.demand is not None
        self.demand = self.engine.demand
        close_later(self.lifecycle.drain)

    def model(self, name: str, size: int = 100, config: str = MODEL) -> None:
        version = self.folder / name / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / "weights").write_bytes(b"x" * size * KB)
        (self.folder / name / "config.pbtxt").write_text(config)

    async def start(self, *names: str) -> None:
        assert await self.lifecycle.load_at_start(names) == []
        self.engine.started()

    def ask(self, model: str, **fields: object) -> "asyncio.Future[Outcome]":
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        tensor = Tensor("IN", DataType.FP32, np.zeros(1, "<f4"))
        request = InferRequest(model, {"IN": tensor}, **fields)  # type: ignore[arg-type]  # any field
        ticket = self.engine.infer(request, lambda outcome, final: future.set_result(outcome))
        future.add_done_callback(lambda done: ticket.cancel() if done.cancelled() else None)
        return future

    async def answer(self, model: str, **fields: object) -> InferResponse:
        outcome = await asyncio.wait_for(self.ask(model, **fields), 10)
        assert isinstance(outcome, InferResponse), outcome
        return outcome

    async def refusal(self, model: str, **fields: object) -> ServingError:
        outcome = await asyncio.wait_for(self.ask(model, **fields), 10)
        assert isinstance(outcome, ServingError)
        return outcome

    async def settle(self) -> None:
        """Wait until no model is being loaded on demand."""
        await until(lambda: not self.demand._loads)

    def ready(self) -> set[str]:
        return {e.name for e in self.engine.index() if e.state is ModelState.READY}


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(demand_module, "ROOM_LOOK_S", 0.001)
    return monkeypatch


@pytest.fixture
def harness(tmp_path: Path, patch: pytest.MonkeyPatch) -> InLoop:
    return InLoop(lambda: Harness(tmp_path, patch))


async def test_the_first_request_loads_its_model_and_all_that_come_meanwhile_wait(harness: Harness) -> None:
    harness.model("m")
    await harness.start()
    assert harness.ready() == set()
    assert harness.engine.is_ready()
    assert await harness.engine.model_ready("m")

    waiting = [harness.ask("m", id=str(i)) for i in range(5)]
    outcomes = await asyncio.gather(*waiting)

    assert [o.id for o in outcomes if isinstance(o, InferResponse)] == ["0", "1", "2", "3", "4"]
    assert harness.backend.loads == ["m"]
    assert harness.ready() == {"m"}


async def test_a_change_of_its_traffic_loads_a_model_and_its_canary_survives_an_eviction(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tmp_path, patch, budget=250)
    harness.model("m", config=MODEL + "version_policy { all { } }")
    (tmp_path / "m" / "2").mkdir()
    (tmp_path / "m" / "2" / "weights").write_bytes(b"x")
    harness.model("other", 200)
    await harness.start()
    traffic = harness.lifecycle.table.traffic

    await traffic.change("m", {"canary": {"version": 2, "stable": 1, "steps": [40, 100]}})
    assert harness.ready() == {"m"}
    await harness.answer("other")
    assert harness.ready() == {"other"}
    found = [(await harness.answer("m")).model_version for _ in range(10)]

    shown: Any = await traffic.show("m")
    assert shown["canary"]["state"] == "running"
    assert (found.count("1"), found.count("2")) == (6, 4)
    with pytest.raises(ServingError, match="'nothing' is not ready"):
        await traffic.change("nothing", {"sticky": "key"})
    traffic.close()


async def test_what_loaded_models_leave_of_the_budget_is_free(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path, patch, budget=250)
    harness.model("a", 100)
    harness.model("b", 30)
    await harness.start()
    assert harness.demand.free_bytes() == 250 * KB

    await harness.answer("a")
    await harness.answer("b")

    assert harness.demand.free_bytes() == 120 * KB


async def test_the_least_recently_used_idle_model_makes_room(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path, patch, budget=250)
    for name in ("a", "b", "c"):
        harness.model(name)
    await harness.start()
    for name in ("a", "b"):
        await harness.answer(name)
        await asyncio.sleep(0.002)  # what was used when is told apart by the millisecond
    await harness.answer("a")

    await harness.answer("c")

    assert harness.ready() == {"a", "c"}
    assert harness.demand.counts.evictions == {"b": 1}
    assert harness.backend.loaded == 2


@pytest.mark.parametrize("is_loaded_meanwhile", [False, True])
async def test_a_model_in_flight_is_waited_for_and_never_unloaded(
    tmp_path: Path, patch: pytest.MonkeyPatch, *, is_loaded_meanwhile: bool
) -> None:
    harness = Harness(tmp_path, patch, budget=150)
    for name in ("a", "b"):
        harness.model(name)
    await harness.start()
    await harness.answer("a")
    gate = threading.Event()
    harness.backend.gate = gate.wait
    busy = harness.ask("a")
    other = harness.ask("b")
    await asyncio.sleep(0.05)
    assert harness.ready() == {"a"}
    assert not busy.done()
    if is_loaded_meanwhile:  # by a request, which the budget does not bind
        await harness.engine.load_model("b")

    gate.set()

    assert isinstance(await busy, InferResponse)
    assert isinstance(await other, InferResponse)
    await harness.settle()
    assert harness.ready() == {"b"}


async def test_loads_whose_models_requests_have_loaded_do_not_wait_for_each_other(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tmp_path, patch, budget=150)
    for name in ("a", "b", "c"):
        harness.model(name)
    await harness.start()
    await harness.answer("a")
    gate = threading.Event()
    harness.backend.gate = gate.wait
    busy = harness.ask("a")
    others = [harness.ask("b"), harness.ask("c")]
    await asyncio.sleep(0.05)
    for name in ("b", "c"):
        await harness.engine.load_model(name)
    gate.set()

    outcomes = await asyncio.wait_for(asyncio.gather(busy, *others), 5)

    assert all(isinstance(each, InferResponse) for each in outcomes)
    await harness.settle()


async def test_pinned_models_are_loaded_at_start_and_stay(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path, patch, budget=250, pinned="a")
    harness.model("a")
    harness.model("b", config=MODEL + 'parameters { key: "pinned" value { string_value: "true" } }')
    harness.model("c")
    await harness.start("a")
    await harness.answer("b")

    error = await harness.refusal("c")

    assert error.code is Code.UNAVAILABLE
    assert "there is no room for model 'c'" in error.message
    assert harness.ready() == {"a", "b"}


async def test_a_model_that_fails_tells_all_who_wait_and_is_not_tried_again_at_once(harness: Harness) -> None:
    harness.model("m")
    harness.backend.failing.add("m")
    await harness.start()

    outcomes = await asyncio.gather(*(harness.ask("m") for _ in range(3)))
    again = await harness.refusal("m")

    assert all(isinstance(o, ServingError) and "this one is broken" in o.message for o in outcomes)
    assert "this one is broken" in again.message
    assert again.code is Code.UNAVAILABLE
    assert "tried again in" in again.hint
    assert harness.backend.loads == ["m"]
    assert not await harness.engine.model_ready("m")
    assert harness.engine.is_ready()
    harness.backend.failing.clear()
    harness.model("m", size=101)
    await harness.lifecycle.poll()
    await harness.answer("m")
    assert harness.demand.counts.failures == {"m": 1}


async def test_the_queue_has_a_limit_and_a_deadline_is_kept(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path, patch, waiting_max=2)
    harness.model("m")
    harness.backend.opened.clear()
    await harness.start()
    patient, hasty = harness.ask("m"), harness.ask("m", timeout_us=1000)

    full = await harness.refusal("m")
    late = await hasty
    deadline = await harness.refusal("m", deadline_ns=now_ns() + 1_000_000)
    harness.backend.opened.set()

    assert "--auto-queue-size" in full.hint
    assert isinstance(late, ServingError)
    assert "not loaded in time" in late.message
    assert "not loaded in time" in deadline.message
    assert isinstance(await patient, InferResponse)


async def test_who_leaves_while_waiting_is_forgotten(harness: Harness) -> None:
    harness.model("m")
    harness.backend.opened.clear()
    await harness.start()
    replies: list[Outcome] = []
    request = InferRequest("m", {"IN": Tensor("IN", DataType.FP32, np.zeros(1, "<f4"))}, id="7")
    ticket = harness.engine.infer(request, lambda outcome, final: replies.append(outcome))

    ticket.cancel()
    ticket.cancel()
    harness.backend.opened.set()
    await harness.answer("m")

    assert [o.code for o in replies if isinstance(o, ServingError)] == [Code.CANCELLED]
    assert len(replies) == 1


async def test_the_steps_of_an_ensemble_are_loaded_with_it_and_leave_after_it(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tmp_path, patch, budget=250)
    for name in ("a", "b", "c"):
        harness.model(name)
    harness.model("pair", 0, ensemble("a", "b"))
    await harness.start()

    await harness.answer("pair")
    assert harness.ready() == {"a", "b", "pair"}
    await harness.answer("c")
    assert "pair" not in harness.ready()
    assert len(harness.ready()) == 2
    await harness.answer("pair")

    assert harness.ready() == {"a", "b", "pair"}


async def test_steps_stay_until_their_ensemble_is_loaded(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    harness, kept = Harness(tmp_path, patch), set()
    for name in ("a", "b"):
        harness.model(name)
    harness.model("pair", 0, ensemble("a", "b"))
    await harness.start()
    load_steps = harness.lifecycle.load_steps
    assert load_steps is not None

    async def brought(steps: Sequence[str]) -> None:
        await load_steps(steps)
        kept.update(harness.demand._pinned_models())

    harness.lifecycle.load_steps = brought
    await harness.answer("pair")

    assert kept == {"a", "b", "pair"}


async def test_an_ensemble_that_does_not_fit_says_so(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path, patch, budget=150)
    for name in ("a", "b"):
        harness.model(name)
    harness.model("pair", 0, ensemble("a", "b"))
    await harness.start()

    error = await harness.refusal("pair")

    assert error.code is Code.UNAVAILABLE
    assert "depends on" in error.message


async def test_a_model_that_calls_another_stays_while_that_is_loaded(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path, patch, budget=150)
    for name in ("caller", "called"):
        harness.model(name)
    await harness.start()
    await harness.answer("caller")

    error = await harness.refusal("called", caller=CallFrame("caller", "1", "caller_0"))

    assert "taken by models that stay" in error.message
    assert harness.ready() == {"caller"}


async def test_who_asks_about_a_model_waits_until_it_is_loaded(harness: Harness) -> None:
    harness.model("m")
    harness.model("bad")
    harness.backend.failing.add("bad")
    await harness.start()

    loading = harness.demand.demand("m")
    assert loading is not None
    await loading

    assert harness.demand.demand("m") is None
    assert harness.demand.demand("none") is None
    assert harness.engine.model_config("m").name == "m"
    for _ in range(2):
        failing = harness.demand.demand("bad")
        assert failing is not None
        with pytest.raises(ServingError, match="this one is broken"):
            await failing


async def test_unknown_models_and_versions_are_refused_as_ever(harness: Harness) -> None:
    harness.model("m")
    await harness.start()

    assert (await harness.refusal("none")).code is Code.NOT_FOUND
    assert (await harness.refusal("m", model_version="7")).code is Code.NOT_FOUND
    assert (await harness.refusal("m", model_version="7")).code is Code.NOT_FOUND
    assert harness.backend.loads == ["m"]


async def test_a_request_for_a_version_that_is_still_being_loaded_waits(tmp_path: Path, harness: Harness) -> None:
    harness.model("m", config=MODEL + "version_policy { all { } }")
    (tmp_path / "m" / "2").mkdir()
    (tmp_path / "m" / "2" / "weights").write_bytes(b"x")
    slow = harness.backend.slow[1] = asyncio.Event()
    await harness.start()
    first = harness.ask("m", model_version="2")
    await until(lambda: ("m", "") in harness.lifecycle.table.routes)

    waiting = harness.ask("m", model_version="1")
    slow.set()

    outcomes = [await asyncio.wait_for(each, 10) for each in (first, waiting)]
    assert [outcome.model_version for outcome in outcomes if isinstance(outcome, InferResponse)] == ["2", "1"]


async def test_only_loaded_models_follow_changes_and_all_that_go_are_gone(tmp_path: Path, harness: Harness) -> None:
    for name in ("loaded", "other"):
        harness.model(name)
    await harness.start()
    await harness.answer("loaded")
    for name in ("loaded", "other", "new"):
        harness.model(name, size=90)

    for _ in range(2):
        await harness.lifecycle.poll()

    assert harness.backend.loads == ["loaded", "loaded"]
    await harness.answer("new")
    for name in ("1/weights", "1", "config.pbtxt", ""):
        path = tmp_path / "loaded" / name
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
    for _ in range(2):
        await harness.lifecycle.poll()
    assert (await harness.refusal("loaded")).code is Code.NOT_FOUND


async def test_what_waits_when_the_server_stops_is_answered(harness: Harness) -> None:
    harness.model("m")
    harness.backend.opened.clear()
    await harness.start()
    waiting = harness.ask("m")

    harness.engine.begin_exit()
    harness.demand.close()
    outcome = await waiting

    assert isinstance(outcome, ServingError)
    assert outcome.code is Code.UNAVAILABLE


async def test_metrics_tell_loads_evictions_sizes_and_who_waits(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path, patch, budget=150)
    for name in ("a", "b"):
        harness.model(name)
    await harness.start()
    await harness.answer("a")
    await harness.answer("b")

    found = {
        family.name: {tuple(s.labels.values()): s.value for s in family.samples} for family in harness.demand.families()
    }

    assert found["charonia_model_memory_budget_bytes"] == {(): 150 * KB}
    assert found["charonia_model_loads_total"] == {("a",): 1, ("b",): 1}
    assert found["charonia_model_evictions_total"] == {("a",): 1}
    assert found["charonia_model_resident_bytes"] == {("b",): 100 * KB}


@pytest.mark.parametrize("mode", ControlMode)
async def test_idle_models_are_unloaded_and_the_next_request_loads_them(
    tmp_path: Path, patch: pytest.MonkeyPatch, mode: ControlMode
) -> None:
    harness = Harness(tmp_path, patch, budget=1000, pinned="kept", mode=mode)
    for name in ("a", "b", "kept", "other"):
        harness.model(name)
    harness.model("both", config=ensemble("a", "b"))
    await harness.start("*")
    await asyncio.sleep(0.002)
    await harness.answer("other")
    used_s = time.time()

    await harness.demand.unload_unused(used_s - 60)
    assert harness.ready() == {"a", "b", "both", "kept", "other"}
    await asyncio.sleep(0.002)
    await harness.answer("both")
    await harness.demand.unload_unused(used_s)
    assert harness.ready() == {"a", "b", "both", "kept"}  # the ensemble was used, and so were its models
    await harness.demand.unload_unused(time.time() + 1)
    assert harness.ready() == {"kept"}
    assert harness.engine.is_ready()
    assert await harness.engine.model_ready("both")

    await asyncio.gather(harness.answer("both"), harness.answer("b"))

    assert harness.ready() == {"a", "b", "both", "kept"}
    assert harness.demand.counts.idle == {"other": 1, "both": 1, "a": 1, "b": 1}


async def test_a_model_in_use_is_not_idle_and_one_that_a_request_has_unloaded_stays_unloaded(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tmp_path, patch, mode=ControlMode.EXPLICIT)
    for name in ("a", "gone"):
        harness.model(name)
    await harness.start("*")
    gate = threading.Event()
    harness.backend.gate = gate.wait
    running = harness.ask("a")
    await harness.demand.unload_unused(time.time() + 1)
    assert harness.ready() == {"a"}

    await harness.engine.unload_model("gone")
    gate.set()

    assert "unloaded" in str(await harness.refusal("gone"))
    assert isinstance(await running, InferResponse)
