"""Compare two servers: the same load on each in turn, and the median of the ratios of the pairs.

python -m bench.compare charonia:identity triton:python_identity

Both servers run the whole time and only one has load at a time; every other round begins with the other one.
Disturbances of the machine affect both alike, so the ratio of a pair varies far less than the figures.
"""

import argparse
import json
import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.load import Load, Point, run
from bench.machine import machine
from bench.servers import Server

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"

# Figure -> whether more is better. Ratios are A : B of the first kind and B : A of the second, above 1 A is better.
FIGURES = {"rate_per_s": True, "p50_us": False, "p99_us": False, "cpu_us": False}

Pair = tuple[Point, Point]


def ratios(pairs: list[Pair], figure: str) -> list[float]:
    """Return for each pair how many times better A is than B."""
    values = [(getattr(a, figure), getattr(b, figure)) for a, b in pairs]
    return [a / b if FIGURES[figure] else b / a for a, b in values if a and b]


def summary(pairs: list[Pair]) -> dict[str, dict[str, float]]:
    """Return for each figure the medians of A and B, and the median, least and greatest ratio of the pairs."""
    table = {}
    for figure in FIGURES:
        each = ratios(pairs, figure) or [float("nan")]
        table[figure] = {
            "a": median(getattr(a, figure) for a, _ in pairs),
            "b": median(getattr(b, figure) for _, b in pairs),
            "ratio": median(each),
            "ratio_min": min(each),
            "ratio_max": max(each),
        }
    return table


def measure(a: Server, b: Server, load: Load, rounds: int) -> list[Pair]:
    """Run the load on both servers `rounds` times, after one run each that is not counted."""
    warm_up = Load(load.client, load.protocol, load.concurrency, 1.0)
    run(a, warm_up), run(b, warm_up)
    pairs = []
    for number in range(rounds):
        if number % 2:
            second = run(b, load)
            pairs.append((run(a, load), second))
        else:
            first = run(a, load)
            pairs.append((first, run(b, load)))
    return pairs


def as_line(load: Load, table: dict[str, dict[str, float]]) -> str:
    """Return one line of the table."""
    cells = [f"{load.protocol:<5}{load.concurrency:>4}"]
    for figure, digits in (("rate_per_s", 0), ("p50_us", 0), ("p99_us", 0), ("cpu_us", 1)):
        row = table[figure]
        cells.append(
            f"{row['a']:>8.{digits}f} {row['b']:>8.{digits}f} {row['ratio']:5.2f} "
            f"[{row['ratio_min']:.2f}-{row['ratio_max']:.2f}]"
        )
    return " | ".join(cells)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("a", help="first variant, server:model")
    parser.add_argument("b", help="second variant")
    parser.add_argument(
        "--client",
        choices=["perf_analyzer", "wrk"],
        default="perf_analyzer",
        help="wrk stands for light clients: over gRPC it is h2load",
    )
    parser.add_argument("--protocol", choices=["http", "grpc"], nargs="+", default=["http", "grpc"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs, at least 5 for figures to publish")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument(
        "--flag-a", action="append", default=[], help="flag for server A, as --flag-a=--x=1; repeatable"
    )
    parser.add_argument("--flag-b", action="append", default=[], help="flag for server B")
    parser.add_argument("--output", type=Path, help="results file (default: bench/results/A-vs-B-CLIENT.json)")
    return parser.parse_args()


def main() -> None:
    """Measure, print and write after each line, so that an interrupted run keeps its results."""
    given = arguments()
    name = re.sub(r"\W+", "-", f"{given.a}-vs-{given.b}-{given.client}") + ".json"
    output = given.output or RESULTS / name
    with Server(given.a, given.flag_a) as a, Server(given.b, given.flag_b) as b:
        record: dict[str, Any] = {
            "format": 1,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "settings": {"client": given.client, "rounds": given.rounds, "seconds": given.seconds},
        }
        for key, server, flags in (("a", a, given.flag_a), ("b", b, given.flag_b)):
            start = {"start_s": round(server.start_seconds, 2), "memory_mib": server.memory_bytes() >> 20}
            record[key] = {"variant": server.variant, "version": server.version(), "flags": flags, **start}
            print(f"{key.upper()}: {server.variant} ({server.version()}), ready after {server.start_seconds:.2f} s")
        figures = "infer/s: A, B, A:B | p50 us: A, B, B:A | p99 us: A, B, B:A | server CPU us: A, B, B:A"
        print(f"load | {figures}; medians of {given.rounds} pairs [least-greatest]")
        record["points"] = []
        for protocol in given.protocol:
            for concurrency in given.concurrency:
                client = "h2load" if (given.client, protocol) == ("wrk", "grpc") else given.client
                load = Load(client, protocol, concurrency, given.seconds)
                pairs = measure(a, b, load, given.rounds)
                table = summary(pairs)
                print(as_line(load, table), flush=True)
                runs = [{"a": asdict(first), "b": asdict(second)} for first, second in pairs]
                record["points"].append(
                    {"protocol": protocol, "concurrency": concurrency, "summary": table, "pairs": runs}
                )
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {output}")


if __name__ == "__main__":
    main()
