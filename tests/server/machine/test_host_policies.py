"""Instances run on the cores of their host policy."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig
from charonia.core.errors import Code, ServingError
from charonia.server.lifecycle.loader import placements
from charonia.server.machine import cores
from charonia.server.machine.cores import HostPolicy, bind_thread, bound_to, memory_nodes, policy_cores, usable_cores

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be bound here")


def test_each_instance_gets_the_cores_of_its_policy_and_no_more_threads_than_those() -> None:
    groups = (
        InstanceGroup(name="a", count=2, kind=InstanceKind.KIND_CPU, host_policy="near"),
        InstanceGroup(name="b", count=1, kind=InstanceKind.KIND_CPU),
        InstanceGroup(name="c", count=1, kind=InstanceKind.KIND_GPU, gpus=(1,)),
    )

    placed = placements(ModelConfig(instance_group=groups), 12, {"near": (0, 1), "gpu_1": (4, 5)})

    assert [(p.name, p.cores, p.threads) for p in placed] == [
        ("a_0", (0, 1), 1),
        ("a_1", (0, 1), 1),
        ("b_0", (), 4),
        ("c_0", (4, 5), 2),
    ]


def test_memory_nodes_are_read_from_the_kernel(tmp_path: Path) -> None:
    for name, text in (("node0", "0-1,4\n"), ("node1", "2-3\n"), ("node2", "\n"), ("power", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(text)
    (tmp_path / "node3").mkdir()

    assert memory_nodes(tmp_path) == {0: (0, 1, 4), 1: (2, 3)}


@needs_affinity
def test_a_policy_is_its_cores_or_those_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(cores, "memory_nodes", lambda: {0: (0, 1), 1: (2, 3, 9)})

    found = policy_cores({"own": HostPolicy((1,), 1), "node": HostPolicy(node=1), "any": HostPolicy()})

    assert found == {"own": (1,), "node": (2, 3), "any": (0, 1, 2, 3)}
    assert policy_cores({}) == {}
    with pytest.raises(ServingError, match="may not use core 7"):
        policy_cores({"far": HostPolicy((7,))})


def test_where_threads_cannot_be_bound_a_policy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "os", SimpleNamespace(cpu_count=lambda: 2))

    bind_thread([0])
    with bound_to([0]), pytest.raises(ServingError) as caught:
        policy_cores({"a": HostPolicy((0,))})

    assert usable_cores() == 2

    assert caught.value.code is Code.UNSUPPORTED


@needs_affinity
def test_what_is_started_meanwhile_stays_on_the_cores() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    seen: list[set[int]] = []

    with bound_to([core]):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
    thread.join()
    with bound_to([]):
        pass

    assert seen == [{core}]
    assert os.sched_getaffinity(0) == before
