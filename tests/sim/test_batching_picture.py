"""The classic picture of dynamic batching comes out as everybody draws it."""

from bench.batching_picture import batches, finished_units, schedulers, simulate


def test_five_requests_take_five_units_alone_three_batched_and_two_and_a_half_with_a_delay() -> None:
    done = {name: simulate(scheduler) for name, scheduler in schedulers().items()}

    assert {name: finished_units(simulation) for name, simulation in done.items()} == {
        "no batching": 5.0,
        "dynamic batching": 3.0,
        "dynamic batching, delay 0.5": 2.5,
    }
    assert batches(done["dynamic batching"]) == "1 at 0.0, 2+3+4 at 1.0, 5 at 2.0"
    assert batches(done["dynamic batching, delay 0.5"]) == "1+2+3 at 0.5, 4+5 at 1.5"
