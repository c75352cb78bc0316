"""The parameter PADDING of a model."""

import json
from dataclasses import replace

import pytest

from charonia.config.model import (
    EnsembleScheduling,
    ModelConfig,
    ModelInput,
    ModelOutput,
    Reshape,
    SequenceBatching,
    TransactionPolicy,
)
from charonia.core.dtypes import DataType
from charonia.server.ragged.configuration import as_padded, padding_plan, padding_problems
from charonia.server.ragged.padding import Companion, CutOutput, PaddedInput

CONFIG = ModelConfig(
    name="m",
    max_batch_size=8,
    input=(
        ModelInput("ids", DataType.INT64, dims=(-1,)),
        ModelInput("image", DataType.FP32, dims=(3, -1, -1)),
        ModelInput("text", DataType.BYTES, dims=(-1,)),
        ModelInput("flags", DataType.BOOL, dims=(-1,)),
        ModelInput("half", DataType.BF16, dims=(-1,)),
        ModelInput("bytes", DataType.UINT8, dims=(-1,)),
        ModelInput("fixed", DataType.FP32, dims=(4,)),
        ModelInput("mask", DataType.INT64, dims=(-1,), optional=True),
        ModelInput("size", DataType.INT32, dims=(2,), optional=True),
        ModelInput("texts", DataType.BYTES, dims=(-1,), optional=True),
        ModelInput("must", DataType.INT64, dims=(-1,)),
    ),
    output=(
        ModelOutput("logits", DataType.FP32, (-1, 10)),
        ModelOutput("map", DataType.FP32, (-1, -1)),
        ModelOutput("label", DataType.FP32, (10,)),
    ),
)


def config_of(document: object, config: ModelConfig = CONFIG) -> ModelConfig:
    text = document if isinstance(document, str) else json.dumps(document)
    return replace(config, parameters={"PADDING": text})


def test_a_model_without_the_parameter_pads_nothing() -> None:
    assert padding_plan(CONFIG) is None
    assert padding_problems(CONFIG) == []
    assert as_padded(CONFIG) is CONFIG


def test_the_parameter_says_what_is_padded_and_what_is_cut() -> None:
    config = config_of(
        {
            "buckets": [16, 32],
            "inputs": {
                "ids": {"value": 1, "mask": "mask"},
                "image": {"value": -0.5, "buckets": [], "length": "size"},
                "text": {"value": "-"},
                "flags": {"value": True},
                "half": {},
            },
            "outputs": {"logits": {"input": "image", "dims": [2], "stride": 4}, "map": {"input": "image"}},
        }
    )

    plan = padding_plan(config)

    assert padding_problems(config) == []
    assert plan is not None
    assert plan.inputs == (
        PaddedInput("ids", (0,), 1, (16, 32), Companion("mask", DataType.INT64)),
        PaddedInput("image", (1, 2), -0.5, (), None, Companion("size", DataType.INT32)),
        PaddedInput("text", (0,), b"-", (16, 32)),
        PaddedInput("flags", (0,), True, (16, 32)),
        PaddedInput("half", (0,), 0, (16, 32)),
    )
    assert plan.outputs == (CutOutput("logits", "image", (0,), (1,), 4), CutOutput("map", "image", (0, 1), (0, 1)))


