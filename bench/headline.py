"""Measure again what README.md and docs/speed.md quote, and rewrite their tables.

python -m bench.headline              # about 20 minutes; after make install-fast and bench/peers.sh
python -m bench.headline --list       # what would run, and what cannot
python -m bench.headline --only forms --rounds 5

Each table stands above the command that measures it; the command finds the table. Only rows and the line "Measured on"
are replaced, where the measurement has succeeded. Tables that need an environment or hours are named at the end.
"""

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bench.compare import RESULTS, ROOT
from bench.machine import machine
from bench.servers import PEERS
from charonia import compiled

PAGES = ("README.md", "docs/speed.md")
MEASURED = "Measured on "
LABELS = {"http": "HTTP", "grpc": "gRPC"}
FIGURES = {"infer/s": "rate_per_s", "p50 us": "p50_us", "p99 us": "p99_us", "server CPU us": "cpu_us"}
"""Name in a summary by the beginning of a column's head."""

Rows = list[list[str]]
Renderer = Callable[[list[str], list[Any]], Rows]


@dataclass(frozen=True)
class Table:
    """A table of the pages.

    Attributes:
        commands: What measures it, as on the pages, after "python -m bench.", and the name of each results file.
        rows: Returns the rows from the head and the contents of the results files.
    """

    commands: tuple[tuple[str, str], ...]
    rows: Renderer


def number(value: float) -> str:
    """Return a figure with three digits, or whole."""
    return f"{value:.1f}" if value < 100 and value != round(value) else f"{value:,.0f}"


def label(point: dict[str, Any]) -> str:
    """Return the load of a point: "HTTP, 16"."""
    return f"{LABELS[point['protocol']]}, {point['concurrency']}"


