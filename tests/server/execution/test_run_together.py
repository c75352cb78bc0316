"""Requests that came together are answered and counted as if each had been submitted alone."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.in_place import FixedPlace

from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.response import ANSWERED, InferResponse, Outcome
from charonia.core.statistics import ModelStatistics
from charonia.core.tensor import Tensor
from charonia.server.backends.api import Execution, Outputs, Placement, Result
from charonia.server.execution import runner as runner_module
from charonia.server.execution.executor import BlockingExecutor
from charonia.server.execution.runner import ModelRunner
from charonia.server.scheduling.schedulers import make_scheduler

FINE, REFUSED, BROKEN = range(3)
"""What the model makes of a request: its first element."""


class Model:
    """Doubles its input, in two outputs; refuses a request, or fails, where the request says so."""

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        return Execution([self._result(request.inputs["IN"].array) for request in requests], 1, 2)

    def _result(self, array: np.ndarray) -> Result:
        if array.flat[0] == BROKEN:
            raise RuntimeError("a fault of the model")
        if array.flat[0] == REFUSED:
            return internal("not this one")
        return Outputs([Tensor(name, DataType.FP32, 2 * array) for name in ("OUT", "OTHER")], {"key": 1})

    def close(self) -> None:
        """Nothing to close."""


def request(kind: int, number: int, *, outputs: tuple[str, ...] = (), elements: int = 2) -> InferRequest:
    inputs = {"IN": Tensor("IN", DataType.FP32, np.array([[kind] * elements], "<f4"))}
    return InferRequest("m", inputs, id=str(number), outputs=tuple(map(RequestedOutput, outputs)))


def run(scenario: Callable[[ModelRunner], Coroutine[object, object, None]], *, batches: bool = False) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        config = ModelConfig(
            name="m",
            max_batch_size=4,
            input=(ModelInput("IN", DataType.FP32, dims=(2,)),),
            output=tuple(ModelOutput(name, DataType.FP32, (2,)) for name in ("OUT", "OTHER")),
            dynamic_batching=DynamicBatching() if batches else None,
        )
        executor = BlockingExecutor(Model(), Placement("m_0", InstanceKind.KIND_CPU), loop)
        executor.rule = FixedPlace(in_place=True)
        made = ModelRunner(config, "1", scheduler=make_scheduler(config), executors=[executor], labels={}, loop=loop)
        await scenario(made)
        await made.drain()
        await made.aclose()

    asyncio.run(main())


def told(outcome: Outcome) -> object:
    """Return what an outcome says, without times."""
    if not isinstance(outcome, InferResponse):
        return repr(outcome)
    run = outcome.execution
    assert run is not None
    tensors = [(tensor.name, tensor.array.tolist()) for tensor in outcome.outputs]
    return outcome.model_version, outcome.id, tensors, outcome.parameters, run.instance, run.batch_size


def counts(statistics: ModelStatistics) -> object:
    return (
        *(statistics.inference_count, statistics.execution_count),
        *(statistics.success.count, statistics.fail.count, statistics.queue.count),
        {size: batch.compute_infer.count for size, batch in statistics.batches.items()},
    )


@given(st.lists(st.sampled_from([FINE, REFUSED, BROKEN]), max_size=6, min_size=1), st.booleans())
def test_outcomes_and_counters_are_those_of_requests_that_come_alone(kinds: list[int], names_outputs: bool) -> None:
    async def scenario(together: ModelRunner) -> None:
        outputs = ("OTHER",) if names_outputs else ()
        asked = [request(kind, number, outputs=outputs) for number, kind in enumerate(kinds)]
        found: list[object] = []
        while len(found) < len(asked):  # a busy machine takes more time than they have
            found += map(told, together.run_together(asked[len(found) :]))
        counted = counts(together.metrics.statistics)

        async def compare(alone: ModelRunner) -> None:
            taken: list[Outcome] = []
            for each in asked:
                alone.submit(each, lambda outcome, final: taken.append(outcome))
            assert found == list(map(told, taken))
            assert counted == counts(alone.metrics.statistics)

        comparing.append(compare)

    comparing: list[Callable[[ModelRunner], Coroutine[object, object, None]]] = []
    run(scenario)
    run(comparing[0])


def test_requests_that_are_refused_or_may_batch_are_to_be_submitted() -> None:
    async def refused(runner: ModelRunner) -> None:
        assert runner.run_together([request(FINE, 1, elements=3)] * 2) == []
        assert runner.metrics.statistics.fail.count == 0  # `submit` counts them

    async def batches(runner: ModelRunner) -> None:
        assert runner.run_together([request(FINE, 1)] * 2) == []

    run(refused)
    run(batches, batches=True)


def test_the_first_are_answered_when_they_have_taken_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "TOGETHER_NS_MAX", 0)

    async def scenario(runner: ModelRunner) -> None:
        (outcome,) = runner.run_together([request(FINE, 1), request(FINE, 2)])
        assert not isinstance(outcome, ServingError)
        assert outcome.id == "1"

    run(scenario)


def collecting(runner: ModelRunner, taken: list[Outcome]) -> None:
    """Submit requests until the runner collects those of a turn."""
    for number in range(runner_module.COLLECT_EVERY):
        assert runner.submit(request(FINE, number), lambda outcome, final: taken.append(outcome)) is ANSWERED
    taken.clear()


@pytest.mark.parametrize("end", ["turn", "drain", "thread", "abandon"])
def test_requests_of_one_turn_of_the_loop_are_answered_together_in_their_order(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "TOGETHER_NS_MAX", 60 * 10**9)  # one turn runs all, on a busy machine, too

    async def scenario(runner: ModelRunner) -> None:
        taken: list[Outcome] = []
        collecting(runner, taken)
        kinds = [FINE, REFUSED, FINE, BROKEN]
        asked = [request(kind, number) for number, kind in enumerate(kinds)]
        tickets = [runner.submit(each, lambda outcome, final: taken.append(outcome)) for each in asked]
        runner.submit(request(FINE, 9, elements=3), lambda outcome, final: taken.append(outcome))
        assert "unexpected shape" in str(taken.pop())
        tickets[2].cancel()
        assert "cancelled" in str(taken.pop())
        assert taken == []
        if end == "thread":
            executor = runner.instances[0]
            assert isinstance(executor, BlockingExecutor)
            executor.rule.in_place = False
        if end == "abandon":
            runner.abandon(internal("too late"))
        if end in ("drain", "thread"):
            await runner.drain()
        await asyncio.sleep(0)

        if end == "abandon":
            assert [str(each) for each in taken] == ["too late"] * 3
        else:
            assert [isinstance(each, InferResponse) for each in taken] == [True, False, False]
            assert "not this one" in str(taken[1])
        assert runner.in_flight == 0
        assert runner.metrics.statistics.success.count == runner_module.COLLECT_EVERY + (end != "abandon")

    run(scenario)


def test_a_lone_caller_does_not_wait_for_the_end_of_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "TOGETHER_NS_MAX", 60 * 10**9)  # a turn runs both, on a busy machine, too

    async def scenario(runner: ModelRunner) -> None:
        taken: list[Outcome] = []
        collecting(runner, taken)
        runner.submit(request(FINE, 0), lambda outcome, final: taken.append(outcome))
        assert taken == []
        await asyncio.sleep(0)
        assert len(taken) == 1
        collecting(runner, taken)
        for _ in range(2):
            runner.submit(request(FINE, 0), lambda outcome, final: taken.append(outcome))
        await asyncio.sleep(0)
        assert len(taken) == 2
        for lone in range(runner_module.LONE_TURNS):
            taken.clear()
            runner.submit(request(FINE, lone), lambda outcome, final: taken.append(outcome))
            assert taken == []
            await asyncio.sleep(0)
            assert len(taken) == 1

        assert runner.submit(request(FINE, 0), lambda outcome, final: taken.append(outcome)) is ANSWERED

    run(scenario)
