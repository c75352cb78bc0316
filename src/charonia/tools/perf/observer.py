"""Observes the server beside the load: statistics, metrics page, and its processes if they run on this machine.

Each of them may be missing.

Readings are kept with their times, so that those closest to the windows of a result can be compared later.
"""

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from operator import attrgetter, itemgetter
from typing import TypeVar

import psutil

from charonia.client.sync_client import Client
from charonia.core.errors import ServingError, unavailable
from charonia.http_call import NO_ANSWER, http_call, no_answer_reason
from charonia.tools.perf import statistics
from charonia.tools.perf.api import RunSettings
from charonia.tools.perf.statistics import Reading
from charonia.tools.results.records import Gpu, MachineLoad, Resources, ServerModel, ServerSide
from charonia.wire.endpoint import parse_url


class ProcessTree:
    """The process that listens at an address, and its children."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._spent_by_gone = 0.0
        self._last: dict[int, float] = {}

    def is_within(self, process: psutil.Process) -> bool:
        """Whether a process has started the server, or is the server."""
        try:
            return process in (self._root, *self._root.parents())
        except psutil.Error:
            return False

    def sample(self) -> tuple[float, int, int] | None:
        """Return CPU seconds so far, resident bytes and number of processes; None if the server has exited."""
        if not self._root.is_running():
            return None
        rss = 0
        now: dict[int, float] = {}
        for process in (self._root, *descendants(self._root)):
            try:
                times = process.cpu_times()
                rss += process.memory_info().rss
            except psutil.Error:
                continue  # it has just exited
            now[process.pid] = times.user + times.system
        # The CPU time of exited processes counts too, so that a restart does not look like negative time.
        self._spent_by_gone += sum(spent for pid, spent in self._last.items() if pid not in now)
        self._last = now
        return self._spent_by_gone + sum(now.values()), rss, len(now)


def descendants(root: psutil.Process) -> list[psutil.Process]:
    """Return the processes that a process has started, directly or not, as far as they are visible.

    Linux lists the children of each thread. psutil would read all processes of the machine: milliseconds that a load on
    the same cores has to wait for.
    """
    found: list[psutil.Process] = []
    with suppress(OSError, psutil.Error):  # it has just exited
        if not os.path.exists(f"/proc/{root.pid}/task/{root.pid}/children"):
            return list(root.children(recursive=True))
        for thread in os.listdir(f"/proc/{root.pid}/task"):
            with open(f"/proc/{root.pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(psutil.Process, map(int, file.read().split()))
    return [*found, *(each for child in found for each in descendants(child))]


_RELAYS = frozenset({"docker-proxy", "rootlessport", "slirp4netns", "pasta", "kubectl", "ssh"})
"""Programs that listen on behalf of a server elsewhere: in a container, or on another machine."""


def find_processes(url: str) -> ProcessTree | None:
    """Return the processes of the server at a URL; None if it is on another machine, or not visible."""
    endpoint = parse_url(url)
    if not is_local_host(endpoint.host):
        return None
    try:
        listening = [
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (endpoint.port,) and connection.pid
        ]
        if not listening:
            return None
        # Of processes that share a port, the oldest has started the others.
        root = min(map(psutil.Process, set(listening)), key=lambda process: process.create_time())
        return None if root.name() in _RELAYS else ProcessTree(root)
    except psutil.Error:
        return None


def is_local_host(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    own = {address.address for family in psutil.net_if_addrs().values() for address in family}
    return any(address in own or ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses)


Sample = tuple[int, float, int, int]
"""Monotonic time in nanoseconds, CPU seconds, resident bytes, processes."""


def timed(processes: ProcessTree) -> Sample | None:
    """Return a sample with its time."""
    now = time.monotonic_ns()
    found = processes.sample()
    return (now, *found) if found is not None else None


SAMPLE_S = 0.5
"""Time between two samples of the server's processes."""

METRICS_BYTES_MAX = 8 * 2**20
METRICS_TIMEOUT_S = 2.0


