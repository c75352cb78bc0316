"""The load: one run of perf_analyzer, wrk or h2load against a server, as a record."""

import csv
import json
import re
import statistics
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.models import MODEL, input_tensor
from bench.servers import PEERS, Server
from charonia.schema.pool import message_class

RUN_TIMEOUT_S = 300.0

TRIES_MAX = 5
"""Attempts to run perf_analyzer, which fails if the measurement is disturbed."""

_WRK_SCRIPT = """\
local file = io.open("{body}", "rb")
wrk.method = "POST"
wrk.body = file:read("*a")
wrk.headers["Content-Type"] = "application/octet-stream"
wrk.headers["Inference-Header-Content-Length"] = "{header_length}"
"""
_UNIT_US = {"us": 1.0, "ms": 1e3, "s": 1e6}


@dataclass(frozen=True)
class Load:
    """What to send.

    Attributes:
        client: "perf_analyzer"; or, with far less CPU on the client's side, "wrk" for HTTP and "h2load" for gRPC.
        protocol: "http" or "grpc".
        concurrency: Requests in flight.
        seconds: Length of one measurement.
    """

    client: str
    protocol: str
    concurrency: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """What came of one run.

    Attributes:
        rate_per_s: Inferences a second.
        p50_us: Median latency in us.
        p99_us: 99th percentile of the latency in us.
        cpu_us: The server's CPU time per inference in us, from its own count of inferences, warm-up included.
    """

    rate_per_s: float
    p50_us: float
    p99_us: float
    cpu_us: float


def run(server: Server, load: Load) -> Point:
    """Run the load once."""
    cpu_before, count_before = server.cpu_seconds(), server.inference_count()
    rate, p50, p99 = _CLIENTS[load.client](server, load)
    count = server.inference_count() - count_before
    return Point(rate, p50, p99, (server.cpu_seconds() - cpu_before) * 1e6 / max(count, 1))


def _perf_analyzer(server: Server, load: Load) -> tuple[float, float, float]:
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.csv"
        command = [
            str(PEERS / "bin" / "perf_analyzer"),
            *("-m", MODEL, "-u", server.http if load.protocol == "http" else server.grpc, "-i", load.protocol),
            *("--concurrency-range", str(load.concurrency), "-f", str(table)),
            # Three windows of any spread, as the pairs show it.
            *("-p", str(round(load.seconds * 1000)), "-s", "999", "-r", "3"),
        ]
        _check(command, tries=TRIES_MAX)
        with table.open(newline="") as file:
            (row,) = csv.DictReader(file)
    return float(row["Inferences/Second"]), float(row["p50 latency"]), float(row["p99 latency"])


def _wrk(server: Server, load: Load) -> tuple[float, float, float]:
    datatype, shape, content = input_tensor(server.model)
    tensor = {
        "name": "INPUT0",
        "datatype": datatype,
        "shape": shape,
        "parameters": {"binary_data_size": len(content)},
    }
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    with tempfile.TemporaryDirectory() as folder:
        body, script = Path(folder) / "body", Path(folder) / "post.lua"
        body.write_bytes(header + content)
        script.write_text(_WRK_SCRIPT.format(body=body, header_length=len(header)))
        url = f"http://{server.http}/v2/models/{MODEL}/infer"
        duration = f"{max(1, round(load.seconds))}s"
        report = _check(["wrk", "-t1", f"-c{load.concurrency}", f"-d{duration}", "--latency", "-s", str(script), url])
    if "Non-2xx" in report or "Socket errors" in report:
        raise SystemExit(f"{server.variant}: requests failed\n{report}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", report)
    assert rate, report
    return float(rate[1]), wrk_percentile(report, 50), wrk_percentile(report, 99)


def _h2load(server: Server, load: Load) -> tuple[float, float, float]:
    request: Any = message_class("inference.ModelInferRequest")(model_name=MODEL)
    datatype, shape, content = input_tensor(server.model)
    request.inputs.add(name="INPUT0", datatype=datatype, shape=shape)
    request.raw_input_contents.append(content)
    encoded: bytes = request.SerializeToString()
    with tempfile.TemporaryDirectory() as folder:
        body, log = Path(folder) / "body", Path(folder) / "log"
        body.write_bytes(b"\0" + struct.pack(">I", len(encoded)) + encoded)
        url = f"http://{server.grpc}/inference.GRPCInferenceService/ModelInfer"
        headers = ("-H", "content-type: application/grpc", "-H", "te: trailers")
        counts = ("-t1", "-m1", f"-c{load.concurrency}", f"-D{max(1, round(load.seconds))}")
        report = _check(["h2load", *counts, *headers, f"--data={body}", f"--log-file={log}", url])
        times_us = [int(line.split("\t")[2]) for line in log.read_text().splitlines()]
    rate = re.search(r"^finished in .*?, ([\d.]+) req/s", report, re.MULTILINE)
    if rate is None or " 0 failed, 0 errored" not in report:
        raise SystemExit(f"{server.variant}: requests failed\n{report}")
    cuts = statistics.quantiles(times_us, n=100)
    return float(rate[1]), cuts[49], cuts[98]


_CLIENTS = {"perf_analyzer": _perf_analyzer, "wrk": _wrk, "h2load": _h2load}


def wrk_percentile(report: str, percent: int) -> float:
    """Return a percentile of the latency in us from wrk's report."""
    match = re.search(rf"^\s+{percent}%\s+([\d.]+)(us|ms|s)$", report, re.MULTILINE)
    assert match, report
    return float(match[1]) * _UNIT_US[match[2]]


def _check(command: list[str], tries: int = 1) -> str:
    for remaining in reversed(range(tries)):
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
        if not done.returncode:
            return done.stdout
        if not remaining or "stable measurement" not in done.stdout + done.stderr:
            break
    raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
