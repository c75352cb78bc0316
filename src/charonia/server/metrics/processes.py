"""The guard's record of the processes of its server: as text for other processes, and as metrics. Pure.

The guard writes the record to a file, and the engine reads it for each scrape of its metrics. Times are of the
machine's monotonic clock, which all processes share.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from charonia.server.metrics.metric_families import Family, family

RESTARTS = "charonia_process_restarts_total"
UPTIME = "charonia_process_uptime_seconds"
CPU = "charonia_process_cpu_seconds_total"
RESIDENT = "charonia_process_resident_memory_bytes"

Usage = Callable[[int], tuple[float, int] | None]
"""Returns the CPU time of a process in seconds and its resident memory in bytes; None if it has ended."""


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process of the server.

    Attributes:
        name: Its name: "engine", "front_end_1", …
        pid: Its number, 0 while it does not run.
        started_ns: When it was started, 0 while it does not run.
        restarts: Number of restarts, by the reason of the previous exit.
        last_exit: The reason of its last end, "" if it has never ended.
    """

    name: str
    pid: int = 0
    started_ns: int = 0
    restarts: Mapping[str, int] = field(default_factory=dict)
    last_exit: str = ""

    def uptime_s(self, now_ns: int) -> float:
        """Return how long it has been running, in seconds."""
        return max(0, now_ns - self.started_ns) / 1e9 if self.pid else 0.0


def to_text(records: Sequence[ProcessRecord]) -> str:
    return json.dumps([asdict(record) for record in records])


def from_text(text: str) -> tuple[ProcessRecord, ...]:
    return tuple(ProcessRecord(**values) for values in json.loads(text))


def families(records: Sequence[ProcessRecord], now_ns: int, usage: Usage) -> list[Family]:
    """Return the metrics of the processes; none for a server of one process."""
    if not records:
        return []
    used = [({"process": record.name}, usage(record.pid)) for record in records if record.pid]
    return [
        family(
            RESTARTS, "counter", "Restarts of processes of the server, by the reason of the previous exit",
            *(
                (count, {"process": record.name, "reason": reason})
                for record in records
                for reason, count in record.restarts.items()
            ),
        ),
        family(
            UPTIME, "gauge", "Time since a process of the server was started, 0 while it does not run",
            *((round(record.uptime_s(now_ns), 3), {"process": record.name}) for record in records),
        ),
        family(
            CPU, "counter", "CPU time of a process of the server since it was started",
            *((round(found[0], 3), labels) for labels, found in used if found is not None),
        ),
        family(
            RESIDENT, "gauge", "Resident memory of a process of the server, without the models' own processes",
            *((found[1], labels) for labels, found in used if found is not None),
        ),
    ]  # fmt: skip


CONNECTIONS = "charonia_connections_open"
ACCEPTED = "charonia_connections_accepted_total"
REQUESTS = "charonia_requests_received_total"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic of an endpoint since its process was started.

    Attributes:
        process: Name of the process: "front_end_1", …; "server" for a server of one process.
        protocol: "http" or "grpc".
        open: Connections that are open now.
        accepted: Connections accepted.
        requests: Requests received: HTTP requests, gRPC calls, and each message of a stream.
    """

    process: str
    protocol: str
    open: int
    accepted: int
    requests: int


def traffic_metric_names() -> tuple[str, ...]:
    return (CONNECTIONS, ACCEPTED, REQUESTS)


def traffic_families(traffic: Iterable[Traffic]) -> list[Family]:
    """Return the metrics of endpoints. While one process replaces another, their sums have its name."""
    sums: dict[tuple[str, str], Traffic] = {}
    for each in traffic:
        at = each.process, each.protocol
        so_far = sums.get(at, Traffic(*at, 0, 0, 0))
        sums[at] = Traffic(
            *at, so_far.open + each.open, so_far.accepted + each.accepted, so_far.requests + each.requests
        )
    rows = [({"process": each.process, "protocol": each.protocol}, each) for each in sums.values()]
    return [
        family(CONNECTIONS, "gauge", "Connections of clients that are open", *((row.open, at) for at, row in rows)),
        family(ACCEPTED, "counter", "Connections of clients accepted", *((row.accepted, at) for at, row in rows)),
        family(REQUESTS, "counter", "Requests received", *((row.requests, at) for at, row in rows)),
    ]
