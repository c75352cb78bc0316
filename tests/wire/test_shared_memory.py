"""Tensors in shared memory, in requests and responses of both protocols."""

import json
from base64 import b64encode
from typing import Any

import numpy as np
import pytest

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, not_found
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.schema.pool import message_class
from charonia.wire import grpc_infer, grpc_messages, shared_memory, v2_response
from charonia.wire.shared_memory import CudaRegion, RegionSpan, SystemRegion
from charonia.wire.v2_request import HttpInferCall, InferDecoder

X = np.arange(4, dtype=np.float32)
FIRST = RegionSpan("r", 0, 16)
SECOND = RegionSpan("r", 16, 16)


class FakePlace:
    def __init__(self, span: RegionSpan, memory: bytearray) -> None:
        self.span = span
        self._memory = memory

    def write(self, data: bytes | memoryview) -> None:
        self._memory[self.span.offset : self.span.offset + len(data)] = data


class FakeRegions:
    """One region, `r`, of 64 bytes that begins with 0, 1, 2, 3 as FP32."""

    def __init__(self) -> None:
        self.memory = bytearray(64)
        self.memory[:16] = X.tobytes()

    def view(self, span: RegionSpan) -> memoryview:
        if span.region != "r":
            raise not_found(f"Unable to find shared memory region: '{span.region}'")
        return memoryview(self.memory)[span.offset : span.offset + span.byte_size].toreadonly()

    def place(self, span: RegionSpan) -> FakePlace:
        self.view(span)
        return FakePlace(span, self.memory)


def parameters(span: RegionSpan, **more: object) -> dict[str, object]:
    return {
        "shared_memory_region": span.region,
        "shared_memory_offset": span.offset,
        "shared_memory_byte_size": span.byte_size,
        **more,
    }


def http_call(
    regions: FakeRegions | None,
    *outputs: object,
    decoder: InferDecoder | None = None,
    given: dict[str, object] | None = None,
) -> HttpInferCall:
    document = {
        "inputs": [{"name": "x", "shape": [4], "datatype": "FP32", "parameters": given or parameters(FIRST)}],
        "outputs": list(outputs),
    }
    return (decoder or InferDecoder(1024, regions)).decode("m", "", json.dumps(document).encode())


def grpc_message(*, given: dict[str, object] | None = None, output: dict[str, object] | None = None) -> Any:
    message: Any = message_class("inference.ModelInferRequest")(model_name="m")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[4])
    fill(tensor.parameters, parameters(FIRST) if given is None else given)
    if output is not None:
        fill(message.outputs.add(name="y").parameters, output)
    return message


def fill(target: Any, values: dict[str, object]) -> None:
    for key, value in values.items():
        setattr(target[key], "string_param" if isinstance(value, str) else "int64_param", value)


def test_an_input_is_a_read_only_view_of_its_region() -> None:
    regions = FakeRegions()
    for request in (
        http_call(regions).request,
        grpc_infer.decode_infer(grpc_message().SerializeToString(), regions).request,
    ):
        array = request.inputs["x"].array

        np.testing.assert_array_equal(array, X)
        assert np.shares_memory(array, np.frombuffer(regions.memory, np.uint8))
        assert not array.flags.writeable


def test_a_remembered_request_reads_what_is_registered_when_it_comes() -> None:
    regions = FakeRegions()
    decoder = InferDecoder(1024, regions)
    http_call(regions, decoder=decoder)

    regions.memory[:4] = np.float32(7).tobytes()

    assert http_call(regions, decoder=decoder).request.inputs["x"].array[0] == 7


def test_text_in_a_region_is_copied_before_it_is_read() -> None:
    regions = FakeRegions()
    regions.memory[:16] = b"\x03\0\0\0abc\x05\0\0\0hello"
    document = {"inputs": [{"name": "x", "shape": [2], "datatype": "BYTES", "parameters": parameters(FIRST)}]}

    tensor = InferDecoder(1024, regions).decode("m", "", json.dumps(document).encode()).request.inputs["x"]

    assert tensor.array.tolist() == [b"abc", b"hello"]


