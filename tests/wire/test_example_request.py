"""Made-up requests: they fit the model, and every written form of them carries the same tensors."""

import json
import shlex
import subprocess
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import charonia.client
from charonia.config.model import ModelConfig, ModelInput, ModelOutput, ModelWarmup, TransactionPolicy, WarmupInput
from charonia.config.parameters import JSON_SCHEMA
from charonia.core.dtypes import DataType
from charonia.core.metadata import ModelMetadata, TensorMetadata
from charonia.core.tensor import Tensor
from charonia.wire.example_inputs import example_dims, example_inputs, takes_picture
from charonia.wire.example_request import ELEMENTS_MAX, HINT_ELEMENTS_MAX, ExampleRequest, body_hint, example_request
from charonia.wire.python_values import make_tensors
from charonia.wire.tensors import bytes_array
from charonia.wire.v2_generate import decode_generate
from charonia.wire.v2_request import InferDecoder

LIMIT = 1 << 28
DIMS = st.lists(st.sampled_from([-1, 1, 3, 16]), max_size=3).map(tuple)
INPUTS = st.lists(st.tuples(st.sampled_from(DataType), DIMS), min_size=1, max_size=3)


def model(*inputs: tuple[DataType, tuple[int, ...]], batch: int = 0, decoupled: bool = False) -> ModelConfig:
    return ModelConfig(
        name="my model",
        max_batch_size=batch,
        input=tuple(ModelInput(f"in put{index}", kind, dims=dims) for index, (kind, dims) in enumerate(inputs)),
        output=(ModelOutput("y", DataType.FP32, dims=(1,)),),
        model_transaction_policy=TransactionPolicy(decoupled=True) if decoupled else None,
    )


def fits(config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """Assert that tensors are what a model's configuration asks for."""
    for given_input in config.input:
        tensor = tensors[given_input.name]
        dims = (-1, *given_input.dims) if config.max_batch_size else given_input.dims
        assert tensor.datatype is given_input.data_type
        assert len(tensor.shape) == len(dims)
        assert all(dim in (-1, size) for dim, size in zip(dims, tensor.shape, strict=True))
        assert tensor.array.size > 0


def decoded(config: ModelConfig, body: bytes, length: int | None = None) -> dict[str, Tensor]:
    return InferDecoder(LIMIT).decode(config.name, "", body, length).request.inputs


def body_of(command: str) -> tuple[str, bytes, int | None]:
    """Return the URL, the body and the length of the JSON part that a command for curl sends, by running it."""
    script = 'curl() { printf "%s\\n" "$@" > /dev/fd/3; for last in "$@"; do :; done; [ ! -t 0 ] && cat; true; }\n'
    done = subprocess.run(
        ["bash", "-c", f"exec 3>&2\n{script}{command}"], capture_output=True, check=True, stdin=subprocess.DEVNULL
    )
    words = done.stderr.decode().splitlines()
    url = next(word for word in words if word.startswith("http"))
    if "-d" in words:
        return url, words[words.index("-d") + 1].encode(), None
    header = next(word for word in words if word.startswith("Inference-Header-Content-Length"))
    return url, done.stdout, int(header.rpartition(" ")[2])


@settings(max_examples=100)
@given(inputs=INPUTS, batch=st.sampled_from([0, 4]))
def test_a_made_up_request_fits_the_model_and_so_does_each_json_form(
    inputs: list[tuple[DataType, tuple[int, ...]]], batch: int
) -> None:
    config = model(*inputs, batch=batch)
    request = example_request(config)

    fits(config, dict(request.inputs))
    plain, full = request.generate_body(), request.infer_body()
    if plain is not None:
        same(decode_generate(config, "", json.dumps(plain).encode(), LIMIT).request.inputs, request)
    if full is not None:
        same(decoded(config, json.dumps(full).encode()), request)
    else:
        assert {DataType.FP16, DataType.BF16} & {kind for kind, _ in inputs}


def test_another_size_is_that_of_all_dimensions_whose_size_is_guessed() -> None:
    config = model(
        *((DataType.FP32, (-1, -1, -1, -1)), (DataType.INT64, (-1, -1)), (DataType.FP32, (-1, -1))),
        *((DataType.FP32, (2, -1, 64)), (DataType.FP32, (-1,)), (DataType.BYTES, (-1, -1))),
    )

    shapes = [tensor.shape for tensor in example_inputs(config, 48).values()]

    assert shapes == [(1, 3, 48, 48), (1, 48), (1, 48), (2, 1, 64), (48,), (1, 1)]


def same(tensors: dict[str, Tensor], request: ExampleRequest) -> None:
    assert tensors.keys() == request.inputs.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == request.inputs[name].shape
        np.testing.assert_array_equal(tensor.array, request.inputs[name].array)


@settings(max_examples=60)
@given(inputs=INPUTS, batch=st.sampled_from([0, 4]))
def test_the_python_program_sends_the_made_up_tensors(
    inputs: list[tuple[DataType, tuple[int, ...]]], batch: int
) -> None:
    config = model(*inputs, batch=batch)
    request = example_request(config)
    sent = run_python(request)

    same(make_tensors(config.name, sent, metadata(config)), request)


def metadata(config: ModelConfig) -> ModelMetadata:
    lead = (-1,) if config.max_batch_size else ()
    inputs = tuple(TensorMetadata(i.name, i.data_type or DataType.FP32, (*lead, *i.dims)) for i in config.input)
    return ModelMetadata(config.name, ("1",), "", inputs, ())


def run_python(request: ExampleRequest) -> dict[str, Any]:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Client:
        def __init__(self, url: str) -> None:
            self.url = url

        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def infer(self, model_name: str, inputs: dict[str, Any]) -> dict[str, str]:
            calls.append((model_name, inputs))
            return {"y": "answer"}

        def stream_infer(self, model_name: str, inputs: dict[str, Any]) -> list[dict[str, str]]:
            return [self.infer(model_name, inputs)] if self.url.startswith("grpc://") else []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charonia.client, "Client", Client)
        exec(compile(request.python(), "example", "exec"), {})
    ((name, inputs),) = calls
    assert name == request.config.name
    return inputs


