"""Every rule for sequence batching, by an example of a file that breaks it."""

import pytest

from charonia.config.pbtxt import parse
from charonia.config.problems import Problem
from charonia.server.scheduling.configuration import scheduling_problems

START = "control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] }"
END = "control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] }"


STATE = "state { input_name: 'i' output_name: 'o' data_type: TYPE_FP32"
OTHER = "state { data_type: TYPE_FP32 dims: 2"


def problems(text: str) -> list[Problem]:
    tensors = "input { name: 'IN' } output { name: 'OUT' data_type: TYPE_FP32 dims: 1 }"
    return scheduling_problems(parse(f"name: 'm' max_batch_size: 4 {tensors} sequence_batching {{ {text} }}"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"control_input [{{ name: 'S' {START} }}, {{ name: 'E' {END} }}]",
        "control_input { name: 'R' control { kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] } }",
        "control_input { name: 'C' control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }",
        "state { input_name: 'i' output_name: 'o' data_type: TYPE_FP32 dims: -1 }",
        "state { input_name: 'i' output_name: 'o' data_type: TYPE_FP32 dims: 1 initial_state { zero_data: true } }",
        "state { input_name: 'i' output_name: 'o' data_type: TYPE_FP32 dims: 1 initial_state { data_file: 'f' } }",
    ],
)
def test_right_sequence_batching_has_no_problems(text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(
    ("text", "path", "fragment"),
    [
        (
            "direct { minimum_slot_utilization: 1.5 }",
            "direct.minimum_slot_utilization",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m, got 1.5",
        ),
        ("direct { minimum_slot_utilization: nan }", "direct.minimum_slot_utilization", "must be in range (0.0, 1.0]"),
        (
            "oldest { preferred_batch_size: 0 }",
            "oldest.preferred_batch_size[0]",
            "sequence batching preferred batch size must be positive for m",
        ),
        (
            "oldest { preferred_batch_size: [4, 8] }",
            "oldest.preferred_batch_size[1]",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        ("oldest { max_candidate_sequences: -1 }", "oldest.max_candidate_sequences", "non-negative"),
        (f"control_input {{ {START} }}", "control_input[0].name", "must specify 'name'"),
        ("control_input { name: 'S' }", "control_input[0].control", "must specify 'control'"),
        (
            f"control_input {{ name: 'S' {START} {END} }}",
            "control_input[0].control",
            "sequence batching control tensor 'S' is specified for multiple control kinds for m",
        ),
        (
            "control_input { name: 'S' control { kind: CONTROL_SEQUENCE_READY } }",
            "control_input[0].control[0]",
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            "CONTROL_SEQUENCE_READY for m",
        ),
        (
            "control_input { name: 'S' control { int32_false_true: [0, 1] fp32_false_true: [0, 1] } }",
            "control_input[0].control[0]",
            "more than one of int32_false_true, fp32_false_true for CONTROL_SEQUENCE_START",
        ),
        (
            "control_input { name: 'S' control { bool_false_true: [true] } }",
            "control_input[0].control[0].bool_false_true",
            "must have exactly 2 entries for CONTROL_SEQUENCE_START for m, got 1",
        ),
        (
            "control_input { name: 'S' control { int32_false_true: [0, 1] data_type: TYPE_FP32 } }",
            "control_input[0].control[0].data_type",
            "must not specify 'data_type' for CONTROL_SEQUENCE_START",
        ),
        (
            "control_input { name: 'C' control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } }",
            "control_input[0].control[0].data_type",
            "expected one of TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING, got TYPE_FP32",
        ),
        (
            "control_input { name: 'C' control { kind: CONTROL_SEQUENCE_CORRID } }",
            "control_input[0].control[0].data_type",
            "got none",
        ),
        (
            "control_input { name: 'C' control { kind: CONTROL_SEQUENCE_CORRID data_type: 5 int32_false_true: 1 } }",
            "control_input[0].control[0].int32_false_true",
            "must not specify 'int32_false_true' for CONTROL_SEQUENCE_CORRID",
        ),
        ("state { input_name: 'i' output_name: 'o' dims: 1 }", "state[0].data_type", "must specify 'data_type'"),
        (
            "state { input_name: 'i' output_name: 'o' data_type: TYPE_FP32 dims: 1 initial_state { name: 'n' } }",
            "state[0].initial_state[0]",
            "zero_data or data_file",
        ),
        (f"{STATE} dims: -2 }}", "state[0].dims[0]", "must be integer >= 1, or -1"),
        (
            f"{STATE} dims: 1 }} {OTHER} input_name: 'IN' output_name: 'p' }}",
            "state[1].input_name",
            "the name of another input of m",
        ),
        (
            f"{STATE} dims: 1 }} {OTHER} input_name: 'j' output_name: 'o' }}",
            "state[1].output_name",
            "the output of another state of m",
        ),
        (
            "state { data_type: TYPE_INT32 dims: 2 input_name: 'j' output_name: 'OUT' }",
            "state[0].output_name",
            "another type than output 'OUT' of m",
        ),
        (
            f"{STATE} dims: 1 initial_state {{ zero_data: true data_type: TYPE_INT32 }} }}",
            "state[0].initial_state[0].data_type",
            "must have the data type of the state",
        ),
        (
            f"{STATE} dims: [-1, 3] initial_state {{ zero_data: true dims: [7, 2] }} }}",
            "state[0].initial_state[0].dims",
            "must have dims that fit [-1, 3] for m, got [7, 2]",
        ),
        (
            f"{STATE} dims: [-1] initial_state {{ zero_data: true dims: [-1] }} }}",
            "state[0].initial_state[0].dims[0]",
            "must be integer >= 1, got -1",
        ),
        (
            "state { input_name: 'i' output_name: 'o' data_type: TYPE_FP32 dims: 1 "
            "initial_state { zero_data: true } initial_state { zero_data: true } }",
            "state[0].initial_state",
            "more than one initial state",
        ),
    ],
)
def test_a_broken_rule_is_one_problem(text: str, path: str, fragment: str) -> None:
    (problem,) = problems(text)

    assert problem.path == f"sequence_batching.{path}"
    assert fragment in problem.message


def test_a_control_kind_is_given_once() -> None:
    found = problems(f"control_input [{{ name: 'A' {END} }}, {{ name: 'B' {END} }}]")

    assert [problem.path for problem in found] == [
        "sequence_batching.control_input[0].control[0].kind",
        "sequence_batching.control_input[1].control[0].kind",
    ]
    assert found[0].message == "sequence batching specifies multiple CONTROL_SEQUENCE_END tensors for m"
