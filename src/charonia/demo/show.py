"""Sends the demo's inputs over both protocols and prints the answers and what was measured."""

import asyncio
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio
import tritonclient.http.aio

from charonia.demo.content import detection_input
from charonia.demo.models import ADD_SUB, CONTENT_TYPE
from charonia.demo.ocr import BLS, ENSEMBLE, TEXT_RECOGNITION
from charonia.demo.process import Ports
from charonia.demo.reading import show_reading
from charonia.demo.traffic import Answers, Call, Client, executed_batches, send

_CONCURRENCY = 16


def show(repository: Path, ports: Ports) -> None:
    """Run the whole demo against a server that is ready.

    Raises:
        tritonclient.utils.InferenceServerException: A request failed.
    """
    asyncio.run(_show(repository, ports))


def next_steps(ports: Ports) -> str:
    """Return commands to try while the server runs."""
    body = '{"inputs": [' + ", ".join(
        f'{{"name": "INPUT{index}", "datatype": "FP32", "shape": [1, 4], "data": {values}}}'
        for index, values in enumerate(([1, 2, 3, 4], [10, 20, 30, 40]))
    )
    return f"""\
The server keeps running; end it with Ctrl-C. Commands to try in another terminal:

  curl {ports.http_address}/v2/models/{ADD_SUB}/infer -d '{body}]}}'
  curl {ports.http_address}/v2/models/{ENSEMBLE}/config
  curl {ports.http_address}/v2/models/{TEXT_RECOGNITION}/stats
  curl -X POST {ports.http_address}/v2/repository/index
  curl {ports.metrics_address}/metrics
  charonia perf -m {ADD_SUB} -u {ports.http_address} --concurrency-range 1:16:5
  charonia perf -m {TEXT_RECOGNITION} -u {ports.grpc_address} -i grpc --shape x:3,48,320 --concurrency-range 8

  python - some-picture.jpg <<'END'
  import sys, numpy as np, tritonclient.http as http
  image = http.InferInput("IMAGE", [1], "BYTES")
  image.set_data_from_numpy(np.array([open(sys.argv[1], "rb").read()], np.object_))
  read = http.InferenceServerClient("{ports.http_address}").infer("{BLS}", [image])
  print(*(line.decode() for line in read.as_numpy("TEXT")), sep="\\n")
  END
"""


async def _show(repository: Path, ports: Ports) -> None:
    async with (
        Client(tritonclient.http.aio, ports.http_address) as http,
        Client(tritonclient.grpc.aio, ports.grpc_address) as grpc,
    ):
        clients = {"HTTP": http, "gRPC": grpc}
        await show_reading(clients, repository)
        await _show_content_types(clients, repository)
        await _print_batches(ports, CONTENT_TYPE)
        await _show_add_sub(clients)
        await _print_batches(ports, ADD_SUB)


async def _show_content_types(clients: dict[str, Client], repository: Path) -> None:
    files = [
        Path(__file__),
        repository / CONTENT_TYPE / "labels.txt",
        repository / CONTENT_TYPE / "config.pbtxt",
        repository / CONTENT_TYPE / "1" / "model.onnx",
    ]
    requests = [{"bytes": detection_input(file.read_bytes())} for file in files]
    print(f"\n== {CONTENT_TYPE}: {len(files)} files, the best class by name")
    for protocol, client in clients.items():
        answers = await send(client, Call(CONTENT_TYPE, ["target_label"], class_count=1), requests, _CONCURRENCY)
        for file, output in zip(files, answers.outputs, strict=True):
            (best,) = np.ravel(output["target_label"])
            score, _, label = best.decode().split(":")
            print(f"    {file.name:<14} {label} ({float(score):.3f})")
        _print_measured(protocol, answers)


async def _show_add_sub(clients: dict[str, Client]) -> None:
    left, right = np.array([[1, 2, 3, 4]], np.float32), np.array([[10, 20, 30, 40]], np.float32)
    print(f"\n== {ADD_SUB}: a Python model, in a process of its own")
    for protocol, client in clients.items():
        answers = await send(client, Call(ADD_SUB), [{"INPUT0": left, "INPUT1": right}] * 100, _CONCURRENCY)
        total, difference = answers.outputs[0]["OUTPUT0"], answers.outputs[0]["OUTPUT1"]
        print(f"    {left[0]} + {right[0]} = {total[0]}, - gives {difference[0]}")
        _print_measured(protocol, answers)


def _print_measured(protocol: str, answers: Answers) -> None:
    print(f"{protocol}: {answers.summary()}")


async def _print_batches(ports: Ports, model: str) -> None:
    batches = await executed_batches(ports.http_address, model)
    print("Executed: " + ", ".join(f"{count} x batch of {size}" for size, count in sorted(batches.items())))
