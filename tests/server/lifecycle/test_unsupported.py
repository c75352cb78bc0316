import pytest

from charonia.config.model import ModelConfig
from charonia.config.pbtxt import parse
from charonia.server.lifecycle.validation import unsupported


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('backend: "onnxruntime" runtime: "model.py"', "runtime"),
        ('backend: "other" batch_input { }', "batch_input"),
        ('backend: "other" batch_output { }', "batch_output"),
        ('cc_model_filenames { key: "7.5" value: "t4.plan" }', "cc_model_filenames"),
        ('parameters { key: "TRITON_BATCH_STRATEGY_PATH" }', "parameters[TRITON_BATCH_STRATEGY_PATH]"),
        ('backend: "other" input { allow_ragged_batch: true }', "input[0].allow_ragged_batch"),
        ("input { } input { is_shape_tensor: true }", "input[1].is_shape_tensor"),
        ("input { is_non_linear_format_io: true }", "input[0].is_non_linear_format_io"),
        ("output { is_shape_tensor: true }", "output[0].is_shape_tensor"),
        ("output { is_non_linear_format_io: true }", "output[0].is_non_linear_format_io"),
        ("instance_group { passive: true }", "instance_group[0].passive"),
        ("instance_group { secondary_devices { } }", "instance_group[0].secondary_devices"),
        ('backend: "tensorrt" instance_group { secondary_devices { } }', "instance_group[0].secondary_devices"),
        ('instance_group { profile: "0" }', "instance_group[0].profile"),
    ],
)
def test_what_is_not_there_is_refused_by_name(text: str, path: str) -> None:
    (problem,) = unsupported(parse(text))

    assert problem.path == path
    assert problem.message.endswith("is not available in this version of the server")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "platform: 'ensemble' ensemble_scheduling { step { model_name: 'm' } }",
        "dynamic_batching { preferred_batch_size: 4 priority_levels: 2 }",
        "input { optional: true reshape { shape: [1] } format: FORMAT_NHWC }",
        "model_transaction_policy { decoupled: true } response_cache { enable: false }",
        "model_warmup { batch_size: 1 } response_cache { enable: true }",
        'backend: "onnxruntime" runtime: "libtriton_onnxruntime.so"',
        "instance_group { rate_limiter { priority: 2 resources { name: 'R' count: 1 } } kind: KIND_GPU gpus: 0 }",
        "optimization { cuda { graphs: true } execution_accelerators { gpu_execution_accelerator { name: 'x' } } }",
        "model_operations { op_library_filename: 'ops.so' } model_metrics { } model_repository_agents { }",
        "metric_tags { key: 'team' value: 'vision' }",
        "parameters { key: 'TRITON_BATCH_STRATEGY_PATH' } parameters { key: 'BATCHING_STRATEGY' }",
        "backend: 'onnxruntime' input { allow_ragged_batch: true } batch_input { } batch_output { }",
        "backend: 'python' input { allow_ragged_batch: true } batch_input { }",
        "platform: 'ensemble' ensemble_scheduling { step { model_name: 'm' model_namespace: 'team' } }",
        "model_repository_agents { agents { name: 'checksum' } }",
        "instance_group { host_policy: 'numa0' }",
    ],
)
def test_what_is_there_or_says_nothing_is_accepted(text: str) -> None:
    assert unsupported(parse(text)) == []


def test_everything_that_is_not_there_is_named_at_once() -> None:
    text = "input { is_shape_tensor: true } instance_group { passive: true }"
    config = parse(f'backend: "onnxruntime" runtime: "model.py" {text}')

    assert [problem.path for problem in unsupported(config)] == [
        "runtime",
        "input[0].is_shape_tensor",
        "instance_group[0].passive",
    ]
    assert unsupported(ModelConfig()) == []
