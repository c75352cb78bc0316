"""What the onnxruntime backend adds to ONNX Runtime: `python -m bench.onnx_direct`.

The same batches, with the same threads: once through `execute` of the backend, as the engine calls it, with one request
for each row, and once by calling `InferenceSession.run` on arrays that are already batched. Rounds alternate; a ratio
is of the two medians of one round, and above 1 the backend is slower. Other load of the machine disturbs CPU time less,
so with one thread trust its ratio. With more threads, the two differ in how long idle threads spin.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from tests.support import models

from bench.machine import machine
from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, ModelFiles, Placement
from charonia.server.backends.onnxruntime.backend import OnnxRuntimeBackend
from charonia.server.backends.onnxruntime.instance import OnnxRuntimeInstance
from charonia.server.machine.cores import usable_cores

RUNS_PER_ROUND_S = 0.4


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the rows of a batch."""

    name: str
    model: bytes
    input: str
    row: tuple[int, ...]
    batch: int


def recognition_model() -> bytes:
    """Return PP-OCRv4's text recognition model from the package that ships it."""
    found = find_spec("rapidocr_onnxruntime")
    if found is None or found.origin is None:
        raise SystemExit("rapidocr-onnxruntime is not installed: pip install 'charonia[demo]'")
    return (Path(found.origin).parent / "models" / "ch_PP-OCRv4_rec_infer.onnx").read_bytes()


def cases() -> list[Case]:
    """Return what is measured."""
    mlp, resnet, recognition = models.mlp(), models.resnet18(), recognition_model()
    return [
        *(Case("mlp", mlp, "input", (128,), batch) for batch in (1, 8, 64)),
        *(Case("resnet18", resnet, "input", (3, 224, 224), batch) for batch in (1, 8)),
        *(Case("pp-ocrv4 recognition", recognition, "x", (3, 48, 320), batch) for batch in (1, 4)),
    ]


def instance_of(case: Case, folder: Path, threads: int) -> OnnxRuntimeInstance:
    """Load the case's model as the server does."""
    path = models.write_model(folder, "m", case.model)
    files, settings = ModelFiles(path, 1, path / "1"), BackendSettings({}, default_max_batch_size=64)

    async def load() -> OnnxRuntimeInstance:
        group = InstanceGroup("m_0", InstanceKind.KIND_CPU, count=1)
        backend = OnnxRuntimeBackend()
        config = (await backend.complete(files, ModelConfig(name="m", instance_group=(group,)), settings)).config
        model = await backend.load(files, config, settings)
        instance = await model.create_instance(Placement("m_0", InstanceKind.KIND_CPU, 0, threads))
        assert isinstance(instance, OnnxRuntimeInstance)
        return instance

    return asyncio.run(load())


def session_of(case: Case, threads: int) -> onnxruntime.InferenceSession:
    """Load the case's model as a program of one's own would."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(case.model, options, providers=["CPUExecutionProvider"])


def times_us(call: Callable[[], object]) -> tuple[float, float]:
    """Return the median time of a call and its mean CPU time, over a fixed time."""
    call()
    times: list[int] = []
    cpu_start = time.process_time_ns()
    end = time.monotonic() + RUNS_PER_ROUND_S
    while time.monotonic() < end or len(times) < 3:
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return median(times) / 1000, (time.process_time_ns() - cpu_start) / len(times) / 1000


def compare(case: Case, rounds: int, threads: int) -> dict[str, float | str | int]:
    """Measure one case."""
    random = np.random.default_rng(0)
    rows: list[NDArray[np.float32]] = [random.random((1, *case.row), np.float32) for _ in range(case.batch)]
    requests = [InferRequest("m", {case.input: Tensor(case.input, DataType.FP32, row)}) for row in rows]
    feed = {case.input: np.concatenate(rows)}
    with tempfile.TemporaryDirectory() as folder:
        instance = instance_of(case, Path(folder), threads)
    session = session_of(case, threads)
    calls: list[Callable[[], object]] = [lambda: instance.execute(requests), lambda: session.run(None, feed)]
    pairs = []
    for number in range(rounds):
        if number % 2:
            bare = times_us(calls[1])
            pairs.append((times_us(calls[0]), bare))
        else:
            pairs.append((times_us(calls[0]), times_us(calls[1])))
    ratios = [ours / bare for (ours, _), (bare, _) in pairs]
    return {
        "model": case.name,
        "batch": case.batch,
        "threads": threads,
        "backend_us": round(median(ours for (ours, _), _ in pairs), 1),
        "bare_us": round(median(bare for _, (bare, _) in pairs), 1),
        "ratio": round(median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "cpu_ratio": round(median(ours / bare for (_, ours), (_, bare) in pairs), 3),
    }


def main() -> None:
    """Measure every case, and print the table and, on request, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--json", type=Path, help="write the figures and the machine there")
    arguments = parser.parse_args()
    print(f"{'model':<22}{'batch':>6}{'backend us':>12}{'bare us':>12}{'ratio':>8}{'of CPU':>8}  (least to greatest)")
    results = []
    for case in cases():
        result = compare(case, arguments.rounds, arguments.threads)
        results.append(result)
        print(
            f"{case.name:<22}{case.batch:>6}{result['backend_us']:>12}{result['bare_us']:>12}{result['ratio']:>8}"
            f"{result['cpu_ratio']:>8}"
            f"  ({result['ratio_min']} to {result['ratio_max']})",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
