"""What a client writes, the server reads, and the other way round: in both protocols, in every form."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, invalid
from charonia.core.request import SEQUENCE_END, SEQUENCE_START, InferRequest, RequestedOutput
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.wire import grpc_codec, grpc_infer, http_codec, v2_response
from charonia.wire.compression import decompress
from charonia.wire.endpoint import parse_url
from charonia.wire.grpc_framing import MessageReader
from charonia.wire.shared_memory import RegionSpan
from charonia.wire.tensors import bytes_array, encode_tensor
from charonia.wire.transport import RequestForm, SharedTensor, WireOptions
from charonia.wire.v2_data import NO_JSON_FORM
from charonia.wire.v2_request import InferDecoder

NAMES = ("x", "y", "a longer name")
IN_JSON = [each for each in DataType if each not in NO_JSON_FORM]


class Place:
    def __init__(self, span: RegionSpan) -> None:
        self.span = span
        self.written = b""

    def write(self, data: bytes | memoryview) -> None:
        self.written = bytes(data)


class Memory:
    """Shared memory with regions of any name, all of which have the same bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def view(self, span: RegionSpan) -> memoryview:
        return memoryview(self.data)[span.offset : span.offset + span.byte_size]

    def place(self, span: RegionSpan) -> Place:
        return Place(span)


@st.composite
def tensor_lists(draw: st.DrawFn, datatypes: Sequence[DataType]) -> list[Tensor]:
    tensors = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        datatype = draw(st.sampled_from(datatypes))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        count, factor = prod(shape), draw(st.integers(1, 3))
        if datatype is DataType.BYTES:
            tensors.append(
                Tensor(name, datatype, bytes_array(name, shape, [b"\xc3\xbc" * (n * factor % 4) for n in range(count)]))
            )
        else:
            tensors.append(Tensor(name, datatype, (np.arange(count) * factor).astype(datatype.numpy).reshape(shape)))
    return tensors


LIMITS = st.sampled_from([-(2**63), 2**63 - 1, 2**63, 2**64 - 1])
parameters = st.dictionaries(
    st.sampled_from(["k", "l"]),
    st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), LIMITS, st.floats(allow_nan=False, width=32), st.text()),
)


@st.composite
def requests(draw: st.DrawFn, datatypes: Sequence[DataType]) -> InferRequest:
    correlation_id = draw(st.one_of(st.just(0), st.just(7), st.just("s")))
    return InferRequest(
        "m",
        {tensor.name: tensor for tensor in draw(tensor_lists(datatypes))},
        model_version=draw(st.sampled_from(["", "3"])),
        id=draw(st.sampled_from(["", "i"])),
        outputs=tuple(
            RequestedOutput(name, draw(st.integers(0, 2)))
            for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
        ),
        parameters=draw(parameters),
        correlation_id=correlation_id,
        flags=draw(st.sampled_from([0, SEQUENCE_START, SEQUENCE_END, SEQUENCE_START | SEQUENCE_END]))
        if correlation_id
        else 0,
        priority=draw(st.integers(0, 2)),
        timeout_us=draw(st.integers(0, 2)),
    )


@st.composite
def shared_outputs(draw: st.DrawFn) -> dict[str, SharedTensor]:
    return {
        name: SharedTensor(f"region of {name}", draw(st.integers(1, 9)), draw(st.integers(0, 2)))
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    }


def seen(tensors: Mapping[str, Tensor]) -> list[object]:
    assert list(tensors) == [each.name for each in tensors.values()]
    return [(each.name, each.datatype, each.shape, bytes(encode_tensor(each))) for each in tensors.values()]


def facts(request: InferRequest) -> dict[str, object]:
    """Return everything that a client can say in a request."""
    return {
        "names": (request.model_name, request.model_version, request.id),
        "inputs": seen(request.inputs),
        "outputs": [(output.name, output.classification) for output in request.outputs],
        "parameters": {key: (type(value), value) for key, value in request.parameters.items()},
        "sequence": (request.correlation_id, request.flags),
        "queue": (request.priority, request.timeout_us),
    }


