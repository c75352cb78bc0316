import pytest

from charonia.config.kinds import InstanceKind
from charonia.config.model import (
    All,
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    ModelInput,
    Optimization,
    QueuePolicy,
    TransactionPolicy,
    VersionPolicy,
)
from charonia.config.pbtxt import MAX_TEXT_CHARS, parse, render
from charonia.config.problems import MAX_QUOTED_CHARS
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError


def refusal(text: str) -> ServingError:
    with pytest.raises(ServingError) as caught:
        parse(text)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value


TWO_INPUTS = ModelConfig(
    input=(ModelInput("A", DataType.FP32, dims=(3, -1)), ModelInput("B", DataType.BYTES, dims=(1,))),
)


@pytest.mark.parametrize(
    "text",
    [
        'input { name: "A" data_type: TYPE_FP32 dims: 3 dims: -1 } input { name: "B" data_type: TYPE_STRING dims: 1 }',
        'input [ { name: "A" data_type: TYPE_FP32 dims: [3, -1] }, { name: "B" data_type: TYPE_STRING dims: [ 1 ] } ]',
        'input: [{name:"A",data_type:TYPE_FP32,dims:[3,-1]},{name:"B";data_type:TYPE_STRING;dims:1;}]',
        "input: { name: 'A' data_type: 11 dims: [3] dims: [-1] }\r\ninput < name: 'B' data_type: 13 dims: 0x1 >",
        '# two\ninput [{ name: "A" # first\n data_type: TYPE_FP32 dims: [3, -1] }]\ninput { name: "" "B"\n'
        "data_type: TYPE_STRING dims: 1 }",
        '\ufeffinput { name: "A" data_type: TYPE_FP32 dims: [3, -1] }\ninput { name: "B" data_type: 13 dims: 1 }',
    ],
)
def test_every_way_to_write_two_inputs_means_the_same(text: str) -> None:
    assert parse(text) == TWO_INPUTS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('parameters { key: "a" value: { string_value: "b" } }', ModelConfig(parameters={"a": "b"})),
        ('parameters: { key: "a", value: { string_value: "b" }, }', ModelConfig(parameters={"a": "b"})),
        (
            'parameters [{ key: "a" }, { key: "c" value { string_value: "d" } }]',
            ModelConfig(parameters={"a": "", "c": "d"}),
        ),
        ('metric_tags { key: "a" value: "b" }', ModelConfig(metric_tags={"a": "b"})),
        (
            "model_transaction_policy { decoupled: True }",
            ModelConfig(model_transaction_policy=TransactionPolicy(decoupled=True)),
        ),
        ("version_policy: { all { } }", ModelConfig(version_policy=VersionPolicy(all=All()))),
        ("optimization { }", ModelConfig(optimization=Optimization())),
        (
            "instance_group [{ kind: KIND_CPU count: 2 }] instance_group { gpus: [0, 1] }",
            ModelConfig(
                instance_group=(InstanceGroup(kind=InstanceKind.KIND_CPU, count=2), InstanceGroup(gpus=(0, 1)))
            ),
        ),
        (
            "dynamic_batching { priority_queue_policy { key: 2 value { max_queue_size: 3 } } }",
            ModelConfig(dynamic_batching=DynamicBatching(priority_queue_policy={2: QueuePolicy(max_queue_size=3)})),
        ),
    ],
)
def test_text_becomes_records(text: str, expected: ModelConfig) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            'name: "m"\nmax_bach_size: 8',
            "config.pbtxt line 2, column 1: ModelConfig has no field 'max_bach_size'",
            "did you mean 'max_batch_size'?",
        ),
        (
            'input { name: "x" dimensions: 3 }',
            "config.pbtxt line 1, column 19: ModelInput has no field 'dimensions'",
            "known are name, data_type, format, dims, reshape, is_shape_tensor, allow_ragged_batch, optional, "
            "is_non_linear_format_io",
        ),
        (
            "input_pinned_memory { enable: true }",
            "config.pbtxt line 1, column 1: ModelConfig has no field 'input_pinned_memory'",
            "'input_pinned_memory' is a field of ModelOptimizationPolicy",
        ),
        ("zzz: 1", "config.pbtxt line 1, column 1: ModelConfig has no field 'zzz'", ""),
        (
            "input { data_type: FP32 }",
            "config.pbtxt line 1, column 20: DataType has no value FP32",
            "did you mean TYPE_FP32?",
        ),
        (
            "input { data_type: TYPE_BYTES }",
            "config.pbtxt line 1, column 20: DataType has no value TYPE_BYTES",
            "did you mean TYPE_STRING?",
        ),
        (
            'input { data_type: "TYPE_FP32" }',
            'config.pbtxt line 1, column 20: DataType has no value "TYPE_FP32"',
            "write TYPE_FP32 without quotes",
        ),
        (
            "instance_group { kind: KIND_CPUS }",
            "config.pbtxt line 1, column 24: Kind has no value KIND_CPUS",
            "did you mean KIND_CPU?",
        ),
        (
            "instance_group { kind: 'fast' }",
            "config.pbtxt line 1, column 24: Kind has no value 'fast'",
            "known are KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL",
        ),
        (
            'name: "a"\nname: "b"',
            "config.pbtxt line 2, column 7: field 'name' is given twice",
            "only repeated fields may be given more than once",
        ),
        (
            "dynamic_batching { }\nsequence_batching { }",
            "config.pbtxt line 2, column 1: 'sequence_batching' and 'dynamic_batching' are both given",
            "at most one of them may be",
        ),
        (
            "backend: onnxruntime",
            "config.pbtxt line 1, column 10: expected string but found: 'onnxruntime'",
            'texts stand in quotes: "onnxruntime"',
        ),
        (
            'max_batch_size: "8"',
            'config.pbtxt line 1, column 17: couldn\'t parse integer: "8"',
            "numbers stand without quotes: 8",
        ),
        (
            "input { dims: [None, 3] }",
            "config.pbtxt line 1, column 16: couldn't parse integer: None",
            "a dimension of any size is -1",
        ),
        (
            "dynamic_batching: true",
            'config.pbtxt line 1, column 19: expected "{".',
            'braces belong here, such as dynamic_batching { } or value { string_value: "8" }',
        ),
        (
            'input [ { name: "a" }',
            'config.pbtxt line 1, column 22: expected ",".',
            'a "[" has no "]", or there is no comma between two elements',
        ),
        (
            '{"max_batch_size": 8}',
            "config.pbtxt line 1, column 1: expected identifier or number, got {.",
            "this is JSON; config.pbtxt holds fields without braces around them, such as max_batch_size: 8",
        ),
        (
            "dynamic_batching {\n  preserve_ordering: true\n",
            'config.pbtxt line 2, column 22: expected "}".',
            "the brace in line 1, 'dynamic_batching {', is not closed",
        ),
        (
            "input {\n  reshape {\n    shape: 1\n}\ninput {\n  reshape {\n    shape: 1\n}\n",
            "config.pbtxt line 5, column 1: ModelInput has no field 'input'",
            "the brace in line 2, 'reshape {', is not closed; 'input' is a field of GraphSpec, LowerBound, ModelConfig",
        ),
        (
            "input {\n  reshape { shape: 1 }\n  dims: 1\n\n",
            'config.pbtxt line 3, column 9: expected "}".',
            "the brace in line 1, 'input {', is not closed",
        ),
        (
            "input {\n  reshape {\n    shape: 1 }\n",
            'config.pbtxt line 3, column 14: expected "}".',
            "the brace in line 1, 'input {', is not closed",
        ),
        (
            "input {\nreshape {\n}\n",
            'config.pbtxt line 3, column 1: expected "}".',
            "the brace in line 1, 'input {', is not closed",
        ),
        (
            "  input {\n}\ndynamic_batching {",
            'config.pbtxt line 3, column 18: expected "}".',
            "the brace in line 3, 'dynamic_batching {', is not closed",
        ),
        ("max_batch_size: many", "config.pbtxt line 1, column 17: couldn't parse integer: many", ""),
        ("max_batch_size: 4294967296", "config.pbtxt line 1, column 17: value out of range: 4294967296", ""),
        ("\ninput { data_type: '\ud800' }", "config.pbtxt line 2: '\\ud800' is no character", ""),
        ("name: 'a'\n'\udc80'", "config.pbtxt line 2: byte 0x80 is not UTF-8", ""),
        ("name: '\udcff'", "config.pbtxt line 1: byte 0xff is not UTF-8", ""),
        ("name: '\udc7f'", "config.pbtxt line 1: '\\udc7f' is no character", ""),
        ("name: '\udd00'", "config.pbtxt line 1: '\\udd00' is no character", ""),
        ("input { data_type: 99999999999 }", "config.pbtxt: Value out of range: 99999999999", ""),
        ("input { data_type: 99 }", "input[0].data_type: 99 is not a number of DataType", ""),
    ],
)
def test_an_error_says_where_what_and_what_was_meant(text: str, message: str, hint: str) -> None:
    error = refusal(text)

    assert (error.message, error.hint) == (message, hint)


