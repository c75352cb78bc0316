"""Who used the cores of this machine meanwhile: the load generator and the server, other programs, the hypervisor."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from charonia.tools.perf.resources import ProcessTree
from charonia.tools.results.server import MachineLoad


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU time so far, in seconds of all cores together.

    Attributes:
        at_ns: Monotonic time.
        busy_s: Time that programs ran.
        idle_s: Time that nothing ran.
        stolen_s: Time that the hypervisor gave to other machines although a program wanted to run here.
        known_s: Time of the load generator and the server.
    """

    at_ns: int
    busy_s: float
    idle_s: float
    stolen_s: float
    known_s: float


class MachineWatch:
    """Samples the cores that this process may use.

    Args:
        server: The server's processes, None if they are on another machine.
    """

    def __init__(self, server: ProcessTree | None) -> None:
        own = psutil.Process()
        self._known = [ProcessTree(own)]
        if server is not None and not server.is_within(own):
            self._known.append(server)
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._samples: list[CpuSample] = []

    def begin(self) -> None:
        """Forget all samples."""
        self._samples = []

    def sample(self) -> None:
        """Take a sample."""
        times = psutil.cpu_times(percpu=True)
        used = [times[core] for core in self._cores if core < len(times)] or times
        self._samples.append(
            CpuSample(
                at_ns=time.monotonic_ns(),
                busy_s=_total(used, ("user", "nice", "system", "irq", "softirq")),
                idle_s=_total(used, ("idle", "iowait")),
                stolen_s=_total(used, ("steal",)),
                known_s=sum(found[0] for processes in self._known if (found := processes.sample()) is not None),
            )
        )

    def load(self, begin_ns: int, end_ns: int) -> MachineLoad | None:
        """Return who used the cores in an interval; None without two samples of it."""
        return load_between(self._samples, begin_ns, end_ns, len(self._cores) or psutil.cpu_count() or 1)


def load_between(samples: Sequence[CpuSample], begin_ns: int, end_ns: int, core_count: int) -> MachineLoad | None:
    """Return who used the cores between the samples that are closest to an interval, or None if there are not two."""
    if len(samples) < 2:
        return None
    first = min(samples[:-1], key=lambda sample: abs(sample.at_ns - begin_ns))
    later = [sample for sample in samples if sample.at_ns > first.at_ns]
    if not later:
        return None
    last = min(later, key=lambda sample: abs(sample.at_ns - end_ns))
    seconds = (last.at_ns - first.at_ns) / 1e9

    def cores(read: Callable[[CpuSample], float]) -> float:
        return max(0.0, read(last) - read(first)) / seconds

    return MachineLoad(
        core_count=core_count,
        idle_cores=cores(lambda sample: sample.idle_s),
        other_cores=max(0.0, cores(lambda sample: sample.busy_s) - cores(lambda sample: sample.known_s)),
        stolen_cores=cores(lambda sample: sample.stolen_s),
    )


def _total(times: Sequence[object], names: Sequence[str]) -> float:
    # Which of them there are depends on the system.
    return float(sum(getattr(each, name, 0.0) for each in times for name in names))
