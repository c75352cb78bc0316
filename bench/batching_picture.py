"""The classic picture of dynamic batching, in simulated time: `python -m bench.batching_picture`.

Five requests arrive within 1.2 units of time, and one execution takes 1 unit for any batch size up to 4. When is
the last one answered: each alone, batched without a delay, batched with a queue delay of half a unit? It computes, it
does not measure: the result is the same on every machine.
"""

from tests.support.simulation import Simulation

from charonia.server.scheduling.api import BatchPolicy, Run, Scheduler, Submit
from charonia.server.scheduling.dynamic import DynamicBatcher

UNIT_NS = 1_000_000
ARRIVALS = {1: 0.0, 2: 0.2, 3: 0.4, 4: 0.9, 5: 1.2}
"""When each request arrives, in units."""

SIZE_MAX = 4


def schedulers() -> dict[str, Scheduler]:
    """Return the three ways to serve, by name."""
    return {
        "no batching": DynamicBatcher(BatchPolicy()),
        "dynamic batching": DynamicBatcher(BatchPolicy(SIZE_MAX)),
        "dynamic batching, delay 0.5": DynamicBatcher(BatchPolicy(SIZE_MAX, delay_ns=UNIT_NS // 2)),
    }


def one_unit(_: Run) -> int:
    """Return how long an execution takes: the same for every batch."""
    return UNIT_NS


def simulate(scheduler: Scheduler) -> Simulation:
    """Serve the five requests on one slot."""
    simulation = Simulation(scheduler, one_unit)
    for request_id, units in ARRIVALS.items():
        simulation.at(round(units * UNIT_NS), Submit(request_id))
    simulation.run()
    return simulation


def finished_units(simulation: Simulation) -> float:
    """Return when the last request was answered."""
    return max(simulation.finished_ns.values()) / UNIT_NS


def mean_latency_units(simulation: Simulation) -> float:
    """Return the mean time from arrival to answer."""
    times_ns = [simulation.finished_ns[request] - arrived_ns for request, arrived_ns in simulation.submitted_ns.items()]
    return sum(times_ns) / len(times_ns) / UNIT_NS


def batches(simulation: Simulation) -> str:
    """Return each batch and when it started, e.g. `1+2 at 0.5`."""
    return ", ".join(f"{batch_ids(run)} at {start_ns / UNIT_NS:.1f}" for start_ns, run in simulation.runs)


def batch_ids(run: Run) -> str:
    """Return the requests of a batch, joined by +."""
    return "+".join(map(str, run.ids))


def table() -> str:
    """Return the picture as a table."""
    lines = [f"{'':28} {'all done':>8} {'mean latency':>13}  batches (requests at start time)"]
    for name, scheduler in schedulers().items():
        done = simulate(scheduler)
        lines.append(f"{name:28} {finished_units(done):8.1f} {mean_latency_units(done):13.2f}  {batches(done)}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
