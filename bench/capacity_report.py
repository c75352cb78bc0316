"""What larger machines do, from what `bench.front_ends` has measured: rewrites the tables of `docs/capacity.md`.

python -m bench.front_ends --client wrk --model engine_identity      # each of these four takes some minutes
python -m bench.front_ends --client wrk --model identity
python -m bench.front_ends --client wrk --model engine_image
python -m bench.front_ends --client wrk --model image
python -m bench.capacity_report

First comes the check: the simulation of the machine that was measured, with its client, beside the rates that were
measured there. Then come the machines of `bench.capacity.CORES`, with clients elsewhere.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.capacity import CORES, Costs, Figures, Shape, best, simulate
from bench.compare import RESULTS, ROOT
from bench.front_ends import CLIENT
from bench.models import input_tensor
from charonia.server.front_ends.processes import choose_front_ends

PAGE = ROOT / "docs" / "capacity.md"
ORIGIN = "Measured on "

IN_ENGINE = ("engine_identity", "engine_image")
"""Models that front ends do not run."""

MODELS = ("engine_identity", "identity", "engine_image", "image")

CLIENTS = 256
"""Requests in flight on the larger machines."""

SIMULATED = 4_000
"""Requests of a simulation."""


class Measured(NamedTuple):
    """Measurements with one load.

    Attributes:
        load: Protocol and requests in flight, such as "http-64".
        costs: Costs with one front end, of a model that runs in the engine or the front end itself.
        rates: Inferences a second by number of front ends.
    """

    load: str
    costs: Costs
    rates: dict[int, float]


def measured(record: dict[str, Any]) -> Iterator[Measured]:
    """Yield the loads of a results file of `bench.front_ends` that have runs without front ends and with one."""
    for load, samples in record.items():
        if load in ("date", "machine") or not {"0", "1"} <= samples.keys():
            continue
        alone, apart = (_medians(samples[number]) for number in ("0", "1"))
        costs = Costs(
            front_end_us=apart["front ends"],
            engine_us=apart["engine"],
            one_process_us=alone["server"],
            client_us=apart[CLIENT],
        )
        rates = {int(n): statistics.median(each["rate_per_s"] for each in runs) for n, runs in samples.items()}
        yield Measured(load, costs, rates)


def _medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    shares: list[dict[str, float]] = [run["cpu_us_by_process"] for run in runs]
    return {name: statistics.median(share[name] for share in shares) for name in shares[0]}


def check_rows(model: str, found: Measured, cores: int) -> Iterator[str]:
    """Yield a row for each number of front ends: the measurement and the simulation."""
    in_flight = int(found.load.partition("-")[2])
    for front_ends, rate_per_s in found.rates.items():
        figures = simulate(found.costs, Shape(cores, front_ends, 1), in_flight, SIMULATED)
        costs = found.costs
        cpu_us = costs.front_end_us + costs.engine_us if front_ends else costs.one_process_us
        yield (
            f"| {model} | {_words(found.load)} | {front_ends} | {cpu_us:.0f} | {costs.client_us:.0f} | "
            f"{rate_per_s:,.0f} | {figures.rate_per_s:,.0f} | {rate_per_s / figures.rate_per_s:.2f} |"
        )


def machine_row(model: str, found: Measured, cores: int) -> str:
    """Return the row of a larger machine, with clients elsewhere: the best number of front ends, and that of `auto`."""
    costs = replace(found.costs, client_us=0.0)
    shape, figures = best(costs, cores, CLIENTS, SIMULATED)
    auto = choose_front_ends(cores, "the model stays in the engine" if model in IN_ENGINE else "").number
    _, by_auto = best(costs, cores, CLIENTS, SIMULATED, front_ends=auto)
    gigabits = figures.rate_per_s * len(input_tensor(model)[2]) * 8 / 1e9
    return (
        f"| {model} | {_words(found.load)} | {cores} | {shape.front_ends} | {figures.rate_per_s:,.0f} | "
        f"{_limit(figures)} | {auto} | {by_auto.rate_per_s:,.0f} | {gigabits:.1f} |"
    )


def limit_row(model: str, found: Measured) -> str:
    """Return the row that says where the engine becomes the limit."""
    costs = found.costs
    is_limit = costs.engine_us > 0.02 * costs.front_end_us  # not where front ends run the model
    most = f"{1e6 / costs.engine_us:,.0f}" if is_limit else "-"
    cores = f"{(costs.front_end_us + costs.engine_us) / costs.engine_us:.1f}" if is_limit else "-"
    ratio = (costs.front_end_us + costs.engine_us) / costs.one_process_us
    return (
        f"| {model} | {_words(found.load)} | {costs.one_process_us:.1f} | {costs.front_end_us:.1f} | "
        f"{costs.engine_us:.1f} | {ratio:.2f} | {most} | {cores} |"
    )


def _words(load: str) -> str:
    protocol, _, in_flight = load.partition("-")
    return f"{'HTTP' if protocol == 'http' else 'gRPC'}, {in_flight}"


def _limit(figures: Figures) -> str:
    return f"{figures.busiest} ({figures.busy_share:.0%})"


LIMITS = "| model | protocol, in flight | one process us | front end us | engine us | ratio | engine's limit | cores |"
CHECK = "| model | protocol, in flight | front ends | server us | client us | measured | simulated | ratio |"
MACHINES = "| model | protocol, in flight | cores | front ends | infer/s | limit | auto | infer/s | Gbit/s in |"


def rewrite(page: str, head: str, rows: list[str]) -> str:
    """Return the page with the rows of a table replaced."""
    lines = page.split("\n")
    first = lines.index(head) + 2
    last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    return "\n".join([*lines[:first], *rows, *lines[last:]])


def origin(record: dict[str, Any]) -> str:
    """Return the line that says where the figures come from."""
    facts = record["machine"]
    kind = "" if facts["python_optimised"] else " (not an optimised build)"
    form = facts.get("form", "pure")
    machine = f"{facts['cpu']}, {facts['cores']} cores, Python {facts['python']}{kind}, {form} form"
    return f"{ORIGIN}{record['date'][:10]}: {machine}."


def main() -> None:
    """Print the tables, and rewrite those of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", choices=["perf_analyzer", "wrk"], default="wrk")
    given = parser.parse_args()
    records = {model: _read(RESULTS / f"front_ends-{model}-{given.client}.json") for model in MODELS}
    found = [(model, each) for model, record in records.items() for each in measured(record)]
    # The last load of a protocol is the greatest, with the costs of a busy server.
    greatest = {(model, each.load.partition("-")[0]): each for model, each in found}
    cores = int(records[MODELS[0]]["machine"]["cores"])
    tables = {
        LIMITS: [limit_row(model, each) for model, each in found],
        CHECK: [row for model, each in found for row in check_rows(model, each, cores)],
        MACHINES: [machine_row(model, each, count) for (model, _), each in greatest.items() for count in CORES],
    }
    page = PAGE.read_text(encoding="utf-8")
    for head, rows in tables.items():
        print(head, *rows, sep="\n", end="\n\n")
        page = rewrite(page, head, rows)
    old = next(line for line in page.split("\n") if line.startswith(ORIGIN))
    PAGE.write_text(page.replace(old, origin(records[MODELS[0]])), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise SystemExit(f"{path} is missing: run `python -m bench.front_ends` for this model and client first")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


if __name__ == "__main__":
    main()
