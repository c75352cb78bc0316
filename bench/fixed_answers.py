"""A server without a model: the same response to every inference, over HTTP and gRPC, in one thread on uvloop.

python -m bench.compare charonia:identity fixed:identity --client wrk --concurrency 16
python -m bench.compare charonia:mlp fixed:mlp --protocol http --concurrency 1 --flag-b=--after-us=40

Its CPU time is the least that a server on uvloop, and for gRPC on ngh2, can take: it reads no request that equals the
previous one. With `--after-us`, it responds so long after the arrival and polls in between, so a measured latency minus
that time is the share of the client and the system. It implements only what perf_analyzer, wrk and h2load need.
"""

import argparse
import asyncio
import json
import struct
import time
from collections.abc import Callable
from typing import Any, cast

import ngh2
import uvloop
from google.protobuf import json_format

from bench.models import INPUT_SHAPES, MODEL, OUTPUT_SHAPES, is_batched
from bench.servers import HOST
from charonia.schema.pool import message_class

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

SERVICE = b"/inference.GRPCInferenceService/"
GRPC_HEAD = ((b":status", b"200"), (b"content-type", b"application/grpc"))
GRPC_TRAILERS = ((b"grpc-status", b"0"),)


class Answers:
    """The responses, for all connections.

    Args:
        model: One of `OUTPUT_SHAPES`.
        after_us: Time from the arrival of an inference to its response.

    Attributes:
        count: Number of inferences so far.
        infer: The response to an inference over HTTP.
        message: The same over gRPC, with its prefix.
    """

    def __init__(self, model: str, after_us: int) -> None:
        self.count = 0
        self.infer = response(*inference(model))
        self.message = inference_message(model)
        self._after_ns = 1000 * after_us
        self._documents = documents(model)

    def wait(self) -> None:
        """Count an inference that has arrived now, and wait until its response is due."""
        self.count += 1
        if self._after_ns:
            due = time.perf_counter_ns() + self._after_ns
            while time.perf_counter_ns() < due:
                pass

    def http(self, path: str, request: bytes) -> bytes:
        """Return the response to a request."""
        if path.endswith("/infer"):
            self.wait()
            return self.infer
        if path.endswith("/stats"):
            return response(json.dumps(statistics(self.count)).encode())
        if path.startswith("/v1"):
            return JSON + response(self._documents[path]).partition(b"\r\n")[2]
        return response(self._documents.get(path, b""))

    def grpc(self, method: str) -> bytes:
        """Return the message that answers a call other than an inference, with its prefix."""
        answer: Any = message_class(f"inference.{method}Response")()
        found: dict[str, object] = {"live": True} if method == "ServerLive" else {"ready": True}
        if method == "ModelStatistics":
            found = statistics(self.count)
        elif method in GRPC_PATHS:
            found = json.loads(self._documents[GRPC_PATHS[method]])
            found = {"config": found} if method == "ModelConfig" else found
        return prefixed(json_format.ParseDict(found, answer).SerializeToString())


class HttpConnection(asyncio.Protocol):
    """A client over HTTP, which waits for each response before it sends another request.

    Args:
        answer: Returns the response to a path and the whole request.
        same: Called, in place of that, for a request that equals the previous one.
    """

    def __init__(self, answer: Callable[[str, bytes], bytes], same: Answers | None = None) -> None:
        self._answer = answer
        self._same = same
        self._infer = b""
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, with the same methods

    def data_received(self, data: bytes) -> None:
        """Respond when the request is complete."""
        if self._same is not None and data == self._infer:
            self._same.wait()
            self._transport.write(self._same.infer)
            return
        self._received += data
        if path := complete(self._received):
            request = bytes(self._received)
            self._received.clear()
            if path.endswith("/infer"):
                self._infer = request
            self._transport.write(self._answer(path, request))


class GrpcConnection(asyncio.Protocol):
    """A client over gRPC."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._http2 = ngh2.Connection(ngh2.Role.SERVER)
        self._http2.initiate_connection()
        self._infer: object = None
        self._others: dict[int, str] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Respond to each call that is complete."""
        self._http2.receive_data(data)
        for event in self._http2.events():
            if type(event) is ngh2.DataReceived:
                if event.end_stream:
                    self._respond(event.stream_id)
            elif type(event) is ngh2.RequestReceived and event.headers != self._infer:
                method = dict(event.headers)[b":path"].removeprefix(SERVICE).decode()
                if method == "ModelInfer":
                    self._infer = event.headers
                else:
                    self._others[event.stream_id] = method
        self._transport.write(self._http2.data_to_send())
        self._http2.events()

    def _respond(self, stream_id: int) -> None:
        if self._others and stream_id in self._others:
            message = self._answers.grpc(self._others.pop(stream_id))
        else:
            self._answers.wait()
            message = self._answers.message
        self._http2.send_response(stream_id, GRPC_HEAD)
        self._http2.send_data(stream_id, message)
        self._http2.send_trailers(stream_id, GRPC_TRAILERS)