def test_curl_sends_named_plain_values_where_the_shapes_follow_from_them() -> None:
    config = model((DataType.BYTES, (1,)), (DataType.INT32, (-1,)), batch=4)

    url, body, _ = body_of(example_request(config).curl())

    assert url == "http://localhost:8000/v2/models/my%20model/generate"
    assert json.loads(body) == {"in put0": "hello", "in put1": [1] * 8}


@pytest.mark.parametrize("datatype", [DataType.FP16, DataType.FP32, DataType.BF16, DataType.BYTES, DataType.INT64])
def test_curl_sends_a_long_input_as_zeros_beside_short_ones_in_json(datatype: DataType) -> None:
    config = model((datatype, (3, 64)), (DataType.FP32, (1,)), batch=4)
    request = example_request(config)

    url, body, length = body_of(request.curl())

    assert url.endswith("/infer")
    tensors = decoded(config, body, length)
    fits(config, tensors)
    assert not tensors["in put0"].array.any()  # zeros, or empty strings
    assert tensors["in put1"].array.tolist() == [[0.5]]


def test_shapes_that_plain_values_do_not_tell_are_written_out() -> None:
    config = model((DataType.INT64, (2, -1, 3)))
    request = ExampleRequest(config, {"in put0": Tensor("in put0", DataType.INT64, np.ones((2, 2, 3), "<i8"))})
    assert request.generate_body() is not None

    request = ExampleRequest(
        model((DataType.INT64, (-1, -1))), {"in put0": Tensor("in put0", DataType.INT64, np.ones((2, 2), "<i8"))}
    )
    url, body, _ = body_of(request.curl())

    assert url.endswith("/infer")
    assert json.loads(body)["inputs"][0]["shape"] == [2, 2]


@pytest.mark.parametrize("datatype", [DataType.FP16, DataType.BF16])
def test_the_hint_for_a_body_advises_no_json_that_cannot_carry_the_input(datatype: DataType) -> None:
    hint = body_hint(model((DataType.FP32, (4,)), (datatype, (4,))))

    assert hint.startswith("send the elements of in put1 in binary form")
    assert '"data"' not in hint


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        (
            model((DataType.INT32, (2,))),
            'a body for this model: {"inputs":[{"name":"in put0","shape":[2],"datatype":"INT32","data":[1,1]}]}',
        ),
        (
            model((DataType.INT32, (HINT_ELEMENTS_MAX + 1,)), (DataType.BYTES, (-1,)), batch=4),
            'a body is {"inputs": [{"name": NAME, "datatype": TYPE, "shape": SHAPE, "data": ELEMENTS}]}; the inputs of '
            f"this model are in put0 INT32 [-1, {HINT_ELEMENTS_MAX + 1}], in put1 BYTES [-1, -1]",
        ),
    ],
)
def test_the_hint_for_a_body_is_a_body_or_the_inputs_of_a_long_one(config: ModelConfig, hint: str) -> None:
    assert body_hint(config) == hint