def test_the_backend_gets_what_is_computed_as_inputs_that_are_there() -> None:
    config = as_padded(config_of({"inputs": {"ids": {"mask": "mask"}}}))

    assert {given.name: given.optional for given in config.input if given.name in ("mask", "size")} == {
        "mask": False,
        "size": True,
    }


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        ("{", "", "expected a JSON object"),
        ("[]", "", "expected a JSON object, got []"),
        ({}, "inputs", "must name at least one input"),
        ({"inputs": {"ids": 1}}, "inputs", "expected an object with an object for each name"),
        ({"inputs": {"ids": {}}, "more": 1}, "more", "unknown key"),
        (
            {"inputs": {"ids": {"pad": 1}}},
            "inputs.ids.pad",
            "unknown key, expected one of value, buckets, mask, length",
        ),
        ({"inputs": {"x": {}}}, "inputs.x", "there is no input 'x'"),
        ({"inputs": {"fixed": {}}}, "inputs.fixed", "input 'fixed' has no variable dimension"),
        ({"inputs": {"ids": {}}, "buckets": [2, 1]}, "buckets", "ascending sizes"),
        ({"inputs": {"ids": {"buckets": [0]}}}, "inputs.ids.buckets", "ascending sizes of 1 or more, got [0]"),
        ({"inputs": {"ids": {"buckets": 4}}}, "inputs.ids.buckets", "ascending sizes"),
        ({"inputs": {"ids": {"value": "a"}}}, "inputs.ids.value", "expected a value of TYPE_INT64, got 'a'"),
        ({"inputs": {"ids": {"value": True}}}, "inputs.ids.value", "expected a value of TYPE_INT64, got True"),
        ({"inputs": {"ids": {"value": 1.5}}}, "inputs.ids.value", "1.5 does not fit TYPE_INT64"),
        ({"inputs": {"ids": {"value": 2**63}}}, "inputs.ids.value", "does not fit TYPE_INT64"),
        ({"inputs": {"bytes": {"value": -1}}}, "inputs.bytes.value", "-1 does not fit TYPE_UINT8"),
        ({"inputs": {"flags": {"value": 1}}}, "inputs.flags.value", "expected a value of TYPE_BOOL, got 1"),
        ({"inputs": {"text": {"value": 1}}}, "inputs.text.value", "expected a string for TYPE_STRING, got 1"),
        ({"inputs": {"half": {"value": 1}}}, "inputs.half.value", "BF16 can be padded with 0 only"),
        ({"inputs": {"ids": {"mask": "x"}}}, "inputs.ids.mask", "there is no input 'x'"),
        ({"inputs": {"ids": {"mask": 1}}}, "inputs.ids.mask", "there is no input '1'"),
        ({"inputs": {"ids": {"mask": "must"}}}, "inputs.ids.mask", "input 'must' must be optional"),
        ({"inputs": {"ids": {"mask": "size"}}}, "inputs.ids.mask", "input 'size' must have dims [-1]"),
        ({"inputs": {"ids": {"length": "size"}}}, "inputs.ids.length", "input 'size' must have dims [1]"),
        ({"inputs": {"ids": {"mask": "texts"}}}, "inputs.ids.mask", "must be of numbers or booleans"),
        (
            {"inputs": {"ids": {"mask": "mask"}, "text": {"mask": "mask"}}},
            "inputs",
            "input 'mask' is given 2 times",
        ),
        ({"inputs": {"ids": {}}, "outputs": {"x": {"input": "ids"}}}, "outputs.x", "there is no output 'x'"),
        (
            {"inputs": {"ids": {}}, "outputs": {"logits": {}}},
            "outputs.logits.input",
            "the name of a padded input, got None",
        ),
        ({"inputs": {"ids": {}}, "outputs": {"label": {"input": "ids"}}}, "outputs.label", "has no variable dimension"),
        (
            {"inputs": {"ids": {}}, "outputs": {"map": {"input": "ids"}}},
            "outputs.map.dims",
            "expected a variable dimension of input 'ids', [0], for each of [0, 1], got [0]",
        ),
        (
            {"inputs": {"image": {}}, "outputs": {"logits": {"input": "image", "dims": [0]}}},
            "outputs.logits.dims",
            "got [0]",
        ),
        (
            {"inputs": {"image": {}}, "outputs": {"logits": {"input": "image", "dims": 1}}},
            "outputs.logits.dims",
            "got 1",
        ),
        (
            {"inputs": {"ids": {}}, "outputs": {"logits": {"input": "ids", "stride": 0}}},
            "outputs.logits.stride",
            "got 0",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(document: object, path: str, message: str) -> None:
    found = padding_problems(config_of(document))

    where = f"parameters[PADDING].{path}" if path else "parameters[PADDING]"
    assert any(problem.path == where and message in problem.message for problem in found), found


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CONFIG, max_batch_size=0), "max_batch_size must be 1 or more"),
        (replace(CONFIG, model_transaction_policy=TransactionPolicy(decoupled=True)), "a decoupled model"),
        (replace(CONFIG, sequence_batching=SequenceBatching()), "a model with sequence_batching"),
        (replace(CONFIG, ensemble_scheduling=EnsembleScheduling()), "a model with ensemble_scheduling"),
    ],
)
def test_some_models_cannot_be_padded(config: ModelConfig, message: str) -> None:
    (problem,) = padding_problems(config_of({"inputs": {"ids": {}}}, config))

    assert message in problem.message


def test_an_input_that_takes_another_way_to_the_model_cannot_be_padded() -> None:
    ragged = replace(CONFIG.input[0], allow_ragged_batch=True, reshape=Reshape((-1, 1)))
    mask = replace(CONFIG.input[7], reshape=Reshape((-1, 1)))
    config = replace(CONFIG, input=(ragged, *CONFIG.input[1:7], mask))

    messages = [each.message for each in padding_problems(config_of({"inputs": {"ids": {"mask": "mask"}}}, config))]

    assert [message.split(":")[0] for message in messages] == [
        "input 'ids' has allow_ragged_batch",
        "input 'ids' has a reshape, which cannot be padded",
        "input 'mask' has a reshape, which cannot be computed",
    ]
