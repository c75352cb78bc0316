"""The OpenAPI document is valid, and so is every example in it: by its schema and by the server's decoders."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from tests.support.fake_engine import FakeEngine

from charonia.config.model import (
    DynamicBatching,
    ModelConfig,
    ModelInput,
    ModelOutput,
    SequenceBatching,
    TransactionPolicy,
)
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.metadata import ServerMetadata
from charonia.server.http.frontend import HttpLimits, protocol_routes
from charonia.server.page.openapi import ELEMENTS_SHOWN_MAX, ServedModel, openapi_document
from charonia.wire.json_text import dump
from charonia.wire.v2_generate import decode_generate
from charonia.wire.v2_request import InferDecoder

SERVER = ServerMetadata("triton", "1.2.3", ())
URL = "http://example.org:8000"
LIMIT = 1 << 28
BATCHED = ModelConfig(
    "sum",
    backend="python",
    max_batch_size=8,
    input=(ModelInput("A", DataType.FP32, dims=(4,)), ModelInput("B", DataType.INT8, dims=(-1,), optional=True)),
    output=(ModelOutput("C", DataType.FP32, dims=(4,), label_filename="labels.txt"),),
    dynamic_batching=DynamicBatching(),
)


def document(*configs: ModelConfig, has_keys: bool = False) -> dict[str, Any]:
    models = [ServedModel(config, ("1",), config.backend) for config in configs]
    made: dict[str, Any] = json.loads(dump(openapi_document(SERVER, models, url=URL, has_keys=has_keys)))
    return made


def test_a_plain_value_stands_for_an_input_of_one_element_only() -> None:
    shapes = {(1,): True, (-1,): True, (-1, 1): True, (16,): False, (-1, 2): False}
    for dims, has_one in shapes.items():
        config = replace(BATCHED, input=(ModelInput("A", DataType.FP32, dims=dims),))
        schema = content(document(config), "/v2/models/sum/generate")["schema"]

        assert fits(document(config), schema, {"A": 1.0}) is has_one, dims
        try:
            decode_generate(config, "", b'{"A": 1.0}', LIMIT)
        except ServingError:
            assert not has_one, dims
        else:
            assert has_one, dims


def test_an_id_may_be_null() -> None:
    made = document(BATCHED)
    body = {"id": None, "inputs": [{"name": "A", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}

    assert fits(made, content(made, "/v2/models/sum/infer")["schema"], body)
    assert fits(made, content(made, "/v2/models/sum/generate")["schema"], {"id": None, "A": [1, 2, 3, 4]})


@pytest.mark.parametrize(
    ("parameters", "is_known"),
    [({"config": "{}"}, True), ({"file:1/model.py": "eA=="}, True), ({"colour": "red"}, False), ({"config": 1}, False)],
)
def test_a_load_has_known_parameters_only(parameters: dict[str, object], is_known: bool) -> None:
    made = document(BATCHED)
    body = {"parameters": parameters}

    assert fits(made, content(made, "/v2/repository/models/{model}/load")["schema"], body) is is_known


def content(made: dict[str, Any], path: str) -> dict[str, Any]:
    found: dict[str, Any] = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return found


def fits(made: dict[str, Any], schema: dict[str, Any], value: object) -> bool:
    registry: Registry[Any] = Registry().with_resource("urn:doc", DRAFT202012.create_resource(made))
    validator = OAS31Validator(_absolute(schema), registry=registry)
    return bool(validator.is_valid(value))


def _absolute(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: f"urn:doc{value}" if key == "$ref" else _absolute(value) for key, value in schema.items()}
    return [_absolute(value) for value in schema] if isinstance(schema, list) else schema


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    dims = st.lists(st.sampled_from([-1, 1, 3, 40]), max_size=3).map(tuple)
    tensors = st.lists(st.tuples(st.sampled_from(DataType), dims, st.booleans()), max_size=3)
    batch = draw(st.sampled_from([0, 1, 8]))
    return ModelConfig(
        draw(st.sampled_from(["m", "a model", "{x}/y%"])),
        backend="python",
        max_batch_size=batch,
        input=tuple(
            ModelInput(f"in {i}", kind, dims=dims, optional=optional)
            for i, (kind, dims, optional) in enumerate(draw(tensors))
        ),
        output=tuple(ModelOutput(f"out {i}", kind, dims=dims) for i, (kind, dims, _) in enumerate(draw(tensors))),
        sequence_batching=draw(st.sampled_from([None, SequenceBatching()])) if batch else None,
        model_transaction_policy=draw(st.sampled_from([None, TransactionPolicy(decoupled=True)])),
    )


@pytest.mark.parametrize("has_keys", [False, True])
def test_the_document_is_valid(has_keys: bool) -> None:
    # Every datatype, with and without batches, and a name that has to be quoted.
    every = tuple(ModelInput(f"in {kind.wire}", kind, dims=(-1, 3)) for kind in DataType)
    outputs = tuple(ModelOutput(f"out {kind.wire}", kind, dims=(3,)) for kind in DataType)
    stream = TransactionPolicy(decoupled=True)
    made = document(
        BATCHED,
        ModelConfig("a model {x}/y%", input=every, output=outputs, max_batch_size=4),
        ModelConfig("stream", input=every[:1], output=outputs, model_transaction_policy=stream),
        ModelConfig("nothing"),
        has_keys=has_keys,
    )

    validate(made)


@settings(max_examples=50)
@given(configs())
def test_every_example_fits_its_schema_and_is_what_the_server_reads(config: ModelConfig) -> None:
    made = document(config)

    paths = [path for path in made["paths"] if made["paths"][path].get("post", {}).get("tags") == [config.name]]
    assert any(path.endswith("/infer") for path in paths)
    for path in paths:
        body = content(made, path)
        if "example" in body:
            assert fits(made, body["schema"], body["example"])
            assert decoded(config, path, body["example"]).keys() >= {i.name for i in config.input if not i.optional}


def decoded(config: ModelConfig, path: str, example: object) -> dict[str, Any]:
    text = json.dumps(example).encode()
    if path.endswith("/infer"):
        return dict(InferDecoder(LIMIT).decode(config.name, "", text).request.inputs)
    return dict(decode_generate(config, "", text, LIMIT).request.inputs)


def test_inputs_and_outputs_are_named_with_datatype_and_shape() -> None:
    made = document(BATCHED)

    schema = content(made, "/v2/models/sum/infer")["schema"]
    assert fits(made, schema, {"inputs": [tensor("A", "FP32", [2, 4], [0.5] * 8)]})
    assert fits(made, schema, {"inputs": [tensor("A", "FP32", [1, 4], [[1, 2, 3, 4]])], "id": "x"})
    generate = content(made, "/v2/models/sum/generate")["schema"]
    assert fits(made, generate, {"A": [1, 2, 3, 4], "B": 3, "temperature": 0.5})


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "X", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]},
        {"name": "A", "datatype": "FP64", "shape": [1, 4], "data": [1, 2, 3, 4]},
        {"name": "A", "datatype": "FP32", "shape": [1, 5], "data": [1, 2, 3, 4, 5]},
        {"name": "A", "datatype": "FP32", "shape": [9, 4], "data": [0] * 36},
        {"name": "A", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]},
        {"name": "A", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, "3", 4]},
        {"name": "B", "datatype": "INT8", "shape": [1, 1], "data": [128]},
    ],
)
def test_the_schema_refuses_what_the_server_refuses(entry: dict[str, Any]) -> None:
    made = document(BATCHED)

    assert not fits(made, content(made, "/v2/models/sum/infer")["schema"], {"inputs": [entry]})


def tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def test_long_inputs_have_a_shape_and_a_value_to_fill_it_with() -> None:
    picture = ModelConfig("p", input=(ModelInput("image", DataType.FP16, dims=(3, 224, 224)),), max_batch_size=1)
    made = document(picture)

    assert made["x-models"][0]["inputs"][0]["example"] == {"shape": [1, 3, 224, 224], "fill": 0.5}
    assert "example" not in content(made, "/v2/models/p/infer")
    assert "/v2/models/p/generate" not in made["paths"]  # JSON does not carry FP16
    assert len(json.dumps(made)) < 50 * ELEMENTS_SHOWN_MAX


def test_bf16_values_are_shown_as_numbers() -> None:
    made = document(ModelConfig("p", input=(ModelInput("x", DataType.BF16, dims=(2,)),)))

    assert made["x-models"][0]["inputs"][0]["example"] == {"shape": [2], "data": [0.5, 0.5]}


def test_a_decoupled_model_answers_with_a_stream_of_events() -> None:
    text = ModelInput("PROMPT", DataType.BYTES, dims=(1,))
    model = ModelConfig("llm", input=(text,), model_transaction_policy=TransactionPolicy(decoupled=True))
    made = document(model)

    assert "/v2/models/llm/generate" not in made["paths"]
    for route in ("infer", "generate_stream"):
        operation = made["paths"][f"/v2/models/llm/{route}"]["post"]
        assert list(operation["responses"]["200"]["content"]) == ["text/event-stream"]


def test_a_request_to_a_sequence_model_has_a_sequence() -> None:
    model = ModelConfig(
        "s", max_batch_size=1, input=(ModelInput("x", DataType.INT32, dims=(1,)),), sequence_batching=SequenceBatching()
    )
    sequence = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}

    made = document(model)

    assert content(made, "/v2/models/s/infer")["example"]["parameters"] == sequence
    assert content(made, "/v2/models/s/generate")["example"] == {"x": 1, **sequence}


def test_the_same_request_is_there_as_code() -> None:
    operation = document(BATCHED)["paths"]["/v2/models/sum/infer"]["post"]

    by_label = {sample["label"]: sample["source"] for sample in operation["x-codeSamples"]}
    assert list(by_label) == ["curl", "Python", "charonia infer"]
    assert by_label["curl"].startswith(f"curl {URL}/v2/models/sum/generate -d ")
    assert by_label["charonia infer"].startswith(f"charonia infer sum -u {URL} -i ")


def test_keys_are_described_where_they_are_needed() -> None:
    assert "security" not in document(BATCHED)

    made = document(BATCHED, has_keys=True)
    assert set(made["components"]["securitySchemes"]) == {"bearer", "header"}
    curl, python, command = (sample["source"] for sample in made["x-models"][0]["samples"])
    assert ' -H "Authorization: Bearer $KEY"' in curl
    assert command.endswith(' -H "Authorization: Bearer $KEY"')
    assert """headers=[("Authorization", f"Bearer {os.environ['KEY']}")]""" in python


def test_the_document_describes_routes_that_exist() -> None:
    routes = {(route.path, method.decode().lower()) for route in routes_of_server() for method in route.handlers}
    made = document(BATCHED)

    described = {
        (path.replace("/models/sum/", "/models/{model}/"), method)
        for path in made["paths"]
        for method in made["paths"][path]
    }
    assert described <= routes


def routes_of_server() -> Iterator[Any]:
    yield from protocol_routes(FakeEngine(), HttpLimits())


def test_declared_examples_are_used() -> None:
    model = ModelConfig(
        "m",
        input=(ModelInput("TEXT", DataType.BYTES, dims=(1,)),),
        parameters={"EXAMPLE": json.dumps({"TEXT": "Bonjour"})},
    )

    made = document(model)

    assert content(made, "/v2/models/m/generate")["example"] == {"TEXT": "Bonjour"}
    assert made["x-models"][0]["inputs"][0]["example"]["data"] == ["Bonjour"]
    assert np.prod(made["x-models"][0]["inputs"][0]["example"]["shape"]) == 1
