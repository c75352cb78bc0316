"""Whether a workload fits onto a machine: the memory of GPUs, several servers, one more server."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from charonia.platform.deployments.spec import DeployedModel, DeploymentSpec
from charonia.platform.targets.api import Workload
from charonia.platform.targets.fit import MIB, LocalGpu, LocalMachine, Needs, misfits, needs_of, obstacle
from charonia.platform.targets.local import gpus_of, this_machine

GPUS = (LocalGpu("A", 16000 * MIB, 12000 * MIB, "0"), LocalGpu("A", 16000 * MIB, 16000 * MIB, "1"))
MACHINE = LocalMachine(8, 4000 * MIB, GPUS, idle_cores=4.0)


def workload(**spec: Any) -> Workload:
    whole = DeploymentSpec(name="reader", models=(DeployedModel(name="echo"),), **spec)
    return Workload("default/reader", 1, whole, ())


def test_the_memory_of_a_gpu_has_to_be_free_and_not_be_promised_to_others() -> None:
    asked = workload(device={"gpus": (0, 1), "gpu_memory_mib": 10000})
    others = [Needs(0, (1,), 4000 * MIB), Needs(0, (1,), 4000 * MIB), Needs(0, (0,), 0)]

    assert list(misfits(asked, MACHINE, [])) == []
    assert list(misfits(asked, MACHINE, others)) == [
        "device.gpu_memory_mib: it may use 10000 MiB of GPU 1, and 8000 MiB are left: 16000 of 16000 MiB are free, and "
        "8000 MiB were promised to others"
    ]
    (misfit,) = misfits(workload(device={"gpus": (0,), "gpu_memory_mib": 12001}), MACHINE, [])
    assert "12000 MiB are left" in misfit


def test_servers_that_are_added_need_their_memory_each_and_an_upgrade_that_of_one() -> None:
    asked = workload(device={"gpus": (0,), "gpu_memory_mib": 5000, "memory_mib": 1500}, replicas={"min": 3, "max": 4})

    assert [text.partition(":")[0] for text in misfits(asked, MACHINE, [])] == ["memory", "device.gpu_memory_mib"]
    assert list(misfits(asked, MACHINE, [], running=3)) == []


@pytest.mark.parametrize(
    ("spec", "machine", "said"),
    [
        ({"device": {"gpu_memory_mib": 1}}, MACHINE, "expected device.gpus, too"),
        (
            {"device": {"gpus": (0,), "gpu_memory_mib": 1}},
            LocalMachine(8, 4000 * MIB, [LocalGpu(cuda="0")]),
            "is not known: this needs an NVIDIA driver",
        ),
        ({"device": {"gpus": (2,), "gpu_memory_mib": 1}}, MACHINE, "this machine has GPUs 0 to 1, got 2"),
        (
            {"device": {"gpus": (0, 1)}},
            LocalMachine(8, 4000 * MIB, [LocalGpu(cuda="MIG-1"), LocalGpu(cuda="1")]),
            "one slice of a GPU (MIG)",
        ),
    ],
)
def test_gpu_memory_without_a_gpu_is_refused(spec: dict[str, Any], machine: LocalMachine, said: str) -> None:
    (misfit,) = misfits(workload(**spec), machine, [])

    assert said in misfit


def test_all_cores_count_where_there_is_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)

    assert this_machine().cores == 6


def test_one_more_server_needs_idle_cores_and_memory() -> None:
    needs = needs_of(workload(device={"memory_mib": 1500, "gpus": (0,), "gpu_memory_mib": 7000}))

    assert obstacle(needs, 1, MACHINE, [needs]) == ""
    busy = LocalMachine(8, 4000 * MIB, idle_cores=0.2)
    assert obstacle(needs, 1, busy, []) == "0.2 of 8 cores are idle, and one more server would need them"
    assert obstacle(needs, 3, MACHINE, []) == "it needs 4500 MiB of memory, and 4000 MiB are free"
    assert "2000 MiB are left" in obstacle(needs, 1, MACHINE, [needs, needs])


class NVMLError(Exception):
    """As pynvml has it."""


def library(**calls: Any) -> SimpleNamespace:
    info = SimpleNamespace(total=1000, used=400, free=600)
    made = {
        "NVML_DEVICE_MIG_ENABLE": 1,
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda number: number,
        "nvmlDeviceGetMemoryInfo": lambda handle: info,
        "nvmlDeviceGetMigMode": fails,
        "nvmlDeviceGetName": lambda handle: b"A100",
    }
    return SimpleNamespace(**{**made, **calls})


def fails(*_: object) -> None:
    raise NVMLError("driver not loaded")


def test_nvidias_library_says_names_and_how_much_memory_is_free() -> None:
    assert gpus_of(library()) == [LocalGpu("A100", 1000, 600, "0"), LocalGpu("A100", 1000, 600, "1")]


def test_a_divided_gpu_counts_as_its_slices() -> None:
    def slice_of(handle: int, part: int) -> str:
        if part > 1:
            raise NVMLError("not found")
        return f"MIG-{handle}-{part}"

    divided = library(
        nvmlDeviceGetMigMode=lambda handle: (1 - handle, 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=slice_of,
        nvmlDeviceGetUUID=lambda handle: handle,
    )

    assert [each.cuda for each in gpus_of(divided)] == ["MIG-0-0", "MIG-0-1", "1"]


def test_without_an_answer_the_gpus_are_not_known() -> None:
    assert gpus_of(library(nvmlInit=fails)) == ()
    assert gpus_of(library(nvmlDeviceGetMemoryInfo=fails)) == ()
