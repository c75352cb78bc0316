"""Compare two searches for the best configuration: `charonia tune` and model-analyzer, with the same command line.

python -m bench.tune_search quick_start             the limits of model-analyzer's quick start
python -m bench.tune_search search                  5 instance counts x 8 batch sizes x concurrency to 64

Both search the same Python model. In `search` each starts its own copy of the same tritonserver; in `quick_start`
`charonia tune` uses its default, its own server. The measure is the wall time until the result is written. Then Triton
serves both winners side by side, each gets load in turn with the concurrency that its tool recommends, and the median
of the ratios of the pairs shows which is better.

Existing results are not measured again, so an interrupted comparison resumes; --fresh starts again. An interrupted tool
resumes from its own checkpoint, and the time that it had spent counts.
"""

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.compare import RESULTS
from bench.load import Load, run
from bench.machine import machine
from bench.models import MODEL, MODELS
from bench.servers import PEERS, Server, free_ports
from charonia.config.pbtxt import parse, render

ANALYZER = PEERS / "ma_venv" / "bin" / "model-analyzer"
TRITON = PEERS / "bin" / "tritonserver"
STOP_SECONDS_MAX = 60.0

Limits = tuple[int, int, int]
"""Most instances, largest batch and most requests in flight."""

LIMITS: dict[str, Limits] = {"quick_start": (2, 2, 2), "search": (5, 128, 64)}

_CONFIG = """\
backend: "python"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""

_MODEL = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            left, right = (pb_utils.get_input_tensor_by_name(request, f"INPUT{n}").as_numpy() for n in (0, 1))
            outputs = [pb_utils.Tensor("OUTPUT0", left + right), pb_utils.Tensor("OUTPUT1", left - right)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""


# A wait as for an accelerator: it makes batches and instances worth something, and leaves the cores to the rest.
_WAITING_MODEL = "import time\n\n" + _MODEL.replace(
    "        responses = []", "        time.sleep(0.002)\n        responses = []"
)


@dataclass(frozen=True)
class Found:
    """A tool's recommendation.

    Attributes:
        seconds: Wall time until it was written.
        measurements: How many it made.
        config: Name of the configuration.
        concurrency: Requests in flight.
        rate_per_s: The tool's measurement of it, in inferences a second.
    """

    seconds: float
    measurements: int
    config: str
    concurrency: int
    rate_per_s: float


def write_model(repository: Path, model: str, config: str = _CONFIG) -> None:
    """Write a model with a configuration."""
    (repository / MODEL / "1").mkdir(parents=True, exist_ok=True)
    (repository / MODEL / "config.pbtxt").write_text(config)
    (repository / MODEL / "1" / "model.py").write_text(model)


def command(tool: str, folder: Path, limits: Limits, *, on_triton: bool) -> list[str]:
    """Return the command line of a tool; all options mean the same to both. `on_triton` is for charonia alone."""
    instances, batch_size, concurrency = limits
    program = [sys.executable, "-m", "charonia", "tune"] if tool == "charonia" else [str(ANALYZER)]
    server = ["--triton-server-path", str(TRITON)] if on_triton or tool != "charonia" else []
    if tool != "charonia":
        http, grpc, metrics = (f"localhost:{port}" for port in _ports(folder))
        server += ["--triton-http-endpoint", http, "--triton-grpc-endpoint", grpc]
        server += ["--triton-metrics-url", f"http://{metrics}/metrics"]
    return [
        *(*program, "profile", "--model-repository", str(folder.parent / "models"), "--profile-models", MODEL),
        *("--triton-launch-mode", "local", *server),
        *("--output-model-repository-path", str(folder / "out"), "--override-output-model-repository"),
        *("--export-path", str(folder), "--checkpoint-directory", str(folder / "checkpoints")),
        *("--run-config-search-max-instance-count", str(instances)),
        *("--run-config-search-max-model-batch-size", str(batch_size)),
        *("--run-config-search-max-concurrency", str(concurrency)),
    ]


def _ports(folder: Path) -> list[int]:
    """Return the ports of a folder's server. They stay the same: model-analyzer's checkpoint is keyed by them."""
    kept = folder / "ports.json"
    if not kept.exists():
        kept.write_text(json.dumps(free_ports(3)))
    ports: list[int] = json.loads(kept.read_text())
    return ports


def search(tool: str, folder: Path, limits: Limits, *, on_triton: bool) -> Found:
    """Let a tool search to its end and return its recommendation."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints").mkdir(exist_ok=True)
    spent = folder / "seconds"
    before = float(spent.read_text()) if spent.exists() else 0.0
    begin = time.monotonic()
    try:
        with (folder / "log.txt").open("ab") as log:
            status = _wait(command(tool, folder, limits, on_triton=on_triton), folder, log)
    finally:
        seconds = before + time.monotonic() - begin
        spent.write_text(f"{seconds:.1f}")
    if status:
        tail = "\n".join((folder / "log.txt").read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"{tool} ended with status {status}:\n{tail}")
    return replace(_read(tool, folder), seconds=seconds)


