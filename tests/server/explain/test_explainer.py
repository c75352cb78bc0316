"""Marks of loaded versions and their explanations; setups from configurations."""

import asyncio
import contextlib
from typing import Any, cast

import pytest

from charonia.clock import now_ns
from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError, not_found
from charonia.server.execution.version_runner import Runner
from charonia.server.explain.explainer import Explainer, ProcessHistory, setup_of
from charonia.server.explain.rules import REQUESTS_MIN, ModelSetup
from charonia.server.lifecycle.loader import LoadedVersion, placements
from charonia.server.machine.gauges import CpuTimes
from charonia.server.metrics.model_metrics import ModelMetrics
from charonia.server.metrics.processes import ProcessRecord
from charonia.server.rate_limiter.limiter import Claim, RateLimits
from charonia.server.scheduling.api import BatchPolicy, CloseReason, SlotIdle, Submit
from charonia.server.scheduling.dynamic import DynamicBatcher

MODEL = """\
name: "m" max_batch_size: 8
instance_group [ { name: "m" count: 2 kind: KIND_CPU } ]
dynamic_batching { max_queue_delay_microseconds: 100 preferred_batch_size: [ 4 ] }
"""
LIMITED = """\
name: "NAME"
instance_group [ {
  name: "NAME" count: 1 kind: KIND_CPU rate_limiter { resources { name: "memory" count: 1 } }
} ]
"""
ENSEMBLE = """\
name: "e" platform: "ensemble"
ensemble_scheduling { step [ { model_name: "m" }, { model_name: "gone" } ] }
"""


class OneRunner:
    def __init__(self, text: str, pending: int | None = 0) -> None:
        self.config = parse(text)
        self.version = "3"
        self.metrics = ModelMetrics(self.config.name, self.version)
        self.pending = pending

    def work(self, seconds: float) -> None:
        """Note a batch that took so long."""
        end = int(seconds * 1e9)
        self.metrics.batch_done(
            arrivals_ns=[0], inferences=1, batch_size=1, reason=CloseReason.DELAY, marks_ns=(0, 0, end, end), wall_ms=0
        )


def explainer_of(*runners: OneRunner, claim: Claim | None = None) -> Explainer:
    by_name = {runner.config.name: runner for runner in runners}

    def find(name: str, version: str) -> Runner:
        if name not in by_name:
            raise not_found(f"no model '{name}'")
        return cast("Runner", by_name[name])

    def loaded() -> list[LoadedVersion]:
        return [LoadedVersion(cast("Runner", r), None, claim=claim if r is runners[0] else None) for r in runners]

    return Explainer(loaded, find, cores=4)


def test_a_configuration_says_what_rules_need() -> None:
    assert setup_of(parse(MODEL), "3", 4) == ModelSetup(
        "m", "3", instances=2, cores=4, batch_max=8, batches=True, delay_us=100, preferred=(4,)
    )
    assert setup_of(parse(ENSEMBLE), "1", 4) == ModelSetup("e", "1", instances=0, cores=4, steps=("m", "gone"))


@pytest.mark.parametrize(("value", "threads"), [("2", 2), ("many", 0)])
def test_threads_are_those_of_the_model_s_parameter(value: str, threads: int) -> None:
    text = MODEL + f'parameters {{ key: "intra_op_thread_count" value {{ string_value: "{value}" }} }}'

    assert setup_of(parse(text), "1", 4).threads == threads


def test_a_model_is_explained_by_what_came_between_the_marks() -> None:
    runner = OneRunner(MODEL, pending=5)
    explainer = explainer_of(runner)

    assert [finding.kind for finding in explainer.explain("m").findings] == ["starting"]

    explainer.mark()
    runner.work(0.5)
    explainer.mark()
    found = explainer.explain("m")

    assert found.facts.activity.batch_count == 1
    assert found.facts.activity.queued == (5,)
    assert 0 <= found.facts.activity.idle_cores <= 4


