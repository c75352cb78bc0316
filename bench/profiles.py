"""Where a server, or `charonia perf`, spends its CPU time: the share of samples by library, recorded with perf.

python -m bench.profiles
python -m bench.profiles --only ensemble --seconds 5
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from bench import ensemble
from bench.compare import RESULTS
from bench.load import Load, run
from bench.machine import machine
from bench.models import MODEL
from bench.servers import Server

RATE_HZ = 1999
"""Samples a second of each busy thread; not a multiple of the timers' rates."""

START_S = 1.0
"""Time from the start of a load until samples are taken."""

MISSING = (
    "perf is not installed, or is not permitted to take samples: apt-get install linux-perf, kernel.perf_event_paranoid"
)

EVALUATION = "_PyEval_EvalFrameDefault"
"""The function of the interpreter that runs code that is not compiled."""

LIBRARIES = {
    "kernel": ("[kernel", "[vdso]", "[unknown]", "[guest"),
    "interpreter": ("libpython", "python3"),
    "compiled": ("__mypyc",),
    "event_loop": ("loop.cpython",),
    "http2": ("ngh2", "_core.cpython", "events.cpython"),
    "numpy": ("_multiarray_umath",),
    "orjson": ("orjson",),
    "onnxruntime": ("onnxruntime",),
    "c_library": ("libc.so", "libc-", "libm.so", "libpthread", "ld-linux", "libstdc++"),
}
"""Parts of the names of files, by group. What is in none is "other"."""


def perf_load(*options: str) -> Callable[[Server, float], list[str]]:
    """Return the command of `charonia perf` for a server and a time, with options."""

    def command(server: Server, seconds: float) -> list[str]:
        address = server.grpc if "grpc" in options else server.http
        windows = (f"-p={round(1000 * seconds)}", "-r=3", "-s=999")
        return [sys.executable, "-m", "charonia", "perf", "-m", MODEL, "-u", address, *windows, *options]

    return command


@dataclass(frozen=True)
class Case:
    """A load whose server, or client, is observed.

    Attributes:
        title: Its name on the pages.
        variant: The server and its model; "ensemble_..." is that of `bench.ensemble`.
        load: Of `bench.load`, or the command of a client.
        flags: For the server.
        is_client: Whether the client is observed.
    """

    title: str
    variant: str
    load: tuple[str, str, int] | Callable[[Server, float], list[str]]
    flags: tuple[str, ...] = ()
    is_client: bool = False


_TWO = ("--front-ends=2",)
_JSON = ("--input-tensor-format=json", "--output-tensor-format=json", "--concurrency-range=16")
CASES = (
    Case("identity, HTTP, 16", "charonia:identity", ("wrk", "http", 16)),
    Case("identity, HTTP, 64, 2 front ends", "charonia:identity", ("wrk", "http", 64), _TWO),
    Case("identity in the engine, HTTP, 16, 2 front ends", "charonia:engine_identity", ("wrk", "http", 16), _TWO),
    Case("identity, gRPC, 16", "charonia:identity", ("h2load", "grpc", 16)),
    Case("identity, HTTP, JSON, 16", "charonia:identity", perf_load(*_JSON)),
    Case("perceptron, HTTP, 16", "charonia:mlp", ("wrk", "http", 16)),
    Case("perceptron, tuned, gRPC, 16, 2 front ends", "charonia:mlp_tuned", ("h2load", "grpc", 16), _TWO),
    Case("ensemble, HTTP, 16, 2 front ends", "charonia:ensemble_mlp_tuned", ("wrk", "http", 16), _TWO),
    Case("Python model, batching, gRPC, 16", "charonia:python_batched", ("h2load", "grpc", 16)),
    Case("602,112 bytes, gRPC, 8", "charonia:image", ("h2load", "grpc", 8)),
    Case("fixed response, HTTP, 16", "fixed:identity", ("wrk", "http", 16)),
    Case("fixed response, gRPC, 16", "fixed:identity", ("h2load", "grpc", 16)),
    Case("`charonia perf`, HTTP, 1", "charonia:identity", perf_load("--concurrency-range=1"), (), True),
    Case("`charonia perf`, gRPC, 1", "charonia:identity", perf_load("-i", "grpc", "--concurrency-range=1"), (), True),
    Case(
        "`charonia perf`, HTTP, 50,000/s",
        "fixed:identity",
        perf_load("--request-rate-range=50000", "--processes=1"),
        (),
        True,
    ),
)