async def serve(given: argparse.Namespace) -> None:
    """Respond until ended."""
    loop = asyncio.get_running_loop()
    answers = Answers(given.model, given.after_us)
    await loop.create_server(lambda: GrpcConnection(answers), HOST, given.grpc_port)
    server = await loop.create_server(lambda: HttpConnection(answers.http, answers), HOST, given.http_port)

    def poll() -> None:
        loop.call_soon(poll)

    if given.after_us:
        poll()
    await server.serve_forever()


def complete(received: bytearray) -> str:
    """Return the path of the request, or "" where something is still to come. There is never a second one behind it."""
    head_end = received.find(b"\r\n\r\n")
    if head_end < 0:
        return ""
    head = received[:head_end].lower()
    field = head.find(b"\r\ncontent-length:")
    length = int(head[field + 17 :].split(b"\r\n", 1)[0]) if field >= 0 else 0
    return received.split(b" ", 2)[1].decode() if len(received) >= head_end + 4 + length else ""


def response(body: bytes, header_length: int | None = None) -> bytes:
    """Return a response with its head."""
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n"
    if header_length is not None:
        head += f"Inference-Header-Content-Length: {header_length}\r\nContent-Type: application/octet-stream\r\n"
    return head.encode() + b"\r\n" + body


def inference(model: str) -> tuple[bytes, int]:
    """Return the body of the answer to an inference, and the length of its JSON part."""
    (elements,) = OUTPUT_SHAPES[model]
    output = {
        "name": "OUTPUT0",
        "datatype": "FP32",
        "shape": [1] * is_batched(model) + [elements],
        "parameters": {"binary_data_size": 4 * elements},
    }
    text = json.dumps({"model_name": MODEL, "model_version": "1", "outputs": [output]}).encode()
    return text + struct.pack(f"<{elements}f", *range(elements)), len(text)


def prefixed(message: bytes) -> bytes:
    """Return a message of gRPC as in a body."""
    return struct.pack(">BI", 0, len(message)) + message


def inference_message(model: str) -> bytes:
    """Return the body of the answer to an inference over gRPC."""
    (elements,) = OUTPUT_SHAPES[model]
    answer: Any = message_class("inference.ModelInferResponse")(model_name=MODEL, model_version="1")
    answer.outputs.add(name="OUTPUT0", datatype="FP32", shape=[1] * is_batched(model) + [elements])
    answer.raw_output_contents.append(struct.pack(f"<{elements}f", *range(elements)))
    return prefixed(answer.SerializeToString())


GRPC_PATHS = {
    "ServerMetadata": "/v2",
    "ModelMetadata": f"/v2/models/{MODEL}",
    "ModelConfig": f"/v2/models/{MODEL}/config",
}
"""Path of the same document over HTTP, by method."""


def documents(model: str) -> dict[str, bytes]:
    """Return the responses to the clients' other requests, by path."""
    batch = [-1] * is_batched(model)
    tensors = {
        key: [{"name": name, "datatype": "FP32", "shape": batch + shape}]
        for key, name, shape in (
            ("inputs", "INPUT0", INPUT_SHAPES[model]),
            ("outputs", "OUTPUT0", OUTPUT_SHAPES[model]),
        )
    }
    config = {
        "name": MODEL,
        "platform": "",
        "backend": "fixed",
        "max_batch_size": 4 * is_batched(model),
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": INPUT_SHAPES[model]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": OUTPUT_SHAPES[model]}],
    }
    embedding = {"object": "embedding", "index": 0, "embedding": [0.0]}
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    found = {
        "/v1/embeddings": {"object": "list", "model": MODEL, "data": [embedding], "usage": usage},
        "/v2": {"name": "fixed", "version": "1", "extensions": ["binary_tensor_data", "statistics"]},
        f"/v2/models/{MODEL}": {"name": MODEL, "versions": ["1"], "platform": "fixed", **tensors},
        f"/v2/models/{MODEL}/config": config,
    }
    return {path: json.dumps(document).encode() for path, document in found.items()}


def statistics(count: int) -> dict[str, object]:
    """Return the statistics after so many inferences; no time is counted."""
    phases = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
    phase = {name: {"count": 0 if name == "fail" else count, "ns": 0} for name in (*phases, "cache_hit", "cache_miss")}
    entry = {"name": MODEL, "version": "1", "last_inference": 0, "inference_count": count, "execution_count": count}
    return {"model_stats": [{**entry, "inference_stats": phase, "batch_stats": []}]}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.fixed_answers", description=__doc__)
    parser.add_argument("--model", choices=sorted(OUTPUT_SHAPES), required=True)
    parser.add_argument("--http-port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, required=True)
    parser.add_argument("--after-us", type=int, default=0, help="time from arrival to answer, in us")
    return parser.parse_args()


if __name__ == "__main__":
    uvloop.run(serve(arguments()))
