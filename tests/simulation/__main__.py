"""Run random scenarios of the whole server on a simulated machine, and check their histories.

Each scenario has its own process, forked from this one, and depends on its seed only.
"""

# ruff: noqa: E402 # the machine comes before the server
import sys

from tests.simulation import faults
from tests.simulation.machine import MACHINE, SCHEDULERS, SECOND_NS, START_NS, adapt_server, install

IS_SIMULATED = "--faults" not in sys.argv and "--control-plane" not in sys.argv
if IS_SIMULATED:
    install()

import argparse
import gc
import itertools
import json
import os
import shlex
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.simulation.scenario import THEMES, Operation, Scenario, draw
from tests.simulation.world import World

if IS_SIMULATED:
    adapt_server()

RUNS_MAX = 60
"""Runs in which a failing scenario is made smaller."""

INJECTED = ("cut", "harm_worker", "disk", "shutdown", "kill_engine", "kill_front_end", "upgrade", "error")
"""Operations that `--every-step` injects."""

EVENTS = 25
"""Events shown of a failure."""

NOTHING: dict[str, Any] = {
    "problems": [], "recent": [], "schedulers": {}, "history": "", "simulated_s": 0, "steps": 0, "requests": 0,
}  # fmt: skip
"""What is known of a run whose process has failed."""


