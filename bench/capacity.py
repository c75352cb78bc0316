"""How many inferences a second a machine answers: a discrete-event simulation over measured costs.

python -m bench.capacity --front-end-us 60 --engine-us 15 --model-us 20 --clients 256

A request passes a front end, the engine, a thread of the model, the engine again and the front end again; a model that
computes in microseconds runs in the engine itself. Front ends and the engine are processes with one thread each; a
model has its own threads. Each works on one request at a time, in the order of arrival, and needs a core for that;
cores are assigned in the order of demand. Clients send the next request when they have the answer; they are on other
machines, or one thread on this one. The simulation leaves out effects (caches, the network's interrupts, memory
bandwidth) that make real machines slower, so its figures are upper bounds.

`bench.capacity_report` takes the costs from measurements.

The table has the best number of front ends, and the choice of `--front-ends auto`.
"""

import argparse
import heapq
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from charonia.server.front_ends.processes import LARGE_BYTES, choose_front_ends
from charonia.server.machine.cores import cores_for_models

CORES = (4, 8, 16, 64)

NEARLY = 0.98
"""Share of the highest rate with which another shape is as good."""


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU time of an inference.

    Attributes:
        front_end_us: In the front end, before and after the engine together.
        engine_us: In the engine, before and after the model together.
        model_us: In a thread of the model; 0 if the model runs in the engine itself.
        one_process_us: In the only process of a server without front ends; 0 for the sum of front end and engine.
        client_us: In a client on the same machine, which is one thread; 0 where clients are on other machines.
    """

    front_end_us: float
    engine_us: float
    model_us: float = 0.0
    one_process_us: float = 0.0
    client_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A server.

    Attributes:
        cores: Cores of its machine.
        front_ends: Front-end processes; 0 for a server of one process.
        model_threads: Threads that run the model.
    """

    cores: int
    front_ends: int
    model_threads: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of it.

    Attributes:
        rate_per_s: Inferences a second.
        p99_us: 99th percentile of the latency in us.
        busiest: The part with the largest busy share: "front ends", "engine", "server" where that is one
            process, "model", "client" or "cores".
        busy_share: That share.
    """

    rate_per_s: float
    p99_us: float
    busiest: str
    busy_share: float


@dataclass(eq=False, slots=True)
class _Worker:
    """Something that works on one request at a time."""

    waiting: deque[tuple["_Request", float]] = field(default_factory=deque)
    is_busy: bool = False
    busy_us: float = 0.0


@dataclass(eq=False, slots=True)
class _Request:
    begin_us: float
    way: Iterator[tuple[_Worker, float]]


class _Machine:
    """Workers on cores. Times are in us."""

    def __init__(self, cores: int) -> None:
        self.now_us = 0.0
        self.latencies_us: list[float] = []
        self.free_cores = cores
        self._ready: deque[_Worker] = deque()  # have work and wait for a core
        self._ends: list[tuple[float, int, _Worker, _Request]] = []
        self._number = count()

    def move(self, request: _Request) -> bool:
        """Bring a request to its next worker; return whether there is one."""
        step = next(request.way, None)
        if step is None:
            self.latencies_us.append(self.now_us - request.begin_us)
            return False
        worker, cost_us = step
        worker.waiting.append((request, cost_us))
        if not worker.is_busy and len(worker.waiting) == 1:
            self._ready.append(worker)
        return True

    def begin_work(self) -> None:
        """Give free cores to workers."""
        while self.free_cores and self._ready:
            worker = self._ready.popleft()
            request, cost_us = worker.waiting.popleft()
            worker.is_busy = True
            worker.busy_us += cost_us
            self.free_cores -= 1
            heapq.heappush(self._ends, (self.now_us + cost_us, next(self._number), worker, request))

    def end_work(self) -> _Request:
        """Pass the time until a worker has finished; return its request."""
        self.now_us, _, worker, request = heapq.heappop(self._ends)
        worker.is_busy = False
        self.free_cores += 1
        if worker.waiting:
            self._ready.append(worker)
        return request


def simulate(costs: Costs, shape: Shape, clients: int, requests: int = 20_000, seed: int = 1) -> Figures:
    """Return a server's figures under a closed loop of clients.

    Args:
        costs: Mean CPU times; each single one varies by a quarter.
        shape: The server.
        clients: Requests in flight.
        requests: Length of the simulation.
        seed: Of the random numbers.
    """
    chance = random.Random(seed)
    machine = _Machine(shape.cores)
    engine, client_thread = _Worker(), _Worker()
    front_ends = [_Worker() for _ in range(shape.front_ends)]
    threads = [_Worker() for _ in range(shape.model_threads)] if costs.model_us else []
    one_process_us = costs.one_process_us or costs.front_end_us + costs.engine_us

    def varied(mean_us: float) -> float:
        return mean_us * chance.uniform(0.75, 1.25)

    def in_engine(engine_us: float) -> Iterator[tuple[_Worker, float]]:
        if threads:
            yield engine, varied(engine_us / 2)
            yield min(threads, key=lambda thread: len(thread.waiting) + thread.is_busy), varied(costs.model_us)
            yield engine, varied(engine_us / 2)
        else:
            yield engine, varied(engine_us)

    def way(client: int) -> Iterator[tuple[_Worker, float]]:
        if costs.client_us:
            yield client_thread, varied(costs.client_us)
        if front_ends:
            front_end = front_ends[client % len(front_ends)]
            yield front_end, varied(costs.front_end_us / 2)
            yield from in_engine(costs.engine_us)
            yield front_end, varied(costs.front_end_us / 2)
        else:
            yield from in_engine(one_process_us)

    client_of: dict[_Request, int] = {}

    def send(client: int) -> None:
        request = _Request(machine.now_us, way(client))
        client_of[request] = client
        machine.move(request)

    for client in range(clients):
        send(client)
    while len(machine.latencies_us) < requests:
        machine.begin_work()
        request = machine.end_work()
        if not machine.move(request):
            send(client_of.pop(request))
    busy = {
        "front ends": sum(each.busy_us for each in front_ends) / max(len(front_ends), 1),
        "engine" if front_ends else "server": engine.busy_us,
        "model": sum(each.busy_us for each in threads) / max(len(threads), 1),
        "client": client_thread.busy_us,
        "cores": sum(each.busy_us for each in (*front_ends, engine, *threads, client_thread)) / shape.cores,
    }
    busiest = max(busy, key=lambda name: busy[name])
    settled = sorted(machine.latencies_us[requests // 10 :])
    return Figures(
        len(machine.latencies_us) / machine.now_us * 1e6,
        settled[len(settled) * 99 // 100],
        busiest,
        min(1.0, busy[busiest] / machine.now_us),
    )


def best(
    costs: Costs, cores: int, clients: int, requests: int = 20_000, front_ends: int | None = None
) -> tuple[Shape, Figures]:
    """Return the number of front ends, unless it is given, and threads of the model that answers most requests.

    Threads are at most the cores that the server leaves to models beside its front ends.
    Of several that answer as many but for 2 %, it is the one with the fewest front ends.
    """
    total_us = costs.front_end_us + costs.engine_us + costs.model_us
    enough = round(costs.front_end_us / costs.engine_us) if costs.engine_us else cores
    share, share_of_model = round(cores * costs.front_end_us / total_us), cores * costs.model_us / total_us
    tried = {1, enough - 1, enough, enough + 1, share, share + 1, cores // 2, cores - 1, cores}
    found = []
    for number in sorted({0, *(min(max(each, 1), cores) for each in tried)} if front_ends is None else {front_ends}):
        wanted = (1, max(1, round(share_of_model)), max(1, cores // 2)) if costs.model_us else (1,)
        for threads in sorted({min(each, cores_for_models(cores, number)) for each in wanted}):
            shape = Shape(cores, number, threads)
            found.append((shape, simulate(costs, shape, clients, requests)))
    most = max(figures.rate_per_s for _, figures in found)
    return next(each for each in found if each[1].rate_per_s >= NEARLY * most)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front-end-us", type=float, required=True)
    parser.add_argument("--engine-us", type=float, required=True)
    parser.add_argument("--model-us", type=float, default=0.0)
    parser.add_argument("--one-process-us", type=float, default=0.0)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--cores", type=int, nargs="+", default=list(CORES))
    given = parser.parse_args()
    costs = Costs(given.front_end_us, given.engine_us, given.model_us, given.one_process_us)
    model_bytes = round(given.model_us / 1000 * LARGE_BYTES)
    print("cores | front ends, model threads | infer/s | p99 us | limit")
    for cores in given.cores:
        chosen = choose_front_ends(cores, "a model stays in the engine", model_bytes).number
        for name, number in (("best", None), ("auto", chosen)):
            shape, figures = best(costs, cores, given.clients, front_ends=number)
            print(
                f"{cores:5} | {name} {shape.front_ends:3}, {shape.model_threads:3} | {figures.rate_per_s:9,.0f} | "
                f"{figures.p99_us:7.0f} | {figures.busiest} ({figures.busy_share:.0%})"
            )


if __name__ == "__main__":
    main()