def compared(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.compare` and `bench.ensemble`, as the columns of the head say."""
    rows = []
    for record in records:
        for point in record["points"]:
            row, figure = [], ""
            for column in head:
                started = next((name for start, name in FIGURES.items() if column.startswith(start)), "")
                figure = started or figure
                if column == "model":
                    row.append(point["model"])
                elif column == "protocol, in flight":
                    row.append(label(point))
                elif column == "in flight":
                    row.append(str(point["concurrency"]))
                elif column == "ratio":
                    found = point["summary"][figure]
                    row.append(f"{found['ratio']:.2f} [{found['ratio_min']:.2f}-{found['ratio_max']:.2f}]")
                else:
                    row.append(number(point["summary"][figure]["a" if started else "b"]))
            rows.append(row)
    return rows


def both_forms(head: list[str], records: list[Any]) -> Rows:
    """Return rows of the compiled form and of the pure one, each in pairs with Triton."""
    rows = []
    for fast, pure in zip(*(record["points"] for record in records), strict=True):
        rate, cpu = fast["summary"]["rate_per_s"], fast["summary"]["cpu_us"]
        ratio = f"{rate['ratio']:.1f} [{rate['ratio_min']:.1f}-{rate['ratio_max']:.1f}]"
        rates = (pure["summary"]["rate_per_s"]["a"], rate["a"], rate["b"])
        times = (pure["summary"]["cpu_us"]["a"], cpu["a"], cpu["b"])
        rows.append([label(fast), *map(number, rates), ratio, *map(number, times)])
    return rows


def forms(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.forms`."""
    rows = []
    for name, pairs in records[0].items():
        if isinstance(pairs, list):
            model, protocol, encoding = name.partition(",")[0].split()
            ratios = [pair["compiled_us"] / pair["pure_us"] for pair in pairs]
            shown = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"
            times = [f"{statistics.median(pair[f'{form}_us'] for pair in pairs):.1f}" for form in ("pure", "compiled")]
            title = "perceptron (ONNX)" if model == "mlp" else model
            rows.append([f"{title}, {LABELS[protocol]}{', JSON' * (encoding == 'json')}", *times, shown])
    return rows


def tools(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.perf_client`, of the fast server and of the slow one."""
    rows = []
    for record in records:
        slow = "slow model, " * record["server"]["variant"].endswith("slow")
        for point in record["points"]:
            row = [slow + label(point)]
            for figure in ("rate_per_s", "p50_us", "p99_us", "client_cpu_us"):
                pairs = [(pair["charonia"][figure], pair["perf_analyzer"][figure]) for pair in point["pairs"]]
                row += [f"{statistics.median(each):,.0f}" for each in zip(*pairs, strict=True)]
                if figure == "rate_per_s":
                    row.append(f"{statistics.median(a / b for a, b in pairs):.2f}")
            rows.append([*row[:-2], "", ""] if slow else row)
    return rows


def generators(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.perf_client --rate`."""
    rows = []
    for point in records[0]["points"]:
        late = f"{point['send_error_p99_us']:,.0f}" if point["send_error_p99_us"] is not None else ""
        tool = {"charonia": "`charonia perf`", "locust": "Locust"}.get(point["tool"], point["tool"])
        cpu = f"{point['client_cpu_us']:.1f}" if point["client_cpu_us"] is not None else ""
        rows.append([tool, f"{point['rate_per_s']:,.0f}", late, cpu])
    return rows


def startup(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.startup`."""
    rows = []
    for row in records[0]["rows"]:
        s = row["first_answer_s"]
        shown = f"{statistics.median(s):.2f} [{min(s):.2f}-{max(s):.2f}]"
        name = "perceptron, ONNX" if row["model"] == "mlp" else row["model"]
        rows.append([name, shown, f"{statistics.median(row['memory_mib']):.0f}"])
    return rows


def pair(a: str, b: str, options: str = "", note: str = "") -> tuple[str, str]:
    """Return a comparison and its results file."""
    client = "wrk" if "wrk" in options else "perf_analyzer"
    name = f"{a}-vs-{b}-{client}{note}".replace(":", "-") + ".json"
    return f"compare {a} {b} {options}".strip(), name


LIGHT = "--client wrk --seconds 1"
TABLES = (
    Table(
        (
            pair("charonia:identity", "triton:python_identity", LIGHT),
            pair("pure:identity", "triton:python_identity", LIGHT),
        ),
        both_forms,
    ),
    Table((("forms", "forms.json"),), forms),
    Table((pair("charonia:identity", "triton:python_identity"),), compared),
    Table((pair("charonia:image", "triton:python_image", "--concurrency 1 8"),), compared),
    Table((pair("charonia:python_identity", "triton:python_identity", "--concurrency 1 16"),), compared),
    Table(
        (pair("charonia:python_batched", "triton:python_batched", f"--concurrency 16 {LIGHT}"),),
        compared,
    ),
    Table((("ensemble --model mlp slow --client wrk --concurrency 16 --seconds 1", "ensemble.json"),), compared),
    Table((pair("charonia:mlp", "triton:python_mlp", "--protocol http --concurrency 1 16"),), compared),
    Table((pair("charonia:mlp", "bare:mlp", "--protocol http --concurrency 1"),), compared),
    Table(
        (
            ("perf_client --concurrency 1 16", "perf_client-charonia-identity.json"),
            ("perf_client charonia:python_slow --concurrency 4", "perf_client-charonia-python_slow.json"),
        ),
        tools,
    ),
    Table((("perf_client fixed:identity --rate 50000", "perf_client-rate.json"),), generators),
    Table((("startup", "startup.json"),), startup),
    Table((pair("charonia:mlp", "triton:mlp", "--protocol http --concurrency 1 16"),), compared),
)
"""The most important first: those that no time is left for are left out."""


def missing(table: Table) -> str:
    """Return what the measurement needs and does not find, "" for nothing."""
    text = " ".join(command for command, _ in table.commands)
    light = "wrk" in text
    own_client = text.startswith(("forms", "startup", "perf_client fixed:"))
    needs = {
        "wrk and h2load (apt-get install wrk nghttp2-client)": not light or all(map(shutil.which, ("wrk", "h2load"))),
        "perf_analyzer (bench/peers.sh)": light or own_client or (PEERS / "bin" / "perf_analyzer").exists(),
        "tritonserver (bench/peers.sh)": "triton:" not in text or (PEERS / "bin" / "tritonserver").exists(),
        "Triton's ONNX Runtime backend": "triton:mlp" not in text
        or (PEERS / "triton" / "backends" / "onnxruntime").exists(),
    }
    return ", ".join(need for need, met in needs.items() if not met)


def rewrite(page: str, table: Table, measured: str, records: list[Any]) -> str:
    """Return the page with the rows of the table above the command replaced; the same if it has no such command."""
    lines = page.split("\n")
    shown = f"    python -m bench.{table.commands[0][0]}"
    if shown not in lines:
        return page
    at = lines.index(shown)
    last = max(number for number in range(at) if lines[number].startswith("|"))
    first = last
    while lines[first - 1].startswith("|"):
        first -= 1
    head = [cell.strip() for cell in lines[first].strip("|").split("|")]
    rows = table.rows(head, records)
    after = at
    while lines[after].startswith("    "):
        after += 1
    old = 2 if lines[after + 1].startswith(MEASURED) and "bench.headline" in lines[after + 1] else 0
    body = [f"|{''.join(f' {cell} |' if cell else ' |' for cell in row)}" for row in rows]
    return "\n".join([*lines[: first + 2], *body, *lines[last + 1 : after], "", measured, *lines[after + old :]])


def measure(table: Table, rounds: int, seconds: float) -> list[Any]:
    """Run the commands of a table and return the contents of their results files."""
    records = []
    for command, results in table.commands:
        module, *given = command.split()
        if module != "startup":
            given += ["--rounds", str(rounds)]
        if module in ("compare", "ensemble", "perf_client"):
            given += ["--output", str(RESULTS / results)]
            given += [] if "--seconds" in given else ["--seconds", str(seconds)]
        subprocess.run([sys.executable, "-m", f"bench.{module}", *given], cwd=ROOT, check=True)
        record = json.loads((RESULTS / results).read_text(encoding="utf-8"))
        wanted: dict[str, Sequence[Any]] = {
            "concurrency": numbers_of(given, "--concurrency"),
            "model": values_of(given, "--model"),
        }
        for key, values in wanted.items():  # a file may hold points of other commands
            if values and "points" in record:
                record["points"] = [point for point in record["points"] if point.get(key, values[0]) in values]
        records.append(record)
    return records


def values_of(given: Sequence[str], option: str) -> list[str]:
    """Return the values of an option of a command."""
    if option not in given:
        return []
    rest = given[given.index(option) + 1 :]
    return list(itertools.takewhile(lambda value: not value.startswith("--"), rest))


def numbers_of(given: Sequence[str], option: str) -> list[int]:
    return [int(value) for value in values_of(given, option)]


def quoted() -> list[str]:
    """Return the commands that the pages have."""
    lines = [line for page in PAGES for line in (ROOT / page).read_text(encoding="utf-8").split("\n")]
    return list(dict.fromkeys(line.strip() for line in lines if line.startswith("    python -m bench.")))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure table by table; write the pages after each, so that an interrupted run keeps its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs of each figure")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="a window of perf_analyzer, of which a run has three"
    )
    parser.add_argument("--minutes", type=float, default=20, help="no measurement begins after so long")
    parser.add_argument("--only", default="", help="tables whose commands contain this")
    parser.add_argument("--list", action="store_true", help="only say what would run")
    given = parser.parse_args(arguments)
    if compiled.form != "compiled":
        raise SystemExit(f"the compiled form is needed, the pure one runs: {compiled.problem or 'make install-fast'}")
    begin = time.monotonic()
    covered = {f"python -m bench.{command}" for table in TABLES for command, _ in table.commands}
    left = [] if given.only else [f"{command}: run by hand" for command in quoted() if command not in covered]
    for table in TABLES:
        name = f"python -m bench.{table.commands[0][0]}"
        if given.only not in name:
            continue
        lack = missing(table)
        if lack or time.monotonic() - begin > given.minutes * 60:
            left.append(f"{name}: {f'needs {lack}' if lack else 'no time left'}")
            continue
        print(f"\n{name}", flush=True)
        if given.list:
            continue
        try:
            records = measure(table, given.rounds, given.seconds)
        except subprocess.CalledProcessError as error:
            left.append(f"{name}: failed with exit status {error.returncode}")
            continue
        facts = machine()
        python = f"Python {facts['python']}{'' if facts['python_optimised'] else ' (not an optimised build)'}"
        day = f"{datetime.now(UTC):%d %B %Y}".lstrip("0")
        measured = (
            f"{MEASURED}{day} by `python -m bench.headline`: {facts['cpu']}, {facts['cores']} cores, {python}, "
            f"compiled form, {given.rounds} pairs."
        )
        for page in PAGES:
            text = (ROOT / page).read_text(encoding="utf-8")
            (ROOT / page).write_text(rewrite(text, table, measured, records), encoding="utf-8")
    print(f"\n{(time.monotonic() - begin) / 60:.1f} minutes. Not measured:", *left, sep="\n  ")


if __name__ == "__main__":
    main()
