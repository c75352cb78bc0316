"""Memory of a server after bursts of requests, and what giving it back costs the next burst.

Bursts of large requests follow each other after a pause in which the server gives memory back, or a shorter one, in
turn. The cost of a burst is the CPU time of the server, which other programs on the machine disturb less than its
duration, and the pages that the system has to provide anew.

python -m bench.burst_memory
python -m bench.burst_memory --idle 100000     # memory of a connection without a request instead, HTTP and gRPC
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

from bench.machine import machine
from bench.servers import Server
from charonia import compiled
from charonia.server.machine.memory import QUIET_S

CLIENTS = 256
SHORT_S, LONG_S = QUIET_S - 2.0, QUIET_S + 3.0
MIB = 2**20
SHARE = 15_000
"""Connections of one client process, from one address of the loopback network."""

BARRIER_S = 300.0
IP_BIND_ADDRESS_NO_PORT = 24
"""Of Linux: ports are chosen for an address and its peer, so those of a previous run are no obstacle."""
IDLE_S = 5.0
REQUESTS = {
    "http": b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "grpc": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)),
}
"""What a connection sends before it is idle: a request, and the preface with empty settings."""


async def client(host: str, port: int, data: bytes, count: int) -> None:
    """Send requests one after the other on a connection."""
    reader, writer = await asyncio.open_connection(host, port, limit=4 * MIB)
    for _ in range(count):
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0]))
    writer.close()


async def burst(host: str, port: int, count: int) -> None:
    """Send a burst of requests on separate connections."""
    array = np.ones((1, 3, 224, 224), np.float32)
    document = {
        "inputs": [
            {
                "name": "INPUT0",
                "shape": [*array.shape],
                "datatype": "FP32",
                "parameters": {"binary_data_size": array.nbytes},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(document).encode()
    head = (
        f"POST /v2/models/model/infer HTTP/1.1\r\nHost: a\r\nInference-Header-Content-Length: {len(text)}\r\n"
        f"Content-Length: {len(text) + array.nbytes}\r\n\r\n"
    )
    data = head.encode() + text + array.tobytes()
    await asyncio.gather(*(client(host, port, data, count) for _ in range(CLIENTS)))


def hold(address: str, first: bytes, number: int, count: int, barrier: Barrier) -> None:
    """Hold connections that have sent something and received the response, from the first barrier to the second."""
    host, _, port = address.rpartition(":")
    with ExitStack() as stack:
        try:
            for _ in range(count):
                connection = stack.enter_context(socket.socket())
                connection.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
                connection.bind((f"127.0.1.{number + 1}", 0))
                connection.connect((host, int(port)))
                connection.sendall(first)
                assert connection.recv(4096), f"{address} has closed a connection"
        except BaseException:
            barrier.abort()
            raise
        barrier.wait()
        barrier.wait()


@contextmanager
def connections(address: str, first: bytes, count: int) -> Iterator[None]:
    """Hold connections in as many processes as the system's limit of open files requires."""
    shares = [min(SHARE, count - begin) for begin in range(0, count, SHARE)]
    barrier = multiprocessing.Barrier(len(shares) + 1, timeout=BARRIER_S)
    holders = [
        multiprocessing.Process(target=hold, args=(address, first, number, share, barrier))
        for number, share in enumerate(shares)
    ]
    for holder in holders:
        holder.start()
    barrier.wait()
    yield
    barrier.wait()
    for holder in holders:
        holder.join()


def idle(count: int, front_ends: int, output: Path | None) -> None:
    """Measure connections that have no request, print, and replace their row in the results file."""
    row = {"connections": count, "front_ends": front_ends, "form": compiled.form, "date": f"{datetime.now(UTC):%F}"}
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limits = [f"--{protocol}-max-connections={count}" for protocol in REQUESTS]
    for protocol, first in REQUESTS.items():
        with Server("charonia:identity", [f"--front-ends={front_ends}", *limits]) as server:
            address = getattr(server, protocol)
            with connections(address, first, 100):
                pass
            before, spent, begin = server.memory_bytes(), server.cpu_seconds(), time.monotonic()
            with connections(address, first, count):
                took, spent = time.monotonic() - begin, server.cpu_seconds() - spent
                each = (server.memory_bytes() - before) / count
                rest = server.cpu_seconds()
                time.sleep(IDLE_S)
                rest = (server.cpu_seconds() - rest) / IDLE_S
            row[f"{protocol}_bytes"] = round(each)
            print(
                f"{protocol}, {front_ends} front ends: {each:.0f} bytes a connection; {count} opened in {took:.1f} s, "
                f"{spent / count * 1e6:.0f} us of CPU time each; then {rest:.1%} of a core",
                flush=True,
            )
    if output is not None:
        keys = ("connections", "front_ends", "form")
        known = json.loads(output.read_text(encoding="utf-8"))["rows"] if output.exists() else []
        rows = [each for each in known if any(each[key] != row[key] for key in keys)] + [row]
        rows.sort(key=lambda each: [each[key] for key in keys])
        output.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=10, help="of each of the clients of a burst")
    parser.add_argument("--idle", type=int, default=0, help="connections without a request")
    parser.add_argument("--front-ends", type=int, default=0, help="with --idle")
    parser.add_argument("--output", type=Path, help="with --idle, results file that gets the row")
    given = parser.parse_args()
    if given.idle:
        idle(given.idle, given.front_ends, given.output)
        return
    with Server("charonia:image") as server:
        host, _, port = server.http.rpartition(":")
        print(f"at start {server.memory_bytes() // MIB} MiB")
        costs: dict[float, list[float]] = {SHORT_S: [], LONG_S: []}
        faults: dict[float, list[int]] = {SHORT_S: [], LONG_S: []}
        asyncio.run(burst(host, int(port), given.requests))
        for _ in range(given.rounds):
            for pause_s in (LONG_S, SHORT_S):
                high = server.memory_bytes() // MIB
                time.sleep(pause_s)
                rest, before, pages = server.memory_bytes() // MIB, server.cpu_seconds(), server.page_faults()
                asyncio.run(burst(host, int(port), given.requests))
                costs[pause_s].append(server.cpu_seconds() - before)
                faults[pause_s].append(server.page_faults() - pages)
                burst_cost = f"{costs[pause_s][-1]:.2f} s of CPU time, {faults[pause_s][-1]} page faults"
                print(f"pause {pause_s:.0f} s: {high} -> {rest} MiB, next burst {burst_cost}", flush=True)
        long, short = statistics.median(costs[LONG_S]), statistics.median(costs[SHORT_S])
        ratios = sorted(a / b - 1 for a, b in zip(costs[LONG_S], costs[SHORT_S], strict=True))
        print(f"median after the longer pause {long:.2f} s, after the shorter {short:.2f} s: {long / short - 1:+.1%}")
        print(f"page faults {statistics.median(faults[LONG_S]):.0f} and {statistics.median(faults[SHORT_S]):.0f}")
        print(f"median of the pairs {statistics.median(ratios):+.1%}, from {ratios[0]:+.1%} to {ratios[-1]:+.1%}")


if __name__ == "__main__":
    main()
