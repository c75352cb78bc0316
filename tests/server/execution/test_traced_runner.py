"""Traces in the engine: what a runner notes of the requests that have one, and that it is all that it notes."""

import asyncio

import numpy as np
import pytest
from tests.support.recorded import RecordedScheduler
from tests.support.scripted import ScriptedInstance, TraceIds

from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import internal
from charonia.core.request import InferRequest
from charonia.core.response import Outcome
from charonia.core.tensor import Tensor
from charonia.core.trace import TraceLevel, TraceTree, ordered
from charonia.server.backends.api import Placement
from charonia.server.execution.executor import AsyncExecutor
from charonia.server.execution.in_flight import RunningBatch
from charonia.server.execution.runner import ModelRunner
from charonia.server.scheduling.schedulers import make_scheduler

CONFIG = ModelConfig(
    name="m",
    max_batch_size=4,
    input=(ModelInput("IN", DataType.FP32, dims=(1,)),),
    output=(ModelOutput("OUT", DataType.FP32, (1,)),),
    dynamic_batching=DynamicBatching(),
)
EXECUTED = [
    *("REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"),
    *("INFER_RESPONSE_COMPLETE", "REQUEST_END"),
]
UNEXECUTED = ["REQUEST_START", "QUEUE_START", "INFER_RESPONSE_COMPLETE", "REQUEST_END"]


def request(done: list[TraceTree] | None = None, level: TraceLevel = TraceLevel.TIMESTAMPS) -> InferRequest:
    made = InferRequest("m", {"IN": Tensor("IN", DataType.FP32, np.zeros((1, 1), np.float32))}, id="r")
    if done is not None:
        made.trace = TraceTree(level, TraceIds(), done.append).root
    return made


def runner(instance: ScriptedInstance, config: ModelConfig = CONFIG) -> ModelRunner:
    return ModelRunner(
        config,
        "7",
        scheduler=RecordedScheduler(make_scheduler(config)),
        executors=[AsyncExecutor(instance, Placement("m_0", InstanceKind.KIND_CPU))],
        labels={},
        loop=asyncio.get_running_loop(),
    )


def answered(made: InferRequest) -> object:
    """A reply that lets go of the trace, as a front end does."""

    def reply(outcome: Outcome, final: bool) -> None:
        if final and made.trace is not None:
            made.trace.tree.release()

    return reply


def submit(to: ModelRunner, made: InferRequest) -> object:
    return to.submit(made, answered(made))  # type: ignore[arg-type]


def names(tree: TraceTree) -> list[str]:
    return [name for name, _ in ordered(tree.root.events)]


async def test_a_request_that_ran_has_all_its_times_and_is_over_with_its_batch() -> None:
    instance, done = ScriptedInstance(), list[TraceTree]()
    made = runner(instance)
    submit(made, request(done))
    instance.finish()

    (tree,) = done
    assert names(tree) == EXECUTED
    assert (tree.root.model_name, tree.root.model_version, tree.root.request_id) == ("m", "7", "r")
    times = [at_ns for _, at_ns in ordered(tree.root.events)]
    assert times == sorted(times)


async def test_only_the_requests_that_have_a_trace_are_noted() -> None:
    instance, done = ScriptedInstance(), list[TraceTree]()
    made = runner(instance)
    submit(made, request())
    for each in (request(), request(done), request()):
        submit(made, each)
    instance.finish()
    await asyncio.sleep(0)
    assert len(instance.batches[0][0]) == 3
    instance.finish()

    assert [names(tree) for tree in done] == [EXECUTED]
    await asyncio.sleep(0)
    submit(made, request())
    assert type(instance.batches[0][1]) is RunningBatch


@pytest.mark.parametrize("runs", [False, True])
async def test_a_request_that_is_given_up_is_over(runs: bool) -> None:
    instance, done = ScriptedInstance(), list[TraceTree]()
    made = runner(instance)
    if not runs:
        submit(made, request())
    ticket = made.submit((given_up := request(done)), answered(given_up))  # type: ignore[arg-type]
    ticket.cancel()
    assert done == [] or not runs
    instance.finish()

    (tree,) = done
    assert names(tree) == (EXECUTED if runs else UNEXECUTED)


async def test_a_batch_that_fails_is_noted_as_one_that_does_not() -> None:
    instance, done = ScriptedInstance(), list[TraceTree]()
    made = runner(instance)
    submit(made, request(done))
    instance.finish(error=internal("broken"))

    assert [names(tree) for tree in done] == [EXECUTED]


async def test_a_request_that_is_refused_is_noted() -> None:
    done: list[TraceTree] = []
    wrong = request(done)
    wrong.inputs = {}
    submit(runner(ScriptedInstance()), wrong)

    assert [names(tree) for tree in done] == [UNEXECUTED]


async def test_tensors_are_those_that_came_and_those_that_left() -> None:
    instance, done = ScriptedInstance(), list[TraceTree]()
    submit(runner(instance), request(done, TraceLevel.TENSORS))
    instance.finish()

    (tree,) = done
    shown = [(activity, tensor.name) for activity, tensor in tree.root.tensors]
    assert shown == [("TENSOR_QUEUE_INPUT", "IN"), ("TENSOR_BACKEND_OUTPUT", "OUT")]


async def test_a_front_end_that_fails_does_not_keep_a_trace() -> None:
    instance, done = ScriptedInstance(), list[TraceTree]()
    made, broken = runner(instance), request(done)

    def reply(outcome: Outcome, final: bool) -> None:
        assert broken.trace is not None
        broken.trace.tree.release()
        raise RuntimeError("the front end is broken")

    made.submit(broken, reply)
    instance.finish()

    assert len(done) == 1
    assert made.in_flight == 0
