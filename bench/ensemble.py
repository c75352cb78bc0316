"""The overhead of an ensemble over its slowest step: an identity, a model and an identity against the model alone.

python -m bench.ensemble
python -m bench.ensemble --against triton --model mlp_tuned --client wrk
python -m bench.ensemble --steps 1 2 3 4 --client wrk --concurrency 16

Two servers, one with the ensemble and one with the model, get the same load in turn; a ratio is of one pair. A ratio of
0.9 means that the two other steps and the ensemble itself take a tenth of the time. Against Triton, both servers have
the ensemble. With `--steps`, the benchmark compares ensembles of that many identities: the cost of a step.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.models import identity_pbtxt, resnet18, write_model

from bench.compare import RESULTS, as_line, measure, summary
from bench.load import Load, run
from bench.machine import machine
from bench.models import BATCHED, INPUT_SHAPES, MODEL, MODELS
from bench.servers import Server

IMAGE_SIZE = 64
BATCH_SIZE_MAX = 4
SLOWEST = "slowest"


@dataclass(frozen=True, slots=True)
class Step:
    """The slowest step.

    Attributes:
        given: Name and dims of its input.
        wanted: Name and dims of its output.
    """

    given: tuple[str, list[int]]
    wanted: tuple[str, list[int]]


STEPS = {
    "resnet18": Step(("input", [3, IMAGE_SIZE, IMAGE_SIZE]), ("output", [1000])),
    "mlp": Step(("INPUT0", [128]), ("OUTPUT0", [10])),
    "mlp_tuned": Step(("INPUT0", [128]), ("OUTPUT0", [10])),
    "python_mlp": Step(("INPUT0", [128]), ("OUTPUT0", [10])),
    "slow": Step(("INPUT0", [16]), ("OUTPUT0", [16])),
}
"""By model; "slow" is an identity that takes 0.3 ms."""

_ENSEMBLE = """\
platform: "ensemble"
max_batch_size: {batch}
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: {dims_in} }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: {dims_out} }}
ensemble_scheduling {{
  step {{ model_name: "before" model_version: -1
    input_map {{ key: "INPUT0" value: "INPUT0" }} output_map {{ key: "OUTPUT0" value: "prepared" }} }}
  step {{ model_name: "slowest" model_version: -1
    input_map {{ key: "{given}" value: "prepared" }} output_map {{ key: "{wanted}" value: "raw" }} }}
  step {{ model_name: "after" model_version: -1
    input_map {{ key: "INPUT0" value: "raw" }} output_map {{ key: "OUTPUT0" value: "OUTPUT0" }} }}
}}
"""


def write_alone(repository: Path, model: str) -> None:
    """Write the model as the only one."""
    if model == "resnet18":
        write_model(repository, MODEL, resnet18(IMAGE_SIZE), config="dynamic_batching { }")
    elif model == "slow":
        delay = 'parameters { key: "execute_delay_ms" value { string_value: "0.3" } }'
        write_model(repository, MODEL, "", config=identity_pbtxt(max_batch_size=BATCH_SIZE_MAX, more=delay))
    else:
        MODELS[model](repository)


def write_ensemble(repository: Path, model: str) -> None:
    """Write the ensemble around the model, under the name that gets the load."""
    write_alone(repository, model)
    (repository / MODEL).rename(repository / SLOWEST)
    step = STEPS[model]
    (given, dims_in), (wanted, dims_out) = step.given, step.wanted
    for name, dims in (("before", dims_in), ("after", dims_out)):
        write_model(repository, name, "", config=identity_pbtxt(dims=dims, max_batch_size=BATCH_SIZE_MAX))
    config = _ENSEMBLE.format(batch=BATCH_SIZE_MAX, dims_in=dims_in, dims_out=dims_out, given=given, wanted=wanted)
    write_model(repository, MODEL, "", config=config)


def write_steps(repository: Path, count: int) -> None:
    """Write an ensemble of `count` identities in a row, under the name that gets the load."""
    tensors = ["INPUT0", *(f"t{number}" for number in range(1, count)), "OUTPUT0"]
    steps = []
    for number in range(count):
        write_model(repository, f"step_{number}", "", config=identity_pbtxt(dims=[16], max_batch_size=0))
        maps = f'input_map {{ key: "INPUT0" value: "{tensors[number]}" }}'
        maps += f' output_map {{ key: "OUTPUT0" value: "{tensors[number + 1]}" }}'
        steps.append(f'step {{ model_name: "step_{number}" model_version: -1 {maps} }}')
    sides = [f'{side}put {{ name: "{side.upper()}PUT0" data_type: TYPE_FP32 dims: [16] }}' for side in ("in", "out")]
    config = "\n".join(('platform: "ensemble"', *sides, "ensemble_scheduling {", *steps, "}"))
    write_model(repository, MODEL, "", config=config)


def compare_steps(counts: Sequence[int], load: Load, rounds: int) -> dict[str, Any]:
    """Measure the server's CPU time of a request by the number of steps, print and return it."""
    with ExitStack() as stack:
        servers = {}
        for count in counts:
            MODELS[f"steps_{count}"] = partial(write_steps, count=count)
            INPUT_SHAPES[f"steps_{count}"] = [16]
            servers[count] = stack.enter_context(Server(f"charonia:steps_{count}"))
            run(servers[count], load)
        costs: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(rounds):
            for count, server in servers.items():
                costs[count].append(run(server, load).cpu_us)
    medians = {count: statistics.median(each) for count, each in costs.items()}
    further = (medians[counts[-1]] - medians[counts[0]]) / (counts[-1] - counts[0])
    shown = ", ".join(f"{count}: {cost:.1f}" for count, cost in medians.items())
    print(
        f"{load.protocol} {load.concurrency:4} | server CPU us by steps: {shown} | each more step {further:.1f}",
        flush=True,
    )
    return {"concurrency": load.concurrency, "further_step_us": further, "cpu_us": costs}


