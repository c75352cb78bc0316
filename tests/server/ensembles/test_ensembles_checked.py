"""Every rule for an ensemble that its own configuration can break."""

import pytest

from charonia.config.complete import normalise
from charonia.config.pbtxt import parse
from charonia.config.problems import Problem
from charonia.server.ensembles.configuration import ensemble_problems
from charonia.server.lifecycle.validation import validate

CHAIN = """
    step { model_name: 'a' model_version: -1 input_map { key: 'X' value: 'in' } output_map { key: 'Y' value: 'mid' } }
    step { model_name: 'b' model_version: -1 input_map { key: 'X' value: 'mid' } output_map { key: 'Y' value: 'out' } }
"""
TENSORS = """
    input { name: 'in' data_type: TYPE_FP32 dims: 1 }
    output { name: 'out' data_type: TYPE_FP32 dims: 1 }
"""

MORE = "name: 'more' data_type: TYPE_FP32 dims: 1"


def problems(steps: str, tensors: str = TENSORS, more: str = "") -> list[Problem]:
    text = f"name: 'e' platform: 'ensemble' {tensors} ensemble_scheduling {{ {steps} }} {more}"
    return ensemble_problems(parse(text))


def step(model: str, inputs: str, output: str) -> str:
    maps = " ".join(f"input_map {{ key: 'X{i}' value: '{name}' }}" for i, name in enumerate(inputs.split()))
    return f"step {{ model_name: '{model}' {maps} output_map {{ key: 'Y' value: '{output}' }} }}"


def test_a_chain_has_no_problems_in_either_order() -> None:
    first, second = CHAIN.strip().splitlines()

    assert problems(first + second) == []
    assert problems(second + first) == []


def test_a_complete_ensemble_is_valid() -> None:
    config = parse(f"platform: 'ensemble' {TENSORS} ensemble_scheduling {{ {CHAIN} }}")

    complete = normalise(config, name="e", gpu_count=1, default_instance_count=1)

    assert validate(complete, gpu_count=1) == []


def test_a_model_that_is_no_ensemble_has_no_problems() -> None:
    assert ensemble_problems(parse("name: 'm' backend: 'identity'")) == []


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        (
            "backend: 'identity' ensemble_scheduling { }",
            "ensemble_scheduling",
            "ensemble scheduling cannot be set for model 'e' whose platform is not ensemble",
        ),
        (
            "platform: 'ensemble'",
            "ensemble_scheduling",
            "ensemble scheduling must be set for ensemble e whose platform is ensemble",
        ),
        (
            "platform: 'ensemble' ensemble_scheduling { }",
            "ensemble_scheduling.step",
            "must specify 'step' for ensemble 'e'",
        ),
    ],
)
def test_scheduling_and_platform_go_together(text: str, path: str, message: str) -> None:
    assert ensemble_problems(parse(f"name: 'e' {text}")) == [Problem(path, message)]


def test_an_ensemble_has_no_backend() -> None:
    config = parse(f"platform: 'ensemble' backend: 'python' {TENSORS} ensemble_scheduling {{ {CHAIN} }}")

    (problem,) = validate(normalise(config, name="e", gpu_count=0, default_instance_count=1), gpu_count=0)

    assert problem.path == "backend"
    assert "Ensemble model 'e' must have platform type 'ensemble' and empty backend type" in problem.message


@pytest.mark.parametrize(
    ("more", "path", "message"),
    [
        ("instance_group { }", "instance_group", "instance group should not be specified for ensemble 'e'"),
        ("optimization { }", "optimization", "optimization should not be specified for ensemble 'e'"),
        ("model_warmup { }", "model_warmup", "model_warmup can not be specified for ensemble 'e'"),
        (f"input {{ {MORE} }}", "input[1]", "ensemble input 'more' for ensemble 'e' is not used"),
        (f"output {{ {MORE} }}", "output[1]", "output 'more' for ensemble 'e' is not written"),
    ],
)
def test_what_belongs_to_the_models_of_the_steps_or_to_no_step_is_refused(more: str, path: str, message: str) -> None:
    assert problems(CHAIN, more=more) == [Problem(path, message)]


@pytest.mark.parametrize(
    ("steps", "path", "message"),
    [
        (
            CHAIN.replace("model_name: 'b'", ""),
            "step[1].model_name",
            "must specify 'model_name' in step 1 of ensemble 'e'",
        ),
        (
            CHAIN + "step { model_name: 'c' output_map { key: 'Y' value: 'more' } }",
            "step[2].input_map",
            "must specify 'input_map' in step 2 of ensemble 'e'",
        ),
        (
            CHAIN + "step { model_name: 'c' input_map { key: 'X' value: 'mid' } }",
            "step[2].output_map",
            "must specify 'output_map' in step 2 of ensemble 'e'",
        ),
        (
            CHAIN.replace("-1", "-2", 1),
            "step[0].model_version",
            "step 0 of ensemble 'e' must have a version number, or -1 for the latest, got -2",
        ),
        (
            CHAIN.replace("'b'", "'e'"),
            "step[1].model_name",
            "circular dependency between ensembles: e -> e",
        ),
        (
            CHAIN.replace("key: 'X' value: 'in'", "key: '' value: 'in'"),
            "step[0].input_map[]",
            "step 0 of ensemble 'e' maps '' to 'in': neither may be empty",
        ),
        (
            CHAIN + step("c", "mid", "spare"),
            "step[2].output_map[Y]",
            "ensemble tensor 'spare' is unused in ensemble 'e'",
        ),
    ],
)
def test_a_step_that_is_wrong(steps: str, path: str, message: str) -> None:
    tensors = TENSORS + f"output {{ {MORE} }}" if "'more'" in steps else TENSORS

    assert problems(steps, tensors) == [Problem(f"ensemble_scheduling.{path}", message)]


def test_a_tensor_is_written_once() -> None:
    twice = problems(CHAIN + step("c", "in", "mid"))
    over_input = problems(CHAIN + step("c", "mid", "in"))

    assert [problem.path for problem in twice] == [
        "ensemble_scheduling.step[0].output_map[Y]",
        "ensemble_scheduling.step[2].output_map[Y]",
    ]
    assert "ensemble tensor 'mid' can appear in an output map only once for ensemble 'e'" in twice[0].message
    assert [problem.path for problem in over_input] == ["ensemble_scheduling.step[2].output_map[Y]"]


def test_an_output_behind_a_missing_tensor_names_it() -> None:
    expected = (
        "output 'out' for ensemble 'e' is not written: at least one of its depending tensors, 'gap', is not connected"
    )

    assert problems(step("a", "in gap", "out")) == [Problem("output[0]", expected)]


def test_steps_that_wait_for_each_other_never_write() -> None:
    found = problems(step("a", "in second", "first") + step("b", "first", "second") + step("c", "second", "out"))

    assert [problem.path for problem in found] == ["output[0]"]
    assert "'second', is not connected" in found[0].message
