"""Every rule by an example of a file that breaks it; the key fragments are those that clients and tests look for."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from charonia.config.complete import normalise
from charonia.config.kinds import InstanceKind
from charonia.config.model import (
    All,
    DynamicBatching,
    InstanceGroup,
    Latest,
    ModelConfig,
    SequenceBatching,
    SequenceDirect,
    SequenceOldest,
    VersionPolicy,
)
from charonia.config.pbtxt import parse
from charonia.config.problems import Problem, check_problems
from charonia.core.errors import Code, ServingError
from charonia.server.lifecycle.validation import validate


def problems(text: str, *, backend: str = 'backend: "identity"', gpu_count: int = 0) -> list[Problem]:
    config = normalise(parse(f"{backend} {text}"), name="m", gpu_count=gpu_count, default_instance_count=1)
    return validate(config, gpu_count=gpu_count)


def check(found: Sequence[Problem], path: str, fragment: str) -> None:
    assert [problem.path for problem in found] == [path]
    assert fragment in found[0].message


X = "name: 'x' data_type: TYPE_FP32"


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"max_batch_size: 8 dynamic_batching {{ }} input {{ {X} dims: [3, -1] }} output {{ {X} dims: 1 }}",
        f"input {{ {X} dims: [3, 224, 224] format: FORMAT_NCHW }}",
        f"input {{ {X} dims: [-1, 6, -1] reshape {{ shape: [-1, 2, 3, -1] }} }}",
        f"max_batch_size: 1 input {{ {X} dims: 1 reshape {{ shape: [] }} }}",
        "max_batch_size: 8 dynamic_batching { preferred_batch_size: [1, 8] }",
        "dynamic_batching { priority_levels: 2 default_priority_level: 2 "
        "priority_queue_policy { key: 1 value { timeout_action: DELAY } } }",
        "dynamic_batching { preserve_ordering: true default_queue_policy { max_queue_size: 1 } }",
        "dynamic_batching { priority_queue_policy { key: 7 } }",
        "version_policy { specific { versions: [1, 3] } }",
        "version_policy { all { } }",
        "instance_group { count: 1024 }",
        "instance_group { count: 2 kind: KIND_MODEL rate_limiter { resources { name: 'R' count: 1 } } }",
        "model_warmup { name: 'w' batch_size: 1 inputs { key: 'x' value { data_type: 11 dims: 4 zero_data: true } } }",
        "response_cache { enable: true }",
        "sequence_batching { direct { minimum_slot_utilization: 1 } }",
        "sequence_batching { direct { } }",
        "max_batch_size: 4 sequence_batching { oldest { max_candidate_sequences: 4 preferred_batch_size: 4 } }",
        "model_metrics { metric_control { metric_identifier { family: 'charonia_batch_size' } "
        "histogram_options { buckets: [1, 5] } } }",
        "default_model_filename: 'folder/model.bin'",
    ],
)
def test_a_right_configuration_has_no_problems(text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(
    ("text", "path", "fragment"),
    [
        ("max_batch_size: -1", "max_batch_size", "'max_batch_size' must be non-negative value for m"),
        ("input { data_type: TYPE_FP32 dims: 1 }", "input[0].name", "model input must specify 'name' for m"),
        ("input { name: 'x' dims: 1 }", "input[0].data_type", "model input 'x' must specify 'data_type'"),
        (f"output {{ {X} }}", "output[0].dims", "model output 'x' must specify 'dims'"),
        (
            f"input {{ {X} dims: [1, 0] }}",
            "input[0].dims[1]",
            "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension, got 0",
        ),
        (
            f"output {{ {X} dims: 1 reshape {{ shape: [-2] }} }}",
            "output[0].reshape.shape[0]",
            "model output 'x' reshape dimensions must be integer >= 1, or -1",
        ),
        (
            f"input {{ {X} dims: [2, 3] reshape {{ shape: 5 }} }}",
            "input[0].reshape",
            "model input 'x' has different size for dims and reshape for m: [2, 3] and [5]",
        ),
        (
            f"input {{ {X} dims: [2, -1, 3] reshape {{ shape: [3, -1, 2] }} }}",
            "input[0].reshape",
            "has different size for dims and reshape",
        ),
        (
            f"input {{ {X} dims: [-1, -1] reshape {{ shape: -1 }} }}",
            "input[0].reshape",
            "has different number of variable-size dimensions for dims and reshape for m",
        ),
        (
            f"output {{ {X} dims: 1 reshape {{ }} }}",
            "output[0].reshape",
            "'x' cannot have empty reshape for non-batching model as scalar tensors are not supported for m",
        ),
        (f"input {{ {X} dims: [2, 2] format: FORMAT_NHWC }}", "input[0].format", "NHWC/NCHW require 3 dims for m"),
        (f"input {{ {X} dims: 1 is_shape_tensor: true }}", "input[0].is_shape_tensor", "only supported for TensorRT"),
        (
            f"output {{ {X} dims: 1 is_non_linear_format_io: true }}",
            "output[0].is_non_linear_format_io",
            "only supported for TensorRT",
        ),
        (f"input {{ {X} dims: 1 allow_ragged_batch: true }}", "input[0].allow_ragged_batch", "max_batch_size is 0"),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: [4, 0] }",
            "dynamic_batching.preferred_batch_size[1]",
            "dynamic batching preferred size must be positive for m",
        ),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: [4, 5] }",
            "dynamic_batching.preferred_batch_size[1]",
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        (
            "dynamic_batching { priority_levels: 2 }",
            "dynamic_batching.default_priority_level",
            "default priority level must be in range [1, 2] for m, got 0",
        ),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 } }",
            "dynamic_batching.priority_queue_policy[3]",
            "priority queue policy must have priority level in range [1, 2] for m",
        ),
        (
            "dynamic_batching { priority_levels: 1025 default_priority_level: 1 }",
            "dynamic_batching.priority_levels",
            "at most 1024",
        ),
        (
            "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
            "dynamic_batching.priority_levels",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
            "dynamic_batching.default_queue_policy.timeout_action",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
        (
            "dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1 "
            "priority_queue_policy { key: 1 value { timeout_action: DELAY } } }",
            "dynamic_batching.priority_queue_policy[1].timeout_action",
            "Queue policy can not have DELAY as timeout action",
        ),
        (
            "sequence_batching { } response_cache { enable: true }",
            "response_cache.enable",
            "Response Cache does not currently support model m with sequence batching scheduler. Please disable",
        ),
        (
            "model_transaction_policy { decoupled: true } response_cache { enable: true }",
            "response_cache.enable",
            "Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable",
        ),
        (
            "sequence_batching { control_input { name: 'A' control { kind: CONTROL_SEQUENCE_START "
            "int32_false_true: [0, 1] } } control_input { name: 'A' control { kind: CONTROL_SEQUENCE_READY "
            "int32_false_true: [0, 1] } } }",
            "sequence_batching.control_input[1].name",
            "more than one control tensor 'A'",
        ),
        ("version_policy { latest { } }", "version_policy.latest.num_versions", "at least 1, got 0"),
        ("version_policy { specific { } }", "version_policy.specific.versions", "at least one"),
        ("version_policy { specific { versions: [1, 0] } }", "version_policy.specific.versions[1]", "got 0"),
        ("default_model_filename: '/etc/passwd'", "default_model_filename", "within the version's folder"),
        ("default_model_filename: '../2/model.onnx'", "default_model_filename", "within the version's folder"),
        ("default_model_filename: 'a\\000b'", "default_model_filename", "within the version's folder"),
        (
            "model_metrics { metric_control { histogram_options { buckets: 1 } } }",
            "model_metrics.metric_control[0].metric_identifier.family",
            "'family'",
        ),
        (
            "model_metrics { metric_control { metric_identifier { family: 'charonia_batch_size' } } }",
            "model_metrics.metric_control[0].histogram_options.buckets",
            "must specify 'buckets'",
        ),
        (
            "model_metrics { metric_control { metric_identifier { family: 'charonia_batch_size' } "
            "histogram_options { buckets: [2, 2] } } }",
            "model_metrics.metric_control[0].histogram_options.buckets",
            "ascending, got [2.0, 2.0]",
        ),
        (
            "model_metrics { metric_control { metric_identifier { family: 'charonia_batch_size' } "
            "histogram_options { buckets: nan } } }",
            "model_metrics.metric_control[0].histogram_options.buckets",
            "ascending",
        ),
        (
            "model_metrics { metric_control { metric_identifier { family: 'charonia_batch_size' } "
            "histogram_options { buckets: inf } } }",
            "model_metrics.metric_control[0].histogram_options.buckets",
            "at least one bucket must have a finite bound",
        ),
    ],
)
def test_a_broken_rule_is_one_problem(text: str, path: str, fragment: str) -> None:
    check(problems(text), path, fragment)


@pytest.mark.parametrize(
    ("text", "path", "fragment"),
    [
        ("", "backend", "must specify 'platform' or 'backend' for 'm'"),
        ("platform: 'onnx'", "platform", "unexpected platform type 'onnx' for m"),
        (
            "platform: 'onnxruntime_onnx' backend: 'pytorch'",
            "platform",
            "unexpected 'platform' and 'backend' pair, got: onnxruntime_onnx, pytorch",
        ),
        ("platform: 'fast' backend: 'pytorch'", "platform", "unexpected 'platform' and 'backend' pair"),
        ("platform: 'tensorrt_plan' backend: 'own'", "platform", "unexpected 'platform' and 'backend' pair"),
    ],
)
def test_platform_and_backend_must_agree(text: str, path: str, fragment: str) -> None:
    check(problems(text, backend=""), path, fragment)


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("platform: 'torch_aoti' backend: 'pytorch'", ""),
        ("platform: 'fast' backend: 'own'", ""),
        ("backend: 'onnxruntime' platform: 'onnxruntime_onnx'", f"output {{ {X} dims: 1 reshape {{ }} }}"),
        ("backend: 'tensorrt'", f"input {{ {X} dims: 1 is_shape_tensor: true }} instance_group {{ profile: '0' }}"),
        ("backend: 'identity'", "instance_group { kind: KIND_GPU gpus: [0, 1] }"),
    ],
)
def test_what_depends_on_the_backend_and_the_machine_is_accepted_there(backend: str, text: str) -> None:
    assert problems(text, backend=backend, gpu_count=2) == []


def test_a_tensor_is_given_once() -> None:
    found = problems(f"input [{{ {X} dims: 1 }}, {{ {X} dims: 1 }}] output {{ {X} dims: 1 }}")

    assert [problem.path for problem in found] == ["input[0].name", "input[1].name"]


@pytest.mark.parametrize(
    ("group", "gpu_count", "path", "message"),
    [
        (
            "kind: KIND_CPU gpus: 0",
            1,
            "gpus",
            "instance group g of model m has kind KIND_CPU but specifies one or more GPUs",
        ),
        ("kind: KIND_MODEL gpus: 0", 1, "gpus", "has kind KIND_MODEL but specifies one or more GPUs"),
        ("kind: KIND_GPU", 0, "kind", "instance group g of model m has kind KIND_GPU but no GPUs are available"),
        (
            "kind: KIND_GPU gpus: [0, 42]",
            2,
            "gpus[1]",
            "specifies invalid or unsupported gpu id 42. GPUs here are 0, 1",
        ),
        ("kind: KIND_GPU gpus: -1", 1, "gpus[0]", "invalid or unsupported gpu id -1"),
        ("count: -1", 0, "count", "1 to 1024 instances, got -1"),
        ("count: 1025", 0, "count", "got 1025"),
        ("profile: '0'", 0, "profile", "only TensorRT"),
        ("rate_limiter { resources { count: 1 } }", 0, "rate_limiter.resources[0].name", "without a name"),
    ],
)
def test_an_instance_group_fits_the_machine(group: str, gpu_count: int, path: str, message: str) -> None:
    found = problems(f"instance_group {{ name: 'g' {group} }}", gpu_count=gpu_count)

    check(found, f"instance_group[0].{path}", message)


def test_bounds_of_instances_are_checked_with_the_rest() -> None:
    text = "parameters { key: 'INSTANCES_MAX' value { string_value: '0' } }"

    check(problems(text), "parameters[INSTANCES_MAX]", "expected a number of instances from 1 to 1024, got '0'")


def test_a_batcher_needs_a_group_that_is_not_passive() -> None:
    passive = "instance_group [{ passive: true }, { passive: true }]"

    check(problems(f"max_batch_size: 1 dynamic_batching {{ }} {passive}"), "instance_group", "must not be passive")
    assert problems(passive) == []
    assert problems("dynamic_batching { } instance_group [{ passive: true }, { }]") == []


COMPLETE = normalise(ModelConfig(backend="identity"), name="m", gpu_count=0, default_instance_count=1)


@pytest.mark.parametrize(
    ("config", "path", "fragment"),
    [
        (replace(COMPLETE, name=""), "name", "model configuration must specify 'name'"),
        (replace(COMPLETE, version_policy=None), "version_policy", "must specify 'version policy' for m"),
        (replace(COMPLETE, version_policy=VersionPolicy()), "version_policy", "must specify 'version policy' for m"),
        (
            replace(COMPLETE, version_policy=VersionPolicy(latest=Latest(1), all=All())),
            "version_policy",
            "at most one of latest, all and specific",
        ),
        (replace(COMPLETE, instance_group=()), "instance_group", "must specify one or more 'instance group's for m"),
        (
            replace(COMPLETE, instance_group=(InstanceGroup("g", InstanceKind.KIND_GPU, 1),)),
            "instance_group[0].gpus",
            "has kind KIND_GPU but specifies no GPUs",
        ),
        (
            replace(COMPLETE, dynamic_batching=DynamicBatching(), sequence_batching=SequenceBatching()),
            "sequence_batching",
            "only one scheduler may be given, got dynamic_batching and sequence_batching",
        ),
        (
            replace(COMPLETE, sequence_batching=SequenceBatching(SequenceDirect(), SequenceOldest())),
            "sequence_batching.oldest",
            "only one strategy",
        ),
    ],
)
def test_records_that_no_file_can_say_are_checked_too(config: ModelConfig, path: str, fragment: str) -> None:
    check(validate(config, gpu_count=1), path, fragment)


@pytest.mark.parametrize(
    ("sample", "path", "fragment"),
    [
        ("batch_size: 1", "name", "must specify 'name'"),
        ("name: 'w' batch_size: 5", "batch_size", "must not exceed max_batch_size 4, got 5"),
    ],
)
def test_a_warm_up_sample_fits_the_model(sample: str, path: str, fragment: str) -> None:
    inputs = "inputs { key: 'x' value { data_type: TYPE_FP32 dims: 4 random_data: true } }"

    check(problems(f"max_batch_size: 4 model_warmup {{ {sample} {inputs} }}"), f"model_warmup[0].{path}", fragment)


@pytest.mark.parametrize(
    ("given", "path", "fragment"),
    [
        ("dims: 1 zero_data: true", ".data_type", "warm-up input 'x' of sample 'w' must specify 'data_type'"),
        ("data_type: TYPE_FP32 dims: [1, -1] zero_data: true", ".dims[1]", "dimension must be integer >= 1, got -1"),
        ("data_type: TYPE_FP32 dims: 1", "", "must specify one of zero_data, random_data and input_data_file"),
    ],
)
def test_warm_up_data_has_type_shape_and_source(given: str, path: str, fragment: str) -> None:
    found = problems(f"model_warmup {{ name: 'w' inputs {{ key: 'x' value {{ {given} }} }} }}")

    check(found, f"model_warmup[0].inputs[x]{path}", fragment)


def test_warm_up_samples_have_inputs_and_names_of_their_own() -> None:
    found = problems("model_warmup [{ name: 'w' }, { name: 'w' }]")

    assert [problem.path for problem in found] == [
        "model_warmup[0].name",
        "model_warmup[0].inputs",
        "model_warmup[1].name",
        "model_warmup[1].inputs",
    ]


IN = "input { name: 'in' data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }"
OUT = "output { name: 'out' data_type: TYPE_FP32 dims: -1 }"


@pytest.mark.parametrize(
    ("section", "path", "fragment"),
    [
        (
            "batch_input { target_name: 't' data_type: TYPE_INT32 }",
            "batch_input[0].source_input",
            "expects 1 source input, got 0",
        ),
        (
            "batch_input { kind: BATCH_ITEM_SHAPE target_name: 't' data_type: TYPE_FP32 source_input: ['in', 'in'] }",
            "batch_input[0].source_input",
            "batch input kind 'BATCH_ITEM_SHAPE' expects 1 source input, got 2",
        ),
        (
            "batch_input { target_name: 't' data_type: TYPE_FP32 source_input: 'no' }",
            "batch_input[0].source_input[0]",
            "unknown source input name 'no'",
        ),
        ("batch_input { data_type: TYPE_FP32 source_input: 'in' }", "batch_input[0].target_name", "'target_name'"),
        (
            "batch_input { target_name: 't' data_type: TYPE_INT64 source_input: 'in' }",
            "batch_input[0].data_type",
            "TYPE_INT32 or TYPE_FP32, got TYPE_INT64",
        ),
        ("batch_input { target_name: 't' source_input: 'in' }", "batch_input[0].data_type", "got none"),
        ("batch_output { source_input: 'in' }", "batch_output[0].target_name", "'target_name'"),
        (
            "batch_output { target_name: 'no' source_input: 'in' }",
            "batch_output[0].target_name[0]",
            "unknown target output name 'no'",
        ),
        ("batch_output { target_name: 'out' }", "batch_output[0].source_input", "expects 1 source input, got 0"),
    ],
)
def test_batch_tensors_name_what_there_is(section: str, path: str, fragment: str) -> None:
    check(problems(f"max_batch_size: 4 {IN} {OUT} {section}"), path, fragment)


def test_an_output_is_scattered_once() -> None:
    scattered = "batch_output { target_name: 'out' source_input: 'in' }"

    found = problems(f"max_batch_size: 4 {IN} {OUT} {scattered} {scattered}")

    assert [problem.path for problem in found] == ["batch_output[0].target_name[0]", "batch_output[1].target_name[0]"]
    assert found[0].message == "target output name 'out' can only be specified once"


def test_all_problems_are_reported_at_once_in_one_error() -> None:
    found = problems("max_batch_size: -1 input { dims: 0 } instance_group { count: -2 }")

    assert [problem.path for problem in found] == [
        "max_batch_size",
        "input[0].name",
        "input[0].data_type",
        "input[0].dims[0]",
        "instance_group[0].count",
    ]
    with pytest.raises(ServingError) as caught:
        check_problems("m", found)
    assert caught.value.code is Code.INVALID_ARG
    lines = caught.value.message.splitlines()
    assert lines[0] == "model 'm': 5 problems in the model configuration"
    assert lines[1] == "  max_batch_size: 'max_batch_size' must be non-negative value for m, got -1"
    assert len(lines) == 6


def test_one_problem_is_one_line() -> None:
    with pytest.raises(ServingError) as caught:
        check_problems("m", [Problem("name", "is wrong")])

    assert caught.value.message == "model 'm': name: is wrong"
