"""Inputs and outputs of language models."""

import json
from dataclasses import replace

import pytest

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput, TransactionPolicy
from charonia.core.dtypes import DataType
from charonia.server.backends.language.backend import IMAGE, complete_language, language_problems
from charonia.wire.example_inputs import example_inputs
from charonia.wire.example_request import ExampleRequest

EMPTY = ModelConfig(name="m", backend="vllm")


def complete(config: ModelConfig = EMPTY) -> ModelConfig:
    return complete_language(config, InstanceKind.KIND_MODEL, ("completions", "embeddings"), (IMAGE,))[0]


def test_an_empty_configuration_is_completed_and_has_no_problem() -> None:
    config = complete()
    assert [given.name for given in config.input if not given.optional] == ["text_input"]
    assert "image" in [given.name for given in config.input]
    assert config.output[0] == ModelOutput("text_output", DataType.BYTES, (-1,))
    assert config.model_transaction_policy == TransactionPolicy(decoupled=True)
    assert config.instance_group == (InstanceGroup(kind=InstanceKind.KIND_MODEL, count=1),)
    assert config.parameters["openai_routes"] == "completions,embeddings"
    assert list(language_problems(config, (IMAGE,))) == []


def test_what_is_given_stays() -> None:
    given = replace(
        EMPTY,
        input=(ModelInput("text_input", DataType.BYTES, dims=(-1,)), ModelInput("seed", DataType.INT64, dims=(1,))),
        output=(ModelOutput("text_output", DataType.BYTES, (1,)),),
        instance_group=(InstanceGroup(kind=InstanceKind.KIND_GPU, count=2),),
        parameters={"openai_routes": "", "EXAMPLE": "{}"},
    )
    config = complete(given)
    assert replace(config, model_transaction_policy=None) == given
    assert list(language_problems(config)) == []


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"max_batch_size": 4}, "max_batch_size", "expected 0"),
        ({"model_transaction_policy": TransactionPolicy(decoupled=False)}, "decoupled", "expected true"),
        ({"input": (ModelInput("prompt", DataType.BYTES, dims=(1,)),)}, "input", "expected 'text_input'"),
        ({"input": (ModelInput("text_input", DataType.INT8, dims=(1,)),)}, "input[0].data_type", "TYPE_STRING"),
        ({"parameters": {"max_requests": "0"}}, "max_requests", "at least 1"),
        ({"output": (ModelOutput("answer", DataType.BYTES, (1,)),)}, "output[0].name", "no output 'answer'"),
    ],
)
def test_what_no_engine_can_meet_is_a_problem(change: dict[str, object], path: str, words: str) -> None:
    config = replace(complete(), **change)  # type: ignore[arg-type]
    assert any(path in str(problem) and words in str(problem) for problem in language_problems(config, (IMAGE,)))


def test_the_example_streams_a_few_tokens_and_shows_what_it_asks_for() -> None:
    config = complete()
    inputs = example_inputs(config)
    example = ExampleRequest(config, inputs)
    assert inputs["stream"].array.tolist() == [True]
    assert json.loads(inputs["sampling_parameters"].array[0]) == {"max_tokens": 32}
    assert example.curl().startswith("curl -N http://localhost:8000/v2/models/m/generate_stream")
    assert [line.strip() for line in example.python().splitlines() if "print" in line] == [
        'print(result["text_output"])'
    ]
