"""Compare two load generators on the same server: `charonia perf` and perf_analyzer, with the same command line.

python -m bench.perf_client                        how much load each of them generates
python -m bench.perf_client charonia:python_slow   whether they agree on a server that is slower than both

Both run in turn, in alternating order. Agreement is the ratio of the figures that they report; CPU time is that of the
tool and its processes.
"""

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

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
