"""Measure again what README.md and docs/speed.md quote, and rewrite their tables.

python -m bench.headline              # about 20 minutes; after make install-fast and bench/peers.sh
python -m bench.headline --minutes 300       # every table
python -m bench.headline --list       # what would run, and what cannot
python -m bench.headline --only forms --rounds 5

Each table stands above the command that measures it; the command finds the table. Only rows and the line "Measured on"
are replaced, where the measurement has succeeded. What could not be measured is named at the end, with the reason.
"""

import argparse
import itertools
import json
import os
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
TITLES = {
    "mlp": "perceptron",
    "mlp_tuned": "perceptron, tuned",
    "python_identity": "Python model",
    "python_batched": "Python model, batching",
    "python_string": "Python model, 1 string",
    "python_strings": "Python model, 1,000 strings",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "classifier": "shorter side 256, crop 224, normalise",
    "letterbox": "letterbox 640",
}
"""Names of models, networks and steps on the pages, where they differ."""

UNPAIRED = ("startup", "instances", "burst_memory", "tune_search", "profiles", "link_cost")
"""Modules that measure no pairs."""

SHARES = {
    "kernel": "kernel",
    "interpreter": "interpreter",
    "of it, source": "evaluation",
    "compiled code": "compiled",
    "event loop": "event_loop",
    "HTTP/2 library": "http2",
    "numpy": "numpy",
    "orjson": "orjson",
    "ONNX Runtime": "onnxruntime",
    "C library": "c_library",
}
"""Groups of `bench.profiles` by the head of a column."""

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

    def shown(self) -> list[str]:
        """Return the commands as on the pages."""
        return [f"python -m bench.{command}" for command, _ in self.commands]


def number(value: float) -> str:
    """Return a figure with three digits, or whole."""
    return f"{value:.1f}" if value < 100 and value != round(value) else f"{value:,.0f}"


def duration(microseconds: float) -> str:
    """Return a time with its unit."""
    shown = f"{microseconds:,.1f} us" if abs(microseconds) < 1000 else f"{microseconds / 1000:,.1f} ms"
    return shown.replace("-", "\N{MINUS SIGN}")


def titled(model: str) -> str:
    """Return the name of a model on the pages."""
    for written, shown in (
        ("pp-ocrv4", "PP-OCRv4"),
        ("minilm", "MiniLM"),
        ("xgboost ", "XGBoost, "),
        ("lightgbm ", "LightGBM, "),
    ):
        model = model.replace(written, shown)
    return TITLES.get(model, model)


def spread(ratios: Sequence[float]) -> str:
    """Return the median of ratios, with the least and the greatest."""
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"


def label(point: dict[str, Any]) -> str:
    """Return the load of a point: "HTTP, 16"."""
    return f"{LABELS[point['protocol']]}, {point['concurrency']}"


