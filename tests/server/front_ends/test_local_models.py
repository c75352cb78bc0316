"""The models that a front end runs itself, over the offers of a real engine; both in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.support.in_place import FixedPlace
from tests.support.models import chain_pbtxt, identity_pbtxt, write_model

from charonia.busy_poll import ALONE_MIN, BusyPoll, SiblingProcesses
from charonia.clock import now_ns
from charonia.config.backends import BackendRecord
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.metadata import ServerMetadata
from charonia.core.request import InferRequest
from charonia.core.response import ANSWERED, InferResponse, Outcome, Reply, Ticket
from charonia.core.tensor import Tensor
from charonia.core.trace import TraceLevel, TraceTree
from charonia.server.backends.registry import installed_backends
from charonia.server.engine import ModelEngine
from charonia.server.execution.executor import BlockingExecutor
from charonia.server.execution.runner import ModelRunner
from charonia.server.front_ends import local_models
from charonia.server.front_ends.local_models import LocalModels
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.front_end_placement import Choice
from charonia.server.lifecycle.lifecycle import Lifecycle, LifecycleOptions
from charonia.server.model_options import ControlMode
from charonia.server.options import ServerOptions


def parameters(**values: str) -> str:
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}\n' for key, text in values.items()
    )


def write_identity(repository: Path, name: str = "m", choice: Choice = Choice.YES, **values: str) -> None:
    more = parameters(front_end=choice.value, **values)
    write_model(repository, name, "", config=identity_pbtxt(dims=(4,), max_batch_size=0, more=more))


def write_ensemble(repository: Path, name: str, *models: str) -> None:
    write_model(repository, name, "", config=chain_pbtxt(*models, dims=(4,), max_batch_size=0))


def request(model: str = "m", size: int = 4) -> InferRequest:
    return InferRequest(model, {"INPUT0": Tensor("INPUT0", DataType.FP32, np.arange(size, dtype="<f4"))}, id="r")


class Bench:
    """An engine, and the models of a front end."""

    def __init__(self, repository: Path) -> None:
        self.backends = Backends(installed_backends())
        self.lifecycle = Lifecycle(LifecycleOptions((repository,), ControlMode.EXPLICIT, cores=2), self.backends)
        self.engine = ModelEngine(self.lifecycle, ServerMetadata("test", "0", ()))
        self.passed_on: list[InferRequest] = []
        self.local = LocalModels(Backends(installed_backends()), self._infer)

    async def follow(self) -> None:
        """Let the front end know what is offered, and load it."""
        self.local.follow(self.engine.offers.now(), self.engine.directory().configs)
        await asyncio.gather(*self.local._loads.values())

    def infer(self, sent: InferRequest) -> list[Outcome] | None:
        """Return the outcomes of a request that the front end takes; None if it does not."""
        outcomes: list[Outcome] = []
        ticket = self.local.infer(sent, lambda outcome, final: outcomes.append(outcome))
        return None if ticket is None else outcomes

    def count(self) -> None:
        """Let the engine count what the front end has counted."""
        for number, increase in self.local.take_counts():
            self.engine.offers.count(number, increase)

    async def successes(self) -> dict[str, int]:
        return {each.name: each.success.count for each in await self.engine.model_statistics()}

    def _infer(self, sent: InferRequest, reply: Reply) -> Ticket:
        """Run a request here or in the engine, as a front end does."""
        ticket = self.local.infer(sent, reply)
        if ticket is not None:
            return ticket
        self.passed_on.append(sent)
        reply(ServingError(Code.UNAVAILABLE, "passed on"), True)
        return ANSWERED

    async def close(self) -> None:
        await self.local.aclose()
        await self.lifecycle.drain()
        await self.backends.aclose()


@asynccontextmanager
async def running(repository: Path) -> AsyncIterator[Bench]:
    bench = Bench(repository)
    await bench.lifecycle.load_at_start(["*"])
    try:
        yield bench
    finally:
        await bench.close()


def executor_of(bench: Bench, model: str = "m") -> BlockingExecutor:
    runner = bench.local._routes[model, ""].runner
    assert isinstance(runner, ModelRunner)
    (executor,) = runner._executors.values()
    assert isinstance(executor, BlockingExecutor)
    return executor


async def test_a_copy_answers_at_once_by_name_and_by_version_and_the_engine_counts_it(tmp_path: Path) -> None:
    write_identity(tmp_path)

    async with running(tmp_path) as bench:
        assert bench.infer(request()) is None
        await bench.follow()

        (outcome,) = bench.infer(request()) or [None]
        assert isinstance(outcome, InferResponse)
        assert (outcome.model_name, outcome.model_version, outcome.id) == ("m", "1", "r")
        assert outcome.outputs[0].array.tolist() == [0, 1, 2, 3]
        versioned = request()
        versioned.model_version = "1"
        assert bench.infer(versioned) is not None
        (refused,) = bench.infer(request(size=3)) or [None]
        assert isinstance(refused, ServingError)
        assert await bench.successes() == {"m": 0}
        bench.count()
        bench.count()
        (counted,) = await bench.engine.model_statistics("m")
        assert (counted.success.count, counted.fail.count, counted.execution_count) == (2, 1, 2)
        assert bench.passed_on == []


async def test_a_request_with_a_trace_and_other_versions_are_left_to_the_engine(tmp_path: Path) -> None:
    write_identity(tmp_path)

    async with running(tmp_path) as bench:
        await bench.follow()
        traced = request()
        ids = cast("Any", SimpleNamespace(trace_id=lambda: 1, span_id=lambda: 0))
        traced.trace = TraceTree(TraceLevel.TIMESTAMPS, ids, lambda tree: None).root
        unknown = request()
        unknown.model_version = "7"

        assert bench.infer(traced) is bench.infer(unknown) is bench.infer(request("other")) is None


async def test_an_automatic_model_is_offered_when_the_engine_has_measured_it(tmp_path: Path) -> None:
    write_identity(tmp_path, choice=Choice.AUTO)
    write_identity(tmp_path, "held", choice=Choice.NO)

    async with running(tmp_path) as bench:
        runner = bench.engine.find("m")
        assert isinstance(runner, ModelRunner)
        assert bench.engine.offers.now() == {}
        assert "not been measured" in bench.engine.offers.reason(runner)

        runner.begin_in_place()
        await bench.follow()

        assert set(bench.engine.offers.now()) == {("m", ""), ("m", "1")}
        assert bench.engine.offers.reason(runner) == ""
        assert bench.infer(request()) is not None
        assert bench.infer(request("held")) is None


async def test_what_is_unloaded_gets_no_further_request_and_its_last_counts_are_lost_with_it(tmp_path: Path) -> None:
    write_identity(tmp_path)
    write_identity(tmp_path, "stays")

    async with running(tmp_path) as bench:
        await bench.follow()
        bench.infer(request())
        bench.infer(request("stays"))
        number = bench.local._routes["m", ""].offer.number
        assert len(bench.local._copies) == 2

        await bench.engine.unload_model("m")
        await bench.follow()
        await asyncio.gather(*bench.local._retirements)

        assert bench.infer(request()) is None
        assert bench.infer(request("stays")) is not None
        assert number not in bench.local._copies
        assert number in dict(bench.local.take_counts())
        assert bench.local.take_counts() == []


async def test_a_model_that_is_loaded_again_is_another_copy(tmp_path: Path) -> None:
    write_identity(tmp_path)

    async with running(tmp_path) as bench:
        await bench.follow()
        before = bench.local._routes["m", ""]
        write_identity(tmp_path, response_parameters="true")
        await bench.engine.load_model("m")
        await bench.follow()

        assert bench.local._routes["m", ""] is not before
        (outcome,) = bench.infer(request()) or [None]
        assert isinstance(outcome, InferResponse)
        assert outcome.parameters["param1"] == 42
        bench.count()
        assert await bench.successes() == {"m": 1}


async def test_files_that_have_changed_since_the_engine_read_them_are_not_used(tmp_path: Path) -> None:
    write_identity(tmp_path)
    (tmp_path / "m" / "1" / "weights").write_text("old")

    async with running(tmp_path) as bench:
        (tmp_path / "m" / "1" / "weights").write_text("newer")
        await bench.follow()
        assert bench.infer(request()) is None

        await bench.engine.load_model("m")
        await bench.follow()
        assert bench.infer(request()) is not None


async def test_a_copy_that_cannot_be_loaded_leaves_its_requests_to_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_identity(tmp_path)

    async with running(tmp_path) as bench:
        bench.local._backends._factories = {}
        await bench.follow()
        await bench.follow()

        assert bench.infer(request()) is None
        assert caplog.text.count("model 'm' version 1 runs in the engine only: unable to find backend") == 1


async def test_an_offer_that_is_withdrawn_while_it_is_loaded_is_not_taken_in(tmp_path: Path) -> None:
    write_identity(tmp_path)

    async with running(tmp_path) as bench:
        offers, configs = bench.engine.offers.now(), bench.engine.directory().configs
        bench.local.follow(offers, configs)
        loads = list(bench.local._loads.values())
        bench.local.follow({}, {})
        await asyncio.gather(*loads)

        assert bench.local._copies == {}
        assert bench.infer(request()) is None


async def test_a_number_that_the_next_engine_gives_to_another_model_is_loaded_for_that_one(tmp_path: Path) -> None:
    write_identity(tmp_path, "before")
    write_identity(tmp_path, "after")

    async with running(tmp_path) as bench:
        offers, configs = bench.engine.offers.now(), bench.engine.directory().configs
        before, after = offers["before", ""], offers["after", ""]
        bench.local.follow({("before", ""): before}, configs)
        loads = list(bench.local._loads.values())
        bench.local.reset()
        bench.local.follow({("after", ""): replace(after, number=before.number)}, configs)
        await asyncio.gather(*loads)
        await asyncio.gather(*bench.local._loads.values())

        assert bench.infer(request("after")) is not None
        assert bench.infer(request("before")) is None


async def test_a_copy_that_has_become_slow_rests_and_then_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_identity(tmp_path)
    now = 10**12
    monkeypatch.setattr(local_models, "now_ns", lambda: now)

    async with running(tmp_path) as bench:
        await bench.follow()
        executor_of(bench).rule.in_place = False
        assert bench.infer(request()) is None
        now += local_models.REST_NS - 1
        assert bench.infer(request()) is None
        now += 1
        assert bench.infer(request()) is not None
        assert executor_of(bench).rule.in_place


async def test_a_process_polls_for_a_lone_caller_of_a_copy_only_while_no_other_process_has_requests(
    tmp_path: Path,
) -> None:
    write_identity(tmp_path / "models")
    processes = [SiblingProcesses(tmp_path, number, 3, cores=2) for number in range(3)]

    async with running(tmp_path / "models") as bench:
        poll = BusyPoll(asyncio.get_running_loop(), 60 * 10**9, processes[1])
        bench.local._backends.busy_poll = poll
        await bench.follow()
        begin_ns = now_ns()
        for _ in range(ALONE_MIN + 1):
            assert bench.infer(request()) is not None
            await asyncio.sleep(0)
        assert poll.worker_ns
        assert not processes[0].has_spare_core(begin_ns)
        assert not processes[2].has_spare_core(begin_ns)

        processes[2].record_request(now_ns() + 60 * 10**9)  # later than any pause of the machine

        assert not poll.worker_ns


async def test_a_process_does_not_poll_for_many_callers_of_a_copy(tmp_path: Path) -> None:
    write_identity(tmp_path)

    async with running(tmp_path) as bench:
        poll = BusyPoll(asyncio.get_running_loop(), 60 * 10**9)
        bench.local._backends.busy_poll = poll
        await bench.follow()
        for _ in range(ALONE_MIN + 1):
            for _ in range(2):
                assert bench.infer(request()) is not None
            await asyncio.sleep(0)

        assert not poll.worker_ns


async def test_an_ensemble_runs_here_when_all_of_its_steps_do(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_identity(tmp_path, name)
    write_identity(tmp_path, "far", choice=Choice.NO)
    write_ensemble(tmp_path, "inner", "a", "b")
    write_ensemble(tmp_path, "outer", "inner", "a")
    write_ensemble(tmp_path, "mixed", "a", "far")

    async with running(tmp_path) as bench:
        await bench.follow()
        assert bench.infer(request("mixed")) is None
        reason = bench.engine.offers.reason(bench.engine.find("mixed"))
        assert reason == "its step 'far' stays there: parameter front_end is 'no'"

        (outcome,) = bench.infer(request("outer")) or [None]
        assert isinstance(outcome, InferResponse)
        assert outcome.outputs[0].array.tolist() == [0, 1, 2, 3]
        bench.count()
        assert await bench.successes() == {"a": 2, "b": 1, "far": 0, "inner": 1, "mixed": 0, "outer": 1}

        executor_of(bench, "b").rule = FixedPlace(in_place=False)
        (refused,) = bench.infer(request("inner")) or [None]
        assert isinstance(refused, ServingError)
        assert "step 'b'" in refused.message
        assert [sent.model_name for sent in bench.passed_on] == ["b"]


async def test_an_ensemble_follows_a_step_that_is_loaded_again(tmp_path: Path) -> None:
    write_identity(tmp_path, "a")
    write_ensemble(tmp_path, "e", "a", "a")

    async with running(tmp_path) as bench:
        await bench.follow()
        bench.infer(request("e"))
        write_identity(tmp_path, "a", response_parameters="false")
        await bench.engine.load_model("a")
        await bench.follow()
        assert bench.infer(request("e")) is not None
        bench.count()
        assert await bench.successes() == {"a": 2, "e": 2}


async def test_a_front_end_that_leaves_waits_for_its_requests_up_to_a_limit(tmp_path: Path) -> None:
    write_identity(tmp_path, execute_delay_ms="20")

    async with running(tmp_path) as bench:
        await bench.follow()
        executor_of(bench).rule = FixedPlace(in_place=False)
        runner = bench.local._routes["m", ""].runner
        answered: list[Outcome] = []
        runner.submit(request(), lambda outcome, final: answered.append(outcome))
        assert await bench.local.drained(30)
        assert isinstance(answered[0], InferResponse)
        assert await bench.local.drained(0)

        runner.submit(request(), lambda outcome, final: answered.append(outcome))
        assert not await bench.local.drained(0)
        assert isinstance(answered[1], ServingError)
        assert answered[1].code is Code.UNAVAILABLE


async def test_the_counts_for_an_engine_that_is_gone_are_forgotten(tmp_path: Path) -> None:
    write_identity(tmp_path)

    async with running(tmp_path) as bench:
        await bench.follow()
        bench.infer(request())

        bench.local.reset()

        assert bench.local.take_counts() == []
        assert bench.infer(request()) is None


def test_the_package_of_a_backend_is_part_of_the_software(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mirrored").mkdir()
    (tmp_path / "mirrored" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    record = BackendRecord(name="mirror", factory="mirrored.backend:Mirror", in_front_ends=True)
    monkeypatch.setattr(local_models, "records", lambda: (record,))

    assert str(tmp_path / "mirrored") in local_models.software_of(ServerOptions())
