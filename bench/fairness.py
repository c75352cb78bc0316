"""Latency of well-behaved clients while others attack the server: the figures of docs/faults.md.

Eight clients infer in a closed loop over HTTP. Each group of attackers runs beside them, in turn with quiet phases to
compare with. Attackers prepare their bytes beforehand and have a low priority of the operating system, so that the
work of the server is measured, and not how processes share its cores.

python -m bench.fairness

Where other programs run, `chrt --rr 1 python -m bench.fairness --nice=-18` puts the server and the clients before them,
and the attackers between.
"""

import argparse
import json
import multiprocessing
import os
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import ngh2

from bench.servers import Server

CLIENTS = 8
START_S = 0.5
"""Time for attackers to begin."""

PATIENCE_S = 1.0
"""Time after which an attacker whose bytes are not taken connects anew."""

BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [16], "data": [1.5] * 16}]}).encode()
INFER = b"POST /v2/models/model/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST /v2/models/model/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
CALL = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
    (b":authority", b"a"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]

Address = tuple[str, int]


class Attack(NamedTuple):
    """A kind of attack.

    Attributes:
        name: The attack.
        attackers: Their number.
        is_grpc: Whether they use the gRPC port.
        data: What each sends.
        once: Whether each connects anew to send it again.
    """

    name: str
    attackers: int
    is_grpc: bool
    data: bytes
    once: bool = False


def attacks() -> list[Attack]:
    """Return all attacks."""
    return [
        Attack("pipelined health checks, unread", 5, False, LIVE * 2000),
        Attack("pipelined inferences, unread", 5, False, INFER * 1000),
        Attack("bodies of tiny chunks", 5, False, CHUNKED + b"1\r\n \r\n" * 65_000, once=True),
        Attack("malformed requests", 3, False, b"nonsense\r\n\r\n", once=True),
        Attack("cancelled calls", 3, True, http2(6000, cancelled_call), once=True),
        Attack("calls, unread", 3, True, http2(10_000, call), once=True),
        Attack("pings", 3, True, http2(20_000, ping), once=True),
    ]


def http2(count: int, stir: Callable[[ngh2.Connection], bytes]) -> bytes:
    """Return the bytes of a new connection that does something so many times."""
    connection = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration())
    connection.initiate_connection({ngh2.Setting.INITIAL_WINDOW_SIZE: 2**31 - 1})
    connection.receive_data(SERVER_SETTINGS)
    return b"".join([connection.data_to_send(), *(stir(connection) for _ in range(count))])


SERVER_SETTINGS = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x03\x7f\xff\xff\xff"
"""Settings of a server that permits any number of concurrent calls."""


def call(connection: ngh2.Connection) -> bytes:
    """Return the bytes of a call."""
    stream_id = connection.send_request(CALL)
    connection.send_data(stream_id, bytes(5), end_stream=True)
    return connection.data_to_send()


def cancelled_call(connection: ngh2.Connection) -> bytes:
    """Return the bytes of a call that is cancelled immediately."""
    stream_id = connection.send_request(CALL)
    data = connection.data_to_send()
    connection.reset_stream(stream_id, ngh2.ErrorCode.CANCEL)
    return data + connection.data_to_send()


def ping(connection: ngh2.Connection) -> bytes:
    """Return the bytes of a ping."""
    connection.ping()
    return connection.data_to_send()


def flood(address: Address, attack: Attack, nice: int) -> None:
    """Attack until this process is killed."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    while True:
        with suppress(OSError), socket.create_connection(address, PATIENCE_S) as connection:
            connection.sendall(attack.data)
            while not attack.once:
                connection.sendall(attack.data)
            while connection.recv(65536):
                pass


def latencies(address: Address, seconds: float) -> list[float]:
    """Return the sorted latencies of the well-behaved clients, in ms."""
    selector = selectors.DefaultSelector()
    connection: socket.socket
    began: dict[socket.socket, float] = {}
    found: list[float] = []
    for _ in range(CLIENTS):
        connection = socket.create_connection(address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ, connection)
        began[connection] = time.perf_counter()
        connection.sendall(INFER)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for key, _ in selector.select(1.0):
            connection = key.data
            answer = connection.recv(65536)
            if not answer.startswith(b"HTTP/1.1 200"):  # a small response comes in one piece
                raise RuntimeError(f"a request of a well-behaved client failed: {answer!r}")
            now = time.perf_counter()
            found.append((now - began[connection]) * 1e3)
            began[connection] = now
            connection.sendall(INFER)
    for connection in began:
        connection.close()
    return sorted(found)


def address_of(endpoint: str) -> Address:
    """Return host and port."""
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def p99(server: Server, seconds: float) -> float:
    """Return the 99th percentile of the latency of the well-behaved clients, in ms."""
    found = latencies(address_of(server.http), seconds)
    return found[len(found) * 99 // 100]


def measure(server: Server, attack: Attack, nice: int, rounds: int, seconds: float) -> None:
    """Print the p99 of quiet and of attacked phases: medians, ranges, and the ratio of the medians."""
    quiet, attacked = [], []
    for _ in range(rounds):
        quiet.append(p99(server, seconds))
        arguments = address_of(server.grpc if attack.is_grpc else server.http), attack, nice
        attackers = [multiprocessing.Process(target=flood, args=arguments) for _ in range(attack.attackers)]
        for attacker in attackers:
            attacker.start()
        time.sleep(START_S)
        attacked.append(p99(server, seconds))
        for attacker in attackers:
            attacker.kill()
        for attacker in attackers:
            attacker.join()
    ratio = statistics.median(attacked) / statistics.median(quiet)
    who = f"{attack.attackers} x {attack.name}"
    print(f"{who:36} quiet {spread(quiet)}  attacked {spread(attacked)}  {ratio:.2f} times", flush=True)


def spread(values: Sequence[float]) -> str:
    """Return median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}) ms"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default="", help="attacks whose names contain this")
    parser.add_argument("--nice", type=int, default=19, help="of the attackers")
    given = parser.parse_args()
    with Server("charonia:identity") as server:
        for attack in attacks():
            if given.only in attack.name:
                measure(server, attack, given.nice, given.rounds, given.seconds)


if __name__ == "__main__":
    main()
