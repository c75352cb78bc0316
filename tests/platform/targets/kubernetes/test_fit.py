"""Whether a server fits into a cluster."""

from typing import Any

import pytest
from tests.platform.targets.kubernetes.conftest import workload

from charonia.platform.targets.kubernetes.values import (
    PodNeed,
    node_misfits,
    quantity,
    quota_misfits,
    unsupported_requests,
)

GIB = 2**30


def node(cpu: str, memory: str, gpus: int = 0, **spec: Any) -> dict[str, Any]:
    return {"spec": spec, "status": {"allocatable": {"cpu": cpu, "memory": memory, "nvidia.com/gpu": str(gpus)}}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500m", 0.5),
        ("2", 2.0),
        ("1Gi", float(GIB)),
        ("128974848", 128974848.0),
        ("1e3", 1000.0),
        ("2k", 2000.0),
        ("?", 0.0),
    ],
)
def test_quantities(text: str, expected: float) -> None:
    assert quantity(text) == expected


def test_what_no_node_can_ever_give() -> None:
    nodes = [node("3920m", "15Gi"), node("2", "7Gi", gpus=1), node("64", "500Gi", unschedulable=True)]

    assert list(node_misfits(PodNeed(2, GIB, 1), nodes)) == []
    assert list(node_misfits(PodNeed(8, 32 * GIB, 2), nodes)) == [
        "device.cpu_cores: the largest node of the cluster has 3.92, got 8",
        "memory: a server needs 32768 MiB, and the largest node of the cluster has 15360 MiB",
        "device.gpus: the node with the most GPUs in the cluster has 1, got 2",
    ]
    assert list(node_misfits(PodNeed(3, GIB, 1), nodes)) == [
        "device: no node of the cluster has enough cores, memory and GPUs together"
    ]
    assert list(node_misfits(PodNeed(1000, GIB, 1), [])) == []  # they may not be looked at


def test_what_a_quota_leaves() -> None:
    status = {
        "hard": {"requests.cpu": "10", "requests.memory": "8Gi", "pods": "20"},
        "used": {"requests.cpu": "7", "requests.memory": "1Gi", "pods": "3"},
    }
    quotas = [{"metadata": {"name": "team"}, "status": status}]

    assert list(quota_misfits(PodNeed(1, GIB, 0), 3, quotas)) == []
    assert list(quota_misfits(PodNeed(2, 4 * GIB, 0), 2, quotas)) == [
        "quota 'team' of the namespace: requests.cpu 4 is needed, and 3 of 10 is left",
        "quota 'team' of the namespace: requests.memory 8192Mi is needed, and 7168Mi of 8Gi is left",
    ]


def test_a_part_of_a_gpu_cannot_be_asked_for() -> None:
    [found] = unsupported_requests(workload(1, device={"gpus": (0,), "gpu_memory_mib": 2048}))

    assert found.startswith("device.gpu_memory_mib: pods get whole GPUs")
    assert list(unsupported_requests(workload(1, device={"gpus": (0,)}))) == []
