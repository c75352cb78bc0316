"""A server without a model: the same response to every inference after a fixed time. One thread, HTTP only.

python -m bench.compare charonia:mlp fixed:mlp --protocol http --concurrency 1 --flag-b=--after-us=40

A measured latency minus that time is the share of the client and the system. It implements only what perf_analyzer and
wrk need, and polls all the time.
"""

import argparse
import json
import select
import socket
import struct
import time

from bench.models import INPUT_SHAPES, MODEL, OUTPUT_SHAPES, is_batched
from bench.servers import HOST

REQUEST_BYTES_MAX = 1 << 20

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def main() -> None:
    """Answer until ended."""
    given = arguments()
    answers = documents(given.model)
    infer = response(*inference(given.model))
    count = 0
    connections: dict[int, tuple[socket.socket, bytearray]] = {}
    listening = socket.create_server((HOST, given.http_port))
    polling = select.epoll()
    polling.register(listening, select.EPOLLIN)
    while True:
        for descriptor, _ in polling.poll(0 if connections else -1):
            if descriptor == listening.fileno():
                connection, _ = listening.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connections[connection.fileno()] = connection, bytearray()
                polling.register(connection, select.EPOLLIN)
                continue
            due = time.perf_counter_ns() + 1000 * given.after_us
            connection, received = connections[descriptor]
            try:
                data = connection.recv(REQUEST_BYTES_MAX)
            except ConnectionResetError:
                data = b""
            received += data
            if not data:
                del connections[descriptor]
                connection.close()
            elif path := complete(received):
                received.clear()
                if path.endswith("/infer"):
                    count += 1
                    while time.perf_counter_ns() < due:
                        pass
                    connection.sendall(infer)
                elif path.startswith("/v1"):
                    connection.sendall(JSON + response(answers[path]).partition(b"\r\n")[2])
                elif path.endswith("/stats"):
                    connection.sendall(response(json.dumps(statistics(count)).encode()))
                else:
                    connection.sendall(response(answers.get(path, b"")))


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
    parser.add_argument("--after-us", type=int, default=0, help="time from arrival to answer, in us")
    return parser.parse_args()


if __name__ == "__main__":
    main()
