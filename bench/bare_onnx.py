"""A minimal Python server for the perceptron: uvloop, ONNX Runtime in place, and no protocol.

python -m bench.compare charonia:mlp bare:mlp --protocol http --concurrency 1

It takes the tensor from the end of the request and sends the result after a fixed head. It does not parse, check,
schedule, count or encode; how much faster it is shows the cost of all that. It busy-polls between requests, as the
server does for a single client.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import uvloop

from bench.fixed_answers import HttpConnection, documents, inference, response, statistics
from bench.models import INPUT_SHAPES, MODELS, OUTPUT_SHAPES
from bench.servers import HOST

AWAKE_NS = 1_000_000


class Bare:
    """State shared by the connections.

    Args:
        model: Name in `bench.models` of an ONNX model with one input and one output.
        loop: Where it runs.
    """

    def __init__(self, model: str, loop: asyncio.AbstractEventLoop) -> None:
        with tempfile.TemporaryDirectory() as folder:
            MODELS[model](Path(folder))
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            (path,) = Path(folder).rglob("*.onnx")
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._session = session
        self._input = session.get_inputs()[0].name
        self._outputs = [session.get_outputs()[0].name]
        (self._elements,) = INPUT_SHAPES[model]
        (outputs,) = OUTPUT_SHAPES[model]
        self._head = response(*inference(model))[: -4 * outputs]
        self._documents = documents(model)
        self._loop = loop
        self._count = 0
        self._last_ns = 0
        self._is_polling = False

    def answer(self, path: str, request: bytes) -> bytes:
        """Return the whole response."""
        if path.endswith("/stats"):
            return response(json.dumps(statistics(self._count)).encode())
        if not path.endswith("/infer"):
            return response(self._documents.get(path, b""))
        self._count += 1
        self._last_ns = time.monotonic_ns()
        if not self._is_polling:
            self._is_polling = True
            self._loop.call_soon(self._poll)
        size = 4 * self._elements
        tensor = np.frombuffer(request, np.float32, self._elements, len(request) - size).reshape(1, self._elements)
        (result,) = self._session.run(self._outputs, {self._input: tensor})
        body: bytes = result.tobytes()
        return self._head + body

    def _poll(self) -> None:
        if time.monotonic_ns() < self._last_ns + AWAKE_NS:
            os.sched_yield()
            self._loop.call_soon(self._poll)
        else:
            self._is_polling = False


async def serve(model: str, port: int) -> None:
    """Answer until ended."""
    loop = asyncio.get_running_loop()
    bare = Bare(model, loop)
    server = await loop.create_server(lambda: HttpConnection(bare.answer), HOST, port)
    await server.serve_forever()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m bench.bare_onnx", description=__doc__)
    parser.add_argument("--model", choices=["mlp"], required=True)
    parser.add_argument("--http-port", type=int, required=True)
    given = parser.parse_args()
    uvloop.run(serve(given.model, given.http_port))


if __name__ == "__main__":
    main()
