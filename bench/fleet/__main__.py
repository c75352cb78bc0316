"""Simulate many servers, and print what each policy makes of them.

Usage: python -m bench.fleet [SCENARIO ...]
    Service times: bench/results/fleet_real.json, which `python -m bench.fleet.real` measures.
"""

import itertools
import json
import sys
import time
from collections.abc import Sequence

from bench.fleet.real import RESULTS, measured_before
from bench.fleet.scenarios import cases
from bench.fleet.simulation import Fleet, Result
from bench.machine import machine


def main(wanted: Sequence[str]) -> None:
    """Run the scenarios."""
    real = measured_before()
    print(f"Service times in ms by batch: {[round(1e3 * s, 1) for s in real.times.by_batch]}")
    rows = []
    for scenario, group in itertools.groupby(cases(real.times, real.start_s), lambda case: case.scenario):
        if wanted and scenario not in wanted:
            continue
        print(f"\n## {scenario}\n")
        for ordinal, case in enumerate(group):
            begin = time.monotonic()
            row = {**case.labels, **figures(Fleet(case.plan).run())}
            if not ordinal:
                print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
            print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
            rows.append({"scenario": scenario, **row, "took_s": round(time.monotonic() - begin, 1)})
    if not wanted:
        (RESULTS / "fleet.json").write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def figures(result: Result) -> dict[str, str | int]:
    """Return a run's cells of a table."""
    bad = [second for second, (came, good) in result.by_second.items() if good < 0.99 * came]
    return {
        "p50 ms": in_ms(result.quantile(0.5)),
        "p99 ms": in_ms(result.quantile(0.99)),
        "goodput": f"{result.goodput:.3%}",
        "lost": result.failed,
        "refused": result.refused,
        "seconds under 99 %": len(bad),
        "most servers": max(count for _, count in result.servers),
        "executed": f"{result.executions / (result.offered or 1):.2f}",
        **({"cache hits": f"{result.hits:.0%}"} if result.hits else {}),
    }


def in_ms(seconds: float) -> str:
    """Return a latency, for a table."""
    return "late" if seconds == float("inf") else f"{seconds * 1e3:.0f}"


if __name__ == "__main__":
    main(sys.argv[1:])
