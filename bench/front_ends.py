"""CPU time of an inference by process, with front ends apart and without, in turn.

python -m bench.front_ends --client wrk --model engine_identity        # every request goes to the engine
python -m bench.front_ends --client wrk --model identity               # the model runs in the front ends, too

Over gRPC, h2load takes the place of wrk. With the results, `bench.capacity_report` says what larger machines do. The
client is on the same machine and takes cores from the server, so the rates are for a machine that runs both.
"""

import argparse
import json
import resource
import statistics
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from typing import NamedTuple

from bench.compare import RESULTS
from bench.load import Load, Point, run
from bench.machine import machine
from bench.servers import Server

ROLES = {"serve_process engine": "engine", "serve_process front": "front ends"}
"""Names of processes by a part of their command; others are the server's only process, or its parent."""


CLIENT = "client"
"""Name of what sends the load."""


class Sample(NamedTuple):
    """A run.

    Attributes:
        point: Rate, latencies and CPU time of all processes.
        cpu_us: CPU time of an inference by the name of its processes, in us; that of the client is "client".
    """

    point: Point
    cpu_us: dict[str, float]


def cpu_seconds(server: Server) -> dict[str, float]:
    """Return the CPU time so far by the name of processes."""
    found: dict[str, float] = {}
    for process in server.processes():
        command = " ".join(process.cmdline())
        name = next((name for part, name in ROLES.items() if part in command), "server")
        times = process.cpu_times()
        found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def sample(server: Server, load: Load) -> Sample:
    """Run the load once."""
    before, client_before, count_before = cpu_seconds(server), client_seconds(), server.inference_count()
    point = run(server, load)
    count = max(server.inference_count() - count_before, 1)
    spent = {name: time - before[name] for name, time in cpu_seconds(server).items()}
    spent[CLIENT] = client_seconds() - client_before
    return Sample(point, {name: time * 1e6 / count for name, time in spent.items()})


def client_seconds() -> float:
    """Return the CPU time of all clients so far: of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="identity")
    parser.add_argument("--client", choices=["perf_analyzer", "wrk"], default="perf_analyzer")
    parser.add_argument("--protocol", choices=["http", "grpc"], nargs="+", default=["http", "grpc"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--front-ends", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    given = parser.parse_args()
    record: dict[str, object] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    with ExitStack() as stack:
        variant = f"charonia:{given.model}"
        servers = {n: stack.enter_context(Server(variant, [f"--front-ends={n}"])) for n in given.front_ends}
        for protocol in given.protocol:
            client = "h2load" if (given.client, protocol) == ("wrk", "grpc") else given.client
            for concurrency in given.concurrency:
                load = Load(client, protocol, concurrency, given.seconds)
                samples: dict[int, list[Sample]] = {n: [] for n in servers}
                for number in range(given.rounds + 1):
                    for n in list(servers)[:: 1 if number % 2 else -1]:
                        found = sample(servers[n], load)
                        samples[n] += [found] * bool(number)  # the first round is a warm-up
                for n, each in samples.items():
                    rate = statistics.median(one.point.rate_per_s for one in each)
                    p99 = statistics.median(one.point.p99_us for one in each)
                    shares = {name: statistics.median(one.cpu_us[name] for one in each) for name in each[0].cpu_us}
                    split = ", ".join(f"{name} {us:.1f}" for name, us in shares.items())
                    server_us = sum(shares.values()) - shares[CLIENT]
                    print(
                        f"{protocol} {concurrency:3} | {n} front ends | {rate:8.0f} infer/s | p99 {p99:7.0f} us | "
                        f"CPU us: {split}, all of the server {server_us:.1f}",
                        flush=True,
                    )
                record[f"{protocol}-{concurrency}"] = {
                    n: [{**asdict(one.point), "cpu_us_by_process": one.cpu_us} for one in each]
                    for n, each in samples.items()
                }
                name = f"front_ends-{given.model}-{given.client}.json"
                (RESULTS / name).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