def compared(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.compare` and `bench.ensemble`, as the columns of the head say."""
    rows = []
    for record in records:
        processes = "2 front ends" if "--front-ends=2" in record["settings"].get("flag", ()) else "one process"
        for point in record["points"]:
            row, figure = [], ""
            for column in head:
                started = next((name for start, name in FIGURES.items() if column.startswith(start)), "")
                figure = started or figure
                if column in ("model", "with 45 us"):
                    row.append(titled(point["model"] if "model" in point else record["a"]["variant"].partition(":")[2]))
                elif column == "protocol, in flight":
                    row.append(label(point))
                elif column == "in flight":
                    row.append(str(point["concurrency"]))
                elif column == "Charonia with":
                    row.append(processes)
                elif column.endswith(" ratio"):
                    row.append(f"{point['summary'][FIGURES[f'{column.split()[0]} us']]['ratio']:.2f}")
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
            shown = spread([pair["compiled_us"] / pair["pure_us"] for pair in pairs])
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
        name = "perceptron, ONNX" if row["model"] == "mlp" else row["model"]
        rows.append([name, spread(row["first_answer_s"]), f"{statistics.median(row['memory_mib']):.0f}"])
    return rows


def frameworks(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.backends` and `bench.openvino`."""
    rows = []
    for row in records[0]["results"]:
        times = [row[name] for name in ("backend_us", "bare_us", "openvino_us", "onnxruntime_us") if name in row]
        added = [duration(row["added_us_per_request"])] if "added_us_per_request" in row else []
        ratio = f"{row['ratio']:.2f} [{row['ratio_min']:.2f}-{row['ratio_max']:.2f}]"
        first = [row["backend"]] if "backend" in row else []
        rows.append([*first, titled(row["model"]), str(row["batch"]), *map(duration, times), *added, ratio])
    return rows


def beside_fastapi(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.tensorflow_service`."""
    rows = []
    for model, runs in records[0].items():
        if model in ("mlp", "resnet50"):
            both = list(zip(runs["fastapi"], runs["charonia"], strict=True))
            rates, times = (
                [statistics.median(each[key] for each in way) for way in zip(*both, strict=True)]
                for key in ("rate_per_s", "p99_ms")
            )
            ratio = spread([b["rate_per_s"] / a["rate_per_s"] for a, b in both])
            rows.append([titled(model), *map(number, rates), ratio, *map(number, times)])
    return rows


def images(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.image_backend`."""
    rows = []
    for point in records[0]["points"]:
        rates, times = (
            [number(statistics.median(pair[way][key] for pair in point["pairs"])) for way in (0, 1)]
            for key in ("images_per_s", "cpu_ms")
        )
        title = f"{titled(point['recipe'])}; {point['photo'].replace('x', ' x ')}"
        rows.append([title, *rates, spread(point["ratios"]), *times])
    return rows


def instances(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.instances`."""
    keys = ("instances", "rate_per_s", "p50_us", "p99_us", "memory_mib")
    return [[titled(row["model"]), *(f"{row[key]:,.0f}" for key in keys)] for row in records[0]["rows"]]


def pictures(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.ocr`."""
    rows = []
    for point in records[0]["points"]:
        found = point["summary"]
        ratio = f"{found['ratio']:.2f} [{found['ratio_min']:.2f}-{found['ratio_max']:.2f}]"
        rates = [f"{found[f'{way}_per_s']:.2f}" for way in ("pipeline", "steps")]
        times = [f"{found[f'{way}_p50_ms']:,.0f}" for way in ("pipeline", "steps")]
        rows.append([f"{point['picture']}, {point['pipeline'].split()[0]}", label(point), *rates, ratio, *times])
    return rows


def searches(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.tune_search`."""
    rows = []
    for record in records:
        ours, theirs = record["found"]["charonia"], record["found"]["model-analyzer"]
        most, batch, concurrency = record["settings"]["limits"]
        load = f"{most} instances, batch {batch}, {concurrency} in flight"
        counts = [str(each["measurements"]) for each in (ours, theirs)]
        seconds = [number(each["seconds"]) for each in (ours, theirs)]
        winners = record["winners"]
        ratio = f"{winners['ratio']:.2f} [{winners['ratio_min']:.2f}-{winners['ratio_max']:.2f}]"
        rows.append([load, *seconds, *counts, f"{ours['seconds'] / theirs['seconds']:.2f}", ratio])
    return rows


def idle_connections(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.burst_memory --idle`."""
    keys = ("connections", "front_ends", "form", "http_bytes", "grpc_bytes")
    return [[f"{row[key]:,}" if key != "form" else row[key] for key in keys] for row in records[0]["rows"]]


def profiles(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.profiles`; shares below one percent are left out."""
    rows = []
    for point in records[0]["points"]:
        shares = [point["shares"][SHARES[column]] for column in head[1:]]
        rows.append([point["title"], *(f"{share:.0f}" if share >= 1 else "" for share in shares)])
    return rows


def links(head: list[str], records: list[Any]) -> Rows:
    """Return rows of `bench.link_cost`."""
    keys = ("one_process_us", "apart_us")
    return [[str(row["together"]), *(f"{row[key]:.1f}" for key in keys)] for row in records[0]["rows"]]


def pair(a: str, b: str, options: str = "", note: str = "") -> tuple[str, str]:
    """Return a comparison and its results file."""
    client = "wrk" if "wrk" in options else "perf_analyzer"
    name = f"{a}-vs-{b}-{client}{note}".replace(":", "-") + ".json"
    return f"compare {a} {b} {options}".strip(), name


LIGHT = "--client wrk --seconds 1"
NATIVE = f"{LIGHT} --rounds 3"
ENSEMBLE = "--client wrk --concurrency 16 64 --rounds 3 --seconds 1"
TABLES = (
    Table(
        (
            pair("charonia:identity", "triton:python_identity", LIGHT),
            pair("pure:identity", "triton:python_identity", LIGHT),
        ),
        both_forms,
    ),
    Table((("forms", "forms.json"),), forms),
    Table((pair("charonia:identity", "fixed:identity", f"{LIGHT} --concurrency 16 64"),), compared),
    Table((("profiles", "profiles.json"),), profiles),
    Table((("link_cost", "link_cost.json"),), links),
    Table((pair("charonia:identity", "triton:python_identity"),), compared),
    Table((pair("charonia:image", "triton:python_image", "--concurrency 1 8"),), compared),
    Table((pair("charonia:python_identity", "triton:python_identity", "--concurrency 1 16"),), compared),
    Table(
        (
            pair("charonia:python_batched", "triton:python_batched", f"{NATIVE} --concurrency 16 64"),
            pair("charonia:python_string", "triton:python_string", f"{NATIVE} --concurrency 1 16"),
            pair("charonia:python_strings", "triton:python_strings", f"{NATIVE} --concurrency 1 16"),
        ),
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
    Table(
        tuple(
            pair(f"charonia:{model}", f"triton:{model}", f"{NATIVE} --concurrency 16 64 256 --flag-a=--front-ends=2")
            for model in ("identity", "mlp_tuned")
        ),
        compared,
    ),
    Table(
        tuple(
            (f"ensemble --against triton --model mlp mlp_tuned {ENSEMBLE}{flag}", f"native-ensemble-{name}.json")
            for flag, name in ((" --flag=--front-ends=2", "two_front_ends"), ("", "one_process"))
        ),
        compared,
    ),
    Table(
        tuple(
            pair(f"charonia:{model}", f"fixed:{model}", "--protocol http --concurrency 1 --flag-b=--after-us=45")
            for model in ("identity", "mlp")
        ),
        compared,
    ),
    Table(
        tuple(
            pair(f"charonia@/usr/bin/python3.11:{model}", f"charonia:{model}", "--concurrency 1 16")
            for model in ("identity", "python_identity")
        ),
        compared,
    ),
    Table((("backends --threads 1", "backends.json"),), frameworks),
    Table((("openvino", "openvino.json"),), frameworks),
    Table((("tensorflow_service ENVIRONMENT", "tensorflow_service.json"),), beside_fastapi),
    Table((("image_backend", "image_backend.json"),), images),
    Table((("instances", "instances.json"),), instances),
    Table((("burst_memory --idle 100000 --front-ends 8", "idle_connections.json"),), idle_connections),
    Table((("ocr --count 4", "ocr.json"),), pictures),
    Table(tuple((f"tune_search {name}", f"tune-{name}.json") for name in ("quick_start", "search")), searches),
)
"""The most important first: those that no time is left for are left out."""


def missing(table: Table) -> str:
    """Return what the measurement needs and does not find, "" for nothing."""
    text = " ".join(command for command, _ in table.commands)
    light = "wrk" in text or "profiles" in text
    own_client = not text.startswith(("compare", "perf_client --", "perf_client charonia"))
    native = ("triton:mlp", "triton:identity", "against triton")
    needs = {
        "an environment with TensorFlow and FastAPI, named by ENVIRONMENT": "ENVIRONMENT" not in text
        or "ENVIRONMENT" in os.environ,
        "an optimised interpreter with Charonia's dependencies": "@" not in text
        or not subprocess.run(
            [text.partition("@")[2].partition(":")[0], "-c", "import uvloop"], stderr=subprocess.DEVNULL
        ).returncode,
        "model-analyzer (bench/peers.sh)": "tune_search" not in text or (PEERS / "bin" / "model-analyzer").exists(),
        "wrk and h2load (apt-get install wrk nghttp2-client)": not light or all(map(shutil.which, ("wrk", "h2load"))),
        "perf (apt-get install linux-perf)": "profiles" not in text or shutil.which("perf"),
        "perf_analyzer (bench/peers.sh)": light or own_client or (PEERS / "bin" / "perf_analyzer").exists(),
        "tritonserver (bench/peers.sh)": "triton:" not in text or (PEERS / "bin" / "tritonserver").exists(),
        "Triton's C++ backends": not any(each in text for each in native)
        or (PEERS / "triton" / "backends" / "onnxruntime").exists(),
    }
    return ", ".join(need for need, met in needs.items() if not met)


def rewrite(page: str, table: Table, measured: str, records: list[Any]) -> str:
    """Return the page with the rows of the table above the command replaced; the same if it has no such command."""
    lines = page.split("\n")
    at = next((lines.index(f"    {shown}") for shown in table.shown() if f"    {shown}" in lines), 0)
    if not at:
        return page
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
        given = [os.environ["ENVIRONMENT"] if each == "ENVIRONMENT" else each for each in given]
        if "--rounds" not in given and module not in UNPAIRED:
            given += ["--rounds", str(rounds)]
        if module not in ("forms", "startup", "instances", "tensorflow_service"):
            given += ["--output", str(RESULTS / results)]
        if module in ("compare", "ensemble", "perf_client"):
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
    left: list[str] = []
    for table in TABLES:
        name = table.shown()[0]
        if not any(given.only in command for command in table.shown()):
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
            f"compiled form{'' if table.commands[0][0].split()[0] in UNPAIRED else f', {given.rounds} pairs'}."
        )
        for page in PAGES:
            text = (ROOT / page).read_text(encoding="utf-8")
            (ROOT / page).write_text(rewrite(text, table, measured, records), encoding="utf-8")
    print(f"\n{(time.monotonic() - begin) / 60:.1f} minutes. Not measured:", *left, sep="\n  ")


if __name__ == "__main__":
    main()
