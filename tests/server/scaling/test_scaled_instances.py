"""The instances of a loaded version, with instances that start and compute when the test says so, in simulated time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.support.recorded import RecordedScheduler

from charonia import clock
from charonia.config.complete import normalise
from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, BatchSink, Completion, ModelFiles, Outputs, Placement
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.loader import LoadedVersion, load_version
from charonia.server.lifecycle.repository.scan import ModelFolder
from charonia.server.rate_limiter.limiter import RateLimits
from charonia.server.rate_limiter.options import ResourceLimit
from charonia.server.scaling import instances
from charonia.server.scaling.rule import BACK_OFF_NS, GROW_AFTER_NS, SAMPLE_NS, SHRINK_AFTER_NS, Headroom

TEXT = """
name: "m" backend: "held"
input { name: "IN" data_type: TYPE_FP32 dims: 1 } output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
parameters { key: "INSTANCES_MAX" value { string_value: "3" } }
"""
VALUE = Tensor("IN", DataType.FP32, np.ones(1, "<f4"))


class HeldInstance:
    """Finishes its batches when the test says so."""

    def __init__(self, backend: "HeldBackend", placement: Placement) -> None:
        self.backend = backend
        self.placement = placement
        self.batches: list[tuple[Sequence[InferRequest], BatchSink]] = []

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self.batches.append((requests, sink))
        if requests[0].model_version:  # a sample that warms it up
            self.backend.warmed.append(self.placement.name)
            self.finish(self.backend.warm_up_error)

    def cancel(self, sink: BatchSink, index: int) -> None:
        pass

    async def aclose(self) -> None:
        assert not self.batches
        await self.backend.close_gate()
        self.backend.open.remove(self)
        self.backend.closed.append(self.placement.name)

    def finish(self, error: ServingError | None = None) -> None:
        requests, sink = self.batches.pop(0)
        if error is not None:
            sink.finish(0, 0, error)
            return
        for index in range(len(requests)):
            sink.respond(index, Outputs([Tensor("OUT", DataType.FP32, VALUE.array)]), True)
        sink.finish(0, 0)


class HeldBackend:
    """Makes such instances; those after the first wait for `gate`."""

    name = "held"

    def __init__(self) -> None:
        self.open: list[HeldInstance] = []
        self.closed: list[str] = []
        self.warmed: list[str] = []
        self.warm_up_error: ServingError | None = None
        self.gate: Callable[[], Awaitable[None]] = _at_once
        self.close_gate: Callable[[], Awaitable[None]] = _at_once
        self.is_model_closed = False

    def uses_gpus(self) -> bool:
        return False

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        return Completion(config)

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> "HeldBackend":
        return self

    async def create_instance(self, placement: Placement) -> HeldInstance:
        if self.open:
            await self.gate()
        self.open.append(HeldInstance(self, placement))
        return self.open[-1]

    def memory(self) -> list[MemoryUsage]:
        return []

    async def aclose(self) -> None:
        self.is_model_closed = not self.open


async def _at_once() -> None:
    pass


class Bench:
    """A loaded version, and time that passes in samples."""

    def __init__(self, loaded: LoadedVersion, backend: HeldBackend, advance: Callable[[int], None]) -> None:
        assert loaded.scaling is not None
        self.loaded = loaded
        self.backend = backend
        self.scaling = loaded.scaling
        self.room = Headroom(4, 2.5)
        self.answers = 0
        self.sent = 0
        self._advance = advance

    def send(self, count: int) -> None:
        def reply(outcome: object, final: bool) -> None:
            assert isinstance(outcome, InferResponse), outcome
            self.answers += 1

        for _ in range(count):
            self.sent += 1
            self.loaded.runner.submit(InferRequest("m", {"IN": VALUE}), reply)

    async def passes(self, ns: int) -> None:
        for _ in range(ns // SAMPLE_NS):
            self._advance(SAMPLE_NS)
            self.scaling.check(lambda: self.room)
            for _ in range(10):  # what was begun goes on
                await asyncio.sleep(0)

    async def answer_all(self) -> None:
        while busy := [each for each in self.backend.open if each.batches]:
            busy[0].finish()
            await asyncio.sleep(0)


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    ahead_ns = 0

    def forward(ns: int) -> None:
        nonlocal ahead_ns
        ahead_ns += ns

    monkeypatch.setattr(instances, "now_ns", lambda: clock.now_ns() + ahead_ns)
    return forward


async def bench(
    folder: Path,
    advance: Callable[[int], None],
    text: str = TEXT,
    limits: RateLimits | None = None,
    instances_before: int = 0,
) -> Bench:
    backend = HeldBackend()
    config = normalise(parse(text), name="m", gpu_count=0, default_instance_count=1)
    backends = Backends({"held": lambda: backend}, observed=RecordedScheduler, limits=limits)
    model = ModelFolder("m", folder, folder)
    loaded = await load_version(model, 1, config, instances_before, backends=backends, cores=4)
    return Bench(loaded, backend, advance)


async def test_requests_that_wait_get_instances_and_an_idle_model_gives_them_back(
    tmp_path: Path, advance: Callable[[int], None]
) -> None:
    m = await bench(tmp_path, advance)
    m.send(5)

    await m.passes(3 * GROW_AFTER_NS + 2 * SAMPLE_NS)
    assert [(i.placement.name, i.placement.threads) for i in m.backend.open] == [("m_0", 4), ("m_1", 2), ("m_2", 2)]
    assert m.scaling.counts().changes == {"requests_waited": 2, "idle": 0, "start_failed": 0}
    assert [len(each.batches) for each in m.backend.open] == [1, 1, 1]

    await m.answer_all()
    assert m.answers == m.sent
    await m.passes(2 * SHRINK_AFTER_NS + 4 * SAMPLE_NS)
    await asyncio.sleep(0)
    assert m.scaling.count == 1
    assert m.backend.closed == ["m_2", "m_1"]
    assert m.scaling.rule.explanation(0).startswith("1 of 1 to 3 instances")

    m.send(2)
    await m.answer_all()
    assert m.answers == m.sent
    await m.loaded.retire()
    assert m.backend.is_model_closed


@pytest.mark.parametrize(("before", "names"), [(2, ["m_0", "m_1"]), (9, ["m_0", "m_1", "m_2"])])
async def test_a_version_begins_with_as_many_instances_as_the_one_before(
    tmp_path: Path, advance: Callable[[int], None], before: int, names: list[str]
) -> None:
    m = await bench(tmp_path, advance, instances_before=before)

    assert sorted(each.placement.name for each in m.backend.open) == names
    assert m.scaling.rule.explanation(0) == f"{len(names)} of 1 to 3 instances"
    m.send(4)
    assert sum(len(each.batches) for each in m.backend.open) == len(names)
    while m.answers < m.sent:
        await m.answer_all()
    await m.passes(2 * SHRINK_AFTER_NS + 4 * SAMPLE_NS)
    assert m.scaling.count == 1
    await m.loaded.retire()


async def test_a_version_is_retired_while_an_instance_is_starting(
    tmp_path: Path, advance: Callable[[int], None]
) -> None:
    m = await bench(tmp_path, advance)
    started = asyncio.Event()

    async def slowly() -> None:
        started.set()
        await asyncio.Event().wait()

    m.backend.gate = slowly
    m.send(2)
    await m.passes(GROW_AFTER_NS + 2 * SAMPLE_NS)
    assert started.is_set()

    retiring = asyncio.create_task(m.loaded.retire())
    await asyncio.sleep(0)
    while not retiring.done():
        await m.answer_all()
        await asyncio.sleep(0)
    await retiring
    assert m.answers == m.sent
    assert m.backend.is_model_closed
    assert not m.scaling.check(lambda: m.room)


async def test_a_version_is_retired_when_the_instance_that_is_being_closed_is_closed(
    tmp_path: Path, advance: Callable[[int], None]
) -> None:
    m = await bench(tmp_path, advance, instances_before=2)
    finalized = asyncio.Event()

    async def slowly() -> None:
        await finalized.wait()

    m.backend.close_gate = slowly
    await m.passes(SHRINK_AFTER_NS + 2 * SAMPLE_NS)
    assert (m.scaling.count, len(m.backend.open)) == (1, 2)
    m.backend.close_gate = _at_once

    retiring = asyncio.create_task(m.loaded.retire())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not m.backend.closed
    finalized.set()
    await retiring
    assert m.backend.closed == ["m_1", "m_0"]
    assert m.backend.is_model_closed


@pytest.mark.parametrize("error", [internal("out of memory"), RuntimeError("out of memory")])
async def test_an_instance_that_fails_to_start_costs_no_request_and_is_tried_again_later(
    tmp_path: Path, advance: Callable[[int], None], error: Exception
) -> None:
    m = await bench(tmp_path, advance)

    async def fail() -> None:
        raise error

    m.backend.gate = fail
    m.send(3)
    await m.passes(GROW_AFTER_NS + 2 * SAMPLE_NS)
    assert m.scaling.count == 1
    assert "out of memory" in m.scaling.rule.explanation(clock.now_ns())

    m.backend.gate = _at_once
    await m.passes(max(BACK_OFF_NS, GROW_AFTER_NS) + 3 * SAMPLE_NS)
    assert m.scaling.count == 2
    await m.answer_all()
    assert m.answers == m.sent
    await m.loaded.retire()


async def test_an_added_instance_is_warmed_up_and_one_that_cannot_be_is_closed(
    tmp_path: Path, advance: Callable[[int], None]
) -> None:
    text = TEXT + (
        'model_warmup { name: "s" batch_size: 1 inputs { key: "IN" '
        "value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }"
    )

    m = await bench(tmp_path, advance, text)
    m.send(3)
    m.backend.warm_up_error = internal("not warm")
    await m.passes(GROW_AFTER_NS + 2 * SAMPLE_NS)
    assert (m.scaling.count, m.backend.warmed, m.backend.closed) == (1, ["m_0", "m_1"], ["m_1"])
    assert "not warm" in m.scaling.rule.explanation(0)

    m.backend.warm_up_error = None
    await m.passes(max(BACK_OFF_NS, GROW_AFTER_NS) + 3 * SAMPLE_NS)
    assert (m.scaling.count, m.backend.warmed) == (2, ["m_0", "m_1", "m_1"])
    await m.answer_all()
    assert m.answers == m.sent
    await m.loaded.retire()


async def test_without_an_idle_core_nothing_is_added_and_the_story_says_so(
    tmp_path: Path, advance: Callable[[int], None]
) -> None:
    m = await bench(tmp_path, advance)
    m.room = Headroom(4, 0.1)
    m.send(3)

    await m.passes(5 * GROW_AFTER_NS)

    assert m.scaling.count == 1
    assert m.scaling.rule.explanation(0).endswith("requests wait, and none is added: 0.1 of 4 cores are idle")
    await m.answer_all()
    await m.loaded.retire()


@pytest.mark.parametrize(("units", "running"), [(1, 1), (2, 2)])
async def test_added_instances_take_their_resources_of_the_rate_limiter(
    tmp_path: Path, advance: Callable[[int], None], units: int, running: int
) -> None:
    text = TEXT + "instance_group { rate_limiter { resources { name: 'R' count: 1 } } }"

    m = await bench(tmp_path, advance, text, RateLimits([ResourceLimit("R", units)]))
    m.send(4)

    await m.passes(6 * GROW_AFTER_NS)

    assert sum(bool(each.batches) for each in m.backend.open) == running
    while m.answers < m.sent:
        await m.answer_all()
        await asyncio.sleep(0)
    await m.passes(4 * SHRINK_AFTER_NS)
    assert m.scaling.count == 1
    await m.loaded.retire()
