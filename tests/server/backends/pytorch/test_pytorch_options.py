import pytest

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.server.backends.pytorch.program import PARAMETERS, RunPlan, read_plan


def plan(**parameters: str) -> RunPlan:
    found, problems = read_plan(ModelConfig(name="m", parameters=parameters), {})
    assert problems == []
    return found


def test_without_parameters_a_model_runs_in_inference_mode_with_its_share_of_the_cores() -> None:
    assert plan() == RunPlan()
    assert RunPlan().uses_inference_mode
    assert RunPlan().intra_op_threads == 0


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"INFERENCE_MODE": "false"}, RunPlan(uses_inference_mode=False)),
        ({"DISABLE_OPTIMIZED_EXECUTION": "true"}, RunPlan(is_optimized=False)),
        ({"DISABLE_CUDNN": "1"}, RunPlan(uses_cudnn=False)),
        ({"ENABLE_WEIGHT_SHARING": "TRUE"}, RunPlan(shares_weights=True)),
        ({"ENABLE_CACHE_CLEANING": "true"}, RunPlan(cleans_cache=True)),
        ({"ENABLE_JIT_EXECUTOR": "false"}, RunPlan(jit_executor=False)),
        ({"ENABLE_JIT_PROFILING": "true"}, RunPlan(jit_profiling=True)),
        ({"INTRA_OP_THREAD_COUNT": "3"}, RunPlan(intra_op_threads=3)),
        ({"NUM_THREADS": "3"}, RunPlan(intra_op_threads=3)),
        ({"INTER_OP_THREAD_COUNT": "2"}, RunPlan(inter_op_threads=2)),
        ({"NUM_INTEROP_THREADS": "2"}, RunPlan(inter_op_threads=2)),
        ({"CHANNELS_LAST": "true"}, RunPlan(is_channels_last=True)),
        ({"PRECISION": "bf16"}, RunPlan(precision=DataType.BF16)),
        ({"PRECISION": "FP32"}, RunPlan()),
        ({"ALLOW_UNPICKLING": "true"}, RunPlan(unpickles=True)),
        ({"MODULE_CLASS": "Net"}, RunPlan(class_name="Net")),
        (
            {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"dynamic": true}'},
            RunPlan(compile_options={"dynamic": True}),
        ),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"disable": true, "mode": "default"}'}, RunPlan()),
    ],
)
def test_each_parameter_has_its_effect(parameters: dict[str, str], expected: RunPlan) -> None:
    assert plan(**parameters) == expected


def test_settings_of_the_backend_hold_for_all_models_unless_one_says_otherwise() -> None:
    settings = {"INTRA_OP_THREAD_COUNT": "2", "default-max-batch-size": "8"}

    assert read_plan(ModelConfig(), settings)[0].intra_op_threads == 2
    assert read_plan(ModelConfig(parameters={"INTRA_OP_THREAD_COUNT": "1"}), settings)[0].intra_op_threads == 1


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("INFERENCE_MODE", "maybe", "expected true or false, got 'maybe'"),
        ("NUM_THREADS", "-1", "expected a whole number of at least 0, got '-1'"),
        ("PRECISION", "int8", "expected one of fp32, bf16, fp16, got 'int8'"),
        ("TORCH_COMPILE_OPTIONAL_PARAMETERS", "{", "expected a JSON object"),
        ("TORCH_COMPILE_OPTIONAL_PARAMETERS", "[]", "expected a JSON object"),
        ("TORCH_COMPILE_OPTIONAL_PARAMETERS", '{"model": 1}', "unknown argument 'model'"),
        ("TORCH_COMPILE_OPTIONAL_PARAMETERS", '{"dynamic": "yes"}', "'dynamic' of type bool"),
    ],
)
def test_a_value_that_means_nothing_is_a_problem_with_its_place(key: str, text: str, message: str) -> None:
    _, [problem] = read_plan(ModelConfig(parameters={key: text}), {})

    assert problem.path == f"parameters['{key}']"
    assert message in problem.message


def test_an_unknown_parameter_is_pointed_out_with_the_nearest_one() -> None:
    config = ModelConfig(name="m", parameters={"inference_mod": "true", "NUM_THREADS": "1"})

    [sentence] = PARAMETERS.remarks(config)

    assert "no parameter 'inference_mod'" in sentence
    assert "did you mean 'INFERENCE_MODE'?" in sentence
