"""Who used the cores of the machine, and what that means for a verdict."""

import subprocess

import psutil
import pytest

from charonia.tools.perf.observer import CpuSample, descendants, load_between
from charonia.tools.perf.outcome import judged
from charonia.tools.results.records import MachineLoad, Verdict

S = 1_000_000_000
SAMPLES = [
    CpuSample(0, busy_s=100, idle_s=100, stolen_s=0, known_s=40),
    CpuSample(1 * S, busy_s=102, idle_s=100, stolen_s=0, known_s=40.5),
    CpuSample(3 * S, busy_s=104, idle_s=101, stolen_s=1, known_s=43),
]


def test_what_is_neither_idle_nor_ours_nor_stolen_is_of_other_programs() -> None:
    assert load_between(SAMPLES, 1 * S, 3 * S, 2) == MachineLoad(2, 0.5, 0.0, 0.5)
    assert load_between(SAMPLES, 0, 1 * S, 2) == MachineLoad(2, 0.0, 1.5, 0.0)


def test_the_samples_closest_to_the_interval_count() -> None:
    assert load_between(SAMPLES, S // 10, S + S // 10, 2) == MachineLoad(2, 0.0, 1.5, 0.0)
    assert load_between(SAMPLES[:1], 0, S, 2) is None
    assert load_between([], 0, S, 2) is None


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (MachineLoad(2, 0.0, 1.1, 0.0), "other programs took 1.1 during"),
        (MachineLoad(2, 0.1, 0.3, 0.2), "other programs took 0.3 and the hypervisor took 0.2 (steal time) during"),
        (MachineLoad(2, 1.0, 0.0, 0.1), "the hypervisor took 0.1 (steal time) during"),
    ],
)
def test_who_took_cores_is_told(load: MachineLoad, words: str) -> None:
    assert words in load.disturbance


@pytest.mark.parametrize(
    "load",
    [MachineLoad(2, 0.0, 0.1, 0.0), MachineLoad(64, 30.0, 20.0, 0.0), MachineLoad(2, 0.4, 0.5, 0.01)],
)
def test_what_others_do_beside_idle_cores_disturbs_no_measurement(load: MachineLoad) -> None:
    assert load.disturbance == ""


def test_an_unstable_level_is_disturbed_where_others_took_cores_and_any_other_verdict_stays() -> None:
    busy, quiet = MachineLoad(2, 0.0, 1.1, 0.0), MachineLoad(2, 1.0, 0.0, 0.0)

    assert judged(Verdict.UNSTABLE, ("It differed.",), busy) == (
        Verdict.DISTURBED,
        (busy.disturbance, "It differed.", "Measure again when the machine is quiet."),
    )
    assert judged(Verdict.STABLE, ("It agreed.",), busy) == (Verdict.STABLE, ("It agreed.", busy.disturbance))
    for load in (quiet, None):
        assert judged(Verdict.UNSTABLE, ("It differed.",), load) == (Verdict.UNSTABLE, ("It differed.",))


def test_the_processes_of_a_server_are_those_that_it_has_started_and_theirs() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo started; wait"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        own = psutil.Process()

        found = descendants(own)

        child = psutil.Process(parent.pid)
        (grandchild,) = child.children()
        assert child in found
        assert grandchild in found
        assert set(found) <= set(own.children(recursive=True))
        grandchild.kill()
        parent.kill()
    assert descendants(child) == []