def test_a_body_of_as_many_elements_as_a_hint_may_have_is_one() -> None:
    assert body_hint(model((DataType.INT32, (HINT_ELEMENTS_MAX,)))).startswith("a body for this model")


def test_a_text_that_is_not_the_json_of_its_input_is_sent_as_a_tensor() -> None:
    schema = {"inputs": {"in put0": {"type": "string", "contentSchema": {}}}, "outputs": {}}
    config = replace(model((DataType.BYTES, (1,))), parameters={JSON_SCHEMA: json.dumps(schema)})
    request = example_request(config)

    assert request.generate_body() is None
    url, body, length = body_of(request.curl())
    assert url.endswith("/infer")
    assert decoded(config, body, length)["in put0"].array.tolist() == [b"hello"]


def test_a_key_is_in_every_form_of_the_request() -> None:
    request = replace(example_request(model((DataType.FP32, (2,)))), has_key=True)

    assert ' -H "Authorization: Bearer $KEY" -d ' in request.curl()
    assert request.infer_command().endswith(' -H "Authorization: Bearer $KEY"')
    assert request.python().splitlines()[:4] == ["import os", "", "from charonia.client import Client, WireOptions", ""]
    assert request.python().splitlines()[-4:-2] == [
        """options = WireOptions(headers=[("Authorization", f"Bearer {os.environ['KEY']}")])""",
        'with Client("localhost:8000", options=options) as client:',
    ]


def test_curl_sends_a_file_that_is_the_only_input() -> None:
    picture, other = {"in put0": "a b.png"}, {"in put1": "c.png"}
    request = replace(example_request(model((DataType.BYTES, (1,)))), files=picture)
    pair = example_request(model((DataType.BYTES, (1,)), (DataType.BYTES, (1,))))

    assert request.curl() == (
        "curl http://localhost:8000/v2/models/my%20model/infer -H 'Inference-Header-Content-Length: 0' "
        "--data-binary '@a b.png' --output response.bin"
    )
    assert replace(request, parameters={"top_k": 3}).curl() == ""
    assert replace(pair, files=picture).curl() == replace(pair, files=picture | other).curl() == ""
    assert replace(example_request(model((DataType.FP32, (1,)))), files=picture).curl() == ""
    assert replace(example_request(model((DataType.BYTES, (1,)), decoupled=True)), files=picture).curl() == ""


@pytest.mark.parametrize(("elements", "filled"), [([b"a"], True), ([b"a\0", b"a"], False)])
def test_long_texts_are_filled_where_they_are_equal(elements: list[bytes], filled: bool) -> None:
    array = bytes_array("x", [300, len(elements)], elements * 300)
    request = replace(
        example_request(model((DataType.BYTES, (300, -1)))), inputs={"x": Tensor("x", DataType.BYTES, array)}
    )

    assert ("np.full(" in request.python()) is filled


def test_outputs_that_json_cannot_carry_are_asked_for_in_binary_form() -> None:
    config = ModelConfig(
        name="m",
        input=(ModelInput("x", DataType.FP32, dims=(1,)),),
        output=(ModelOutput("y", DataType.FP16, dims=(1,)),),
    )

    curl = example_request(config).curl()

    assert curl.endswith(" --output response.bin")
    assert json.loads(shlex.split(curl)[3])["parameters"] == {"binary_data_output": True}


def test_a_model_with_any_number_of_responses_is_asked_for_a_stream() -> None:
    request = example_request(model((DataType.BYTES, (1,)), decoupled=True))

    assert request.curl() == (
        """curl -N http://localhost:8000/v2/models/my%20model/generate_stream -d '{"in put0":"hello"}'"""
    )
    assert run_python(request) == {"in put0": ["hello"]}
    assert request.infer_command() == "charonia infer 'my model' -i 'in put0=hello' --stream"
    assert example_request(model((DataType.FP16, (1,)), decoupled=True)).curl() == ""
    assert 'Client("grpc://host:9001")' in example_request(request.config, url="http://host:9000").python()


