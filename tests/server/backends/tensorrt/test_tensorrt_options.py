"""Options of plans, and the shapes that CUDA graphs are captured for."""

from dataclasses import replace

import pytest

from charonia.config.kinds import InstanceKind
from charonia.config.model import (
    Accelerator,
    Cuda,
    DynamicBatching,
    ExecutionAccelerators,
    GraphLowerBound,
    GraphShape,
    GraphSpec,
    InstanceGroup,
    ModelConfig,
    ModelInput,
    Optimization,
)
from charonia.core.dtypes import DataType
from charonia.server.backends.tensorrt.options import (
    GraphShapes,
    PlanOptions,
    graph_shapes,
    group_of,
    profiles_of,
    read_options,
    without_effect,
)

CONFIG = ModelConfig(name="m", max_batch_size=8, input=(ModelInput("x", DataType.FP32, dims=(-1,)),))
USUAL = {"x": (4, 16)}


def with_specs(*specs: GraphSpec) -> ModelConfig:
    return replace(CONFIG, optimization=Optimization(cuda=Cuda(graphs=True, graph_spec=specs)))


def problems(config: ModelConfig, **settings: str) -> list[str]:
    return [str(problem) for problem in read_options(config, settings)[1]]


def test_options_come_from_the_model_and_the_settings() -> None:
    settings = {"plugins": "/a.so;/b.so", "version-compatible": "TRUE"}

    assert read_options(with_specs(), settings) == (PlanOptions(("/a.so", "/b.so"), True, 0, True), [])
    assert read_options(CONFIG, {}) == (PlanOptions(), [])


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"parameters": {"execution_context_allocation_strategy": "NONE"}},
            "expected one of STATIC, ON_PROFILE_CHANGE",
        ),
        ({"parameters": {"enable_multi_device": "true"}}, "an engine over several GPUs is not available"),
        ({"instance_group": (InstanceGroup("g", InstanceKind.KIND_CPU),)}, "group 'g' would run on the CPU"),
        (
            {"instance_group": (InstanceGroup("g", profile=("large",)),)},
            "expected the number of an optimization profile",
        ),
    ],
)
def test_what_a_plan_cannot_do_is_a_problem(changed: dict[str, object], expected: str) -> None:
    (found,) = problems(replace(CONFIG, **changed))  # type: ignore[arg-type] # fields of any type

    assert expected in found


def test_accelerators_are_for_models_that_are_not_compiled() -> None:
    accelerators = ExecutionAccelerators(gpu_execution_accelerator=(Accelerator("tensorrt"),))
    config = replace(CONFIG, optimization=Optimization(execution_accelerators=accelerators))

    assert "a plan is compiled already" in problems(config)[0]


def test_a_setting_that_is_no_switch_is_a_problem() -> None:
    assert "expected true or false, got 'perhaps'" in problems(CONFIG, **{"version-compatible": "perhaps"})[0]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (GraphSpec(0), "expected batch sizes from 1 to 8, got 0"),
        (GraphSpec(9), "expected batch sizes from 1 to 8, got 9"),
        (GraphSpec(4, graph_lower_bound=GraphLowerBound(5)), "no larger shapes"),
        (GraphSpec(4, {"y": GraphShape((3,))}), "expected the shape of each input (x)"),
        (
            GraphSpec(4, {"x": GraphShape((3,))}, GraphLowerBound(1, {"x": GraphShape((4,))})),
            "no larger shapes",
        ),
        (GraphSpec(4, {"x": GraphShape((3,))}, GraphLowerBound(1, {"x": GraphShape((3, 3))})), "no larger shapes"),
    ],
)
def test_a_graph_that_cannot_be_captured_is_a_problem(spec: GraphSpec, expected: str) -> None:
    (found,) = problems(with_specs(spec))

    assert found.startswith("optimization.cuda.graph_spec[0]")
    assert expected in found


@pytest.mark.parametrize(
    ("config", "batches"),
    [
        (CONFIG, [1, 2, 3, 4, 6, 8]),
        (replace(CONFIG, dynamic_batching=DynamicBatching(preferred_batch_size=(5, 9))), [1, 5, 8]),
    ],
)
def test_without_specs_graphs_are_for_usual_batches(config: ModelConfig, batches: list[int]) -> None:
    found = graph_shapes(config, USUAL)

    assert [shapes.upper for shapes in found] == [shapes.lower for shapes in found] == [{"x": (b, 16)} for b in batches]


def test_without_batches_there_is_one_graph_of_the_usual_shapes() -> None:
    assert graph_shapes(replace(CONFIG, max_batch_size=0), USUAL) == [GraphShapes(USUAL, USUAL)]


def test_specs_say_shapes_and_lower_bounds() -> None:
    bounded = GraphSpec(4, {"x": GraphShape((32,))}, GraphLowerBound(2, {"x": GraphShape((8,))}))

    first, second = graph_shapes(with_specs(bounded, GraphSpec(3)), USUAL)

    assert (first, second.upper) == (GraphShapes({"x": (4, 32)}, {"x": (2, 8)}), {"x": (3, 16)})
    served = {shape: first.serves({"x": shape}) for shape in ((2, 8), (4, 32), (1, 8), (5, 8), (4, 33), (4, 32, 1))}
    assert list(served.values()) == [True, True, False, False, False, False]


def test_what_changes_nothing_is_named() -> None:
    cuda = Cuda(graphs=True, busy_wait_events=True, output_copy_stream=True)
    config = replace(
        CONFIG,
        parameters={"execution_context_allocation_strategi": "STATIC"},
        optimization=Optimization(cuda=cuda, eager_batching=True, gather_kernel_buffer_threshold=3),
    )
    found = list(without_effect(config, {"coalesce-request-input": "true"}))

    assert "did you mean 'execution_context_allocation_strategy'?" in found[0]
    assert [sentence.split(" ")[2] for sentence in found[1:]] == [
        "--backend-config",
        "optimization.cuda.busy_wait_events",
        "optimization.cuda.output_copy_stream",
        "optimization.eager_batching",
        "optimization.gather_kernel_buffer_threshold",
    ]
    assert list(without_effect(CONFIG, {})) == []


def test_instances_have_the_profiles_of_their_group() -> None:
    config = replace(CONFIG, instance_group=(InstanceGroup("a"), InstanceGroup("a_1", profile=("2", "0", "2"))))

    assert profiles_of(group_of(config, "a_0")) == [0]
    assert profiles_of(group_of(config, "a_1_3")) == [2, 0]
