"""Sends the demo's inputs over both protocols and prints the answers and what was measured."""

import asyncio
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio
import tritonclient.http.aio
from PIL import Image

from charonia.demo.content import detection_input
from charonia.demo.models import ADD_SUB, CONTENT_TYPE, TEXT_RECOGNITION, recognition_characters, scanned_page
from charonia.demo.page import read_word, recognition_input, words_of_page
from charonia.demo.process import Ports
from charonia.demo.traffic import Answers, Target, executed_batches, send

_CONCURRENCY = 16
_PAGES = 3

_Protocols = dict[str, Target]


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
  curl {ports.http_address}/v2/models/{TEXT_RECOGNITION}/config
  curl {ports.http_address}/v2/models/{TEXT_RECOGNITION}/stats
  curl -X POST {ports.http_address}/v2/repository/index
  curl {ports.metrics_address}/metrics
  perf_analyzer -m {ADD_SUB} -u {ports.http_address} --concurrency-range 1:16:5
  perf_analyzer -m {TEXT_RECOGNITION} -u {ports.grpc_address} -i grpc --shape x:3,48,160 --concurrency-range 8

  python - <<'END'
  import numpy as np, tritonclient.http as http
  client = http.InferenceServerClient("{ports.http_address}")
  inputs = [http.InferInput(name, [1, 4], "FP32") for name in ("INPUT0", "INPUT1")]
  for tensor in inputs:
      tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
  print(client.infer("{ADD_SUB}", inputs).as_numpy("OUTPUT0"))
  END
"""


async def _show(repository: Path, ports: Ports) -> None:
    await _show_recognition(_protocols(ports, TEXT_RECOGNITION))
    await _show_detection(_protocols(ports, CONTENT_TYPE, class_count=1), repository)
    await _show_add_sub(_protocols(ports, ADD_SUB))


def _protocols(ports: Ports, model: str, class_count: int = 0) -> _Protocols:
    return {
        "HTTP": Target(tritonclient.http.aio, ports.http_address, model, class_count),
        "gRPC": Target(tritonclient.grpc.aio, ports.grpc_address, model, class_count),
    }


async def _show_recognition(protocols: _Protocols) -> None:
    lines = words_of_page(np.asarray(Image.open(scanned_page())))
    requests = [{"x": recognition_input(word)} for line in lines for word in line]
    characters = recognition_characters()
    _heading(f"{TEXT_RECOGNITION}: {len(requests)} words of a scanned page, {_PAGES} times, {_CONCURRENCY} at once")
    for protocol, target in protocols.items():
        answers = await send(target, requests * _PAGES, _CONCURRENCY)
        words = iter([read_word(scores, characters) for output in answers.outputs for scores in output.values()])
        print(f"What it read over {protocol}:")
        for line in lines:
            print("    " + " ".join(next(words) for _ in line))
        _print_measured(protocol, answers)
    await _print_batches(protocols["HTTP"])


async def _show_detection(protocols: _Protocols, repository: Path) -> None:
    files = [
        Path(__file__),
        scanned_page(),
        repository / CONTENT_TYPE / "labels.txt",
        repository / CONTENT_TYPE / "config.pbtxt",
        repository / CONTENT_TYPE / "1" / "model.onnx",
    ]
    requests = [{"bytes": detection_input(file.read_bytes())} for file in files]
    _heading(f"{CONTENT_TYPE}: {len(files)} files, the best class by name")
    for protocol, target in protocols.items():
        answers = await send(target, requests, _CONCURRENCY)
        for file, output in zip(files, answers.outputs, strict=True):
            (best,) = np.ravel(next(iter(output.values())))
            score, _, label = best.decode().split(":")
            print(f"    {file.name:<14} {label} ({float(score):.3f})")
        _print_measured(protocol, answers)
    await _print_batches(protocols["HTTP"])


async def _show_add_sub(protocols: _Protocols) -> None:
    left, right = np.array([[1, 2, 3, 4]], np.float32), np.array([[10, 20, 30, 40]], np.float32)
    _heading(f"{ADD_SUB}: a Python model, in a process of its own")
    for protocol, target in protocols.items():
        answers = await send(target, [{"INPUT0": left, "INPUT1": right}] * 100, _CONCURRENCY)
        total, difference = answers.outputs[0]["OUTPUT0"], answers.outputs[0]["OUTPUT1"]
        print(f"    {left[0]} + {right[0]} = {total[0]}, - gives {difference[0]}")
        _print_measured(protocol, answers)
    await _print_batches(protocols["HTTP"])


def _heading(text: str) -> None:
    print(f"\n== {text}")


def _print_measured(protocol: str, answers: Answers) -> None:
    print(f"{protocol}: {answers.summary()}")


async def _print_batches(target: Target) -> None:
    batches = await executed_batches(target)
    print("Executed: " + ", ".join(f"{count} x batch of {size}" for size, count in sorted(batches.items())))