def test_the_command_names_short_inputs_only_and_a_server_that_is_not_the_default() -> None:
    config = model((DataType.FP32, (ELEMENTS_MAX + 1,)), (DataType.INT32, (2,)))

    assert example_request(config).infer_command() == "charonia infer 'my model' -i 'in put1=[1,1]'"
    assert example_request(config, url="localhost:9000", version="2").infer_command() == (
        "charonia infer 'my model' -u localhost:9000 --model-version 2 -i 'in put1=[1,1]'"
    )


@pytest.mark.parametrize(
    ("dims", "datatype", "batched", "expected"),
    [
        ((-1, 3, -1, -1), DataType.FP32, False, (1, 3, 224, 224)),
        ((-1, -1, 3), DataType.UINT8, True, (224, 224, 3)),
        ((-1, -1, -1), DataType.FP32, True, (3, 224, 224)),
        ((-1, -1), DataType.INT64, False, (1, 8)),
        ((-1,), DataType.INT64, True, (8,)),
        ((-1,), DataType.INT64, False, (8,)),
        ((-1, -1), DataType.FP32, False, (1, 512)),
        ((2, -1, 128), DataType.FP32, False, (2, 1, 128)),
        ((-1, -1, 80), DataType.FP32, False, (1, 8, 80)),
        ((-1, -1), DataType.BYTES, False, (1, 1)),
        ((), DataType.INT64, False, ()),
    ],
)
def test_variable_dimensions_get_the_usual_sizes(
    dims: tuple[int, ...], datatype: DataType, batched: bool, expected: tuple[int, ...]
) -> None:
    assert example_dims(dims, datatype, batched=batched) == expected


@pytest.mark.parametrize(
    ("dims", "takes"),
    [
        ((-1, 3, -1, -1), True),
        ((224, 224, 3), True),
        ((1, 28, 28), True),
        ((1, 1, 128), False),  # the state of a recurrent network
        ((-1, 80, 3000), False),
    ],
)
def test_a_picture_has_channels_and_sides(dims: tuple[int, ...], takes: bool) -> None:
    config = model((DataType.FP32, dims))

    assert takes_picture(config, config.input[0]) is takes


@pytest.mark.parametrize(
    ("name", "datatype", "value"),
    [
        ("input_ids", DataType.INT64, 1),
        ("attention_mask", DataType.INT64, 1),
        ("token_type_ids", DataType.INT64, 0),
        ("sr", DataType.INT64, 16000),
        ("state", DataType.FP32, 0),
        ("text", DataType.BYTES, b"hello"),
        ("flag", DataType.BOOL, True),
    ],
)
def test_values_suit_the_names_of_inputs(name: str, datatype: DataType, value: object) -> None:
    config = ModelConfig(name="m", input=(ModelInput(name, datatype, dims=(1,)),))

    assert example_inputs(config)[name].array.tolist() == [value]


def test_the_first_warm_up_sample_gives_the_shape() -> None:
    config = ModelConfig(
        name="m",
        max_batch_size=2,
        input=(ModelInput("x", DataType.FP32, dims=(-1,)),),
        model_warmup=tuple(
            ModelWarmup("w", 1, {"x": WarmupInput(DataType.FP32, (size,), zero_data=True)}) for size in (77, 78)
        ),
    )

    assert example_inputs(config)["x"].shape == (1, 77)


def test_the_model_parameter_gives_values_also_of_an_optional_input() -> None:
    config = ModelConfig(
        name="m",
        input=(
            ModelInput("x", DataType.FP32, dims=(2,)),
            ModelInput("y", DataType.BYTES, dims=(1,), optional=True),
            ModelInput("z", DataType.BYTES, dims=(1,), optional=True),
        ),
        parameters={"EXAMPLE": '{"x": [3, 4], "y": "a"}'},
    )

    made = example_inputs(config)

    assert {name: tensor.array.tolist() for name, tensor in made.items()} == {"x": [3, 4], "y": [b"a"]}


@pytest.mark.parametrize("text", ["no JSON", '{"x": [1]}', "[]"])
def test_a_model_parameter_that_does_not_fit_is_as_if_it_were_not_there(text: str) -> None:
    config = ModelConfig(name="m", input=(ModelInput("x", DataType.FP32, dims=(2,)),), parameters={"EXAMPLE": text})

    assert example_inputs(config)["x"].array.tolist() == [0.5, 0.5]
