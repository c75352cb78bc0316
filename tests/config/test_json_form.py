"""What loading a model may send as its configuration, and how wrong ones are refused."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.config.json_form import from_json
from charonia.config.model import DynamicBatching, ModelConfig, ModelInput, QueuePolicy, VersionPolicy
from charonia.config.pbtxt import MAX_TEXT_CHARS
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError

NOT_JSON = "the model configuration is not JSON"
INPUT_FIELDS = (
    "known are name, data_type, format, dims, reshape, is_shape_tensor, allow_ragged_batch, optional, "
    "is_non_linear_format_io"
)
BATCHING_FIELDS = (
    "known are preferred_batch_size, max_queue_delay_microseconds, preserve_ordering, priority_levels, "
    "default_priority_level, default_queue_policy, priority_queue_policy"
)


@pytest.mark.parametrize(
    ("path", "low", "high"),
    [
        ("max_batch_size", -(2**31), 2**31 - 1),
        ("input.dims", -(2**63), 2**63 - 1),
        ("dynamic_batching.max_queue_delay_microseconds", 0, 2**64 - 1),
        ("dynamic_batching.default_queue_policy.max_queue_size", 0, 2**32 - 1),
    ],
)
def test_integers_have_the_range_of_their_field(path: str, low: int, high: int) -> None:
    def read(value: int) -> ModelConfig:
        document: object = [value] if path.endswith("dims") else value
        for name in reversed(path.split(".")):
            document = {name: [document] if name == "input" else document}
        return from_json(json.dumps(document))

    assert str(low) in repr(read(low))
    assert str(high) in repr(read(high))
    for value in (low - 1, high + 1):
        with pytest.raises(ServingError, match=f"{value}"):
            read(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", ModelConfig()),
        ('{"max_batch_size": 4}', ModelConfig(max_batch_size=4)),
        ('{"maxBatchSize": "4"}', ModelConfig(max_batch_size=4)),
        ('{"name": null, "version_policy": null}', ModelConfig()),
        ('{"version_policy": {}}', ModelConfig(version_policy=VersionPolicy())),
        (
            '{"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["-1", 3]}]}',
            ModelConfig(input=(ModelInput("x", DataType.FP32, dims=(-1, 3)),)),
        ),
        ('{"input": [{"dataType": 11}]}', ModelConfig(input=(ModelInput(data_type=DataType.FP32),))),
        (
            '{"dynamic_batching": {"priority_queue_policy": {"2": {"max_queue_size": 3}}}}',
            ModelConfig(dynamic_batching=DynamicBatching(priority_queue_policy={2: QueuePolicy(max_queue_size=3)})),
        ),
        ('{"parameters": {"a": {"string_value": "b"}}}', ModelConfig(parameters={"a": "b"})),
    ],
)
def test_json_becomes_records(text: str, expected: ModelConfig) -> None:
    assert from_json(text) == expected


@pytest.mark.parametrize(
    ("lenient", "strict"),
    [
        ('{"max_batch_size": 4 , }', '{"max_batch_size": 4}'),
        ('{"input": [{"name": "x"},\n]}', '{"input": [{"name": "x"}]}'),
        ('{"name": "a,]", "backend": "\\"b,}",}', '{"name": "a,]", "backend": "\\"b,}"}'),
        ('{"input": {"name": "x", "dims": 4}}', '{"input": [{"name": "x", "dims": [4]}]}'),
        (
            '{"modelWarmup": {"inputs": {"x": {"dims": 4}}}}',
            '{"model_warmup": [{"inputs": {"x": {"dims": [4]}}}]}',
        ),
        ('{"ensemble_scheduling": {"step": {}}}', '{"ensemble_scheduling": {"step": [{}]}}'),
        ("{name: 'm', maxBatchSize : 4}", '{"name": "m", "max_batch_size": 4}'),
        ("""{'name': 'it\\'s "m": {x: 1,}'}""", """{"name": "it's \\"m\\": {x: 1,}"}"""),
        (
            """{"name": "it's {x: 'm',}", parameters: {a1: {string_value: 'b'}}}""",
            """{"name": "it's {x: 'm',}", "parameters": {"a1": {"string_value": "b"}}}""",
        ),
    ],
)
def test_what_other_parsers_let_pass_is_read_as_it_is_meant(lenient: str, strict: str) -> None:
    assert from_json(lenient) == from_json(strict)


