import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, ModelInput, ModelOutput, Reshape
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.core.trace import TraceLevel, TraceTree
from charonia.server.backends.api import BackendSettings, BlockingInstance, ModelFiles, Outputs, Placement
from charonia.server.backends.identity import IdentityBackend
from charonia.testing.backend_suite import BackendCase, BackendSuite

NO_FILES = ModelFiles(Path("m"), 1, Path("m/1"))
CPU = Placement("m_0", InstanceKind.KIND_CPU)

CONFIG = ModelConfig(
    name="m",
    backend="identity",
    max_batch_size=8,
    input=(ModelInput("INPUT0", DataType.FP32, dims=(4,)), ModelInput("INPUT_B", DataType.BYTES, dims=(-1,))),
    output=(ModelOutput("OUTPUT0", DataType.FP32, (4,)), ModelOutput("OUTPUT_B", DataType.BYTES, (-1,))),
)


def request(seed: int, size: int) -> InferRequest:
    numbers = np.random.default_rng(seed).random((size, 4), np.float32)
    texts = np.array([[b"\xff%d" % seed, b""]] * size, object)
    return InferRequest(
        "m", {"INPUT0": Tensor("INPUT0", DataType.FP32, numbers), "INPUT_B": Tensor("INPUT_B", DataType.BYTES, texts)}
    )


def instances(config: ModelConfig, count: int = 1) -> list[BlockingInstance]:
    async def make() -> list[BlockingInstance]:
        model = await IdentityBackend().load(NO_FILES, config, BackendSettings())
        return [await model.create_instance(CPU) for _ in range(count)]

    return asyncio.run(make())


class TestIdentity(BackendSuite):
    @pytest.fixture
    def backend_case(self) -> BackendCase:
        return BackendCase(IdentityBackend, NO_FILES, CONFIG, request, needs_files=False)


def test_an_output_is_the_very_array_that_came_in() -> None:
    [instance] = instances(CONFIG)
    asked = request(1, 2)

    [result] = instance.execute([asked]).results

    assert isinstance(result, Outputs)
    assert [t.name for t in result.tensors] == ["OUTPUT0", "OUTPUT_B"]
    assert result.tensors[0].array is asked.inputs["INPUT0"].array
    assert not result.parameters


def test_an_input_that_was_left_out_has_no_output() -> None:
    [instance] = instances(CONFIG)
    asked = request(1, 1)
    del asked.inputs["INPUT_B"]

    [result] = instance.execute([asked]).results

    assert isinstance(result, Outputs)
    assert [t.name for t in result.tensors] == ["OUTPUT0"]


def test_a_batch_takes_as_long_as_the_configuration_says() -> None:
    [instance] = instances(replace(CONFIG, parameters={"execute_delay_ms": "20"}))
    start = time.monotonic_ns()

    execution = instance.execute([request(1, 1)])

    assert execution.output_start_ns - start >= 20_000_000


def test_the_delay_of_an_instance_grows_with_its_number() -> None:
    parameters = {"execute_delay_ms": "10", "instance_wise_delay_multiplier": "2"}
    made = instances(replace(CONFIG, parameters=parameters), 2)
    took = []
    for instance in made:
        start = time.monotonic_ns()
        instance.execute([request(1, 1)])
        took.append(time.monotonic_ns() - start)

    assert took[0] >= 20_000_000
    assert took[1] >= 40_000_000


def test_an_instance_takes_its_time_to_be_made() -> None:
    start = time.monotonic()

    instances(replace(CONFIG, parameters={"creation_delay_sec": "0.05"}))

    assert time.monotonic() - start >= 0.05


def test_response_parameters_come_in_every_type_when_asked_for() -> None:
    [instance] = instances(replace(CONFIG, parameters={"response_parameters": "true"}))

    [result] = instance.execute([request(1, 1)]).results

    assert isinstance(result, Outputs)
    assert {k: type(v) for k, v in (result.parameters or {}).items()} == {
        "param0": str,
        "param1": int,
        "param2": bool,
        "param3": float,
    }


def test_activities_are_added_to_a_trace_when_asked_for() -> None:
    [instance] = instances(replace(CONFIG, parameters={"enable_custom_tracing": "true"}))
    traced, other = request(1, 1), request(2, 1)
    ids = SimpleNamespace(trace_id=lambda: 1, span_id=lambda: 0)
    traced.trace = TraceTree(TraceLevel.TIMESTAMPS, ids, lambda tree: None).root

    instance.execute([traced, other])

    names = [name for name, _ in traced.trace.events]
    assert names == ["CUSTOM_ACTIVITY_START", "CUSTOM_SINGLE_ACTIVITY", "CUSTOM_ACTIVITY_END"]


