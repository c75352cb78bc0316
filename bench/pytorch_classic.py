"""The classic tables of a PyTorch model: instances against throughput and memory, and dynamic batching.

    python -m bench.pytorch_classic --device cpu
    python -m bench.pytorch_classic --device gpu --shared-memory

For a ResNet-50-shaped and a BERT-base-shaped network, in fp32 and in fp16 (bf16 on a CPU):

1. the module called directly in a loop, with batches of 1, 2, 4, ...: the best batch size, and the target throughput;
2. 1, 2, 4 and 8 instances, without batching, against throughput, latency and memory;
3. dynamic batching off, on, and with a delay; its largest batch is the best one of the loop;
4. requests that already are batches of that size;
5. the same, alternating with the loop: the share of its throughput that the server reaches. The other lines are
   minutes apart from the loop, in which the speed of a shared machine changes by more than the server's overhead.

`charonia perf` measures throughput and latency. A line in the results file is not measured again, except with --again,
so an interrupted run resumes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.compare import RESULTS
from bench.machine import machine
from bench.models import MODEL, MODELS
from bench.servers import Server
from bench.torch_networks import NETWORKS, save
from charonia.server.machine.cores import usable_cores
from charonia.server.machine.gpus import Nvml
from charonia.tools.results.json_form import from_json
from charonia.tools.results.records import PerfRun

COUNTS = (1, 2, 4, 8)
DELAY_US = 5000
GROUP = 3
"""Calls between two looks at the clock."""
GROUPS_MIN = 3
PERF_TIMEOUT_S = 900

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """The measurement and its length."""

    device: str
    network: str
    precision: str
    seconds: float
    batch_max: int
    concurrency: int
    has_shared_memory: bool

    @property
    def torch_device(self) -> torch.device:
        """Where it computes."""
        return torch.device("cuda", 0) if self.device == "gpu" else torch.device("cpu")

    @property
    def datatype(self) -> torch.dtype:
        """What weights and floating inputs are."""
        return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[self.precision]


def config(setting: Setting, *, instances: int, max_batch: int, batching: str) -> str:
    network = NETWORKS[setting.network]
    dims = ", ".join(map(str, network.row))
    return "\n".join(
        [
            f'backend: "pytorch" max_batch_size: {max_batch}',
            f'input {{ name: "INPUT__0" data_type: {network.datatype} dims: [ {dims} ] }}',
            f'output {{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ {network.out} ] }}',
            f"instance_group {{ count: {instances} kind: KIND_{'GPU gpus: 0' if setting.device == 'gpu' else 'CPU'} }}",
            f'parameters {{ key: "PRECISION" value: {{ string_value: "{setting.precision}" }} }}',
            batching,
        ]
    )


def direct(setting: Setting, files: Path) -> list[Row]:
    """Call the module in a loop: items per second by batch size, with copies to the device and back and without."""
    module = loaded(setting, files)
    rows = []
    batch = 1
    while batch <= setting.batch_max:
        given = NETWORKS[setting.network].sample(batch)
        rows.append({"batch": batch, **{name: rate * batch for name, rate in rates(setting, module, given).items()}})
        print(f"  direct, batch {batch:>3}: {rows[-1]['items_per_s']:>9.1f} items/s", flush=True)
        batch *= 2
    return rows


def loaded(setting: Setting, files: Path) -> torch.nn.Module:
    """Return the network as a program of one's own would have it."""
    module: torch.nn.Module = torch.jit.load(  # type: ignore[no-untyped-call]
        files / f"{setting.network}.pt", map_location=setting.torch_device
    ).to(setting.datatype)
    module.eval()
    torch.set_num_threads(usable_cores())
    return module


def rates(setting: Setting, module: torch.nn.Module, given: torch.Tensor) -> dict[str, float]:
    device, datatype = setting.torch_device, setting.datatype

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(datatype) if tensor.is_floating_point() else tensor

    placed = converted(given.to(device))

    def compute() -> None:
        module(placed)

    def with_copies() -> None:
        module(converted(given.to(device))).float().cpu()

    with torch.inference_mode():
        return {
            "items_per_s": calls_per_s(with_copies, setting.seconds, setting.device),
            "computing_only_per_s": calls_per_s(compute, setting.seconds, setting.device),
        }


