"""Compares reading a picture by one request to a pipeline with a client that calls the steps one by one.

python -m bench.ocr

One server, the public asynchronous client, the demo's two pictures. A round measures a pipeline and the client in turn,
in alternating order; a ratio is of one pair, and above 1 the pipeline is better.
"""

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from examples.demo.client import connected
from examples.demo.pictures import photo, scanned_page
from examples.demo.reading import STEP_BY_STEP, WAYS
from examples.demo.server import Ports, free_ports, running_server
from examples.ocr.make_repository import build_ocr

from bench.compare import RESULTS
from bench.machine import machine

PROTOCOLS = {"http": "HTTP", "grpc": "gRPC"}
PICTURES = {"page": scanned_page, "photo": photo}
PIPELINES = [way for way in WAYS if way != STEP_BY_STEP]


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: pictures per second, and the median time that one took."""

    rate_per_s: float
    p50_ms: float


@dataclass(frozen=True, slots=True)
class Load:
    """The load: protocol, number of pictures, number in flight."""

    protocol: str
    concurrency: int
    count: int


async def run(way: str, picture: bytes, ports: Ports, load: Load) -> Point:
    """Read the picture `load.count` times in one way."""
    times_ms = []
    async with connected(ports) as clients:
        client = clients[PROTOCOLS[load.protocol]]
        waiting = iter(range(load.count))

        async def lane() -> None:
            for _ in waiting:
                begin = time.perf_counter()
                await WAYS[way](client, picture)
                times_ms.append((time.perf_counter() - begin) * 1e3)

        begin = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(load.concurrency)))
        return Point(load.count / (time.perf_counter() - begin), median(times_ms))


async def measure(pipeline: str, picture: bytes, ports: Ports, load: Load, rounds: int) -> list[tuple[Point, Point]]:
    """Return pairs of the pipeline and of the client that calls the steps, after one of each that is not counted."""
    ways = (pipeline, STEP_BY_STEP)
    for way in ways:
        await run(way, picture, ports, Load(load.protocol, load.concurrency, load.concurrency))
    pairs = []
    for number in range(rounds):
        order = ways[::-1] if number % 2 else ways
        points = {way: await run(way, picture, ports, load) for way in order}
        pairs.append((points[pipeline], points[STEP_BY_STEP]))
    return pairs


def summary(pairs: list[tuple[Point, Point]]) -> dict[str, float]:
    """Return the medians of both, and the median, least and greatest ratio of the rates of the pairs."""
    ratios = [pipeline.rate_per_s / steps.rate_per_s for pipeline, steps in pairs]
    return {
        "pipeline_per_s": median(pipeline.rate_per_s for pipeline, _ in pairs),
        "steps_per_s": median(steps.rate_per_s for _, steps in pairs),
        "pipeline_p50_ms": median(pipeline.p50_ms for pipeline, _ in pairs),
        "steps_p50_ms": median(steps.p50_ms for _, steps in pairs),
        "ratio": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def as_line(load: str, row: dict[str, float]) -> str:
    """Return one line of the table."""
    return (
        f"{load} | {row['pipeline_per_s']:>6.2f} {row['steps_per_s']:>6.2f} {row['ratio']:5.2f} "
        f"[{row['ratio_min']:.2f}-{row['ratio_max']:.2f}] | {row['pipeline_p50_ms']:>6.0f} {row['steps_p50_ms']:>6.0f}"
    )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ocr", description=__doc__)
    parser.add_argument("--protocol", choices=PROTOCOLS, nargs="+", default=list(PROTOCOLS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs, at least 5 for figures to publish")
    parser.add_argument("--count", type=int, default=8, help="pictures read in one run")
    parser.add_argument("--output", type=Path, default=RESULTS / "ocr.json")
    return parser.parse_args()


def main() -> None:
    """Measure, print and write after each line, so that an interrupted run keeps its results."""
    given = arguments()
    record: dict[str, Any] = {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": {"rounds": given.rounds, "count": given.count},
        "points": [],
    }
    print("load | pictures/s: pipeline, step by step, ratio [least-greatest] | p50 ms: pipeline, step by step")
    with tempfile.TemporaryDirectory() as folder:
        build_ocr(Path(folder))
        ports = free_ports()
        with running_server(Path(folder), ports):
            for name, pipeline, protocol, concurrency in itertools.product(
                PICTURES, PIPELINES, given.protocol, given.concurrency
            ):
                load = Load(protocol, concurrency, given.count)
                pairs = asyncio.run(measure(pipeline, PICTURES[name](), ports, load, given.rounds))
                row = summary(pairs)
                print(as_line(f"{name:<6}{pipeline:<20}{protocol:<5}{concurrency:>3}", row), flush=True)
                runs = [{"pipeline": asdict(first), "steps": asdict(second)} for first, second in pairs]
                where = {"picture": name, "pipeline": pipeline, "protocol": protocol, "concurrency": concurrency}
                record["points"].append({**where, "summary": row, "pairs": runs})
                given.output.parent.mkdir(parents=True, exist_ok=True)
                given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {given.output}")


if __name__ == "__main__":
    main()