@pytest.mark.parametrize(
    "text", ["input {", 'name: "', "}", "name: {", "dims", "[x.y]: 1", 'name: "\\xff"', "a" * 10_000]
)
def test_broken_text_is_refused_with_its_position(text: str) -> None:
    assert refusal(text).message.startswith("config.pbtxt line 1, column ")


def test_an_error_is_short_and_printable_whatever_the_text() -> None:
    for text in ("\x00\x1b[31m", "\ud800: 1", "max_batch_size: " + "1" * 100_000, f'"{"x" * 100_000}"', "\u202e"):
        message = str(refusal(text))

        assert message.isprintable()
        assert len(message) < 4 * MAX_QUOTED_CHARS


def test_deep_nesting_is_refused() -> None:
    assert "line 1" in refusal("input [" * 100_000).message
    assert "line 1" in refusal("optimization { graph { " * 40_000).message


def test_a_text_over_the_limit_is_refused_unread() -> None:
    assert parse(" " * MAX_TEXT_CHARS) == ModelConfig()
    assert f"at most {MAX_TEXT_CHARS} are read" in refusal(" " * (MAX_TEXT_CHARS + 1)).message


def test_rendered_text_is_readable() -> None:
    config = ModelConfig(name="m", max_batch_size=8, input=(ModelInput("é", DataType.FP32, dims=(3, -1)),))

    assert render(config).splitlines() == [
        'name: "m"',
        "max_batch_size: 8",
        "input {",
        '  name: "é"',
        "  data_type: TYPE_FP32",
        "  dims: [3, -1]",
        "}",
    ]
