"""The simulation itself: the seed alone decides what happens."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.simulation.control_plane import simulate
from tests.simulation.faults import FAULTS, LEFTOVERS, Fault


def test_every_fault_can_be_put_back() -> None:
    for fault in (*FAULTS, *(left for left, *_ in LEFTOVERS)):
        compile(fault.text(), fault.file, "exec")


class Simulations:
    """A process that simulates in forks of itself."""

    def __init__(self, **variables: str) -> None:
        command = [sys.executable, "-m", "tests.simulation", "--each-line"]
        streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(command, env=os.environ | variables, text=True, **streams)

    def run(self, *arguments: str) -> tuple[int, str]:
        """Simulate; return the exit status and what is printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(shlex.join(arguments), file=self._process.stdin, flush=True)
        shown = ""
        for line in self._process.stdout:
            if line.startswith("ended with status "):
                return int(line.split()[-1]), shown
            shown += line
        raise AssertionError(shown)

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def simulations() -> Iterator[Callable[..., Simulations]]:
    """Returns the process with these variables."""
    started: dict[str, Simulations] = {}

    def of(**variables: str) -> Simulations:
        if str(variables) not in started:
            started[str(variables)] = Simulations(**variables)
        return started[str(variables)]

    yield of
    for each in started.values():
        each.close()


@pytest.mark.parametrize("shape", ["one", "apart"])
def test_the_same_seed_gives_the_same_history_in_every_process(
    simulations: Callable[..., Simulations], shape: str, tmp_path: Path
) -> None:
    drawn = ("--seed", "3", "--scenarios", "2", "--length", "2", "--shape", shape)
    histories = []
    for hash_seed in ("1", "2"):
        file = tmp_path / hash_seed
        status, shown = simulations(PYTHONHASHSEED=hash_seed).run(*drawn, "--history", str(file))
        assert status == 0, shown
        histories.append(file.read_bytes())

    assert histories[0].count(b" request ") > 500
    assert histories[0] == histories[1]


@pytest.mark.parametrize(
    "injected",
    [
        "one --stride 25 --every-step cut shutdown", "apart --stride 25 --every-step kill_engine kill_front_end error",
        "one --stride 2 --every-step error",
    ],
)  # fmt: skip
def test_a_short_scenario_holds_at_every_step(simulations: Callable[..., Simulations], injected: str) -> None:
    drawn = ("--seed", "3", "--length", "0.2", "--rate", "30", "--theme", "")
    status, shown = simulations(PYTHONHASHSEED="1").run(*drawn, "--shape", *injected.split())

    assert status == 0, shown


@pytest.mark.parametrize(("fault", "scenario", "left"), LEFTOVERS)
def test_what_is_left_over_is_found(
    simulations: Callable[..., Simulations], fault: Fault, scenario: str, left: str
) -> None:
    shown = ("--theme", "", *scenario.split(), "--scenarios", "1", "--quick", "--fault", fault.name)
    status, printed = simulations(CHARONIA_PURE="1").run(*shown)  # faults are put into source

    assert status == 1
    assert left in printed


def test_rollouts_converge_and_nothing_is_orphaned_while_two_platforms_are_killed() -> None:
    plane = simulate(seed=5, deployments=8, seconds=60.0)

    assert plane.killed
    assert plane.problems == []
