"""Records, messages, text and JSON say the same."""

import dataclasses
import json
from collections.abc import Mapping
from enum import Enum, EnumType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.config.convert import MESSAGE, from_message, plan, to_message
from charonia.config.json_form import from_json, to_json
from charonia.config.model import (
    DynamicBatching,
    InstanceGroup,
    Latest,
    ModelConfig,
    ModelInput,
    Optimization,
    PinnedMemoryBuffer,
    QueuePolicy,
    RateLimiter,
    RateLimiterResource,
    SequenceBatching,
    SequenceDirect,
    VersionPolicy,
)
from charonia.config.pbtxt import parse, render
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.schema.pool import message_class, pool

ONE_OF = {
    ModelConfig: ("dynamic_batching", "sequence_batching", "ensemble_scheduling"),
    VersionPolicy: ("latest", "all", "specific"),
    SequenceBatching: ("direct", "oldest"),
}
"""Records of which at most one of the fields may be set."""

DATA_SOURCES = {"zero_data", "random_data", "data_file", "input_data_file"}


def singles() -> st.SearchStrategy[float]:
    # The decimal that stands for a 32-bit float is the shortest one that reads back as it. That of the largest ones is
    # larger than they are, and protobuf's JSON refuses it.
    return st.floats(-(2.0**127), 2.0**127, width=32).map(lambda value: float(str(np.float32(value))))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = {
    3: st.integers(-(2**63), 2**63 - 1),
    4: st.integers(0, 2**64 - 1),
    5: st.integers(-(2**31), 2**31 - 1),
    13: st.integers(0, 2**32 - 1),
    1: st.floats(allow_nan=False),
    2: singles(),
}
"""Values by the number of the protobuf type: int64, uint64, int32, uint32, double, float."""


def leaf(hint: Any, descriptor: Any) -> st.SearchStrategy[Any]:
    if dataclasses.is_dataclass(hint):
        return records(hint, descriptor.message_type)
    if hint is DataType:
        return st.none() | st.sampled_from(list(DataType))
    if issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    if hint is str:
        return TEXT
    return st.booleans() if hint is bool else NUMBERS[descriptor.type]


