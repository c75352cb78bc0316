"""Which example a model takes, found by asking it."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, ModelInput
from charonia.config.parameters import EXAMPLE_REFUSED, TRY_EXAMPLE
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.request import InferRequest
from charonia.server.backends.api import Execution, Outputs, Placement
from charonia.server.execution.executor import BlockingExecutor
from charonia.server.lifecycle import loader
from charonia.server.lifecycle.loader import with_example
from charonia.wire.example_inputs import example_inputs

Shape = tuple[int, ...]


class Instance:
    """An instance that refuses some shapes of its input, and notes all."""

    def __init__(self, takes: Callable[[Shape], bool]) -> None:
        self.asked: list[Shape] = []
        self._takes = takes

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        shape = requests[0].inputs["x"].shape
        self.asked.append(shape)
        if not self._takes(shape):
            raise invalid(f"got {list(shape)}")
        return Execution([Outputs([])], 0, 0)

    def close(self) -> None:
        pass


def model(*dims: int, batch: int = 4, **parameters: str) -> ModelConfig:
    given = ModelInput("x", DataType.FP32, dims=dims)
    return ModelConfig("m", max_batch_size=batch, input=(given,), parameters=parameters or {TRY_EXAMPLE: "true"})


def tried(config: ModelConfig, instance: Instance) -> ModelConfig:
    async def scenario() -> ModelConfig:
        placement = Placement("m_0_0", InstanceKind.KIND_CPU)
        executor = BlockingExecutor(instance, placement, asyncio.get_running_loop())
        try:
            return await with_example(config, "1", executor)
        finally:
            await executor.aclose()

    return asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_model_that_takes_the_usual_sizes_is_asked_once_and_keeps_its_configuration() -> None:
    instance = Instance(lambda shape: True)

    found = tried(model(3, -1, -1), instance)

    assert found == ModelConfig("m", max_batch_size=4, input=found.input)
    assert instance.asked == [(1, 3, 224, 224)]


@pytest.mark.parametrize("batch", [0, 4])
def test_a_size_that_the_model_takes_is_that_of_all_further_examples(batch: int) -> None:
    instance = Instance(lambda shape: shape[-2] == 48)

    found = tried(model(*([] if batch else [-1]), 3, -1, -1, batch=batch), instance)

    assert [shape[-1] for shape in instance.asked] == [224, 32, 48]
    assert example_inputs(found)["x"].shape == (1, 3, 48, 48)
    assert found.model_warmup[0].batch_size == 0
    assert not found.parameters


def test_a_model_that_refuses_every_size_leaves_what_it_said_first() -> None:
    instance = Instance(lambda shape: False)

    found = tried(model(-1), instance)

    assert found.parameters == {EXAMPLE_REFUSED: "got [1, 512]"}
    assert [shape[-1] for shape in instance.asked] == [512, *loader.TRIAL_SIZES]


def test_no_further_size_is_tried_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "TRIAL_SECONDS_MAX", -1.0)
    instance = Instance(lambda shape: False)

    assert tried(model(-1), instance).parameters == {EXAMPLE_REFUSED: "got [1, 512]"}
    assert instance.asked == [(1, 512)]


def test_examples_that_are_too_large_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "TRIAL_ELEMENTS_MAX", 64)
    instance = Instance(lambda shape: False)

    tried(model(-1), instance)

    assert instance.asked == [(1, 32), (1, 48), (1, 64)]


@pytest.mark.parametrize("config", [model(3, 8), model(3, -1, other="1")], ids=["fixed", "not asked for"])
def test_other_models_are_not_run(config: ModelConfig) -> None:
    instance = Instance(lambda shape: False)

    assert TRY_EXAMPLE not in tried(config, instance).parameters
    assert instance.asked == []
