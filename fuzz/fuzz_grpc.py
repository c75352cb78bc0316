"""Whatever bytes arrive, whole or split, nothing but a clean answer or a clean close comes of them.

A seeded mutation fuzzer of the gRPC side, in two parts:

- messages: a mutated ModelInferRequest is either a request or one of the two kinds of error, cutting its tensors out
  agrees with the parser, and the reader of a call gives the same messages however the bytes are split;
- connections: the bytes of a client's session are mutated and fed whole or split. No exception leaves the connection,
  no fault of the server is logged, what is written consists of whole HTTP/2 frames, and once the client has gone
  nothing is left: no call, and no request that is neither answered nor cancelled.
"""

import asyncio
import random
from contextlib import suppress

import ngh2
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_memory import MemoryTransport, frame, request_headers

from charonia.core.errors import ServingError
from charonia.schema.pool import message_class
from charonia.server.grpc.frontend import GrpcFrontend, GrpcLimits
from charonia.wire.grpc_framing import MessageReader
from charonia.wire.grpc_infer import decode_infer, split_raw_inputs
from charonia.wire.grpc_status import RpcError

MUTATIONS_MAX = 4
PIECE_BYTES_MAX = 200
MESSAGE_BYTES_MAX = 10_000
LIMITS = GrpcLimits(message_bytes_max=MESSAGE_BYTES_MAX, streams_max=8, resets_burst=8)

METHODS = (
    "ModelInfer",
    "ModelInfer",
    "ModelStreamInfer",
    "ServerLive",
    "ModelConfig",
    "RepositoryModelLoad",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/no/method",
)
HTTP1 = b"HTTP/1.1 505 "


def infer_message(rng: random.Random) -> bytes:
    """Return a ModelInferRequest with some of everything."""
    message = message_class("inference.ModelInferRequest")(model_name="identity", id=str(rng.randrange(100)))
    for number in range(rng.randrange(1, 3)):
        datatype, element = rng.choice([("FP32", bytes(4)), ("INT8", bytes(1)), ("BYTES", b"\2\0\0\0ab")])
        count = rng.choice([0, 1, 4])
        item = message.inputs.add(name=f"INPUT{number}", datatype=datatype, shape=[1, count])  # type: ignore[attr-defined]  # a generated class
        if rng.random() < 0.1:
            item.contents.int_contents.extend([1, 2])
        else:
            message.raw_input_contents.append(element * count)  # type: ignore[attr-defined]  # as above
    for key in rng.sample(["sequence_id", "priority", "timeout", "own", "triton_x"], rng.choice([0, 0, 1, 2])):
        message.parameters[key].int64_param = rng.randrange(-1, 50)  # type: ignore[attr-defined]  # as above
    return message.SerializeToString()


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with a few of them changed, removed, added or repeated."""
    changed = bytearray(data)
    for _ in range(rng.choice([0, 0, 1, 1, 2, MUTATIONS_MAX])):
        position = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 if position < len(changed):
                changed[position] = rng.randrange(256)
            case 1 if position < len(changed):
                changed[position] ^= 1 << rng.randrange(8)
            case 2:
                del changed[position : position + rng.randrange(1, 20)]
            case 3:
                changed[position:position] = rng.randbytes(rng.randrange(1, 20))
            case _:
                start = rng.randrange(len(changed) + 1)
                changed[position:position] = changed[start : start + rng.randrange(1, 60)]
    return bytes(changed)


def pieces(data: bytes, rng: random.Random) -> list[bytes]:
    """Return the bytes whole, one by one, or in pieces of any size."""
    if rng.random() < 0.3:
        return [data]
    found = []
    size_max = rng.choice([1, 10, PIECE_BYTES_MAX])
    position = 0
    while position < len(data):
        size = rng.randint(1, size_max)
        found.append(data[position : position + size])
        position += size
    return found


def check_message(rng: random.Random) -> None:
    """Decode one mutated message in every way."""
    data = mutated(infer_message(rng), rng)
    with suppress(ServingError, RpcError):  # a clean refusal
        decode_infer(data)
    rest, raw = split_raw_inputs(data)
    if raw is not None:
        whole, without = _parsed(data), _parsed(bytes(rest))
        assert (whole is None) == (without is None)
        if whole is not None:
            assert list(whole.raw_input_contents) == [bytes(part) for part in raw]  # type: ignore[attr-defined]  # a generated class
    body = mutated(frame(data) + frame(b"", rng.randrange(3)), rng)
    assert _read(pieces(body, rng)) == _read([body])


def _parsed(data: bytes) -> object | None:
    try:
        return message_class("inference.ModelInferRequest").FromString(data)
    except Exception:
        return None


def _read(parts: list[bytes]) -> tuple[list[bytes], int | None]:
    reader = MessageReader(b"gzip", MESSAGE_BYTES_MAX)
    messages: list[bytes] = []
    try:
        for part in parts:
            reader.feed(part)
            while (message := reader.next_message()) is not None:
                messages.append(bytes(message))
    except RpcError as error:
        return messages, error.status
    return messages, None


def session(rng: random.Random) -> bytes:
    """Return what a client sends on a connection with some calls."""
    client = ngh2.Connection(ngh2.Role.CLIENT)
    client.initiate_connection()
    for _ in range(rng.randrange(1, 5)):
        method = rng.choice(METHODS)
        more = [(b"grpc-timeout", b"1S")] if rng.random() < 0.2 else []
        stream_id = client.send_request(request_headers(method, *more))
        for _ in range(rng.choice([0, 1, 1, 1, 1, 3])):
            client.send_data(
                stream_id, frame(mutated(infer_message(rng), rng) if rng.random() < 0.3 else infer_message(rng))
            )
        match rng.randrange(10):
            case 0:
                client.reset_stream(stream_id)
            case 1:
                client.send_trailers(stream_id, [(b"x", b"y")])
            case 2:
                client.ping()
            case _:
                client.end_stream(stream_id)
    return client.data_to_send()


async def check_connection(rng: random.Random) -> None:
    """Feed one mutated session, then let the client vanish."""
    engine = FakeEngine()
    engine.hold = rng.random() < 0.5
    frontend = GrpcFrontend(engine, LIMITS)
    protocol = frontend.connect()
    transport = MemoryTransport(protocol)
    protocol.connection_made(transport)
    for piece in pieces(mutated(session(rng), rng), rng):
        if transport.is_closed:
            break
        protocol.data_received(piece)
        if engine.tickets and rng.random() < 0.1:
            engine.release(rng.randrange(len(engine.tickets)))
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert _is_frames(transport.take())
    transport.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert repr(protocol) == "<GrpcConnection closing calls=0 deferred=0>"
    assert all(ticket.finished for ticket in engine.tickets)
    await frontend.close()


def _is_frames(data: bytes) -> bool:
    """Return whether the bytes are whole HTTP/2 frames, or the one answer to HTTP/1."""
    if data.startswith(HTTP1):
        return True
    position = 0
    while position < len(data):
        position += 9 + int.from_bytes(data[position : position + 3], "big")
    return position == len(data)


async def check(rng: random.Random) -> None:
    """Check a message and a connection."""
    check_message(rng)
    await check_connection(rng)