def field_values(hint: Any, descriptor: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is tuple:
        return st.lists(leaf(get_args(hint)[0], descriptor), max_size=2).map(tuple)
    if get_origin(hint) is Mapping:
        entry = descriptor.message_type.fields_by_name
        keys = leaf(get_args(hint)[0], entry["key"])
        return st.dictionaries(keys, leaf(get_args(hint)[1], entry["value"]), max_size=2)
    arguments = get_args(hint)
    return leaf(arguments[0], descriptor) | st.none() if arguments else leaf(hint, descriptor)


@st.composite
def records(draw: st.DrawFn, record_type: Any, descriptor: Any) -> Any:
    hints = get_type_hints(record_type)
    names = draw(st.sets(st.sampled_from(sorted(hints)), max_size=6)) if hints else set()
    for group in (set(ONE_OF.get(record_type, ())), DATA_SOURCES):
        names -= set(sorted(names & group)[1:])
    fields = descriptor.fields_by_name
    return record_type(**{name: draw(field_values(hints[name], fields[name.rstrip("_")])) for name in sorted(names)})


def configs() -> st.SearchStrategy[ModelConfig]:
    return records(ModelConfig, pool().FindMessageTypeByName(MESSAGE))


@settings(max_examples=150, deadline=None)
@given(configs())
def test_text_reads_back_as_it_was_written(config: ModelConfig) -> None:
    assert parse(render(config)) == config


@settings(max_examples=150, deadline=None)
@given(configs())
def test_json_reads_back_as_it_was_written(config: ModelConfig) -> None:
    assert from_json(json.dumps(to_json(config))) == config


@settings(max_examples=50, deadline=None)
@given(configs())
def test_the_json_form_is_one_that_protobuf_reads(config: ModelConfig) -> None:
    text = json.dumps(to_json(config))

    message = json_format.Parse(text, message_class(MESSAGE)(), descriptor_pool=pool())

    assert message == to_message(config)


def test_records_have_every_field_of_their_messages_with_its_default_and_no_other() -> None:
    seen = set()
    waiting: list[tuple[Any, Any]] = [(pool().FindMessageTypeByName(MESSAGE), ModelConfig)]
    while waiting:
        descriptor, record_type = waiting.pop()
        seen.add(record_type)
        fields = plan(descriptor, record_type)
        defaults = {field.name: field.default for field in dataclasses.fields(record_type)}
        assert {field.attribute for field in fields} == set(defaults)
        for field in fields:
            if isinstance(field.leaf, EnumType) and field.leaf is not DataType:
                numbers = descriptor.fields_by_name[field.name].enum_type.values_by_number
                assert [(one.value, one.name) for one in list[Enum](field.leaf)] == [
                    (at, numbers[at].name) for at in sorted(numbers)
                ]
            elif type(default := defaults[field.attribute]) in (int, float, bool, str) and record_type is not Latest:
                assert default == descriptor.fields_by_name[field.name].default_value, (record_type, field.name)
        waiting += [(field.message, field.leaf) for field in fields if field.message and not field.is_parameter]
    assert RateLimiterResource in seen


def test_an_empty_configuration_is_an_empty_text() -> None:
    assert render(ModelConfig()) == ""
    assert parse("") == ModelConfig()


def test_json_has_every_scalar_and_only_the_messages_that_are_set() -> None:
    config = ModelConfig(
        name="m",
        backend="python",
        max_batch_size=8,
        input=(ModelInput("IN", DataType.FP32, dims=(-1,)), ModelInput()),
        dynamic_batching=DynamicBatching(max_queue_delay_microseconds=100, priority_queue_policy={2: QueuePolicy()}),
        instance_group=(InstanceGroup("g", rate_limiter=RateLimiter((RateLimiterResource("R", True, 2),))),),
        optimization=Optimization(input_pinned_memory=PinnedMemoryBuffer(True)),
        parameters={"key": "value"},
    )

    assert to_json(config) == {
        "name": "m",
        "platform": "",
        "backend": "python",
        "runtime": "",
        "max_batch_size": 8,
        "input": [
            {
                "name": "IN",
                "data_type": "TYPE_FP32",
                "format": "FORMAT_NONE",
                "dims": [-1],
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": False,
                "is_non_linear_format_io": False,
            },
            {
                "name": "",
                "data_type": "TYPE_INVALID",
                "format": "FORMAT_NONE",
                "dims": [],
                "is_shape_tensor": False,
                "allow_ragged_batch": False,
                "optional": False,
                "is_non_linear_format_io": False,
            },
        ],
        "output": [],
        "batch_input": [],
        "batch_output": [],
        "optimization": {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        },
        "dynamic_batching": {
            "preferred_batch_size": [],
            "max_queue_delay_microseconds": 100,
            "preserve_ordering": False,
            "priority_levels": 0,
            "default_priority_level": 0,
            "priority_queue_policy": {
                "2": {
                    "timeout_action": "REJECT",
                    "default_timeout_microseconds": 0,
                    "allow_timeout_override": False,
                    "max_queue_size": 0,
                }
            },
        },
        "instance_group": [
            {
                "name": "g",
                "kind": "KIND_AUTO",
                "count": 0,
                "rate_limiter": {"resources": [{"name": "R", "global": True, "count": 2}], "priority": 0},
                "gpus": [],
                "secondary_devices": [],
                "profile": [],
                "passive": False,
                "host_policy": "",
            }
        ],
        "default_model_filename": "",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {"key": {"string_value": "value"}},
        "model_warmup": [],
    }


def test_json_stands_in_the_order_of_the_schema() -> None:
    names = list(to_json(parse("response_cache {} version_policy { all {} } dynamic_batching {}")))

    assert names.index("version_policy") < names.index("max_batch_size") < names.index("dynamic_batching")
    assert names[-1] == "response_cache"


def test_numbers_that_json_lacks_are_names() -> None:
    buckets = "buckets: [nan, inf, -inf, 0.5]"
    config = parse(f"model_metrics {{ metric_control {{ histogram_options {{ {buckets} }} }} }}")

    controls: Any = to_json(config)["model_metrics"]

    expected = ["NaN", "Infinity", "-Infinity", 0.5]
    assert controls["metric_control"][0]["histogram_options"]["buckets"] == expected


def test_a_single_precision_number_keeps_its_decimals() -> None:
    config = parse("sequence_batching { direct { minimum_slot_utilization: 0.1 } }")

    assert config.sequence_batching == SequenceBatching(direct=SequenceDirect(minimum_slot_utilization=0.1))


@pytest.mark.parametrize(
    ("config", "path"),
    [
        (ModelConfig(max_batch_size=2**31), "max_batch_size"),
        (ModelConfig(name="\ud800"), "name"),
        (ModelConfig(name=b"\xff"), "name"),  # type: ignore[arg-type]
        (ModelConfig(input=(ModelInput(dims=(2**63,)),)), "input[0].dims"),
        (ModelConfig(parameters={"a": 1}), "parameters[a]"),  # type: ignore[dict-item]
        (ModelConfig(metric_tags={"a": None}), "metric_tags[a]"),  # type: ignore[dict-item]
        (
            ModelConfig(dynamic_batching=DynamicBatching(priority_queue_policy={-1: QueuePolicy()})),
            "dynamic_batching.priority_queue_policy[-1]",
        ),
    ],
)
def test_a_value_that_the_message_cannot_hold_is_refused_with_its_path(config: ModelConfig, path: str) -> None:
    with pytest.raises(ServingError) as caught:
        to_message(config)

    assert caught.value.message.startswith(f"{path}: ")
    assert "does not fit" in caught.value.message


def test_a_number_that_an_enumeration_lacks_is_refused_with_its_path() -> None:
    message = message_class(MESSAGE)()
    message.MergeFromString(to_message(ModelConfig(input=(ModelInput("x"),))).SerializeToString())
    message.input[0].data_type = 99  # type: ignore[attr-defined]

    with pytest.raises(ServingError, match=r"input\[0\].data_type: 99 is not a number of DataType"):
        from_message(message)
