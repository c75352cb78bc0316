"""Where a small model computes, on the event loop or in its thread: in each of many short runs on one server.

python -m bench.settling
python -m bench.settling charonia@PYTHON:mlp charonia:mlp --runs 30

A run is on the loop if the other threads of the server use less than a tenth of its CPU time. With several servers,
they get the load in turn, so that disturbances of the machine affect all of them.
"""

import argparse
from collections import Counter
from contextlib import ExitStack
from statistics import median

import psutil

from bench.load import Load, Point, run
from bench.servers import Server

LOOP, BOTH, THREAD = "loop", "both", "thread"
_SHARE_OF_LOOP, _SHARE_OF_THREAD = 0.1, 0.25


def thread_seconds(server: Server) -> tuple[float, float]:
    """Return the CPU time of the server's main thread, and that of its other threads."""
    process = psutil.Process(server.pid)
    times = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    return times.pop(server.pid), sum(times.values())


def measured(server: Server, load: Load) -> tuple[Point, str]:
    """Run the load once; return what came of it, and where the model computed."""
    main, others = thread_seconds(server)
    point = run(server, load)
    main_after, others_after = thread_seconds(server)
    share = (others_after - others) / max(others_after - others + main_after - main, 1e-9)
    return point, LOOP if share < _SHARE_OF_LOOP else BOTH if share < _SHARE_OF_THREAD else THREAD


def main() -> None:
    """Measure and print a line for each run, and a summary."""
    parser = argparse.ArgumentParser(prog="python -m bench.settling", description=__doc__)
    parser.add_argument("variants", nargs="*", default=["charonia:mlp"], help="as for bench.compare")
    parser.add_argument("--client", choices=["wrk", "perf_analyzer"], default="perf_analyzer")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one run; perf_analyzer makes three of it")
    given = parser.parse_args()
    load = Load(given.client, "http", given.concurrency, given.seconds)
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(variant)) for variant in given.variants]
        runs: list[list[tuple[Point, str]]] = [[] for _ in servers]
        for number in range(given.runs):
            for server, made in zip(servers, runs, strict=True):
                point, where = measured(server, load)
                made.append((point, where))
                print(f"{number:>3} {server.variant:<40} {point.rate_per_s:>8.0f}/s {point.cpu_us:>6.1f} us {where}")
        for server, made in zip(servers, runs, strict=True):
            rates = sorted(point.rate_per_s for point, _ in made)
            cpu = sorted(point.cpu_us for point, _ in made)
            places = dict(Counter(where for _, where in made))
            print(
                f"{server.variant}: {median(rates):.0f}/s [{rates[0]:.0f}-{rates[-1]:.0f}], "
                f"{median(cpu):.1f} us [{cpu[0]:.1f}-{cpu[-1]:.1f}], {places}"
            )


if __name__ == "__main__":
    main()