def test_an_output_is_written_to_its_place_and_answered_without_data() -> None:
    response = InferResponse("m", "1", "", [Tensor("y", DataType.FP32, X + 1)])
    over_http, over_grpc = FakeRegions(), FakeRegions()

    call = http_call(over_http, {"name": "y", "parameters": parameters(SECOND)})
    document, blobs = v2_response.encode_response(response, call.binary, call.forms, call.places)
    decoded = grpc_infer.decode_infer(grpc_message(output=parameters(SECOND)).SerializeToString(), over_grpc)
    message: Any = message_class("inference.ModelInferResponse").FromString(
        b"".join(grpc_infer.encode_response(response, places=decoded.places))
    )

    assert json.loads(document)["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [4]}]
    assert blobs == []
    assert list(message.raw_output_contents) == [b""]
    for regions in (over_http, over_grpc):
        np.testing.assert_array_equal(np.frombuffer(regions.memory, np.float32, 4, 16), X + 1)
        assert regions.memory[32:] == bytes(32)


def test_only_outputs_that_ask_for_it_go_to_shared_memory() -> None:
    regions = FakeRegions()
    call = http_call(regions, {"name": "y", "parameters": parameters(SECOND)}, {"name": "z"})
    response = InferResponse("m", "1", "", [Tensor("y", DataType.FP32, X), Tensor("z", DataType.FP32, X)])

    document, _ = v2_response.encode_response(response, call.binary, call.forms, call.places)

    assert [list(entry) for entry in json.loads(document)["outputs"]] == [
        ["name", "datatype", "shape"],
        ["name", "datatype", "shape", "data"],
    ]


def test_an_output_beyond_its_place_is_an_error_and_nothing_is_written() -> None:
    regions = FakeRegions()
    response = InferResponse("m", "1", "", [Tensor("y", DataType.FP32, X)])
    places = shared_memory.places({"y": RegionSpan("r", 16, 15)}, regions)

    for encode in (
        lambda: v2_response.encode_response(response, False, {}, places),
        lambda: grpc_infer.encode_response(response, places=places),
    ):
        with pytest.raises(ServingError, match=r"output 'y' \(15 bytes\) should be at least 16 bytes") as caught:
            encode()
        assert caught.value.code is Code.INTERNAL
    assert regions.memory[16:] == bytes(48)


@pytest.mark.parametrize(
    ("given", "code", "fragment"),
    [
        (parameters(RegionSpan("none", 0, 16)), Code.NOT_FOUND, "Unable to find shared memory region: 'none'"),
        (parameters(RegionSpan("r", 0, 15)), Code.INVALID_ARG, "input byte size mismatch for input 'x'"),
        (parameters(FIRST, shared_memory_byte_size=-1), Code.INVALID_ARG, "expected a number of bytes, got -1"),
        (parameters(FIRST, shared_memory_offset="0"), Code.INVALID_ARG, "expected a number of bytes"),
        (parameters(FIRST, shared_memory_region=3), Code.INVALID_ARG, "expected the name of a region"),
    ],
)
def test_bad_parameters_of_an_input_are_refused_over_both_protocols(
    given: dict[str, object], code: Code, fragment: str
) -> None:
    for decode in (
        lambda: http_call(FakeRegions(), given=given),
        lambda: grpc_infer.decode_infer(grpc_message(given=given).SerializeToString(), FakeRegions()),
    ):
        with pytest.raises(ServingError) as caught:
            decode()
        assert caught.value.code is code
        assert fragment in caught.value.message


def test_a_region_without_a_name_is_refused() -> None:
    for region in ("", 7, None):
        with pytest.raises(ServingError, match="expected the name of a region"):
            shared_memory.span("input 'x'", region, None, 1)


def test_offset_and_size_have_defaults() -> None:
    assert shared_memory.span("input 'x'", "r", None, None) == RegionSpan("r", 0, 0)


def test_a_value_without_a_kind_is_refused_over_grpc() -> None:
    message = grpc_message()
    message.inputs[0].parameters["shared_memory_region"].Clear()

    with pytest.raises(ServingError, match="expected the name of a region"):
        grpc_infer.decode_infer(message.SerializeToString(), FakeRegions())


def test_an_input_in_a_region_cannot_have_contents_too() -> None:
    message = grpc_message()
    message.inputs[0].contents.fp32_contents.extend(X.tolist())

    with pytest.raises(ServingError, match="contents field must not be specified"):
        grpc_infer.decode_infer(message.SerializeToString(), FakeRegions())


def test_an_output_is_not_classified_into_shared_memory() -> None:
    with pytest.raises(ServingError, match="can't set both 'shared_memory_region' and 'classification'"):
        http_call(FakeRegions(), {"name": "y", "parameters": parameters(SECOND, classification=1)})
    with pytest.raises(ServingError, match="can't set both 'shared_memory_region' and 'classification'"):
        grpc_infer.decode_infer(
            grpc_message(output=parameters(SECOND, classification=1)).SerializeToString(), FakeRegions()
        )


def test_outputs_of_a_stream_go_to_their_place_too() -> None:
    regions = FakeRegions()
    response = InferResponse("m", "1", "", [Tensor("y", DataType.FP32, X)])

    parts = grpc_infer.encode_stream_response(response, True, shared_memory.places({"y": SECOND}, regions))

    message: Any = message_class("inference.ModelStreamInferResponse").FromString(b"".join(parts))
    assert list(message.infer_response.raw_output_contents) == [b""]
    assert regions.memory[16:32] == X.tobytes()


# Registering.


def test_what_is_registered_is_read_over_http() -> None:
    handle = b64encode(b"h" * 64).decode()

    assert shared_memory.decode_system_register("r", b'{"key": "/k", "byte_size": 8}') == SystemRegion("r", "/k", 0, 8)
    assert shared_memory.decode_system_register("r", b'{"key": "k", "offset": 4, "byte_size": 8}').offset == 4
    assert shared_memory.decode_cuda_register(
        "r", json.dumps({"raw_handle": {"b64": handle}, "device_id": 1, "byte_size": 8}).encode()
    ) == CudaRegion("r", b"h" * 64, 1, 8)


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        (b"", "has no 'key' field"),
        (b"{}", "has no 'key' field"),
        (b'{"key": 5, "byte_size": 8}', "has no 'key' field"),
        (b'{"key": "k"}', "has no 'byte_size' field"),
        (b'{"key": "k", "byte_size": "8"}', "'byte_size' must be a non-negative integer, got a string"),
        (b'{"key": "k", "byte_size": 8, "offset": -1}', "'offset' must be a non-negative integer, got -1"),
        (b"[]", "expected an object"),
    ],
)
def test_a_body_that_registers_nothing_is_refused(body: bytes, fragment: str) -> None:
    with pytest.raises(ServingError) as caught:
        shared_memory.decode_system_register("r", body)

    assert caught.value.code is Code.INVALID_ARG
    assert fragment in caught.value.message


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        (b"", "has no 'raw_handle' field"),
        (b'{"raw_handle": "x"}', "has no 'raw_handle' field"),
        (b'{"raw_handle": {"b64": "%"}}', "'raw_handle' is not base64"),
        (b'{"raw_handle": {"b64": "aGg="}}', "has no 'device_id' field"),
    ],
)
def test_a_body_that_registers_no_memory_of_a_gpu_is_refused(body: bytes, fragment: str) -> None:
    with pytest.raises(ServingError) as caught:
        shared_memory.decode_cuda_register("r", body)

    assert fragment in caught.value.message


