"""The simulation of a server's capacity agrees with what can be said without it."""

import pytest
from bench.capacity import Costs, Shape, best, simulate

COSTS = Costs(front_end_us=60, engine_us=12, model_us=20)


def test_one_client_waits_for_every_step_and_nothing_else() -> None:
    figures = simulate(COSTS, Shape(cores=8, front_ends=4, model_threads=2), clients=1, requests=2000)

    assert figures.rate_per_s == pytest.approx(1e6 / 92, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "expected_us", "busiest"),
    [
        (Shape(cores=2, front_ends=2, model_threads=1), 92 / 2, "cores"),
        (Shape(cores=16, front_ends=2, model_threads=4), 60 / 2, "front ends"),
        (Shape(cores=64, front_ends=32, model_threads=8), 12, "engine"),
        (Shape(cores=64, front_ends=16, model_threads=1), 20, "model"),
        (Shape(cores=4, front_ends=0, model_threads=2), 72, "server"),
    ],
)
def test_under_load_the_scarcest_resource_sets_the_rate(shape: Shape, expected_us: float, busiest: str) -> None:
    figures = simulate(COSTS, shape, clients=256, requests=5000)

    assert figures.rate_per_s == pytest.approx(1e6 / expected_us, rel=0.08)
    assert figures.busiest == busiest
    assert figures.busy_share > 0.9


@pytest.mark.parametrize(
    ("costs", "shape", "expected_us", "busiest"),
    [
        (Costs(60, 12), Shape(cores=64, front_ends=32, model_threads=4), 12, "engine"),
        (Costs(60, 12), Shape(cores=2, front_ends=1, model_threads=1), 60, "front ends"),
        (Costs(60, 12, one_process_us=50), Shape(cores=2, front_ends=0, model_threads=1), 50, "server"),
        (Costs(60, 12, client_us=30), Shape(cores=2, front_ends=2, model_threads=1), (60 + 12 + 30) / 2, "cores"),
        (Costs(10, 12, client_us=30), Shape(cores=4, front_ends=2, model_threads=1), 30, "client"),
    ],
)
def test_a_model_that_runs_in_the_engine_has_no_threads(
    costs: Costs, shape: Shape, expected_us: float, busiest: str
) -> None:
    figures = simulate(costs, shape, clients=256, requests=5000)

    assert figures.rate_per_s == pytest.approx(1e6 / expected_us, rel=0.08)
    assert figures.busiest == busiest


def test_no_more_front_ends_are_used_than_the_engine_can_serve() -> None:
    shape, figures = best(Costs(50, 12), 64, 256, requests=5000)

    assert figures.busiest == "engine"
    assert shape.front_ends == 5


def test_front_ends_take_cores_from_slow_models() -> None:
    shape, figures = best(Costs(60, 12, model_us=5000), 8, 256, requests=3000, front_ends=3)

    assert shape.model_threads == 5
    assert figures.rate_per_s == pytest.approx(5 / 0.005, rel=0.05)


def test_the_best_shape_uses_more_front_ends_on_more_cores() -> None:
    small, large = (best(COSTS, cores, 256, requests=3000) for cores in (4, 16))

    assert small[0].front_ends < large[0].front_ends
    assert small[1].rate_per_s < large[1].rate_per_s
