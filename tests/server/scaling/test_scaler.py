"""What looks at all models: it measures the cores, and gives each of them to one model."""

import os
from collections.abc import Callable
from typing import cast

import pytest

from charonia.server.machine.gauges import CpuTimes
from charonia.server.scaling import instances as scaler
from charonia.server.scaling.instances import MEASURE_NS, InstanceScaler, ScaledInstances
from charonia.server.scaling.rule import Headroom


class Greedy:
    """A model that adds an instance whenever a core is idle."""

    def __init__(self) -> None:
        self.saw: list[float] = []

    def check(self, room: Callable[[], Headroom]) -> bool:
        self.saw.append(room().idle_cores)
        return self.saw[-1] >= 1


def test_a_model_sees_the_idle_cores_that_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns, times = 0, CpuTimes(0.0, 0.0, 0.0)
    monkeypatch.setattr(scaler, "now_ns", lambda: now_ns)
    monkeypatch.setattr(CpuTimes, "read", lambda workers_s: times)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    first, second = Greedy(), Greedy()
    watched = InstanceScaler(lambda: cast("list[ScaledInstances]", [first, second]), lambda: 0.0, lambda: Headroom(4))

    watched.check()
    now_ns += MEASURE_NS
    times = CpuTimes(idle_s=1.5, busy_s=2.5, own_s=1.0)
    watched.check()
    now_ns += MEASURE_NS // 2
    watched.check()

    assert first.saw == [0.0, 1.5, 0.5]
    assert second.saw == [0.0, 0.5, 0.5]
