import os
from pathlib import Path

import pytest

from charonia.server.machine.cores import share, usable_cores


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


def cores(tmp_path: Path, cgroup: str | None, files: dict[str, str]) -> int:
    process, groups = tmp_path / "self", tmp_path / "cgroup"
    process.mkdir()
    if cgroup is not None:
        (process / "cgroup").write_text(cgroup)
    for name, content in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return usable_cores(process=process, groups=groups)


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        # Version 2: inside a container the group is the root; outside it is a path, and every group around it counts.
        ("0::/\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000", "a/cpu.max": "800000 100000"}, 3),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"cpu.max": "6400000 100000"}, 16),
        ("0::/\n", {"cpu.max": "nonsense"}, 16),
        ("0::/\n", {"cpu.max": "1 0"}, 16),
        # Version 1, with the folder of either name; the path may be the host's.
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu,cpuacct:/x\n", {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "50000"}, 4),
        ("4:cpu:/\n3:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        ("4:cpu:/kubepods/x\n", {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("3:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 16),
        # Both at once.
        ("0::/../x\n4:cpu:/\n", {"unified/cpu.max": "500000 100000"}, 5),
        (None, {}, 16),
    ],
)
def test_usable_cores_are_those_of_the_affinity_and_the_quota(
    tmp_path: Path, cgroup: str | None, files: dict[str, str], expected: int
) -> None:
    assert cores(tmp_path, cgroup, files) == expected


def test_the_affinity_counts_where_it_is_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)

    assert cores(tmp_path, "0::/\n", {"cpu.max": "400000 100000"}) == 2


def test_where_there_is_no_affinity_the_machine_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)

    assert cores(tmp_path, None, {}) == 6


@pytest.mark.parametrize(
    ("cores", "instances", "threads"), [(16, 1, 16), (16, 4, 4), (16, 5, 3), (2, 4, 1), (1, 1, 1), (8, 0, 8)]
)
def test_the_shares_of_the_instances_stay_within_the_cores(cores: int, instances: int, threads: int) -> None:
    assert share(cores, instances) == threads
