"""Looks at every model whose number of instances follows the load, as long as the server runs."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from charonia.server.execution.clock import now_ns
from charonia.server.machine.cpu_times import CpuTimes
from charonia.server.scaling.instances import ScaledInstances
from charonia.server.scaling.room import Room, idle_cores
from charonia.server.scaling.rule import SAMPLE_NS

_log = logging.getLogger(__name__)

MEASURE_NS = 1_000_000_000
"""Time over which the use of cores is measured."""


class InstanceScaler:
    """Adds and closes instances.

    Args:
        models: Returns the versions whose number of instances follows the load.
        workers_s: Returns the CPU time of all workers so far, in seconds.
        room: Returns the cores that the server may use, and free memory; `idle_cores` is filled in.
    """

    def __init__(
        self,
        models: Callable[[], Sequence[ScaledInstances]],
        workers_s: Callable[[], float],
        room: Callable[[], Room],
    ) -> None:
        self._models = models
        self._workers_s = workers_s
        self._room = room
        self._times: CpuTimes | None = None
        self._measured_ns = 0
        self._idle_cores = 0.0

    async def run(self) -> None:
        """Look at all models periodically, until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_NS / 1e9)
            try:
                self.look()
            except Exception:  # a fault of ours must not end scaling
                _log.exception("looking at the instances of models failed")

    def look(self) -> None:
        """Look at all models now."""
        models = self._models()
        if not models:
            self._times = None
            return
        self._measure()
        for each in models:
            if each.look(self._room_now):
                self._idle_cores = max(0.0, self._idle_cores - 1)  # until the next measurement

    def _room_now(self) -> Room:
        return replace(self._room(), idle_cores=self._idle_cores)

    def _measure(self) -> None:
        now = now_ns()
        if self._times is not None and now - self._measured_ns < MEASURE_NS:
            return
        times = CpuTimes.read(self._workers_s())
        if self._times is not None:
            own, others = times.used_since(self._times, (now - self._measured_ns) / 1e9)
            self._idle_cores = idle_cores(self._room().cores, os.cpu_count() or 1, own, others)
        self._times, self._measured_ns = times, now