class Observer:
    """The observations of the server during a level.

    Args:
        processes: Its processes, None if they are not on this machine.
    """

    def __init__(
        self,
        client: Client,
        settings: RunSettings,
        composing: list[tuple[str, str]],
        has_statistics: bool,
        processes: ProcessTree | None,
    ) -> None:
        self._client = client
        self._settings = settings
        self._composing = composing
        self._has_statistics = has_statistics
        self._processes = processes
        self._problem = ""
        self._metrics_problem = ""
        self._reads: list[tuple[int, Reading]] = []
        self._samples: list[Sample] = []
        # A server on this machine that cannot be seen would count among the other programs.
        is_seen = processes is not None or not is_local_host(parse_url(settings.target.url).host)
        self._machine = MachineWatch(processes) if is_seen else None
        self._pages: list[tuple[int, statistics.Page]] = []
        self._next_sample = self._next_page = 0.0

    def begin(self) -> None:
        """Discard all observations before a new load."""
        self._reads, self._samples, self._pages = [], [], []
        if self._machine is not None:
            self._machine.begin()
        self._next_sample = self._next_page = 0.0
        self.mark()

    def mark(self) -> None:
        """Read the statistics now, at a boundary of a window."""
        self._sample()
        if not self._has_statistics:
            return
        target = self._settings.target
        try:
            entries = list(self._client.statistics(target.model, target.version))
            for name, version in self._composing:
                entries += self._client.statistics(name, version)
        except ServingError as error:
            self._problem = f"The server's statistics could not be read: {error.message}."
            return
        self._reads.append((time.monotonic_ns(), statistics.reading(entries)))

    def sample_due(self) -> None:
        """Take the periodic samples that are due; call it often."""
        now = time.monotonic()
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_S
            self._sample()
        plan = self._settings.server
        if plan.metrics_url and now >= self._next_page:
            self._next_page = now + plan.metrics_interval_ms / 1000
            try:
                self._pages.append((time.monotonic_ns(), statistics.parse_page(read_page(plan.metrics_url))))
            except ServingError as error:
                self._metrics_problem = error.message

    def server_side(self, begin_ns: int, end_ns: int, ended: Callable[[int, int], int], in_flight: int) -> ServerSide:
        """Return the server's statistics of an interval.

        Args:
            ended: Returns how many of our requests ended in an interval.
        """
        if not self._has_statistics:
            return ServerSide(None, False, ("The server has no statistics extension.",))
        notes = [note for note in (self._problem, self._metrics_problem) if note]
        if len(self._reads) < 2:
            return ServerSide(None, False, tuple(notes))
        (first_ns, before), (last_ns, after) = closest(self._reads, begin_ns, end_ns, itemgetter(0))
        target = self._settings.target
        model, note = statistics.difference(before, after, target.model, target.version)
        notes += [note] if note else []
        parts: list[ServerModel] = []
        for name, version in self._composing:
            part, note = statistics.difference(before, after, name, version)
            notes += [note] if note else []
            parts += [part] if part is not None else []
        return statistics.server_side(model, parts, notes, ended(first_ns, last_ns), in_flight)

    def resources(self, begin_ns: int, end_ns: int) -> Resources | None:
        """Return the resources that the server's processes used in an interval, None if they are not visible."""
        inside = [sample for sample in self._samples if begin_ns <= sample[0] <= end_ns]
        if len(inside) < 2:
            inside = self._samples
        if len(inside) < 2:
            return None
        first, last = inside[0], inside[-1]
        cpu = last[1] - first[1]
        return Resources(
            cpu_seconds=cpu * (end_ns - begin_ns) / (last[0] - first[0]),
            cpu_cores=cpu * 1e9 / (last[0] - first[0]),
            rss_bytes=max(sample[2] for sample in inside),
            process_count=last[3],
        )

    def machine_load(self, begin_ns: int, end_ns: int) -> MachineLoad | None:
        """Return who used the cores of this machine in an interval, None if that is unknown."""
        return self._machine.load(begin_ns, end_ns) if self._machine is not None else None

    def metrics(self, begin_ns: int, end_ns: int) -> tuple[tuple[Gpu, ...], statistics.Page]:
        """Return the GPUs on the metrics page in an interval, and all numbers of the last page."""
        inside = [page for at, page in self._pages if begin_ns <= at <= end_ns]
        inside = inside or [page for _, page in self._pages]
        return statistics.gpus(inside), dict(inside[-1]) if inside else {}

    def _sample(self) -> None:
        if self._machine is not None:
            self._machine.sample()
        if self._processes is not None:
            sample = timed(self._processes)
            if sample is not None and (not self._samples or sample[0] > self._samples[-1][0]):
                self._samples.append(sample)


_T = TypeVar("_T")


def closest(readings: Sequence[_T], begin_ns: int, end_ns: int, at: Callable[[_T], int]) -> tuple[_T, _T]:
    """Return the readings, at least two at different times, that are closest to the ends of an interval."""
    first = min(readings[:-1], key=lambda reading: abs(at(reading) - begin_ns))
    later = (reading for reading in readings if at(reading) > at(first))
    return first, min(later, key=lambda reading: abs(at(reading) - end_ns))


def read_page(url: str) -> str:
    """Return the text of a metrics page.

    Raises:
        ServingError: UNAVAILABLE when it cannot be read.
    """
    url = url if "://" in url else f"http://{url}"
    try:
        answer = http_call("GET", url, timeout_s=METRICS_TIMEOUT_S, bytes_max=METRICS_BYTES_MAX)
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"HTTP Error {answer.status}: {answer.reason}")
        return answer.body.decode("utf-8", "replace")
    except NO_ANSWER as error:
        raise unavailable(f"The metrics page {url} could not be read: {no_answer_reason(error)}.") from None


@dataclass(frozen=True, slots=True)
class CpuSample:
    """CPU time so far, in seconds of all cores together.

    Attributes:
        stolen_s: Time that the hypervisor gave to other machines although a program wanted to run here.
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
    if len(samples) < 2 or samples[-1].at_ns == samples[-2].at_ns:
        return None
    first, last = closest(samples, begin_ns, end_ns, attrgetter("at_ns"))
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
