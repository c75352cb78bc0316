"""Warm-up samples that do not match the model's inputs."""

import pytest

from charonia.config.pbtxt import parse
from charonia.server.lifecycle.validation import warmup_problems

INPUTS = (
    'input { name: "A" data_type: TYPE_FP32 dims: [ 2, -1 ] } '
    'input { name: "B" data_type: TYPE_INT64 dims: [ 1 ] optional: true } max_batch_size: 4 '
)
GOOD = '{ key: "A" value { data_type: TYPE_FP32 dims: [ 2, 5 ] zero_data: true } }'


def problems(sample: str, more: str = "") -> list[tuple[str, str]]:
    config = parse(f"{INPUTS} {more} model_warmup {{ {sample} }}")
    return [(problem.path.removeprefix("model_warmup[0]"), problem.message) for problem in warmup_problems(config)]


def test_a_sample_that_fits_has_no_problem() -> None:
    optional = 'inputs { key: "B" value { data_type: TYPE_INT64 dims: [ 1 ] random_data: true } }'

    assert problems(f'name: "s" batch_size: 4 inputs {GOOD} {optional}') == []


@pytest.mark.parametrize(
    ("sample", "path", "message"),
    [
        (f"batch_size: 1 inputs {GOOD}", ".name", "must specify 'name'"),
        (f'name: "s" batch_size: 5 inputs {GOOD}', ".batch_size", "must not exceed max_batch_size 4, got 5"),
        ('name: "s" batch_size: 1', ".inputs", "must specify 'inputs'"),
        (
            'name: "s" batch_size: 1 inputs { key: "A" value { dims: [ 2, 5 ] zero_data: true } }',
            *(".inputs[A].data_type", "must specify 'data_type'"),
        ),
        (
            'name: "s" batch_size: 1 inputs { key: "A" value { data_type: TYPE_FP32 dims: [ 2, 5 ] } }',
            *(".inputs[A]", "must specify one of zero_data, random_data and input_data_file"),
        ),
        (
            'name: "s" batch_size: 1 inputs { key: "A" value { data_type: TYPE_FP16 dims: [ 2, 5 ] zero_data: true } }',
            *(".inputs[A].data_type", "must be TYPE_FP32, got TYPE_FP16"),
        ),
        (
            'name: "s" batch_size: 1 inputs { key: "A" value { data_type: TYPE_FP32 dims: [ 3, 5 ] zero_data: true } }',
            *(".inputs[A].dims", "must have dims [2, -1], got [3, 5]"),
        ),
        (
            'name: "s" batch_size: 1 inputs { key: "B" value { data_type: TYPE_INT64 dims: [ 1 ] zero_data: true } }',
            *(".inputs", "lacks input 'A'"),
        ),
        (
            f'name: "s" batch_size: 1 inputs {GOOD} '
            'inputs { key: "C" value { data_type: TYPE_INT64 dims: [ 1 ] zero_data: true } }',
            *(".inputs[C]", "is not an input of the model, which has A, B"),
        ),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_with_its_path(sample: str, path: str, message: str) -> None:
    ((where, said),) = problems(sample)

    assert where == path
    assert message in said


def test_a_name_is_given_once() -> None:
    sample = f"model_warmup {{ name: 's' batch_size: 1 inputs {GOOD} }} "
    config = parse(INPUTS + 2 * sample)

    assert [problem.path for problem in warmup_problems(config)] == ["model_warmup[0].name", "model_warmup[1].name"]


def test_a_sample_of_a_sequence_model_brings_the_inputs_that_its_scheduler_would_add() -> None:
    sequence = 'sequence_batching { control_input { name: "START" } state { input_name: "S" output_name: "T" } }'
    extra = " ".join(
        f'inputs {{ key: "{name}" value {{ data_type: TYPE_INT32 dims: [ 1 ] zero_data: true }} }}'
        for name in ("START", "S")
    )

    assert problems(f'name: "s" batch_size: 1 inputs {GOOD} {extra}', sequence) == []