def expected(request: InferRequest, form: RequestForm) -> dict[str, object]:
    """Return what the server sees of a request: outputs in shared memory are requested, and have no classes."""
    shared = form.shared_outputs
    outputs = [(each.name, 0 if each.name in shared else each.classification) for each in request.outputs]
    names = {name for name, _ in outputs}
    return {**facts(request), "outputs": outputs + [(name, 0) for name in shared if name not in names]}


def in_memory(request: InferRequest) -> tuple[dict[str, SharedTensor], Memory]:
    """Return shared memory with the first input, and its location, if the input has elements."""
    first = next(iter(request.inputs.values()), None)
    data = b"" if first is None else bytes(encode_tensor(first))
    shared = {first.name: SharedTensor("r", len(data), 3)} if first is not None and data else {}
    return shared, Memory(b"123" + data + b"4")


def placed(places: Mapping[str, Any]) -> dict[str, SharedTensor]:
    return {
        name: SharedTensor(each.span.region, each.span.byte_size, each.span.offset) for name, each in places.items()
    }


@given(
    st.data(), st.booleans(), st.booleans(), st.booleans(), shared_outputs(), st.sampled_from(["", "gzip", "deflate"])
)
def test_a_request_over_http(
    data: st.DataObject, json_inputs: bool, json_outputs: bool, is_shared: bool, outputs: Any, coding: str
) -> None:
    request = data.draw(requests(IN_JSON if json_inputs else list(DataType)))
    shared, memory = in_memory(request) if is_shared else ({}, Memory(b""))
    form = RequestForm(json_inputs, json_outputs, shared_inputs=shared, shared_outputs=outputs)

    encoder = http_codec.HttpEncoder(parse_url("localhost:1"), WireOptions(request_compression=coding))
    prepared = encoder.infer(request, form)
    sent = b"".join(prepared.pieces)
    head, _, body = sent.partition(b"\r\n\r\n")
    fields = dict(line.split(": ") for line in head.decode().split("\r\n")[1:])
    assert (prepared.byte_size, int(fields["Content-Length"])) == (len(sent), len(body))
    assert fields.get("Content-Encoding", "") == coding
    whole = decompress(body, coding, 2**20) if coding else body
    size = fields.get("Inference-Header-Content-Length")
    call = InferDecoder(2**20, memory).decode("m", request.model_version, whole, None if size is None else int(size))

    assert facts(call.request) == expected(request, form)
    assert placed(call.places) == outputs
    wanted = [output.name for output in call.request.outputs if output.name not in outputs]
    is_binary = {name: call.forms.get(name, call.binary) for name in wanted}
    assert set(is_binary.values()) <= {not json_outputs}
    assert call.binary == (not call.request.outputs and not json_outputs)


@given(
    st.data(), st.booleans(), st.booleans(), st.booleans(), shared_outputs(), st.sampled_from(["", "gzip", "deflate"])
)
def test_a_request_over_grpc(
    data: st.DataObject, streaming: bool, empty_final: bool, is_shared: bool, outputs: Any, coding: str
) -> None:
    request = data.draw(requests(list(DataType)))
    shared, memory = in_memory(request) if is_shared else ({}, Memory(b""))
    form = RequestForm(streaming=streaming, empty_final=empty_final, shared_inputs=shared, shared_outputs=outputs)

    encoder = grpc_codec.GrpcEncoder(parse_url("localhost:1"), WireOptions(request_compression=coding))
    prepared = encoder.infer(request, form)
    reader = MessageReader(dict(prepared.headers).get(b"grpc-encoding", b"identity"), 2**20)
    reader.feed(b"".join(prepared.pieces))
    message = reader.next_message()
    assert message is not None
    call = grpc_infer.decode_infer(message, memory)

    method = b"ModelStreamInfer" if streaming else b"ModelInfer"
    assert dict(prepared.headers)[b":path"] == b"/inference.GRPCInferenceService/" + method
    assert prepared.is_stream == streaming
    assert facts(call.request) == expected(request, form)
    assert placed(call.places) == outputs
    assert call.wants_empty_final == (streaming and empty_final)