@given(st.text(alphabet="{}[]\",:\\ \n1a'", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ServingError):
        from_json(text)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("{", "the model configuration is not JSON: Expecting property name enclosed in double quotes", ""),
        ("[" * 200_000, "the model configuration is not JSON: maximum recursion depth exceeded", ""),
        ("[]", "the model configuration must be a JSON object, got list", ""),
        ('{"name": "a", "name": "b"}', "the model configuration is not JSON: member 'name' is given twice", ""),
        (
            '{"max_bach_size": 1}',
            "model configuration: ModelConfig has no field 'max_bach_size'",
            "did you mean 'max_batch_size'?",
        ),
        ('{"input": [{}, {"dimz": [1]}]}', "input[1]: ModelInput has no field 'dimz'", "did you mean 'dims'?"),
        (
            '{"input": [{"data_type": "FP32"}]}',
            "input[0].data_type: Invalid enum value FP32 for enum type",
            "did you mean TYPE_FP32?",
        ),
        ('{"input": [{"data_type": 99}]}', "input[0].data_type: 99 is not a number of DataType", ""),
        ('{"input": [{"dims": ["x"]}]}', "input[0].dims[0]: expected an integer, got 'x'", ""),
        ('{"input": [{"dims": [1, "9223372036854775808"]}]}', "input[0].dims[1]: Value out of range: 92233", ""),
        ('{"input": [{"data_type": 2147483648}]}', "input[0].data_type: Value out of range: 2147483648", ""),
        (
            '{"dynamic_batching": {"priority_levels": -1}}',
            "dynamic_batching.priority_levels: Value out of range: -1",
            "",
        ),
        (
            '{"dynamic_batching": {"priority_queue_policy": {"-1": {}}}}',
            "dynamic_batching.priority_queue_policy[-1]: Value out of range: -1",
            "",
        ),
        (
            '{"dynamic_batching": {"priority_queue_policy": {"x": {}}}}',
            "dynamic_batching.priority_queue_policy[x]: expected an integer, got 'x'",
            "",
        ),
        ('{"input": [{}, 5]}', "input[1]: expected a JSON object, got int", INPUT_FIELDS),
        ('{"input": {"dims": {}}}', "input[0].dims[0]: expected a number, got dict", ""),
        ('{"input": ""}', "input[0]: expected a JSON object, got str", INPUT_FIELDS),
        ('{"max_batch_size": 1,, "name": ""}', "the model configuration is not JSON: Expecting property name", ""),
        ('{"dynamicBatching": ""}', "dynamicBatching: expected a JSON object, got str", BATCHING_FIELDS),
        ('{"dynamic_batching": []}', "dynamic_batching: expected a JSON object, got list", BATCHING_FIELDS),
        ('{"version_policy": {"all": ""}}', "version_policy.all: expected a JSON object, got str", ""),
        ('{"parameters": []}', "parameters: expected a JSON object, got list", ""),
        ('{"parameters": {"\\n": 1}}', "parameters[\\n]: expected a JSON object, got int", "known are string_value"),
        (
            '{"parameters": {"\\n": {"string_value": "", "stringValue": ""}}}',
            "parameters[\\n].stringValue: parameters[",
            "",
        ),
        ('{"parameters": {"a": null}}', "parameters[a]: null is not allowed in a list or map", ""),
        ('{"metric_tags": {"a": null}}', "metric_tags[a]: null is not allowed in a list or map", ""),
        ('{"name": "a", "max_batch_size": 1, "maxBatchSize": 2}', "maxBatchSize: max_batch_size is given too", ""),
        ('{"max_batch_size": true}', "max_batch_size: expected a number, got bool", ""),
        ('{"input": [{"data_type": true}]}', "input[0].data_type: expected a name or number, got bool", ""),
        ('{"response_cache": {"enable": 1}}', "response_cache.enable: expected true or false, got int", ""),
        ('{"input": [{"data_type": Infinity}]}', f"{NOT_JSON}: Infinity is not a JSON number", ""),
        ('{"input": [{"data_type": 1e999}]}', f"{NOT_JSON}: a number is too large: 1e999", ""),
        ('{"max_batch_size": 1' + "0" * 400 + "}", f"{NOT_JSON}: a number is too large: 10000", ""),
        ('{"max_batch_size": 1' + "0" * 5000 + "}", f"{NOT_JSON}: a number is too large: 10000", ""),
        ('{"input": [null]}', "input[0]: null is not allowed", ""),
        ('{"max_batch_size": 1.5}', "max_batch_size: Couldn't parse integer: 1.5", ""),
        ('{"max_batch_size": 99999999999}', "max_batch_size: Value out of range", ""),
        ('{"name": 5}', "name: expected a string, got int", ""),
        ('{"name": "\\ud800"}', "the model configuration is not JSON: 'utf-8' codec can't encode", ""),
        ('{"\\ud800": 1}', "the model configuration is not JSON: 'utf-8' codec can't encode", ""),
        ('{"input": [{"data_type": "\\ud800"}]}', "the model configuration is not JSON: 'utf-8' codec can't", ""),
        ('{"parameters": {"a": "b"}}', "parameters[a]: expected a JSON object, got str", "known are string_value"),
        ('{"dynamic_batching": {}, "sequence_batching": {}}', "model configuration: Message type", ""),
        ('{"[a.b]": 1}', "model configuration: Message type inference.ModelConfig does not have extensions", ""),
        ('{"version_policy": {"all": true}}', "version_policy.all: expected a JSON object, got bool", ""),
    ],
)
def test_an_error_says_where_what_and_what_was_meant(text: str, message: str, hint: str) -> None:
    with pytest.raises(ServingError) as caught:
        from_json(text)

    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.startswith(message)
    assert caught.value.hint == hint
    assert str(caught.value).isprintable()


def test_a_text_over_the_limit_is_refused_unread() -> None:
    text = json.dumps({"name": "x" * MAX_TEXT_CHARS})

    with pytest.raises(ServingError, match=f"at most {MAX_TEXT_CHARS} are read"):
        from_json(text)
