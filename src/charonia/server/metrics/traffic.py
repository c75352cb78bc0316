"""The traffic of the endpoints of each process of a server, as metrics. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from charonia.server.metrics.metric_families import Family, family

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
