"""Answers that are spoiled anywhere: an error that says so, and never anything else."""

import asyncio
from itertools import pairwise
from typing import Any, cast

import ngh2
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.client_servers import Answers, identity_request

from charonia.client.grpc_transport import GrpcClientConnection, GrpcTransport
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.wire.answer import Answer
from charonia.wire.endpoint import parse_url
from charonia.wire.grpc_codec import GrpcEncoder
from charonia.wire.grpc_codec import decode_response as decode_grpc
from charonia.wire.grpc_dialect import GrpcDialect
from charonia.wire.grpc_infer import encode_response as encode_grpc
from charonia.wire.http_codec import HttpEncoder
from charonia.wire.http_codec import decode_response as decode_http
from charonia.wire.http_dialect import HttpDialect
from charonia.wire.query import Dialect, Query
from charonia.wire.tensors import bytes_array
from charonia.wire.transport import WireOptions
from charonia.wire.v2_response import encode_response as encode_http

ENDPOINT = parse_url("grpc://localhost:1")
RESPONSE = InferResponse(
    "m",
    "1",
    "id",
    [
        identity_request().inputs["INPUT0"],
        Tensor("TEXT", DataType.BYTES, bytes_array("TEXT", (2,), [b"a", b"bcd"])),
    ],
    {"a": 1, "b": "x"},
)
JSON, BLOBS = encode_http(RESPONSE, True, {})
HTTP_BODY = b"".join([JSON, *BLOBS])
GRPC_BODY = b"".join(encode_grpc(RESPONSE, True))

cuts = st.tuples(st.integers(0, 400), st.integers(0, 8), st.binary(max_size=8))
values: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)


def spoiled(data: bytes, cut: tuple[int, int, bytes]) -> bytes:
    at, length, noise = cut
    at %= len(data) + 1
    return data[:at] + noise + data[at + length :]


@given(cuts, st.integers(-1, 500))
@settings(max_examples=200, deadline=None)
def test_a_spoiled_http_body_is_a_response_or_an_internal_error(cut: tuple[int, int, bytes], json_bytes: int) -> None:
    for size in (len(JSON), json_bytes):
        try:
            decode_http(spoiled(HTTP_BODY, cut), size)
        except ServingError as error:
            assert error.code is Code.INTERNAL  # noqa: PT017 - it need not be raised


@given(cuts)
@settings(max_examples=200, deadline=None)
def test_a_spoiled_grpc_message_is_a_response_or_an_internal_error(cut: tuple[int, int, bytes]) -> None:
    try:
        decode_grpc(spoiled(GRPC_BODY, cut))
    except ServingError as error:
        assert error.code is Code.INTERNAL  # noqa: PT017 - it need not be raised


def queries(dialect: Dialect[Any]) -> list[Query[Any, Any]]:
    return [
        dialect.server_metadata(),
        dialect.model_metadata("m", ""),
        dialect.model_config("m", ""),
        dialect.statistics("m", ""),
        dialect.index(False),
        dialect.regions(""),
        dialect.infer(identity_request()),
    ]


@pytest.mark.parametrize("number", range(7))
@given(document=values, key=st.sampled_from(["", "name", "inputs", "outputs", "model_stats", "versions", "extensions"]))
@settings(max_examples=60, deadline=None)
def test_json_of_any_kind_is_an_answer_or_an_internal_error(number: int, document: Any, key: str) -> None:
    query = queries(HttpDialect(HttpEncoder(ENDPOINT, WireOptions())))[number]
    answer = Answer(0)
    try:
        answer.body = orjson.dumps({"name": "m", key: document} if key else [document])
    except TypeError:  # numbers of more than 64 bits
        return

    try:
        query.read(answer)
    except ServingError as error:
        assert error.code is Code.INTERNAL  # noqa: PT017 - it need not be raised


@pytest.mark.parametrize("number", range(7))
@given(data=st.binary(max_size=40))
@settings(max_examples=60, deadline=None)
def test_bytes_of_any_kind_are_an_answer_or_an_internal_error(number: int, data: bytes) -> None:
    query = queries(GrpcDialect(GrpcEncoder(ENDPOINT, WireOptions())))[number]
    answer = Answer(0)
    answer.body = data

    try:
        query.read(answer)
    except ServingError as error:
        assert error.code is Code.INTERNAL  # noqa: PT017 - it need not be raised


class SilentTransport(asyncio.Transport):
    """Takes what is written and loses the connection when it is told to."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.written = bytearray()
        self.is_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written += data

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.protocol.connection_lost(None)

    abort = close


def server_bytes(request: bytes, messages: int) -> bytes:
    http2 = ngh2.Connection(ngh2.Role.SERVER)
    http2.initiate_connection()
    http2.receive_data(request)
    http2.send_response(1, ((b":status", b"200"), (b"content-type", b"application/grpc")))
    for _ in range(messages):
        http2.send_data(1, b"\0\0\0\0\4abcd")
    http2.send_trailers(1, ((b"grpc-status", b"0"),))
    return bytes(http2.data_to_send())


@given(cuts, st.integers(0, 2), st.sets(st.integers(1, 200), max_size=4))
@settings(max_examples=200, deadline=None)
def test_spoiled_http2_ends_every_call_exactly_once(
    cut: tuple[int, int, bytes], messages: int, splits: set[int]
) -> None:
    async def scenario() -> None:
        owner = GrpcTransport(ENDPOINT, WireOptions(keepalive_time_s=0))  # there is no socket to watch
        connection = GrpcClientConnection(owner)
        transport = SilentTransport(connection)
        connection.connection_made(transport)
        owner._connection_made(connection)
        answers = Answers()
        owner.send(owner.prepare(identity_request()), answers.take)
        await asyncio.sleep(0)
        data = spoiled(server_bytes(bytes(transport.written), messages), cut)
        edges = [0, *sorted(split for split in splits if split < len(data)), len(data)]

        for start, end in pairwise(edges):
            if not transport.is_closed:
                connection.data_received(data[start:end])
        transport.close()
        await owner.close()
        await asyncio.sleep(0)

        assert len(answers.all) == 1
        assert answers.all[0].final

    asyncio.run(cast(Any, scenario()))
