"""The effect of more instances of a model: rate, latency and memory for 1, 2, 4 and 8.

python -m bench.instances
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

from tests.support.models import resnet18, write_model

from bench.compare import RESULTS
from bench.load import Load, run
from bench.machine import machine
from bench.models import MODEL, MODELS
from bench.servers import Server

COUNTS = (1, 2, 4, 8)
IMAGE_SIZE = 64

_PBTXT = """\
instance_group [ {{ count: {count} kind: KIND_CPU }} ]
"""


def variant(model: str, count: int) -> str:
    """Register `model` with `count` instances and return the name of the variant."""
    name = f"{model}_{count}"

    def write(folder: Path) -> None:
        if model == "resnet18":
            write_model(folder, MODEL, resnet18(IMAGE_SIZE), config=_PBTXT.format(count=count))
        else:
            MODELS[model](folder)
            config = folder / MODEL / "config.pbtxt"
            before = config.read_text() if config.exists() else ""
            config.write_text(before + _PBTXT.format(count=count))

    MODELS[name] = write
    return f"charonia:{name}"


def main() -> None:
    """Measure one count after the other, print and write the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.instances", description=__doc__)
    parser.add_argument("--model", nargs="+", default=["mlp", "resnet18", "python_identity"])
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0)
    given = parser.parse_args()
    load = Load("perf_analyzer", "http", given.concurrency, given.seconds)
    rows = []
    print(f"{'model':<16} {'instances':>9} {'infer/s':>9} {'p50 us':>9} {'p99 us':>9} {'memory MiB':>11}")
    for model in given.model:
        for count in COUNTS:
            with Server(variant(model, count)) as server:
                run(server, Load(load.client, load.protocol, load.concurrency, 0.5))
                point = run(server, load)
                memory = server.memory_bytes() >> 20
            print(
                f"{model:<16} {count:>9} {point.rate_per_s:>9.0f} {point.p50_us:>9.0f} {point.p99_us:>9.0f} "
                f"{memory:>11}",
                flush=True,
            )
            rows.append(
                {
                    "model": model,
                    "instances": count,
                    "rate_per_s": point.rate_per_s,
                    "p50_us": point.p50_us,
                    "p99_us": point.p99_us,
                    "memory_mib": memory,
                }
            )
    record = {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "concurrency": given.concurrency,
        "rows": rows,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "instances.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
