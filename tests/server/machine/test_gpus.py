"""GPUs are counted by their device files, within what CUDA_VISIBLE_DEVICES allows."""

from pathlib import Path

import pytest

from charonia.server.machine.gpus import visible_gpus


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_every_device_file_is_a_gpu(devices: Path) -> None:
    assert visible_gpus({}, devices) == 2


@pytest.mark.parametrize(
    ("value", "count"), [("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("0,7,1", 1), ("GPU-8a2f,GPU-77", 2), ("0,-1,1", 1)]
)
def test_the_variable_restricts_what_is_seen(devices: Path, value: str, count: int) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, devices) == count


def test_a_machine_without_gpus_has_none(tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == 0
