"""Three real servers beside their simulation: service times, latencies, goodput, and the cost of a kill.

The model waits as long as an accelerator would work on a batch, so that three servers fit on two cores.

Usage: python -m bench.fleet.real
"""

import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
from examples.demo.server import HOST, Ports, free_ports, running_server

from bench.fleet.policies import LeastOutstanding, Policy, RandomChoice, RoundRobin
from bench.fleet.server import Request, ServiceTimes
from bench.fleet.simulation import Fleet, Plan, Result
from bench.machine import machine
from charonia.client import AsyncClient
from charonia.core.errors import ServingError

RESULTS = Path(__file__).parents[1] / "results"
SERVERS = 3
CLIENTS = 4
BATCH_MAX = 8
BATCHES_TIMED = 40
SECONDS = 20.0
WARM_S = 2.0
DEADLINE_S = 1.0
KILL_AT_S = 10.0
NOTICED_S = 0.01
"""A lost process refuses connections immediately."""

MODEL = "accelerator"

BALANCED = "two choices, charonia.client"

_CONFIG = f"""\
backend: "python"
max_batch_size: {BATCH_MAX}
dynamic_batching {{ }}
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }}
"""

_SOURCE = """\
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        time.sleep(0.010 + 0.002 * sum(len(array) for array in arrays))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a real server.

    Attributes:
        times: Its service times.
        start_s: Seconds until it answers.
    """

    times: ServiceTimes
    start_s: float


def measured_before() -> Measured:
    """Return the last run's measurements."""
    found = json.loads((RESULTS / "fleet_real.json").read_text())
    return Measured(ServiceTimes(tuple(found["by_batch_s"]), tuple(found["factors"])), found["start_s"])


class Servers:
    """Real servers, as a policy sees them: numbers, and the requests that each client has with each.

    Args:
        ports: Where they are.
        balanced: Whether clients of all servers choose by themselves, whatever the policy says.
    """

    def __init__(self, ports: Sequence[Ports], balanced: bool = False) -> None:
        urls = [f"http://{HOST}:{each.http}" for each in ports]
        self.clients = [AsyncClient(url, timeout_s=DEADLINE_S) for url in urls]
        self.balanced = [AsyncClient(urls, timeout_s=DEADLINE_S) for _ in range(CLIENTS)] if balanced else []
        self.listed = list(range(len(ports)))
        self._own = [[0] * CLIENTS for _ in ports]

    def outstanding(self, server: int) -> int:
        """Return the requests that a server has from all clients."""
        return sum(self._own[server])

    def own_outstanding(self, server: int, client: int) -> int:
        """Return the requests that a server has from one client."""
        return self._own[server][client]

    def reported(self, server: int, client: int) -> int:
        """Return 0: no reports are requested."""
        return 0

    async def infer(self, server: int, client: int, tensor: np.ndarray) -> None:
        """Send a request of a client to a server."""
        self._own[server][client] += 1
        try:
            sender = self.balanced[client] if self.balanced else self.clients[server]
            await sender.infer(MODEL, {"INPUT0": tensor})
        finally:
            self._own[server][client] -= 1

    async def close(self) -> None:
        """Close the connections."""
        for client in [*self.clients, *self.balanced]:
            await client.close()


async def service_times(ports: Ports) -> ServiceTimes:
    """Time batches of each size, one after another, as a client sees them."""
    seconds: dict[int, list[float]] = {}
    async with AsyncClient(f"http://{HOST}:{ports.http}") as client:
        for size in range(1, BATCH_MAX + 1):
            tensor = np.zeros((size, 16), np.float32)
            for _ in range(BATCHES_TIMED):
                begin = time.perf_counter()
                await client.infer(MODEL, {"INPUT0": tensor})
                seconds.setdefault(size, []).append(time.perf_counter() - begin)
    return ServiceTimes.measured(seconds)