def run(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Run a scenario in another process; return what came of it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        gc.freeze()  # what all scenarios have in common is not looked through
        try:
            world = World(scenario, folder)
            world.run()
            found = {
                "problems": world.problems,
                "recent": list(world.recent),
                "schedulers": {
                    name: [f"{(now_ns - START_NS) / SECOND_NS:.6f} {happened}" for now_ns, happened in log]
                    for name, log in SCHEDULERS.items()
                },
                "history": "\n".join(world.history) + "\n",
                "simulated_s": world.now_s(),
                "steps": MACHINE.calls + 1 if MACHINE.calls else world.steps,
                "requests": len(world.requests),
            }
        except BaseException:
            found = NOTHING | {"problems": [traceback.format_exc()]}
        with os.fdopen(writing, "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    _, status, usage = os.wait4(pid, 0)
    result = json.loads(text) if text else NOTHING | {"problems": [f"the process ended with status {status}"]}
    return result | {"cpu_s": usage.ru_utime + usage.ru_stime}


def smaller(scenario: Scenario, folder: Path) -> Scenario:
    """Drop operations, halves first, while the scenario still fails."""
    size = len(scenario.operations) // 2
    runs = 0
    while size and runs < RUNS_MAX:
        start = 0
        while start < len(scenario.operations) and runs < RUNS_MAX:
            kept = scenario.operations[:start] + scenario.operations[start + size :]
            fewer = replace(scenario, operations=kept)
            runs += 1
            if run(fewer, folder)["problems"]:
                scenario = fewer
            else:
                start += size
        size //= 2
    return scenario


def show(scenario: Scenario, found: dict[str, Any]) -> None:
    print(f"seed {scenario.seed}, shape {scenario.shape}, {len(scenario.operations)} operations, {scenario.options}:")
    used = {operation.model for operation in scenario.operations}
    for model in scenario.models if len(scenario.operations) < 30 else ():
        if model.name in used:
            print(f"  model {model.name}: {' '.join(model.pbtxt.split())}")
    for operation in scenario.operations[:EVENTS]:
        print("  operation", operation)
    for text in found["problems"][:8]:
        print("  problem", text)
    show_events(found)


def show_events(found: dict[str, Any]) -> None:
    for name, events in found["schedulers"].items():
        print(f"last events of the scheduler of {name}:", *events, sep="\n  ")
    print("last events:", *found["recent"][-EVENTS:], sep="\n  ")


def every_step(scenario: Scenario, kind: str, stride: int, folder: Path) -> int:
    """Repeat a scenario; inject an operation before a later callback each time."""
    step = runs = 0
    cpu_s, steps = 0.0, 1
    while step < steps:
        values = {"down_s": 0.5, "pick": step + 1}
        found = run(replace(scenario, injected=Operation(step, 0.0, kind, "", values)), folder)
        steps, runs, cpu_s = steps if step else found["steps"], runs + 1, cpu_s + found["cpu_s"]
        if found["problems"]:
            print(*(f"  problem {text}" for text in found["problems"][:8]), sep="\n")
            show_events(found)
            print(f"failed: seed {scenario.seed}, {kind} before step {step} of {steps}")
            return 1
        step += stride
    print(f"seed {scenario.seed}: {kind} before {runs} of {steps} steps, {cpu_s:.1f} s of CPU")
    return 0


def each_line() -> int:
    """Run the arguments of each line of standard input in a fork, and print its exit status in a line of its own."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                status = main(shlex.split(line))
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(status)
        print(f"ended with status {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first scenario")
    parser.add_argument("--hours", type=float, default=0.0, help="CPU time in hours")
    parser.add_argument("--seconds", type=float, default=0.0, help="CPU time in seconds, for each fault 600")
    parser.add_argument(
        "--scenarios", type=int, default=0, help="number of scenarios, 0 for as many as the time allows"
    )
    parser.add_argument("--length", type=float, default=0.0, help="seconds with requests of a scenario; 0: drawn")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second; 0: drawn")
    parser.add_argument("--shape", default="", choices=("", "one", "apart"), help="processes of the server")
    parser.add_argument("--theme", choices=THEMES, help="what happens most; drawn unless given")
    parser.add_argument(
        "--every-step",
        choices=INJECTED,
        nargs="+",
        help="inject this before each callback of the event loop in turn; repeat it with the next kind",
    )
    parser.add_argument("--stride", type=int, default=1, help="leave out steps: every Nth only")
    parser.add_argument("--quick", action="store_true", help="show failures as they are, without making them smaller")
    parser.add_argument("--history", help="file for the histories")
    parser.add_argument("--fault", help="name of a fault to put back (faults.py)")
    parser.add_argument("--faults", nargs="*", help="print which faults are found; beginnings of names, or all")
    parser.add_argument("--control-plane", type=int, metavar="N", help="simulate a platform with N deployments instead")
    parser.add_argument("--each-line", action="store_true", help="run the arguments of each line of standard input")
    given = parser.parse_args(arguments)
    if given.each_line:
        return each_line()
    if given.fault:
        faults.put_back(given.fault)
    if given.control_plane:
        from tests.simulation import control_plane

        for seed in itertools.count(given.seed):
            plane = control_plane.simulate(seed, given.control_plane, given.length or 60.0)
            print(*(f"  problem {each}" for each in plane.problems), sep="\n")
            rollouts = len(plane.target.applied)
            counts = f"{len(plane.wanted)} deployments, {rollouts} rollouts, {plane.killed} platforms killed"
            cpu_s = time.process_time()
            print(f"{'failed' if plane.problems else 'seed'}: {seed}: {counts}, after {cpu_s:.1f} s of CPU")
            if plane.problems or cpu_s >= given.seconds:
                return int(bool(plane.problems))
    if given.faults is not None:
        return int(faults.table(given.faults, given.seconds or 600.0, given.seed) > 0)
    folder = Path(tempfile.gettempdir()) / f"simulation-{os.getpid()}"
    try:
        return simulate(given, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def simulate(given: argparse.Namespace, folder: Path) -> int:
    """Run scenarios as the arguments say, with files in a folder, and return the exit status."""
    limit_s = given.hours * 3600 or given.seconds or 60.0
    simulated_s = cpu_s = 0.0
    count = requests = 0
    digest = sha256()
    if given.every_step:
        drawn = draw(given.seed, given.length, given.rate, given.shape, given.theme)
        return max(every_step(drawn, kind, given.stride, folder) for kind in given.every_step)
    while count < given.scenarios or (not given.scenarios and cpu_s < limit_s):
        scenario = draw(given.seed + count, given.length, given.rate, given.shape, given.theme)
        found = run(scenario, folder)
        count, requests = count + 1, requests + found["requests"]
        simulated_s, cpu_s = simulated_s + found["simulated_s"], cpu_s + found["cpu_s"]
        digest.update(found["history"].encode())
        if given.history:
            with open(given.history, "a") as file:
                file.write(found["history"])
        if found["problems"]:
            if not given.quick:
                scenario = smaller(scenario, folder)
                found = run(scenario, folder)
            show(scenario, found)
            print(f"failed: python -m tests.simulation --seed {scenario.seed} --scenarios 1 after {cpu_s:.1f} s of CPU")
            return 1
    print(
        f"{count} scenarios, {requests} requests, {simulated_s:.0f} simulated seconds in {cpu_s:.1f} s of CPU "
        f"({simulated_s / max(cpu_s, 0.01):.0f} per second), history {digest.hexdigest()[:16]}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