def test_regions_are_described() -> None:
    assert shared_memory.describe_system([SystemRegion("r", "/k", 4, 8)]) == [
        {"name": "r", "key": "/k", "offset": 4, "byte_size": 8}
    ]
    assert shared_memory.describe_cuda([CudaRegion("r", b"h", 1, 8)]) == [{"name": "r", "device_id": 1, "byte_size": 8}]


def test_regions_are_registered_and_described_over_grpc() -> None:
    register: Any = message_class("inference.SystemSharedMemoryRegisterRequest")(
        name="r", key="k", offset=4, byte_size=8
    )
    cuda: Any = message_class("inference.CudaSharedMemoryRegisterRequest")(
        name="r", raw_handle=b"h", device_id=1, byte_size=8
    )

    system_region = grpc_messages.system_region(register)
    cuda_region = grpc_messages.cuda_region(cuda)

    assert system_region == SystemRegion("r", "k", 4, 8)
    assert cuda_region == CudaRegion("r", b"h", 1, 8)
    for kind, described, expected in (
        ("System", shared_memory.describe_system([system_region]), {"key": "k", "offset": 4}),
        ("Cuda", shared_memory.describe_cuda([cuda_region]), {"device_id": 1}),
    ):
        name = f"inference.{kind}SharedMemoryStatusResponse"
        status: Any = grpc_messages.parsed(name, grpc_messages.encoded(name, {"regions": {"r": described[0]}}))
        shown = status.regions["r"]
        assert (shown.name, shown.byte_size, {key: getattr(shown, key) for key in expected}) == ("r", 8, expected)
