"""Whatever bytes arrive, whole or split, nothing but a well-formed answer or a clean close comes of them.

A seeded mutation fuzzer of the HTTP side, in two parts:

- bodies: a mutated body of an inference request is either a request or a `ServingError`;
- connections: the bytes of a client's session are mutated and fed whole, byte by byte and in random pieces. No
  exception leaves the connection, no fault of the server is logged, what is written consists of whole HTTP/1.1
  responses, the same ones however the bytes are split, errors are JSON with a sentence, and once the client has gone
  nothing is in flight.
"""

import asyncio
import gzip
import json
import logging
import random
from contextlib import suppress

from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient, Response, request

from charonia.core.errors import ServingError
from charonia.server.http.frontend import HttpFrontend, HttpLimits
from charonia.wire.v2_request import InferDecoder

MUTATIONS_MAX = 4
PIECE_BYTES_MAX = 60
LIMITS = HttpLimits(
    body_bytes_max=4000,
    discard_bytes_max=8000,
    url_bytes_max=200,
    header_count_max=12,
    header_bytes_max=1000,
    chunk_count_max=5,
)
HANG_S = 15.0
"""Time after which a request that is still unanswered counts as hanging: threads decompress bodies."""

TOKENS = (
    *(b"\r\n", b"\r\n\r\n", b"\n", b" ", b":", b"\0", b"\xff", b"%", b"/", b"?"),
    *(b"{", b"}", b"[", b"]", b",", b'"', b"\\", b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"\\ud800"),
    *(b"-1", b"0", b"1", b"4", b"65", b"4294967296", b"18446744073709551616", b"9" * 60),
    *(
        b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Connection: close\r\n",
    ),
    *(b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"Accept-Encoding: deflate\r\n"),
    *(b"HTTP/1.0", b"GET ", b"HEAD ", b"CONNECT ", b"data", b"shape", b"parameters", b"BYTES", b"FP16", b"triton_"),
)


def infer_body(rng: random.Random) -> tuple[bytes, int | None]:
    """Return the body of a request with some of everything, and the size of its JSON where tensors follow."""
    inputs: list[dict[str, object]] = []
    tail = b""
    for number in range(rng.randrange(3)):
        datatype, element, value = rng.choice(
            [("FP32", bytes(4), 1.5), ("INT8", b"\1", 1), ("BOOL", b"\1", True), ("BYTES", b"\2\0\0\0ab", "ab")]
        )
        count = rng.choice([0, 1, 4, 300])
        tensor: dict[str, object] = {"name": f"INPUT{number}", "datatype": datatype, "shape": [1, count]}
        if rng.random() < 0.6:
            tensor["parameters"] = {"binary_data_size": len(element) * count}
            tail += element * count
        else:
            tensor["data"] = [value] * count
        inputs.append(tensor)
    document: dict[str, object] = {"inputs": inputs}
    if rng.random() < 0.5:
        document["id"] = "r"
    if rng.random() < 0.5:
        document["parameters"] = {"sequence_id": 1, "priority": 2, "binary_data_output": True, "k": 1.5}
    if rng.random() < 0.5:
        document["outputs"] = [{"name": "OUTPUT0", "parameters": {"binary_data": True, "classification": 2}}]
    text = json.dumps(document).encode()
    return text + tail, len(text) if tail or rng.random() < 0.3 else None


def infer_request(rng: random.Random) -> bytes:
    """Return an inference request, framed in one of the ways there are."""
    body, json_size = infer_body(rng)
    headers = {} if json_size is None else {"Inference-Header-Content-Length": str(json_size)}
    if rng.random() < 0.1:
        body = gzip.compress(body, mtime=0)
        headers["Content-Encoding"] = "gzip"
    if rng.random() < 0.2:
        headers["Accept-Encoding"] = "gzip"
    url = rng.choice(["/v2/models/identity/infer", "/v2/models/identity/versions/1/infer", "/v2/models/other/infer"])
    if rng.random() < 0.7:
        return request(url, body=body, headers=headers)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    half = len(body) // 2
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:half], body[half:]) if part)
    return f"POST {url} HTTP/1.1\r\nTransfer-Encoding: chunked\r\n{lines}\r\n".encode() + chunks + b"0\r\n\r\n"


def session(rng: random.Random) -> bytes:
    """Return what a client might send over one connection."""
    others = [
        request("/v2", method="GET"),
        request("/v2/health/live", method="GET", version="1.0", headers={"Connection": "keep-alive"}),
        request("/v2/models/identity/config", method="GET"),
        request("/v2/repository/index", body=b'{"ready": true}'),
        request("/v2/repository/models/a/load", body=b'{"parameters": {"config": "{}", "file:1/x": "YQ=="}}'),
        request("/nowhere", method="HEAD"),
    ]
    return b"".join(
        infer_request(rng) if rng.random() < 0.6 else rng.choice(others) for _ in range(rng.randrange(1, 4))
    )


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return the data with a few changes."""
    changed = bytearray(data)
    for _ in range(rng.randrange(MUTATIONS_MAX + 1)):
        start = rng.randrange(len(changed) + 1)
        end = min(len(changed), start + rng.randrange(20))
        match rng.randrange(6):
            case 0:
                changed[start:start] = rng.choice(TOKENS)
            case 1:
                changed[start:end] = rng.choice(TOKENS)
            case 2:
                del changed[start:end]
            case 3:
                changed[start:start] = changed[start:end]
            case 4:
                changed[start : start + 1] = bytes((rng.randrange(256),))
            case _:
                del changed[start:]
    return bytes(changed)


def check_body(rng: random.Random) -> None:
    """Decode a mutated body.

    Raises:
        Exception: Anything but a `ServingError` came of it.
    """
    body, json_size = infer_body(rng)
    decoder = InferDecoder(LIMITS.body_bytes_max)
    with suppress(ServingError):
        decoder.decode("m", "", mutated(rng, body), json_size)


async def check_connection(rng: random.Random) -> None:
    """Feed a mutated session whole and in pieces.

    Raises:
        AssertionError: The answers are malformed, differ, or something is left.
    """
    data = mutated(rng, session(rng))
    answers = [await answers_to(data, piece) for piece in (0, 1, rng.randrange(2, PIECE_BYTES_MAX))]
    for other in answers[1:]:
        assert essence(other) == essence(answers[0]), answers


def essence(responses: list[Response]) -> list[tuple[int, bytes]]:
    """Return what must not depend on how bytes are split.

    If a connection ends for several reasons, the first one decides. In a short read that begins within an earlier
    request, the limit of a header counts from the next read.
    """
    if responses and responses[-1].status >= 400 and responses[-1].headers.get("connection") == "close":
        responses = responses[:-1]
    return [(response.status, response.body) for response in responses]


async def answers_to(data: bytes, piece: int) -> list[Response]:
    """Return the responses to a session that is sent in pieces of this size, 0 for all at once."""
    engine = FakeEngine()
    client = MemoryClient(HttpFrontend(engine, LIMITS))
    client.send(data, piece)
    async with asyncio.timeout(HANG_S):
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0)
    for response in client.responses:
        if response.status >= 400 and response.body:
            assert json.loads(response.body)["error"], response
    client.leave()
    assert all(ticket.finished for ticket in engine.tickets)
    return client.responses


class FaultLog(logging.Handler):
    """Remembers what the server logs: mutated input must not look like a fault of the server's."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Remember a record."""
        self.records.append(self.format(record))


async def check(rng: random.Random) -> None:
    """Check a body and a connection."""
    check_body(rng)
    await check_connection(rng)