def variants(model: str, against: str) -> tuple[str, str]:
    """Register ensemble and model and return the names of the variants."""
    other = "ensemble" if against == "triton" else "alone"
    MODELS[f"ensemble_{model}"] = lambda folder: write_ensemble(folder, model)
    MODELS[f"alone_{model}"] = lambda folder: write_alone(folder, model)
    INPUT_SHAPES[f"ensemble_{model}"] = INPUT_SHAPES[f"alone_{model}"] = STEPS[model].given[1]
    BATCHED.update((f"ensemble_{model}", f"alone_{model}"))
    server = "triton" if against == "triton" else "charonia"
    return f"charonia:ensemble_{model}", f"{server}:{other}_{model}"


def main() -> None:
    """Measure one model after the other, print and write after each line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ensemble", description=__doc__)
    parser.add_argument("--model", nargs="+", choices=sorted(STEPS), default=list(STEPS))
    parser.add_argument("--against", choices=["alone", "triton"], default="alone", help="the slowest step, or Triton")
    parser.add_argument("--client", choices=["perf_analyzer", "wrk"], default="perf_analyzer")
    parser.add_argument("--flag", action="append", default=[], help="flag for the server with the ensemble; repeatable")
    parser.add_argument("--steps", type=int, nargs="+", help="compare ensembles of so many identities instead")
    parser.add_argument("--protocol", choices=["http", "grpc"], default="http")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs, at least 5 for figures to publish")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--output", type=Path, default=RESULTS / "ensemble.json")
    given = parser.parse_args()
    record: dict[str, Any] = {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": {key: value for key, value in vars(given).items() if key != "output"},
        "points": [],
    }
    if given.steps:
        for concurrency in given.concurrency:
            load = Load(given.client, given.protocol, concurrency, given.seconds)
            record["points"].append(compare_steps(given.steps, load, given.rounds))
        (RESULTS / "ensemble_steps.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return
    print(f"{'model':<12}load      | infer/s: A, B, A:B | p50 us | p99 us | server CPU us; medians")
    for model in given.model:
        ensemble, other = variants(model, given.against)
        with Server(ensemble, given.flag) as a, Server(other) as b:
            for concurrency in given.concurrency:
                load = Load(given.client, given.protocol, concurrency, given.seconds)
                pairs = measure(a, b, load, given.rounds)
                table = summary(pairs)
                print(f"{model:<12}{as_line(load, table)}", flush=True)
                runs = [{"a": asdict(first), "b": asdict(second)} for first, second in pairs]
                point = {"model": model, "concurrency": concurrency, "summary": table, "pairs": runs}
                record["points"].append(point)
                given.output.parent.mkdir(parents=True, exist_ok=True)
                given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