def group_of(library: str) -> str:
    """Return the group of a file that samples are in."""
    name = library.strip()
    return next((group for group, parts in LIBRARIES.items() if any(part in name for part in parts)), "other")


def shares(report: str) -> dict[str, float]:
    """Return the percentage of samples by group from `perf report --sort dso,symbol` with "|" between fields.

    "evaluation" is the part of "interpreter" that runs source.
    """
    found = dict.fromkeys((*LIBRARIES, "other", "evaluation"), 0.0)
    for line in report.splitlines():
        if line.startswith("#") or "|" not in line:
            continue
        percent, library, symbol = line.split("|")[:3]
        share = float(percent.strip().rstrip("%"))
        found[group_of(library)] += share
        if EVALUATION in symbol:
            found["evaluation"] += share
    return {group: round(share, 1) for group, share in found.items()}


def record(processes: Sequence[psutil.Process], seconds: float) -> dict[str, float]:
    """Take samples of processes for some time; return their shares."""
    pids = ",".join(str(process.pid) for process in processes)
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "perf.data")
        take = ["perf", "record", "-q", "-F", str(RATE_HZ), "-o", data, "-p", pids, "--", "sleep", str(seconds)]
        taken = subprocess.run(take, capture_output=True, text=True, check=False)
        if taken.returncode:
            raise SystemExit(f"{MISSING}\n{taken.stderr}")
        show = ["perf", "report", "-i", data, "--stdio", "--sort=dso,symbol", "-t", "|"]
        return shares(subprocess.run(show, capture_output=True, text=True, check=True).stdout)


def measure(case: Case, seconds: float) -> dict[str, float]:
    """Put the load of a case on its server; return the shares of the server, or the client."""
    name = case.variant.partition(":")[2]
    if name.startswith("ensemble_"):
        ensemble.variants(name.removeprefix("ensemble_"), "alone")
    with Server(case.variant, case.flags) as server:
        if isinstance(case.load, tuple):
            run(server, Load(*case.load, 1.0))
            sending = threading.Thread(target=run, args=(server, Load(*case.load, START_S + seconds + 1.0)))
            sending.start()
            time.sleep(START_S)
            found = record(server.processes(), seconds)
            sending.join()
            return found
        before = server.inference_count()
        client = subprocess.Popen(case.load(server, START_S + seconds), stdout=subprocess.DEVNULL)
        while server.inference_count() == before and client.poll() is None:
            time.sleep(START_S / 10)
        time.sleep(START_S)
        root = psutil.Process(client.pid)
        found = record([root, *root.children(recursive=True)] if case.is_client else server.processes(), seconds)
        client.terminate()
        client.wait()
        return found


def main() -> None:
    """Measure one case after the other; print and write after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--seconds", type=float, default=4.0, help="time that samples are taken for")
    parser.add_argument("--output", type=Path, default=RESULTS / "profiles.json")
    given = parser.parse_args()
    if not shutil.which("perf"):
        raise SystemExit(MISSING)
    result: dict[str, Any] = {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": {"seconds": given.seconds, "rate_hz": RATE_HZ},
        "points": [],
    }
    for case in CASES:
        if given.only in case.title:
            found = measure(case, given.seconds)
            shown = ", ".join(f"{group} {share:.0f} %" for group, share in found.items() if share >= 1)
            print(f"{case.title} | {shown}", flush=True)
            result["points"].append({"title": case.title, "shares": found})
            given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