@pytest.mark.parametrize(
    ("given", "wanted", "shape"),
    [
        (
            ModelInput("INPUT0", DataType.FP32, dims=(4,), reshape=Reshape((2, 2))),
            ModelOutput("OUTPUT0", DataType.FP32, (2, 2)),
            (2, 2),
        ),
        (
            ModelInput("INPUT0", DataType.FP32, dims=(4,)),
            ModelOutput("OUTPUT0", DataType.FP32, (1, 4), reshape=Reshape((4,))),
            (1, 4),
        ),
        (
            ModelInput("INPUT0", DataType.FP32, dims=(-1,), reshape=Reshape((-1, 1))),
            ModelOutput("OUTPUT0", DataType.FP32, (1, -1), reshape=Reshape((-1, 1))),
            (1, 4),
        ),
        (
            ModelInput("INPUT0", DataType.FP32, dims=(4,), reshape=Reshape((2, 2))),
            ModelOutput("OUTPUT0", DataType.FP32, (4,), reshape=Reshape((2, 2))),
            (4,),
        ),
    ],
)
def test_a_reshape_is_a_view(given: ModelInput, wanted: ModelOutput, shape: tuple[int, ...]) -> None:
    made = replace(CONFIG, input=(given, CONFIG.input[1]), output=(wanted, CONFIG.output[1]))
    [instance] = instances(made)
    asked = request(1, 3)

    [result] = instance.execute([asked]).results

    assert isinstance(result, Outputs)
    assert [t.name for t in result.tensors] == ["OUTPUT0", "OUTPUT_B"]
    assert result.tensors[0].shape == (3, *shape)
    assert np.shares_memory(result.tensors[0].array, asked.inputs["INPUT0"].array)


def test_an_output_needs_the_shape_that_its_input_is_reshaped_to() -> None:
    given = ModelInput("INPUT0", DataType.FP32, dims=(4,), reshape=Reshape((2, 2)))

    with pytest.raises(ServingError, match="output 'OUTPUT0' needs the datatype and dims, or reshape, of input"):
        instances(replace(CONFIG, input=(given, CONFIG.input[1])))


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", ""])
def test_a_delay_is_a_number_that_can_pass(text: str) -> None:
    with pytest.raises(ServingError, match="expected a number of at least 0"):
        instances(replace(CONFIG, parameters={"execute_delay_ms": text}))


@pytest.mark.parametrize(
    ("text", "is_set"), [("yes", True), ("ON", True), ("1", True), ("False", False), ("off", False)]
)
def test_a_flag_has_several_spellings(text: str, is_set: bool) -> None:
    [instance] = instances(replace(CONFIG, parameters={"response_parameters": text}))

    [result] = instance.execute([request(1, 1)]).results

    assert isinstance(result, Outputs)
    assert bool(result.parameters) is is_set


def test_a_flag_is_true_or_false() -> None:
    with pytest.raises(ServingError, match="expected true or false, got 'maybe'"):
        instances(replace(CONFIG, parameters={"response_parameters": "maybe"}))


def test_parameters_that_it_does_not_have_are_refused() -> None:
    with pytest.raises(ServingError, match="no parameter 'nested_span_count', 'single_activity_frequency'") as caught:
        instances(replace(CONFIG, parameters={"single_activity_frequency": "2", "nested_span_count": "3"}))

    assert caught.value.code is Code.UNSUPPORTED


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((), "input 'INPUT0' needs the name INPUT<x> and an output OUTPUT<x>"),
        ((ModelOutput("OUTPUT0", DataType.INT8, (4,)),), "output 'OUTPUT0' needs the datatype and dims"),
        ((ModelOutput("OUTPUT0", DataType.FP32, (5,)),), "output 'OUTPUT0' needs the datatype and dims"),
        (
            (ModelOutput("OUTPUT0", DataType.FP32, (4,)), ModelOutput("Y", DataType.FP32, (4,))),
            "output 'Y' has no input",
        ),
    ],
)
def test_every_input_needs_its_output(outputs: tuple[ModelOutput, ...], message: str) -> None:
    with pytest.raises(ServingError, match=message):
        instances(replace(CONFIG, input=CONFIG.input[:1], output=outputs))


def test_a_model_without_inputs_is_no_identity() -> None:
    with pytest.raises(ServingError, match="there is no input"):
        instances(replace(CONFIG, input=(), output=()))