@given(requests(list(DataType)), st.sampled_from([9, "t"]), st.integers(0, 3))
def test_a_prepared_request_changes_in_its_sequence_only(
    request: InferRequest, correlation_id: int | str, flags: int
) -> None:
    start, end = bool(flags & SEQUENCE_START), bool(flags & SEQUENCE_END)
    before = facts(request)

    for encoder in (http_codec.HttpEncoder, grpc_codec.GrpcEncoder):
        prepared = encoder(parse_url("localhost:1"), WireOptions()).infer(request, RequestForm())
        part = {"sequence": (correlation_id, flags)}
        assert facts(received(prepared.with_sequence(correlation_id, start, end), request)) == {**before, **part}


def received(prepared: Any, request: InferRequest) -> InferRequest:
    sent = b"".join(prepared.pieces)
    if isinstance(prepared, grpc_codec.PreparedGrpc):
        return grpc_infer.decode_infer(sent[5:]).request
    head, _, body = sent.partition(b"\r\n\r\n")
    size = head.lower().partition(b"inference-header-content-length: ")[2].partition(b"\r\n")[0]
    return InferDecoder(2**20).decode("m", request.model_version, body, int(size) if size else None).request


responses = st.builds(
    InferResponse,
    st.just("m"),
    st.sampled_from(["", "1"]),
    st.sampled_from(["", "i"]),
    tensor_lists(IN_JSON),
    parameters,
)


def said(response: InferResponse) -> list[object]:
    return [
        response.model_name,
        response.model_version,
        response.id,
        seen({each.name: each for each in response.outputs}),
        {key: (type(value), value) for key, value in response.parameters.items()},
    ]


def without(response: InferResponse, places: Mapping[str, Place]) -> InferResponse:
    """Return a response without what is written to shared memory, having compared that."""
    for each in response.outputs:
        assert each.name not in places or places[each.name].written == encode_tensor(each)
    outputs = [each for each in response.outputs if each.name not in places]
    return InferResponse(response.model_name, response.model_version, response.id, outputs, response.parameters)


place_maps = st.lists(st.sampled_from(NAMES)).map(
    lambda names: {each: Place(RegionSpan("r", 0, 999)) for each in names}
)


@given(responses, st.booleans(), st.dictionaries(st.sampled_from(NAMES), st.booleans()), place_maps)
def test_a_response_over_http(
    response: InferResponse, binary: bool, forms: Mapping[str, bool], places: dict[str, Place]
) -> None:
    for _ in range(2):  # the second may be repeated from a cache
        text, blobs = v2_response.encode_response(response, binary, forms, places)
        decoded = http_codec.decode_response(b"".join((text, *blobs)), len(text) if blobs else -1)

        assert said(decoded) == said(without(response, places))
        in_body = [each for each in response.outputs if each.name not in places]
        assert list(map(bytes, blobs)) == [
            bytes(encode_tensor(each)) for each in in_body if forms.get(each.name, binary)
        ]


@given(responses, st.sampled_from([None, False, True]), place_maps)
def test_a_response_over_grpc(response: InferResponse, final: bool | None, places: dict[str, Place]) -> None:
    for empty in [each.name for each in response.outputs if not each.array.size]:
        places.pop(empty, None)  # a message has the same bytes for it in memory and outside
    said_final = {} if final is None else {"triton_final_response": final}
    message = b"".join(grpc_infer.encode_response(response, final, places))
    told = without(response, places)
    told.parameters = {**told.parameters, **said_final}

    assert said(grpc_codec.decode_response(message)) == said(told)

    message = b"".join(grpc_infer.encode_stream_response(response, bool(final), places))
    told.parameters = {**told.parameters, "triton_final_response": bool(final)}
    decoded = grpc_codec.decode_stream_response(message)
    assert isinstance(decoded, InferResponse)
    assert said(decoded) == said(told)
    assert grpc_codec.stream_error(message) == ""


def test_an_error_in_a_stream() -> None:
    message = grpc_infer.encode_stream_error(invalid("no", hint="try"), InferRequest("m", {}, id="i"))[0]

    error = grpc_codec.decode_stream_response(message)

    assert isinstance(error, ServingError)
    assert (error.code, error.message) == (Code.UNKNOWN, "no (hint: try)")
    assert grpc_codec.stream_error(message) == "no (hint: try)"