def calls_per_s(call: Callable[[], None], seconds: float, device: str) -> float:
    """Return how often a call can be made, over all of the time, as the throughput of a server is counted."""
    for _ in range(3):
        call()
    count, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds or count < GROUPS_MIN * GROUP:
        for _ in range(GROUP):
            call()
        if device == "gpu":
            torch.cuda.synchronize()
        count += GROUP
    return count / passed


def served(
    setting: Setting, files: Path, *, batch: int = 1, instances: int = 1, max_batch: int = 1, batching: str = ""
) -> Row:
    """Serve the network and measure it with `charonia perf`."""
    before = gpu_used_bytes()
    with server_of(setting, files, instances, max_batch, batching) as server:
        concurrency = max(2 * instances, 2) if batch > 1 else max(setting.concurrency, 2 * max_batch)
        result = perf(setting, server.http, batch, concurrency)
        memory = server.memory_bytes()
        on_gpu = gpu_used_bytes() - before
    return {
        "concurrency": concurrency,
        "batch": batch,
        "memory_mib": memory >> 20,
        "gpu_memory_mib": on_gpu >> 20,
        **result,
    }


def side_by_side(setting: Setting, files: Path, batch: int, rounds: int) -> Row:
    """Measure the loop and the server in turn, with batches of one size and one or two of them on their way.

    With one for each instance the client waits while a batch is computed; with two its work, and the server's own,
    overlap with the computation, which costs time if they share its cores. Each round has new processes: where a
    process finds its memory alone changes its speed by some percent.
    """
    pairs: list[dict[str, float]] = []
    for number in range(rounds):
        measured = [partial(loop_in_process, setting, files, batch), partial(served_batches, setting, files, batch)]
        pair: dict[str, float] = {}
        for measure_one in measured if number % 2 else reversed(measured):
            pair |= measure_one()
        pairs.append(pair)
    ratios = {name: sorted(pair[name] / pair["loop"] for pair in pairs) for name in ("one", "two")}
    return {
        "batch": batch,
        "pairs": pairs,
        "ratios": {name: [median(of), of[0], of[-1]] for name, of in ratios.items()},
    }


def loop_in_process(setting: Setting, files: Path, batch: int) -> dict[str, float]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return {"loop": process.submit(loop_rate, setting, files, batch).result()}


def loop_rate(setting: Setting, files: Path, batch: int) -> float:
    given = NETWORKS[setting.network].sample(batch)
    return rates(setting, loaded(setting, files), given)["items_per_s"] * batch


def served_batches(setting: Setting, files: Path, batch: int) -> dict[str, float]:
    instances = instances_for_batches(setting)
    with server_of(setting, files, instances, batch, "") as server:
        return {
            name: float(perf(setting, server.http, batch, count * instances)["items_per_s"])
            for name, count in (("one", 1), ("two", 2))
        }


def instances_for_batches(setting: Setting) -> int:
    """Return how many instances compute batches: on a GPU one copies while another computes."""
    return 2 if setting.device == "gpu" else 1


def server_of(setting: Setting, files: Path, instances: int, max_batch: int, batching: str) -> Server:
    """Return a server of the network, to be entered."""

    def write(folder: Path) -> None:
        version = folder / MODEL / "1"
        version.mkdir(parents=True)
        (version / "model.pt").symlink_to((files / f"{setting.network}.pt").resolve())
        text = config(setting, instances=instances, max_batch=max_batch, batching=batching)
        (folder / MODEL / "config.pbtxt").write_text(text, encoding="utf-8")

    MODELS["pytorch_classic"] = write
    return Server("charonia:pytorch_classic", ["--allow-client-shm=true"] if setting.has_shared_memory else [])