def test_cores_are_idle_or_ours_or_taken_by_others() -> None:
    before, after = CpuTimes(idle_s=10, busy_s=100, own_s=20), CpuTimes(idle_s=11, busy_s=107, own_s=22)

    assert after.since(before, 2.0) == (0.5, 2.5)
    assert after.since(before, 0.0) == (0.0, 0.0)


def test_a_worker_that_ended_is_no_negative_time_of_ours() -> None:
    before, after = CpuTimes(idle_s=0, busy_s=100, own_s=50), CpuTimes(idle_s=0, busy_s=102, own_s=3)

    assert after.since(before, 1.0) == (0.0, 2.0)


def test_an_ensemble_is_explained_with_those_of_its_steps_that_are_there() -> None:
    model, ensemble = OneRunner(MODEL), OneRunner(ENSEMBLE, pending=None)
    explainer = explainer_of(model, ensemble)
    explainer.mark()
    model.work(100)
    for _ in range(REQUESTS_MIN):
        ensemble.metrics.composed(duration_ns=10, inferences=1, queue_ns=1, compute_ns=9, end_ns=10, wall_ms=0)
    explainer.mark()

    found = explainer.explain("e")

    assert [step.facts.setup.model for step in found.steps] == ["m"]
    assert found.facts.busiest == ("m", 1.0)
    assert [finding.kind for finding in found.findings] == ["step"]


def test_what_the_rate_limiter_holds_back_is_named_for_the_model_and_for_an_ensemble_of_it() -> None:
    limits = RateLimits()
    claims = []
    for name in ("big", "m"):  # the first one has the resource
        config = parse(LIMITED.replace("NAME", name))
        claim = limits.claim(config, "3", placements(config, 4))
        assert claim is not None
        scheduler = claim.scheduler(DynamicBatcher(BatchPolicy()))
        scheduler.handle(SlotIdle(0), 0)
        scheduler.handle(Submit(1), 0)
        claims.append(claim)
    model, ensemble = OneRunner(MODEL, pending=5), OneRunner(ENSEMBLE, pending=None)
    explainer = explainer_of(model, ensemble, claim=claims[1])
    explainer.mark()
    model.work(0.1)
    ensemble.metrics.composed(duration_ns=10, inferences=1, queue_ns=1, compute_ns=9, end_ns=10, wall_ms=0)
    explainer.mark()

    (found, *_) = explainer.explain("m").findings
    (of_ensemble,) = explainer.explain("e").findings

    assert found.kind == "resources"
    assert "waited for memory, which model 'big' had" in found.says
    assert of_ensemble.kind == "step"
    assert "'m'" in of_ensemble.says


def test_who_is_not_there_is_not_explained() -> None:
    with pytest.raises(ServingError, match="no model 'x'"):
        explainer_of().explain("x")


def test_the_servers_processes_are_part_of_it() -> None:
    runner = OneRunner(MODEL)
    records = (ProcessRecord("engine", 7, now_ns(), {"SIGKILL": 1, "hung": 2}, "hung"), ProcessRecord("front_end_0"))
    explainer = Explainer(list, lambda name, version: cast("Runner", runner), cores=1, processes=lambda: records)

    engine, front_end = explainer.explain("m").processes

    assert (engine.name, engine.restarts, engine.last_exit) == ("engine", 3, "hung")
    assert engine.uptime_s > 0
    assert front_end == ProcessHistory("front_end_0", 0.0, 0, "")


def test_a_version_that_is_gone_leaves_nothing_behind() -> None:
    runners = [OneRunner(MODEL)]
    explainer = Explainer(
        lambda: [LoadedVersion(cast("Runner", runner), None) for runner in runners], cast("Any", None), cores=1
    )
    explainer.mark()
    assert len(explainer._histories) == 1

    runners.clear()
    explainer.mark()

    assert len(explainer._histories) == 0


async def test_marks_are_made_until_the_end() -> None:
    explainer = explainer_of(runner := OneRunner(MODEL))

    task = asyncio.create_task(explainer.run())
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task

    assert runner.metrics in explainer._histories
    assert len(explainer._histories) == 1