def _wait(arguments: list[str], folder: Path, log: Any) -> int:
    """Run a program in a separate session, so that only this process ends it on Ctrl-C."""
    environment = os.environ | {"PATH": f"{PEERS / 'bin'}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        arguments, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
    )
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def _read(tool: str, folder: Path) -> Found:
    with (folder / "results" / "metrics-model-inference.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    if tool == "charonia":
        document = json.loads((folder / "results" / "charonia-tune.json").read_text())
        (group,) = document["groups"]
        best = group["decision"]["best"]
        name = next(each["name"] for each in group["variants"] if each["variant"] == best["variant"])
        rate = best["metrics"][MODEL]["perf_throughput"]["value"]
        return Found(0.0, len(group["trials"]), name, int(best["loads"][0]["value"]), rate)
    row = max(rows, key=lambda row: float(row["Throughput (infer/sec)"]))
    rate = float(row["Throughput (infer/sec)"])
    return Found(0.0, len(rows), row["Model Config Path"], int(row["Concurrency"]), rate)


def compare_winners(found: dict[str, Found], root: Path, model: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Serve both winners by Triton side by side, and measure them in turn."""
    for tool, each in found.items():
        text = (root / tool / "out" / each.config / "config.pbtxt").read_text()
        MODELS[f"winner_{tool}"] = _winner(model, render(replace(parse(text), name=MODEL)))
    pairs = []
    with Server("triton:winner_charonia") as ours, Server("triton:winner_model-analyzer") as theirs:
        servers = {"charonia": ours, "model-analyzer": theirs}
        for tool, server in servers.items():
            run(server, Load("perf_analyzer", "grpc", found[tool].concurrency, 1.0))
        for number in range(rounds):
            order = list(servers) if number % 2 else list(reversed(servers))
            pair = {
                tool: run(servers[tool], Load("perf_analyzer", "grpc", found[tool].concurrency, seconds))
                for tool in order
            }
            pairs.append({tool: asdict(pair[tool]) for tool in servers})
    ratios = [pair["charonia"]["rate_per_s"] / pair["model-analyzer"]["rate_per_s"] for pair in pairs]
    return {"pairs": pairs, "ratio": median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}


def _winner(model: str, config: str) -> Callable[[Path], None]:
    return partial(write_model, model=model, config=config)


def main() -> None:
    """Search, measure the winners, print, and write after each part."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune_search", description=__doc__)
    parser.add_argument("comparison", choices=LIMITS)
    parser.add_argument("--limits", type=int, nargs=3, metavar=("INSTANCES", "BATCH", "CONCURRENCY"), help="others")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/charonia-tune-search"), help="for both tools' files")
    parser.add_argument("--rounds", type=int, default=7, help="pairs of measurements of the winners")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of such a measurement")
    parser.add_argument("--fresh", action="store_true", help="discard earlier measurements")
    parser.add_argument("--output", type=Path, help="results file (default: bench/results/tune-COMPARISON.json)")
    given = parser.parse_args()
    if not ANALYZER.exists() or not TRITON.exists():
        raise SystemExit(
            f"{ANALYZER} or {TRITON} is missing: bench/peers.sh and bench/README.md say how to install them"
        )
    limits = tuple(given.limits or LIMITS[given.comparison])
    output = given.output or RESULTS / f"tune-{given.comparison}.json"
    root = given.folder / f"{given.comparison}-{'x'.join(map(str, limits))}"
    if given.fresh:
        shutil.rmtree(root, ignore_errors=True)
    record = _record(root, {"limits": limits, "rounds": given.rounds, "seconds": given.seconds})
    on_triton = given.comparison == "search"
    model = _WAITING_MODEL if on_triton else _MODEL
    write_model(root / "models", model)
    for tool in ("charonia", "model-analyzer"):
        if tool not in record["found"]:
            record["found"][tool] = asdict(search(tool, root / tool, limits, on_triton=on_triton))
            _keep(record, root, output)
        print(tool, *(f"{key} {value}" for key, value in record["found"][tool].items()), sep=", ", flush=True)
    found = {tool: Found(**each) for tool, each in record["found"].items()}
    print(f"time: {found['charonia'].seconds / found['model-analyzer'].seconds:.3f} of model-analyzer's")
    if "winners" not in record:
        record["winners"] = compare_winners(found, root, model, given.rounds, given.seconds)
        _keep(record, root, output)
    winners = record["winners"]
    print(
        f"its winner has {winners['ratio']:.3f} ({winners['ratio_min']:.3f} to {winners['ratio_max']:.3f}) of the rate "
        "of model-analyzer's winner"
    )
    print(f"written to {output}")


def _record(root: Path, settings: dict[str, Any]) -> dict[str, Any]:
    state = root / "record.json"
    if state.exists():
        known: dict[str, Any] = json.loads(state.read_text())
        return known
    return {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": settings,
        "found": {},
    }


def _keep(record: dict[str, Any], root: Path, output: Path) -> None:
    for path in (root / "record.json", output):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