def perf(setting: Setting, address: str, batch: int, concurrency: int) -> Row:
    command = [sys.executable, "-m", "charonia", "perf", "-m", MODEL, "-u", address, "-b", str(batch)]
    command += ["--concurrency-range", str(concurrency), "--measurement-interval", str(int(setting.seconds * 1000))]
    if setting.has_shared_memory:
        command += ["--shared-memory", "system"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command += ["--max-trials", "6", "--json", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PERF_TIMEOUT_S)
        if not file.exists():
            raise SystemExit(f"charonia perf failed: {done.stderr}")
        return summary(from_json(file.read_text(encoding="utf-8")))


def summary(run: PerfRun) -> Row:
    """Return the figures of a result of `charonia perf`."""
    [level] = run.levels
    return {
        "items_per_s": level.throughput.value,
        "p50_us": level.response_times.percentile(50) / 1000,
        "p99_us": level.response_times.percentile(99) / 1000,
        "verdict": level.verdict.value,
    }


def gpu_used_bytes() -> int:
    nvml = Nvml.find()
    return sum(gpu.memory_used_bytes or 0 for gpu in nvml.read()) if nvml is not None else 0


class Results:
    """Rows by name, written after each one."""

    def __init__(self, path: Path, *, again: bool) -> None:
        self._path = path
        self._rows: dict[str, Any] = {}
        if path.exists() and not again:
            self._rows = json.loads(path.read_text(encoding="utf-8"))["rows"]

    def row(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return a row, and measure it where it is missing."""
        if name not in self._rows:
            self._rows[name] = measure()
            about = {"format": 1, "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
            about["torch"] = torch.__version__
            about["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({**about, "rows": self._rows}, indent=1) + "\n", encoding="utf-8")
        return self._rows[name]


def measure(setting: Setting, files: Path, results: Results, counts: tuple[int, ...], rounds: int) -> None:
    """Measure and print the tables of one network in one precision."""
    key = f"{setting.network}-{setting.precision}"
    print(f"{key} on {setting.device}", flush=True)
    loop = results.row(f"{key}-direct", lambda: direct(setting, files))
    best = max(loop, key=lambda row: row["items_per_s"])
    print(f"  best of the loop: {best['items_per_s']:.1f} items/s with batches of {best['batch']}")

    def line(name: str, **given: Any) -> None:
        row = results.row(f"{key}-{name}", lambda: served(setting, files, **given))
        ratio = row["items_per_s"] / best["items_per_s"]
        print(
            f"  {name:<16}{row['items_per_s']:>10.1f} items/s ({ratio:.2f} of the loop), "
            f"p50 {row['p50_us'] / 1000:.1f} ms, p99 {row['p99_us'] / 1000:.1f} ms, "
            f"memory {row['memory_mib']} MiB, of the GPU {row['gpu_memory_mib']} MiB, {row['verdict']}",
            flush=True,
        )

    for count in counts:
        line(f"instances-{count}", instances=count)
    size = max(best["batch"], 2)
    instances = instances_for_batches(setting)
    line("batching-off", instances=instances)
    line("batching-on", instances=instances, max_batch=size, batching="dynamic_batching {}")
    delay = f"dynamic_batching {{ max_queue_delay_microseconds: {DELAY_US} }}"
    line("batching-delay", instances=instances, max_batch=size, batching=delay)
    line("whole-batches", instances=instances, max_batch=size, batch=size)
    pairs = results.row(f"{key}-pairs", lambda: side_by_side(setting, files, best["batch"], rounds))
    for name, (middle, least, greatest) in pairs["ratios"].items():
        print(
            f"  in turn with the loop, {name} on the way of {pairs['batch']} items: {middle:.2f} of the loop "
            f"[{least:.2f}-{greatest:.2f}]",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pytorch_classic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", nargs="+", choices=sorted(NETWORKS), default=["resnet50", "bert_base"])
    parser.add_argument("--precision", nargs="+", help="default: fp32 and fp16, on a CPU fp32 and bf16")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one measurement window")
    parser.add_argument("--batch-max", type=int, help="largest batch tried; default 16 on a CPU, 256 on a GPU")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="numbers of instances")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of measurements of loop and server")
    parser.add_argument("--shared-memory", action="store_true", help="send inputs through shared memory")
    parser.add_argument("--again", action="store_true", help="also measure settings that the results file has")
    parser.add_argument("--output", type=Path, help="default: results/pytorch_classic-DEVICE.json")
    given = parser.parse_args()
    output = given.output or RESULTS / f"pytorch_classic-{given.device}.json"
    results = Results(output, again=given.again)
    files = Path.home() / ".cache" / "charonia-bench"
    files.mkdir(parents=True, exist_ok=True)
    for network in given.network:
        if not (files / f"{network}.pt").exists():
            save(network, files / f"{network}.pt")
        for precision in given.precision or (["fp32", "fp16"] if given.device == "gpu" else ["fp32", "bf16"]):
            limit = given.batch_max or (256 if given.device == "gpu" else 16)
            setting = Setting(
                *(given.device, network, precision, given.seconds, limit, given.concurrency, given.shared_memory)
            )
            measure(setting, files, results, tuple(given.counts), given.rounds)


if __name__ == "__main__":
    main()
