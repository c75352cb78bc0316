"""The simulation itself: the seed alone decides what happens."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.simulation.control_plane import simulate
from tests.simulation.faults import FAULTS, LEFTOVERS, Fault


def test_every_fault_can_be_put_back() -> None:
    for fault in (*FAULTS, *(left for left, *_ in LEFTOVERS)):
        compile(fault.text(), fault.file, "exec")


def simulation(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)


@pytest.mark.parametrize("shape", ["one", "apart"])
def test_the_same_seed_gives_the_same_history_in_every_process(shape: str, tmp_path: Path) -> None:
    drawn = ("--seed", "3", "--scenarios", "2", "--length", "2", "--shape", shape)
    histories = []
    for hash_seed in ("1", "2"):
        file = tmp_path / hash_seed
        done = simulation(*drawn, "--history", str(file), PYTHONHASHSEED=hash_seed)
        assert done.returncode == 0, done.stdout + done.stderr
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
def test_a_short_scenario_holds_at_every_step(injected: str) -> None:
    done = simulation("--seed", "3", "--length", "0.2", "--rate", "30", "--theme", "", "--shape", *injected.split())

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("fault", "scenario", "left"), LEFTOVERS)
def test_what_is_left_over_is_found(fault: Fault, scenario: str, left: str) -> None:
    shown = ("--theme", "", *scenario.split(), "--scenarios", "1", "--quick", "--fault", fault.name)
    done = simulation(*shown, CHARONIA_PURE="1")  # faults are put into source

    assert done.returncode == 1
    assert left in done.stdout


def test_rollouts_converge_and_nothing_is_orphaned_while_two_platforms_are_killed() -> None:
    plane = simulate(seed=5, deployments=8, seconds=60.0)

    assert plane.killed
    assert plane.problems == []
