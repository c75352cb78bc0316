"""Count the module crossings of one inference over HTTP, and its CPU time.

A crossing is a call from a function of one module of `charonia` to a function of another. Few of them make a request
easy to follow, and each call costs time. The server runs in this process with a small ONNX model; the client is in
memory, so no socket is part of it, and it sends the same request again and again, as real clients do. Requests are
traced after a warm-up, and the most frequent sequence of crossings is shown. Before Python 3.12 only the loop's thread
is traced, so a model that runs in a thread of its own adds nothing:

    python -m tools.module_crossings          # the number of crossings, and the sequence of them
    python -m tools.module_crossings --cpu    # microseconds of CPU a request, without tracing: the best of many rounds
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType

import uvloop
from tests.support.http_memory import MemoryClient, request
from tests.support.models import identity, write_model

import charonia
from charonia.server.app import InferenceServer
from charonia.server.options import ServerOptions

SOURCE = f"{Path(charonia.__file__).parent}/"
FOREIGN = f"{SOURCE}testing/"
"""The client's side."""

WARM_UP = 300
TRACED_REQUESTS = 50
ROUNDS = 500
ROUND_REQUESTS = 50


class Client(MemoryClient):
    """A client that counts responses and does not read them."""

    answered = 0

    def take(self, data: bytes) -> None:
        """Count what the server wrote: a small response is written in one piece."""
        self.answered += 1

    async def infer(self, message: bytes) -> None:
        """Send a request and wait for its response, and for the loop's next round: a socket's bytes come no earlier."""
        expected = self.answered + 1
        self.send(message)
        while self.answered < expected:
            await asyncio.sleep(0)
        await asyncio.sleep(0)


class Tracer:
    """Notes each call between two modules.

    Attributes:
        crossings: Caller and callee of each, as "module.function", in order.
    """

    def __init__(self) -> None:
        self.crossings: list[tuple[str, str]] = []

    def start(self) -> None:
        """Trace this thread, and all those that are there."""
        threading.setprofile_all_threads(self._called) if sys.version_info >= (3, 12) else sys.setprofile(self._called)

    def stop(self) -> None:
        """Trace no longer."""
        threading.setprofile_all_threads(None) if sys.version_info >= (3, 12) else sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or caller.f_code.co_filename == frame.f_code.co_filename:
            return
        if _is_ours(caller.f_code) and _is_ours(frame.f_code):
            self.crossings.append((_name(caller.f_code), _name(frame.f_code)))


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(SOURCE) and not code.co_filename.startswith(FOREIGN)


def _name(code: CodeType) -> str:
    module = code.co_filename.removeprefix(SOURCE).removesuffix(".py").replace("/", ".")
    return f"{module}.{getattr(code, 'co_qualname', code.co_name)}"


def _message() -> bytes:
    tensor = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "parameters": {"binary_data_size": 64}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}
    return request("/v2/models/identity/infer", body=text + bytes(64), headers=headers)


async def measure(repository: str, *, cpu: bool) -> None:
    """Serve a repository, send requests and print what they take."""
    base = ServerOptions()
    server = InferenceServer(
        replace(
            base,
            models=replace(base.models, repositories=(repository,)),
            http=replace(base.http, address="127.0.0.1", port=0),
            grpc=replace(base.grpc, enabled=False),
            metrics=replace(base.metrics, enabled=False),
        )
    )
    await server.start()
    if server.http is None:
        raise RuntimeError("the server has no HTTP front end")
    client, message = Client(server.http), _message()
    for _ in range(WARM_UP):
        await client.infer(message)
    if cpu:
        print(f"{min([await _round(client, message) for _ in range(ROUNDS)]):.2f} us of CPU a request")
    else:
        traced = Counter([await _traced(client, message) for _ in range(TRACED_REQUESTS)])
        crossings = traced.most_common(1)[0][0]
        for caller, callee in crossings:
            print(f"{caller} -> {callee}")
        modules = {name.rsplit(".", 1)[0] for pair in crossings for name in pair}
        print(f"{len(crossings)} crossings between {len(modules)} modules")
    client.leave()
    await server.shutdown()


async def _traced(client: Client, message: bytes) -> tuple[tuple[str, str], ...]:
    tracer = Tracer()
    tracer.start()
    await client.infer(message)
    tracer.stop()
    return tuple(tracer.crossings)


async def _round(client: Client, message: bytes) -> float:
    start = time.process_time()
    for _ in range(ROUND_REQUESTS):
        await client.infer(message)
    return (time.process_time() - start) / ROUND_REQUESTS * 1e6


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="measure CPU time in place of crossings")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as repository:
        write_model(Path(repository), "identity", identity())
        uvloop.run(measure(repository, cpu=arguments.cpu))
    return 0


if __name__ == "__main__":
    sys.exit(main())
