"""A TensorFlow model behind a web framework, and in Charonia: `python -m bench.tensorflow_service ENVIRONMENT`.

ENVIRONMENT is a virtual environment for the first way:
    python -m venv ENVIRONMENT
    ENVIRONMENT/bin/pip install fastapi uvicorn uvloop httptools tensorflow-cpu

Both take a row of floats as raw bytes and answer with the raw bytes of the result, from one process with the model. In
turn, for each network: requests a second and latency of a closed loop of clients.
"""

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import psutil

from bench.backend_cases import TENSORFLOW, Case
from bench.compare import RESULTS
from bench.image_service import Run, Way, load, wait_until_ready
from bench.machine import machine
from bench.servers import HOST, free_ports

CLIENTS = 16

FASTAPI = """\
import numpy as np
import tensorflow as tf
from fastapi import FastAPI, Request, Response

signature = tf.saved_model.load("models/network/1/model.savedmodel").signatures["serving_default"]
(name,) = signature.structured_input_signature[1]
shape = [1, *signature.structured_input_signature[1][name].shape[1:]]
app = FastAPI()


@app.post("/infer")
async def infer(request: Request):
    row = np.frombuffer(await request.body(), np.float32).reshape(shape)
    (answer,) = signature(**{name: tf.constant(row)}).values()
    return Response(answer.numpy().tobytes())
"""


def ways(case: Case, name: str) -> tuple[Way, Way]:
    """Return both ways with a request for one row."""
    row = case.rows()[0]
    tensor = {
        "name": name,
        "datatype": "FP32",
        "shape": list(row.shape),
        "parameters": {"binary_data_size": row.nbytes},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return (
        Way("fastapi", "/infer", "Content-Type: application/octet-stream", row.tobytes()),
        Way(
            *("charonia", "/v2/models/network/infer", f"Inference-Header-Content-Length: {len(head)}"),
            head + row.tobytes(),
        ),
    )


@contextmanager
def serving(way: Way, models: Path, environment: Path) -> Iterator[int]:
    """Start a server that is not ready yet; yield its port."""
    port, *others = free_ports(3)
    with tempfile.TemporaryDirectory(prefix="charonia-bench-") as name:
        folder = Path(name)
        if way.name == "fastapi":
            (folder / "models").symlink_to(models)
            (folder / "service.py").write_text(FASTAPI, encoding="utf-8")
            program = str(environment.resolve() / "bin" / "uvicorn")
            command = [program, "service:app", f"--host={HOST}", f"--port={port}", "--no-access-log"]
        else:
            ports = [f"--http-port={port}", f"--grpc-port={others[0]}", f"--metrics-port={others[1]}"]
            command = [sys.executable, "-m", "charonia", "serve", f"--model-repository={models}", *ports]
        child = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield port
        finally:
            family = [process := psutil.Process(child.pid), *process.children(recursive=True)]
            child.send_signal(signal.SIGTERM)
            for left in psutil.wait_procs(family, timeout=20)[1]:
                left.kill()
            child.wait()


def measure(way: Way, port: int, seconds: float) -> Run:
    """Load a server once."""
    latencies = asyncio.run(load(way, port, CLIENTS, seconds))
    return Run(len(latencies) / seconds, latencies[len(latencies) * 99 // 100] * 1e3, 0.0)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    record: dict[str, object] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    for case in (case for case in TENSORFLOW if case.batch == 1):
        with tempfile.TemporaryDirectory(prefix="charonia-bench-") as name:
            version = Path(name) / "network" / "1"
            version.mkdir(parents=True)
            case.write(version)
            config = "dynamic_batching { } max_batch_size: 16"
            (version.parent / "config.pbtxt").write_text(
                f'platform: "tensorflow_savedmodel" {config}', encoding="utf-8"
            )
            record[case.model] = compare(case, Path(name), given.environment, given.rounds, given.seconds)
    (RESULTS / "tensorflow_service.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def compare(case: Case, models: Path, environment: Path, rounds: int, seconds: float) -> dict[str, object]:
    """Measure a network: both servers run, and one at a time has load."""
    both = ways(case, _input_name(models))
    runs: dict[str, list[Run]] = {way.name: [] for way in both}
    with serving(both[0], models, environment) as one, serving(both[1], models, environment) as other:
        ports = {both[0].name: one, both[1].name: other}
        for way in both:
            wait_until_ready(way, ports[way.name])
            measure(way, ports[way.name], 1.0)
        for number in range(rounds):
            for way in both[:: 1 if number % 2 else -1]:
                runs[way.name].append(measure(way, ports[way.name], seconds))
    ratios = [b.rate_per_s / a.rate_per_s for a, b in zip(runs["fastapi"], runs["charonia"], strict=True)]
    for name, each in runs.items():
        rate, p99 = (statistics.median(run[index] for run in each) for index in (0, 1))
        print(f"{case.model:10} {name:9} {rate:9.1f} requests/s, p99 {p99:7.2f} ms", flush=True)
    print(f"{case.model:10} ratio {statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]", flush=True)
    return {name: [run._asdict() for run in each] for name, each in runs.items()}


def _input_name(models: Path) -> str:
    """Return the name of the network's input, as `charonia config` completes it."""
    command = [sys.executable, "-m", "charonia", "config", str(models / "network"), "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return str(found["input"][0]["name"])


if __name__ == "__main__":
    main()
