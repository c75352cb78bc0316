"""The overhead of a backend over its library: `python -m bench.backends`.

The same batches, with the same threads: once through the backend, as the engine calls it, with one request for each
row, and once by calling the library on an array that is already batched. Rounds alternate; a ratio is of the two
medians of one round, and above 1 the backend is slower. Other load of the machine disturbs CPU time less, so with one
thread trust its ratio. With more threads, the two may differ in how long idle threads spin.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from bench.backend_cases import CASES, Case
from bench.machine import machine
from charonia.config.complete import normalise
from charonia.config.kinds import InstanceKind
from charonia.config.pbtxt import parse
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, BlockingInstance, ModelFiles, Placement
from charonia.server.backends.registry import installed_backends
from charonia.server.machine.cores import usable_cores
from charonia.testing.backend_suite import close, run_batch

RUNS_PER_ROUND_S = 0.4


@contextmanager
def backend_call(case: Case, folder: Path, threads: int) -> Iterator[Callable[[], object]]:
    """Load the case's model as the server does, and give what runs one batch of single rows."""
    backend = installed_backends()[case.backend]()
    files, settings = ModelFiles(folder, 1, folder / "1"), BackendSettings({}, default_max_batch_size=64)
    group = 'instance_group [ { name: "m_0" count: 1 kind: KIND_CPU } ]'
    config = parse(f'name: "m" backend: "{case.backend}" {case.config} {group}')
    with asyncio.Runner() as runner:
        completed = runner.run(backend.complete(files, config, settings)).config
        completed = normalise(completed, name="m", gpu_count=0, default_instance_count=1)
        model = runner.run(backend.load(files, completed, settings))
        instance = runner.run(model.create_instance(Placement("m_0", InstanceKind.KIND_CPU, 0, threads)))
        datatype = completed.input[0].data_type
        assert datatype is not None
        name = completed.input[0].name
        requests = [InferRequest("m", {name: Tensor(name, datatype, row)}) for row in case.rows()]
        if isinstance(instance, BlockingInstance):
            run = instance.execute
            yield lambda: run(requests)
        else:
            yield lambda: runner.run(run_batch(instance, requests))
        runner.run(close(instance))
        runner.run(model.aclose())
        runner.run(backend.aclose())


def times_us(call: Callable[[], object]) -> tuple[float, float]:
    """Return the median time of a call and its mean CPU time in this process, over a fixed time."""
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
    pairs = []
    with tempfile.TemporaryDirectory() as name:
        version = Path(name) / "m" / "1"
        version.mkdir(parents=True)
        case.write(version)
        batch = np.concatenate(case.rows())
        library = case.library(version, threads)
        with backend_call(case, version.parent, threads) as ours:
            calls: list[Callable[[], object]] = [ours, lambda: library(batch)]
            for number in range(rounds):
                order = (0, 1) if number % 2 == 0 else (1, 0)
                taken = {which: times_us(calls[which]) for which in order}
                pairs.append((taken[0], taken[1]))
    ratios = [ours_us / bare_us for (ours_us, _), (bare_us, _) in pairs]
    backend_us, bare_us = median(ours_us for (ours_us, _), _ in pairs), median(bare_us for _, (bare_us, _) in pairs)
    return {
        "backend": case.backend,
        "model": case.model,
        "batch": case.batch,
        "threads": threads,
        "backend_us": round(backend_us, 1),
        "bare_us": round(bare_us, 1),
        "added_us_per_request": round((backend_us - bare_us) / case.batch, 1),
        "ratio": round(median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "cpu_ratio": round(median(ours_us / bare_us for (_, ours_us), (_, bare_us) in pairs), 3),
    }


def main() -> None:
    """Measure the cases, and print the table and, on request, write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", nargs="*", help="only cases of these backends (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--output", type=Path, help="write the figures and the machine there")
    arguments = parser.parse_args()
    print(
        f"{'backend':<14}{'model':<24}{'batch':>6}{'backend us':>12}{'bare us':>12}{'+us/req':>9}{'ratio':>8}{'CPU':>8}"
    )
    results = []
    for case in CASES:
        if arguments.backend and case.backend not in arguments.backend:
            continue
        result = compare(case, arguments.rounds, arguments.threads)
        results.append(result)
        print(
            f"{case.backend:<14}{case.model:<24}{case.batch:>6}{result['backend_us']:>12}{result['bare_us']:>12}"
            f"{result['added_us_per_request']:>9}{result['ratio']:>8}{result['cpu_ratio']:>8}"
            f"  ({result['ratio_min']} to {result['ratio_max']})",
            flush=True,
        )
    if arguments.output:
        arguments.output.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
