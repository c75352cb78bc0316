"""An image service two ways: a web framework with the network in each of N workers, and Charonia with N decoders.

python -m bench.image_service ENVIRONMENT

ENVIRONMENT is a virtual environment for the first way:
    python -m venv ENVIRONMENT
    ENVIRONMENT/bin/pip install fastapi gunicorn uvicorn uvloop httptools onnxruntime pillow

Both decode the same JPEG with the same code (examples/image_service), run the same network of ResNet-18's shape and
return five classes. In turn, for each N: requests a second, p99, memory of all processes (shared pages counted once).
"""

import argparse
import asyncio
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from examples.image_service.make_repository import MODELS, make_repository
from PIL import Image
from tests.support.models import resnet18

from bench.compare import RESULTS
from bench.machine import machine
from bench.servers import HOST, START_TIMEOUT_S, free_ports

WORKERS = (1, 2, 4, 8)
CLIENTS = 16
CLASSES = 5

FASTAPI = f"""\
import os

import numpy as np
import onnxruntime
from fastapi import FastAPI, Request
from pixels import pixels

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = int(os.environ["NETWORK_THREADS"])
session = onnxruntime.InferenceSession("network.onnx", options, providers=["CPUExecutionProvider"])
app = FastAPI()


def classify(data):
    (scores,) = session.run(None, {{"input": pixels(data)[None]}})
    best = np.argsort(scores[0])[: -{CLASSES} - 1 : -1]
    return [[float(scores[0][index]), int(index)] for index in best]


@app.post("/classify")
async def post(request: Request):
    return classify(await request.body())
"""


class Way(NamedTuple):
    """A way to build the service.

    Attributes:
        name: Its name.
        path: Where requests go.
        headers: Headers of a request, without its length.
        body: Its body.
    """

    name: str
    path: str
    headers: str
    body: bytes


class Run(NamedTuple):
    """The measurements of a run.

    Attributes:
        rate_per_s: Requests a second.
        p99_ms: 99th percentile of the latency, in ms.
        memory_mb: Memory of all processes, shared pages counted once.
    """

    rate_per_s: float
    p99_ms: float
    memory_mb: float


def picture() -> bytes:
    """Return a JPEG of 640 x 480 pixels."""
    random = np.random.default_rng(1)
    coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), np.uint8))
    file = io.BytesIO()
    coarse.resize((640, 480), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def ways(image: bytes) -> tuple[Way, Way]:
    """Return both ways with a request for this image."""
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "IMAGE",
                    "datatype": "BYTES",
                    "shape": [1, 1],
                    "parameters": {"binary_data_size": len(image) + 4},
                }
            ],
            "outputs": [{"name": "SCORES", "parameters": {"classification": CLASSES}}],
        }
    ).encode()
    body = head + len(image).to_bytes(4, "little") + image
    return (
        Way("fastapi", "/classify", "Content-Type: image/jpeg", image),
        Way("charonia", "/v2/models/image_service/infer", f"Inference-Header-Content-Length: {len(head)}", body),
    )


@contextmanager
def serving(way: Way, workers: int, environment: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Start a server that is not ready yet; yield its port and its process."""
    port, *others = free_ports(3)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="charonia-bench-") as name:
        folder = Path(name)
        (folder / "network.onnx").write_bytes(resnet18())
        if way.name == "fastapi":
            (folder / "service.py").write_text(FASTAPI, encoding="utf-8")
            shutil.copy(MODELS / "decode" / "1" / "pixels.py", folder)
            program = [str(environment.resolve() / "bin" / "gunicorn"), "service:app", "--bind", f"{HOST}:{port}"]
            command = [*program, "--workers", str(workers), "--worker-class", "uvicorn.workers.UvicornWorker"]
        else:
            make_repository(folder / "models", folder / "network.onnx", decoders=workers)
            ports = [f"--http-port={port}", f"--grpc-port={others[0]}", f"--metrics-port={others[1]}"]
            addresses = [f"--{kind}-address={HOST}" for kind in ("http", "grpc", "metrics")]
            command = [sys.executable, "-m", "charonia", "serve", "--model-repository=models", *ports, *addresses]
        threads = {"NETWORK_THREADS": str(max(1, cores // workers))}
        with (folder / "log").open("wb") as log:
            child = subprocess.Popen(command, cwd=folder, env={**os.environ, **threads}, stdout=log, stderr=log)
        process = psutil.Process(child.pid)
        try:
            yield port, process
        except BaseException:
            print((folder / "log").read_text(errors="replace")[-2000:], file=sys.stderr)
            raise
        finally:
            family = [process, *process.children(recursive=True)]
            child.send_signal(signal.SIGTERM)
            for left in psutil.wait_procs(family, timeout=20)[1]:
                left.kill()
            child.wait()


async def client(way: Way, port: int, end: float, latencies: list[float]) -> None:
    """Send requests one after the other until the time is over."""
    reader, writer = await asyncio.open_connection(HOST, port)
    data = (
        f"POST {way.path} HTTP/1.1\r\nHost: a\r\n{way.headers}\r\nContent-Length: {len(way.body)}\r\n\r\n".encode()
        + way.body
    )
    while (begin := time.perf_counter()) < end:
        writer.write(data)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        answer = await reader.readexactly(int(head.split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0]))
        if b" 200 " not in head[:16]:
            raise RuntimeError(f"{way.name}: {answer[:200]!r}")
        latencies.append(time.perf_counter() - begin)
    writer.close()


async def load(way: Way, port: int, clients: int, seconds: float) -> list[float]:
    """Return the sorted latencies of a closed loop of clients, in seconds."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds
    await asyncio.gather(*(client(way, port, end, latencies) for _ in range(clients)))
    return sorted(latencies)


def wait_until_ready(way: Way, port: int) -> None:
    """Wait for the first answer."""
    give_up = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            asyncio.run(load(way, port, 1, 0.001))
        except (OSError, RuntimeError, asyncio.IncompleteReadError):
            if time.monotonic() > give_up:
                raise
            time.sleep(0.1)
        else:
            return


def measure(way: Way, workers: int, environment: Path, seconds: float) -> Run:
    """Start a server, load it, and stop it."""
    with serving(way, workers, environment) as (port, process):
        wait_until_ready(way, port)
        asyncio.run(load(way, port, CLIENTS, 1.0))
        latencies = asyncio.run(load(way, port, CLIENTS, seconds))
        family = [process, *process.children(recursive=True)]
        memory = sum(member.memory_full_info().pss for member in family)
    return Run(len(latencies) / seconds, latencies[len(latencies) * 99 // 100] * 1e3, memory / 1e6)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS))
    given = parser.parse_args()
    both = ways(picture())
    record: dict[str, object] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    for workers in given.workers:
        runs: dict[str, list[Run]] = {way.name: [] for way in both}
        for number in range(given.rounds):
            for way in both[:: 1 if number % 2 else -1]:
                runs[way.name].append(measure(way, workers, given.environment, given.seconds))
        for name, each in runs.items():
            middle = Run(*(statistics.median(values) for values in zip(*each, strict=True)))
            print(
                f"N = {workers}: {name:8} {middle.rate_per_s:7.1f} requests/s, p99 {middle.p99_ms:7.1f} ms, "
                f"{middle.memory_mb:6.0f} MB",
                flush=True,
            )
        record[f"workers_{workers}"] = {name: [run._asdict() for run in each] for name, each in runs.items()}
        (RESULTS / "image_service.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
