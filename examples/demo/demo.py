"""The demo of `charonia demo`: serves models from installed packages, sends real inputs and prints the responses."""

import asyncio
from pathlib import Path

import numpy as np

from ..ocr.make_repository import BLS, ENSEMBLE, TEXT_RECOGNITION
from .client import Answers, Client, connected, send
from .reading import show_reading
from .repository import ADD_SUB, CONTENT_TYPE, build_repository
from .server import HOST, LOG, Ports, demand_free, free_ports, running_server
from .what_is_it import detection_input

CONCURRENCY = 16


def run(repository: Path, once: bool) -> None:
    """Run the demo, then serve until Ctrl-C, unless it runs once.

    Raises:
        charonia.ServingError: A package or a port that it needs is not there, or the server does not start.
        tritonclient.utils.InferenceServerException: A request failed.
    """
    ports = free_ports() if once else Ports()
    demand_free(ports)
    build_repository(repository)
    print(f"Model repository: {repository.resolve()}, the server's log: {LOG} in it", flush=True)
    with running_server(repository, ports) as server:
        asyncio.run(show(repository, ports))
        if once:
            print("\nTo see the models on the server's page, run `charonia demo`, then open http://localhost:8000/")
        else:
            print("\n" + next_steps(ports), flush=True)
            try:
                server.wait()
            except KeyboardInterrupt:
                print("\nStopping.", flush=True)


async def show(repository: Path, ports: Ports) -> None:
    async with connected(ports) as clients:
        await show_reading(clients, repository)
        await show_content_types(clients, repository)
        await print_batches(clients, CONTENT_TYPE)
        await show_add_sub(clients)
        await print_batches(clients, ADD_SUB)


async def show_content_types(clients: dict[str, Client], repository: Path) -> None:
    folder = repository / CONTENT_TYPE
    files = [Path(__file__), folder / "labels.txt", folder / "config.pbtxt", folder / "1" / "model.onnx"]
    requests = [{"bytes": detection_input(file.read_bytes())} for file in files]
    print(f"\n== {CONTENT_TYPE}: {len(files)} files, the best class by name")
    for protocol, client in clients.items():
        answers = await send(client, CONTENT_TYPE, requests, CONCURRENCY, outputs=["target_label"], class_count=1)
        for file, output in zip(files, answers.outputs, strict=True):
            (best,) = np.ravel(output["target_label"])
            score, _, label = best.decode().split(":")
            print(f"    {file.name:<14} {label} ({float(score):.3f})")
        print_measured(protocol, answers)


async def show_add_sub(clients: dict[str, Client]) -> None:
    left, right = np.array([[1, 2, 3, 4]], np.float32), np.array([[10, 20, 30, 40]], np.float32)
    print(f"\n== {ADD_SUB}: a Python model, in a separate process")
    for protocol, client in clients.items():
        answers = await send(client, ADD_SUB, [{"INPUT0": left, "INPUT1": right}] * 100, CONCURRENCY)
        total, difference = answers.outputs[0]["OUTPUT0"], answers.outputs[0]["OUTPUT1"]
        print(f"    {left[0]} + {right[0]} = {total[0]}, - gives {difference[0]}")
        print_measured(protocol, answers)


def print_measured(protocol: str, answers: Answers) -> None:
    print(f"{protocol}: {answers.summary()}")


async def print_batches(clients: dict[str, Client], model: str) -> None:
    """Print how many batches of each size the server has executed for a model."""
    (entry,) = await clients["HTTP"].connection.statistics(model)
    counts = {int(each["batch_size"]): int(each["compute_infer"]["count"]) for each in entry["batch_stats"]}
    print("Executed: " + ", ".join(f"{count} x batch of {size}" for size, count in sorted(counts.items())))


def next_steps(ports: Ports) -> str:
    """Return commands to try while the server runs."""
    http = f"{HOST}:{ports.http}"
    body = '{"inputs": [' + ", ".join(
        f'{{"name": "INPUT{index}", "datatype": "FP32", "shape": [1, 4], "data": {values}}}'
        for index, values in enumerate(([1, 2, 3, 4], [10, 20, 30, 40]))
    )
    return f"""\
The server keeps running; end it with Ctrl-C. Commands to try in another terminal:

  curl {http}/v2/models/{ADD_SUB}/infer -d '{body}]}}'
  curl {http}/v2/models/{ENSEMBLE}/config
  curl {http}/v2/models/{TEXT_RECOGNITION}/stats
  curl -X POST {http}/v2/repository/index
  curl {HOST}:{ports.metrics}/metrics
  charonia perf -m {ADD_SUB} -u {http} --concurrency-range 1:16:5
  charonia perf -m {TEXT_RECOGNITION} -u {HOST}:{ports.grpc} -i grpc --shape x:3,48,320 --concurrency-range 8

  python - some-picture.jpg <<'END'
  import sys, charonia.client
  read = charonia.client.Client("{http}").infer("{BLS}", {{"IMAGE": [open(sys.argv[1], "rb").read()]}})
  print(*(line.decode() for line in read["TEXT"]), sep="\\n")
  END

Open http://localhost:{ports.http}/
"""
