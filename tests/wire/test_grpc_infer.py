"""The codec against the stock client's own generated messages: same bytes out, same request in."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, invalid
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.wire import grpc_infer
from charonia.wire.grpc_framing import VIEW_ABOVE_BYTES
from charonia.wire.grpc_infer import (
    TOP_LEVEL_FIELDS_MAX,
    GrpcInferCall,
    decode_infer,
    decode_infer_identity,
    encode_response,
    encode_stream_error,
    encode_stream_response,
    split_raw_inputs,
)
from charonia.wire.grpc_status import RpcError, Status


def request_message(values: int = 4, **fields: Any) -> Any:
    message = service_pb2.ModelInferRequest(model_name="m", **fields)
    message.inputs.add(name="x", datatype="FP32", shape=[1, values])
    message.raw_input_contents.append(np.arange(values, dtype="<f4").tobytes())
    return message


def decoded(message: Any) -> InferRequest:
    return decode_infer(message.SerializeToString())[0]


def refused(message: Any) -> ServingError:
    with pytest.raises(ServingError) as caught:
        decode_infer(message.SerializeToString())
    return caught.value


def contents_message(datatype: str, field: str, values: Any, shape: list[int] | None = None) -> Any:
    message = service_pb2.ModelInferRequest(model_name="m")
    item = message.inputs.add(name="x", datatype=datatype, shape=shape if shape is not None else [len(values)])
    getattr(item.contents, field).extend(values)
    item.contents.SetInParent()
    return message


def seen(call: GrpcInferCall) -> object:
    """Return what a decoded message says, for comparison."""
    request = call.request
    inputs = [(t.name, t.datatype, t.array.dtype, t.shape, t.array.tobytes()) for t in request.inputs.values()]
    assert list(request.inputs) == [name for name, *_ in inputs]
    outputs = [(output.name, output.classification) for output in request.outputs]
    told = (request.model_name, request.model_version, request.id, outputs, request.parameters, request.flags)
    return inputs, told, request.priority, request.timeout_us, call.wants_empty_final, call.places


# Reading.


def test_a_request_is_read() -> None:
    message = request_message(model_version="3", id="a")
    message.outputs.add(name="y")
    message.outputs.add(name="z").parameters["classification"].int64_param = 2

    request = decoded(message)

    assert (request.model_name, request.model_version, request.id) == ("m", "3", "a")
    assert request.inputs["x"].datatype is DataType.FP32
    assert request.inputs["x"].array.tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert [(o.name, o.classification) for o in request.outputs] == [("y", 0), ("z", 2)]
    assert (request.parameters, request.flags, request.correlation_id, request.priority) == ({}, 0, 0, 0)


@pytest.mark.parametrize("values", [4, VIEW_ABOVE_BYTES])
def test_the_tensor_is_a_view_of_what_was_received(values: int) -> None:
    array = decoded(request_message(values)).inputs["x"].array

    assert not array.flags.owndata
    assert array.ravel()[3] == 3.0


def test_parameters_with_a_meaning_get_their_fields() -> None:
    message = request_message()
    message.parameters["sequence_id"].int64_param = 7
    message.parameters["sequence_start"].bool_param = True
    message.parameters["sequence_end"].bool_param = True
    message.parameters["priority"].uint64_param = 2
    message.parameters["timeout"].int64_param = 5000
    message.parameters["mine"].string_param = "s"
    message.parameters["rate"].double_param = 0.5

    request = decoded(message)

    assert (request.correlation_id, request.flags) == (7, SEQUENCE_START | SEQUENCE_END)
    assert (request.priority, request.timeout_us) == (2, 5000)
    assert request.parameters == {"mine": "s", "rate": 0.5}


def test_a_sequence_may_have_a_name_and_neither_start_nor_end() -> None:
    message = request_message()
    message.parameters["sequence_id"].string_param = "seq"
    message.parameters["sequence_start"].bool_param = False
    message.parameters["sequence_end"].bool_param = False

    assert (decoded(message).correlation_id, decoded(message).flags) == ("seq", 0)


def test_a_sequence_id_above_the_largest_signed_number_comes_as_a_negative_one() -> None:
    message = request_message()
    message.parameters["sequence_id"].int64_param = -5

    assert decoded(message).correlation_id == 2**64 - 5


def test_the_empty_final_response_is_asked_for_by_its_parameter() -> None:
    message = request_message()
    message.parameters["triton_enable_empty_final_response"].bool_param = True

    request, wants_empty_final, _ = decode_infer(message.SerializeToString())

    assert wants_empty_final
    assert request.parameters == {}


@pytest.mark.parametrize(
    ("key", "field", "value", "fragment"),
    [
        ("sequence_id", "double_param", 1.5, "'sequence_id': expected int or str, got float"),
        ("sequence_id", "bool_param", True, "expected int or str, got bool"),
        ("sequence_start", "int64_param", 1, "expected bool, got int"),
        ("priority", "int64_param", -1, "expected 0 or more, got -1"),
        ("priority", "string_param", "1", "expected int, got str"),
        ("timeout", "int64_param", -5, "expected 0 or more"),
        ("triton_enable_empty_final_response", "int64_param", 1, "expected bool"),
        ("triton_mine", "int64_param", 1, "reserved for Triton usage and should not be specified"),
    ],
)
def test_a_parameter_of_the_wrong_kind_is_refused(key: str, field: str, value: object, fragment: str) -> None:
    message = request_message()
    setattr(message.parameters[key], field, value)

    error = refused(message)

    assert error.code is Code.INVALID_ARG
    assert fragment in error.message


@pytest.mark.parametrize(("key", "fragment"), [("mine", "has no value"), ("priority", "expected int, got NoneType")])
def test_a_parameter_without_value_is_refused(key: str, fragment: str) -> None:
    message = request_message()
    message.parameters[key].SetInParent()

    assert fragment in refused(message).message


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-(2**15), 2**15 - 1]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 2**16 - 1]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1]),
        ("FP32", "fp32_contents", [-1.5, 2.0]),
        ("FP64", "fp64_contents", [0.1, -0.1]),
        ("BYTES", "bytes_contents", [b"", b"ab"]),
    ],
)
def test_typed_contents_are_read_for_every_datatype(datatype: str, field: str, values: list[object]) -> None:
    tensor = decoded(contents_message(datatype, field, values)).inputs["x"]

    assert tensor.array.dtype == tensor.datatype.numpy
    assert tensor.array.tolist() == values


def test_empty_contents_fit_an_empty_shape() -> None:
    assert decoded(contents_message("INT8", "int_contents", [], [0, 3])).inputs["x"].shape == (0, 3)


@pytest.mark.parametrize(
    ("message", "fragment"),
    [
        (contents_message("INT8", "int_contents", [128]), "INT8 holds -128 to 127"),
        (contents_message("UINT8", "uint_contents", [256]), "UINT8 holds 0 to 255"),
        (contents_message("INT16", "int_contents", [-(2**15) - 1]), "INT16 holds"),
        (contents_message("FP32", "fp64_contents", [1.0]), "are expected in fp32_contents, got fp64_contents"),
        (contents_message("FP32", "fp32_contents", [1.0], [2]), "input byte size mismatch for input 'x'"),
        (contents_message("BYTES", "bytes_contents", [b"a"], [2]), "expected 2 string elements"),
        (contents_message("FP16", "fp32_contents", [1.0]), "FP16 has no field in contents"),
        (contents_message("BF16", "fp32_contents", [1.0]), "BF16 has no field in contents"),
    ],
)
def test_contents_that_do_not_fit_are_refused(message: Any, fragment: str) -> None:
    assert fragment in refused(message).message


def test_contents_beside_raw_data_are_refused() -> None:
    message = request_message()
    message.inputs[0].contents.fp32_contents.append(1.0)

    assert "contents field must not be specified when using raw_input_contents for 'x'" in refused(message).message


def test_an_input_without_data_is_refused() -> None:
    message = request_message()
    message.inputs.add(name="y", datatype="FP32", shape=[1])
    alone = service_pb2.ModelInferRequest(model_name="m")
    alone.inputs.add(name="y", datatype="FP32", shape=[1])

    expected = "unable to find data for input tensor 'y' for model 'm' in request."
    assert refused(message).message == expected
    assert refused(alone).message == expected


def test_an_input_without_elements_needs_no_data() -> None:
    message = service_pb2.ModelInferRequest(model_name="m")
    message.inputs.add(name="y", datatype="FP32", shape=[0])

    assert decoded(message).inputs["y"].shape == (0,)


def test_more_raw_data_than_inputs_is_refused() -> None:
    message = request_message()
    message.raw_input_contents.append(b"")

    assert "unexpected additional input data for model 'm': 1 inputs" in refused(message).message


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"datatype": "FLOAT"}, "expected a datatype such as FP32 or BYTES, got 'FLOAT'"),
        ({"shape": [-1, 4]}, "expected dimensions of 0 or more, got [-1, 4]"),
        ({"shape": [2**62, 2**62]}, "input byte size mismatch for input 'x'"),
        ({"shape": [0, 2**62, 2**62]}, "byte size mismatch"),
    ],
)
def test_an_input_that_cannot_be_is_refused(change: dict[str, Any], fragment: str) -> None:
    message = request_message()
    del message.inputs[:]
    message.inputs.add(**{"name": "x", "datatype": "FP32", "shape": [1, 4], **change})

    error = refused(message)

    assert error.code is Code.INVALID_ARG
    assert fragment in error.message


def test_names_may_not_repeat() -> None:
    message = request_message()
    message.inputs.add(name="x", datatype="FP32", shape=[1])
    message.raw_input_contents.append(b"1234")
    outputs = request_message()
    outputs.outputs.add(name="y")
    outputs.outputs.add(name="y")

    assert refused(message).message == "input 'x' already exists in request"
    assert refused(outputs).message == "output 'y' already exists in request"


@pytest.mark.parametrize(("field", "value"), [("int64_param", 0), ("string_param", "1"), ("uint64_param", 1)])
def test_a_classification_is_a_positive_integer(field: str, value: object) -> None:
    message = request_message()
    setattr(message.outputs.add(name="y").parameters["classification"], field, value)

    assert "expected 'classification' as int64_param of 1 or more" in refused(message).message


def test_shared_memory_that_is_not_offered_is_refused() -> None:
    message = request_message()
    message.inputs[0].parameters["shared_memory_region"].string_param = "r"
    outputs = request_message()
    outputs.outputs.add(name="y").parameters["shared_memory_region"].string_param = "r"

    for error in (refused(message), refused(outputs)):
        assert error.code is Code.UNSUPPORTED
        assert "Client shared memory is disabled" in error.message


def test_parameters_without_a_meaning_here_are_passed_over() -> None:
    message = request_message()
    message.inputs[0].parameters["binary_data_size"].int64_param = 16
    message.outputs.add(name="y").parameters["binary_data"].bool_param = True

    assert decoded(message).outputs[0].classification == 0


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", b"\x3a" + b"\xff" * VIEW_ABOVE_BYTES, b"\x0a\x01\xff"])
def test_bytes_that_are_no_message_end_the_call(data: bytes) -> None:
    for decode in (decode_infer, decode_infer_identity):
        with pytest.raises(RpcError) as caught:
            decode(data)
        assert caught.value.status is Status.INTERNAL


def test_a_refused_request_can_still_be_told() -> None:
    request = decode_infer_identity(request_message(model_version="2", id="a").SerializeToString())

    assert (request.model_name, request.model_version, request.id, request.inputs) == ("m", "2", "a", {})


# Cutting tensors out.


@given(
    st.text(max_size=8),
    st.text(max_size=8),
    st.lists(st.binary(max_size=400), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3),
)
def test_cutting_tensors_out_loses_nothing(name: str, id: str, raw: list[bytes], parameters: dict[str, int]) -> None:
    message = service_pb2.ModelInferRequest(model_name=name, id=id, raw_input_contents=raw)
    for key, value in parameters.items():
        message.parameters[key].int64_param = value
    data = message.SerializeToString()

    rest, cut = split_raw_inputs(data)

    assert cut is not None
    assert list(map(bytes, cut)) == raw
    message.ClearField("raw_input_contents")
    assert service_pb2.ModelInferRequest.FromString(bytes(rest)) == message


@pytest.mark.parametrize("length", [b"\x01", b"\x81\0", b"\x81\x80\x80\x80\0"])
def test_a_length_has_at_most_five_bytes(length: bytes) -> None:
    assert split_raw_inputs(b"\x0a\1m\x3a" + length + b"a") == (b"\x0a\1m", [b"a"])
    assert split_raw_inputs(b"\x3a\x81\x80\x80\x80\x80\0a")[1] is None


@given(st.binary(max_size=64))
@settings(max_examples=300)
def test_where_bytes_can_be_cut_the_parser_agrees(data: bytes) -> None:
    rest, cut = split_raw_inputs(data)

    if cut is None:
        assert rest == data
    else:
        try:
            whole = service_pb2.ModelInferRequest.FromString(data)
        except Exception:
            with pytest.raises(Exception, match="parsing"):
                service_pb2.ModelInferRequest.FromString(bytes(rest))
        else:
            assert list(whole.raw_input_contents) == cut
            whole.ClearField("raw_input_contents")
            assert service_pb2.ModelInferRequest.FromString(bytes(rest)) == whole


@pytest.mark.parametrize(
    "data",
    [
        b"\x08\x01",
        b"\x3a\x05abcd",
        b"\x3a\xff\xff\xff\xff\xff\x01",
        b"\x3a",
        b"\x3a\x80",
        b"\x12\x00" * (TOP_LEVEL_FIELDS_MAX + 1),
    ],
    ids=["a number", "cut short", "too long a length", "no length", "half a length", "many fields"],
)
def test_what_is_not_plain_is_left_to_the_parser(data: bytes) -> None:
    assert split_raw_inputs(data) == (data, None)


# Writing.


def response(*outputs: Tensor, **fields: Any) -> InferResponse:
    return InferResponse("m", "1", fields.pop("id", ""), list(outputs), **fields)


def stock_response(*outputs: Tensor, **fields: Any) -> Any:
    message = service_pb2.ModelInferResponse(model_name="m", model_version="1", **fields)
    for tensor in outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype.wire, shape=tensor.shape)
        message.raw_output_contents.append(tensor.array.tobytes())
    return message


SMALL = Tensor("y", DataType.FP32, np.arange(6, dtype="<f4").reshape(2, 3))
EMPTY = Tensor("e", DataType.INT64, np.zeros((0, 2), "<i8"))
LARGE = Tensor("big", DataType.UINT8, np.zeros((3, VIEW_ABOVE_BYTES), "u1"))


@pytest.mark.parametrize(
    "outputs", [[], [SMALL], [SMALL, EMPTY], [LARGE], [LARGE, SMALL], [SMALL, LARGE, LARGE]], ids=lambda o: str(len(o))
)
@pytest.mark.parametrize("id", ["", "request-é", "x" * 300])
def test_a_response_has_the_bytes_that_protobuf_writes(outputs: list[Tensor], id: str) -> None:
    parts = encode_response(response(*outputs, id=id))

    assert b"".join(parts) == stock_response(*outputs, id=id).SerializeToString()


@pytest.mark.parametrize("final", [True, False])
def test_the_final_flag_is_a_parameter(final: bool) -> None:
    expected = stock_response(SMALL)
    expected.parameters["triton_final_response"].bool_param = final

    assert b"".join(encode_response(response(SMALL), final)) == expected.SerializeToString()


def test_parameters_that_are_equal_and_of_other_types_are_not_the_same() -> None:
    for value, field in ((True, "bool_param"), (1, "int64_param"), (True, "bool_param"), (2**64 - 1, "uint64_param")):
        data = b"".join(encode_response(response(parameters={"a": value})))
        message = service_pb2.ModelInferResponse.FromString(data)
        assert message.parameters["a"].WhichOneof("parameter_choice") == field


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=9),
        max_size=4,
    )
)
def test_response_parameters_keep_their_type(parameters: dict[str, bool | int | float | str]) -> None:
    data = b"".join(encode_response(response(parameters=parameters)))

    message = service_pb2.ModelInferResponse.FromString(data)
    values = {key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in message.parameters.items()}
    assert values == parameters
    assert {key: type(value) for key, value in values.items()} == {key: type(v) for key, v in parameters.items()}


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, [1], None, "\ud800"])
def test_a_response_parameter_of_another_kind_is_a_fault(value: Any) -> None:
    with pytest.raises(ServingError, match="response parameter 'p'") as caught:
        encode_response(response(parameters={"p": value}))

    assert caught.value.code is Code.INTERNAL


def test_large_tensors_are_not_copied() -> None:
    parts = encode_response(response(SMALL, LARGE))

    assert isinstance(parts[1], memoryview)
    assert np.shares_memory(np.frombuffer(parts[1], "u1"), LARGE.array)


@pytest.mark.parametrize("outputs", [[SMALL], [LARGE, SMALL]], ids=["small", "large"])
def test_a_stream_response_wraps_a_response(outputs: list[Tensor]) -> None:
    expected = service_pb2.ModelStreamInferResponse(infer_response=stock_response(*outputs, id="a"))
    expected.infer_response.parameters["triton_final_response"].bool_param = True

    assert b"".join(encode_stream_response(response(*outputs, id="a"), True)) == expected.SerializeToString()


def test_a_stream_error_says_which_request_it_is_for() -> None:
    request = InferRequest("m", {}, model_version="2", id="a")

    (data,) = encode_stream_error(invalid("wrong", hint="try"), request)

    message = service_pb2.ModelStreamInferResponse.FromString(bytes(data))
    assert message.error_message == "wrong (hint: try)"
    found = message.infer_response
    assert (found.id, found.model_name, found.model_version) == ("a", "m", request.model_version)
    assert message.infer_response.parameters["triton_final_response"].bool_param


# Messages of one form.

names = st.sampled_from(["x", "y", "a longer name of a tensor", "\x3a\x04abcd", ""])
messages = st.fixed_dictionaries(
    {
        "model": st.sampled_from(["m", "another model with a name longer than the key of the cache"]),
        "version": st.sampled_from(["", "3"]),
        "id": st.sampled_from(["", "", "", "r"]),
        "inputs": st.lists(
            st.tuples(names, st.sampled_from(["FP32", "INT32", "UINT8", "BYTES"]), st.integers(0, 40)),
            min_size=1,
            max_size=3,
            unique_by=lambda each: each[0],
        ),
        "outputs": st.lists(st.sampled_from(["p", "q"]), unique=True),
        "priority": st.sampled_from([0, 0, 0, 2]),
        "moves": st.integers(0, 4),
        "is_contents_first": st.sampled_from([False, False, True]),
        "is_empty_final": st.sampled_from([None, False, True]),
    }
)


def drawn_message(drawn: dict[str, Any], seed: int) -> bytes:
    message = service_pb2.ModelInferRequest(model_name=drawn["model"], model_version=drawn["version"], id=drawn["id"])
    random = np.random.default_rng(seed)
    for name, datatype, count in drawn["inputs"]:
        message.inputs.add(name=name, datatype=datatype, shape=[1, count])
        size = count * {"UINT8": 1}.get(datatype, 4)
        data = bytes(size) if datatype == "BYTES" else random.bytes(size)  # empty strings
        message.raw_input_contents.append(data)
    for name in drawn["outputs"]:
        message.outputs.add(name=name)
    if drawn["priority"]:
        message.parameters["priority"].uint64_param = drawn["priority"]
    if drawn["is_empty_final"] is not None:
        message.parameters[grpc_infer.EMPTY_FINAL].bool_param = drawn["is_empty_final"]
    if len(message.raw_input_contents) > 1:  # perhaps elements of one input are given to the next
        whole, count = b"".join(message.raw_input_contents), drawn["moves"] if seed == 2 else 0
        cut = max(0, len(message.raw_input_contents[0]) - count)
        rest = list(message.raw_input_contents[2:])
        end = len(whole) - sum(map(len, rest))
        del message.raw_input_contents[:]
        message.raw_input_contents.extend([whole[:cut], whole[cut:end], *rest])
    encoded: bytes = message.SerializeToString()
    if drawn["is_contents_first"]:
        head, raw = split_raw_inputs(encoded)
        assert raw is not None
        encoded = encoded[len(head) :] + bytes(head)
    return encoded


@given(messages, st.lists(st.integers(0, 3), min_size=2, max_size=5))
def test_a_message_of_a_form_that_was_seen_says_what_it_would_say_if_it_were_the_first(
    drawn: dict[str, Any], seeds: list[int]
) -> None:
    for seed in seeds:
        data = drawn_message(drawn, seed)
        outcomes: list[object] = []
        for forget in (False, True):
            if forget:
                grpc_infer._forms.clear()
            try:
                outcomes.append(seen(decode_infer(data)))
            except ServingError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("wants_empty_final", [False, True])
def test_the_parser_does_not_see_a_message_of_a_form_that_was_seen(
    monkeypatch: pytest.MonkeyPatch, *, wants_empty_final: bool
) -> None:
    first, second = request_message(), request_message()
    if wants_empty_final:  # as perf_analyzer does with every request
        for message in (first, second):
            message.parameters[grpc_infer.EMPTY_FINAL].bool_param = True
    second.raw_input_contents[0] = np.full(4, 7, "<f4").tobytes()
    decoded(first)
    monkeypatch.setattr(grpc_infer, "_parsed", None)
    call = decode_infer(second.SerializeToString())
    assert call.request.inputs["x"].array.tolist() == [[7, 7, 7, 7]]
    assert call.wants_empty_final == wants_empty_final


def test_forms_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_infer, "FORMS_MAX", 3)
    for values in range(1, 20):
        decoded(request_message(values))
        assert len(grpc_infer._forms) <= 3


@pytest.mark.parametrize("value", [1, 127, 128, 16_383, 16_384, 2**64 - 1])
def test_numbers_are_encoded_as_protobuf_does(value: int) -> None:
    message = service_pb2.InferParameter(uint64_param=value)

    assert grpc_infer.varint(value) == message.SerializeToString()[1:]