async def loaded(
    servers: Servers, rate: float, policy: Policy, seed: int, kill: Callable[[], None] | None = None
) -> Result:
    """Send requests at random times, whether or not previous ones are answered, and follow each."""
    random = Random(seed)
    result = Result(latencies=array("d"))
    tensor = np.zeros((1, 16), np.float32)
    tasks = set()

    async def one(due: float) -> None:
        client = random.randrange(CLIENTS)
        counted = due - begin >= WARM_S
        result.offered += counted
        request = Request(due, client, 0, due + DEADLINE_S)
        try:
            await servers.infer(policy.pick(servers, request, random), client, tensor)
        except ServingError:
            result.failed += counted
            return
        latency = time.perf_counter() - due
        if counted and latency <= DEADLINE_S:
            result.latencies.append(latency)

    begin = time.perf_counter()
    due = begin
    while due < begin + SECONDS:
        due += random.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if kill and due - begin >= KILL_AT_S:
            kill()
            servers.listed = servers.listed[1:]
            kill = None
        task = asyncio.create_task(one(due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return result


def simulated(times: ServiceTimes, rate: float, policy: Callable[[], Policy], seed: int, killed: bool) -> Result:
    """Simulate the same."""
    plan = Plan(
        servers=SERVERS,
        rate=lambda _: rate,
        seconds=SECONDS,
        times=times,
        policy=policy,
        clients=CLIENTS,
        warm_s=WARM_S,
        deadline_s=DEADLINE_S,
        network_s=0.0,
        noticed_s=NOTICED_S,
        seed=seed,
    )
    if killed:
        plan = replace(plan, happenings=[(KILL_AT_S, lambda fleet: fleet.lose(fleet.servers[:1]))])
    return Fleet(plan).run()


POLICIES: dict[str, Callable[[], Policy]] = {
    "round robin": RoundRobin,
    "chance": RandomChoice,
    "two choices, own requests": LeastOutstanding,
    "two choices, one balancer": lambda: LeastOutstanding("all"),
    BALANCED: LeastOutstanding,
}


def row(real: Result, simulation: Result) -> dict[str, str | float | int]:
    """Return both results."""
    figures: dict[str, str | float | int] = {}
    for share in (0.5, 0.9, 0.99):
        pair = (real.quantile(share), simulation.quantile(share))
        figures[f"p{share * 100:.0f} ms real"], figures[f"p{share * 100:.0f} ms simulated"] = (
            round(seconds * 1e3, 1) for seconds in pair
        )
    figures["goodput real"] = f"{real.goodput:.2%}"
    figures["goodput simulated"] = f"{simulation.goodput:.2%}"
    figures["lost real"] = real.failed
    figures["lost simulated"] = simulation.failed
    return figures


@dataclass(frozen=True, slots=True)
class Started:
    """Servers that run.

    Attributes:
        ports: Where they are.
        pids: Their processes.
        seconds: How long each took to start.
    """

    ports: list[Ports]
    pids: list[int]
    seconds: list[float]


@contextmanager
def running_servers(folder: Path) -> Iterator[Started]:
    """Start the servers; stop them on exit."""
    started = Started([], [], [])
    with ExitStack() as stack:
        for _ in range(SERVERS):
            ports = free_ports()
            begin = time.monotonic()
            started.pids.append(stack.enter_context(running_server(folder, ports)).pid)
            started.seconds.append(time.monotonic() - begin)
            started.ports.append(ports)
        yield started


def main() -> None:
    """Measure, simulate, compare."""
    with tempfile.TemporaryDirectory(prefix="charonia-bench-") as temporary:
        folder = Path(temporary)
        version = folder / MODEL / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(_SOURCE)
        (version.parent / "config.pbtxt").write_text(_CONFIG)
        rows = []
        with running_servers(folder) as servers:
            times = asyncio.run(service_times(servers.ports[0]))
            print("batches, ms:", [round(1e3 * s, 2) for s in times.by_batch])
            for load in (0.5, 0.7, 0.9):
                for seed, name in enumerate(POLICIES):
                    rows.append({"load": f"{load:.0%}", **compared(servers, times, load, name, seed)})
                    print(rows[-1], flush=True)
        for seed, name in enumerate(("two choices, own requests", BALANCED)):
            with running_servers(folder) as killed:
                rows.append({"load": "50 %, one of three killed", **compared(killed, times, 0.5, name, seed, True)})
            print(rows[-1], flush=True)
    result = {
        "machine": machine(),
        "by_batch_s": times.by_batch,
        "factors": [round(factor, 4) for factor in times.factors],
        "start_s": statistics.median(servers.seconds),
        "rows": rows,
    }
    (RESULTS / "fleet_real.json").write_text(json.dumps(result, indent=1) + "\n")


def compared(
    servers: Started, times: ServiceTimes, load: float, name: str, seed: int, killed: bool = False
) -> dict[str, str | float | int]:
    """Send requests to real servers and simulate them; one of the servers is killed on the way if `killed`."""
    rate = SERVERS * times.capacity * load
    kill = partial(os.kill, servers.pids[0], signal.SIGKILL) if killed else None
    real = asyncio.run(_run(servers.ports, rate, POLICIES[name](), seed, kill, name == BALANCED))
    return {"policy": name, **row(real, simulated(times, rate, POLICIES[name], seed, killed))}


async def _run(
    ports: Sequence[Ports],
    rate: float,
    policy: Policy,
    seed: int,
    kill: Callable[[], None] | None,
    balanced: bool,
) -> Result:
    servers = Servers(ports, balanced)
    try:
        return await loaded(servers, rate, policy, seed, kill)
    finally:
        await servers.close()


if __name__ == "__main__":
    main()
