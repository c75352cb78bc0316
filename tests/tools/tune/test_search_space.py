"""The dimensions of a search space and their values."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import ServingError
from charonia.tools.tune.api import (
    Dimension,
    Goal,
    LoadSpace,
    ModelChange,
    ModelFacts,
    ModelGoal,
    SearchOptions,
    SearchSpace,
    Setting,
    Variant,
)
from charonia.tools.tune.search.phases import Search
from charonia.tools.tune.space import (
    VARIANTS_MAX,
    Grid,
    automatic_dimensions,
    batch_slots,
    doubling,
    instance_count,
    load_values,
    manual_dimensions,
    max_batch_size,
    powers_of_two,
)

FACTS = ModelFacts("m", max_batch_size=8, instance_count=2, threads_tunable=True)


def fields(parameters: dict[str, object]) -> dict[str, list[object]]:
    return {
        dimension.setting: [json.loads(str(value)) for value in dimension.values]
        for dimension in manual_dimensions("m", parameters)
    }


@pytest.mark.parametrize(
    ("minimum", "maximum", "expected"),
    [(1, 8, (1, 2, 4, 8)), (3, 20, (3, 4, 8, 16, 20)), (4, 4, (4,)), (1, 2, (1, 2)), (5, 7, (5, 7))],
)
def test_powers_of_two_keep_to_both_bounds(minimum: int, maximum: int, expected: tuple[int, ...]) -> None:
    assert powers_of_two(minimum, maximum) == expected


@given(st.floats(0.01, 1e6), st.floats(1, 1e6))
def test_doubling_rises_from_one_bound_to_the_other(minimum: float, factor: float) -> None:
    values = doubling(minimum, minimum * factor)

    assert values[0] == minimum
    assert values[-1] == minimum * factor
    assert all(low < high <= 2 * low for low, high in itertools.pairwise(values))


def test_instances_and_threads_are_tried_together() -> None:
    dimensions = automatic_dimensions(FACTS, core_count=4)

    assert [(dimension.setting, dimension.values) for dimension in dimensions] == [
        (Setting.INSTANCE_COUNT, (1, 2, 3, 4, 5)),
        (Setting.THREAD_COUNT, (1, 2, 4)),
        (Setting.MAX_BATCH_SIZE, (1, 2, 4, 8, 16, 32, 64, 128)),
    ]


@pytest.mark.parametrize(
    "facts",
    [
        ModelFacts("m", max_batch_size=0, instances_tunable=False),
        ModelFacts("m", max_batch_size=8, instances_tunable=False, batching_tunable=False),
    ],
)
def test_what_a_model_does_not_have_is_not_tried(facts: ModelFacts) -> None:
    assert automatic_dimensions(facts, core_count=4) == ()


def test_a_list_sweeps_a_field_and_a_scalar_sets_it() -> None:
    assert fields({"max_batch_size": [4, 8], "default_model_filename": "a.onnx"}) == {
        "default_model_filename": ["a.onnx"],
        "max_batch_size": [4, 8],
    }


def test_a_field_that_is_a_list_needs_one_more_level_to_be_swept() -> None:
    one, two = [{"kind": "KIND_CPU", "count": 1}], [{"kind": "KIND_CPU", "count": 2}]

    assert fields({"instance_group": [one, two]}) == {"instance_group": [one, two]}
    assert fields({"instance_group": one}) == {"instance_group": [one]}


def test_parts_of_a_field_are_swept_as_a_product() -> None:
    assert fields({"instance_group": [{"kind": "KIND_CPU", "count": [1, 2]}]}) == {
        "instance_group": [[{"kind": "KIND_CPU", "count": 1}], [{"kind": "KIND_CPU", "count": 2}]]
    }
    batching = {"preferred_batch_size": [[4], [4, 8]], "max_queue_delay_microseconds": [100, 200]}
    assert len(fields({"dynamic_batching": batching})["dynamic_batching"]) == 4
    assert fields({"dynamic_batching": {}}) == {"dynamic_batching": [{}]}


@pytest.mark.parametrize("parameters", [{"max_batch_size": []}, {"max_batch_size": ["4"]}, {"max_batch_size": [True]}])
def test_values_that_no_batch_size_can_have_are_refused(parameters: dict[str, object]) -> None:
    with pytest.raises(ServingError, match="expected"):
        manual_dimensions("m", parameters)


def test_a_coordinate_stands_for_one_variant() -> None:
    dimensions = (
        Dimension("m", Setting.INSTANCE_COUNT, (1, 2)),
        Dimension("m", Setting.QUEUE_DELAY, (100, 200)),
        Dimension("m", "response_cache", ('{"enable": true}',)),
    )
    grid = Grid(SearchSpace((FACTS,), dimensions))

    variant = grid.variant((1, 1, 0))

    assert variant.changes[0].settings() == {
        "instance_count": 2,
        "queue_delay_us": 200,
        "response_cache": {"enable": True},
    }
    assert str(variant) == "2 instances, delay 200 us, response_cache.enable true"
    assert len({grid.variant(coordinate).key for coordinate in grid.coordinates()}) == 4


def test_neighbours_lie_within_the_bounds() -> None:
    dimensions = (Dimension("m", "a", ("1", "2", "3")), Dimension("m", "b", ("1", "2")))
    grid = Grid(SearchSpace((FACTS,), dimensions))

    assert list(grid.neighbours((0, 0))) == [(0, 1), (1, 0)]


def test_a_variant_of_several_models_names_each() -> None:
    variant = Variant((ModelChange("a", instance_count=2), ModelChange("b"), ModelChange("c", max_batch_size=4)))

    assert str(variant) == "a: 2 instances; c: batch 4"
    assert str(Variant((ModelChange("a"),))) == "default configuration"


def test_the_largest_stage_of_a_pipeline_says_how_much_fits() -> None:
    ensemble = ModelFacts("ens", max_batch_size=4, instances_tunable=False, batching_tunable=False)
    stages = (ModelFacts("one", max_batch_size=1, is_profiled=False), ModelFacts("two", 1, is_profiled=False))
    space = SearchSpace((ensemble, *stages), ())
    variant = Variant((ModelChange("two", instance_count=2, max_batch_size=4),))

    assert batch_slots(space, variant, "ens") == 8
    assert batch_slots(SearchSpace((ensemble,), ()), Variant(), "ens") == 4


def test_instances_are_counted_in_fields_too() -> None:
    change = ModelChange("m", fields=(("instance_group", '[{"count": 2}, {"kind": "KIND_CPU"}]'),))

    assert instance_count(FACTS, change) == 3
    assert instance_count(FACTS, ModelChange("m", fields=(("response_cache", "{}"),))) == 2
    assert max_batch_size(FACTS, ModelChange("m")) == 8


def test_loads_are_what_the_user_gave_or_powers_of_two() -> None:
    assert load_values(LoadSpace(values=(3, 5))) == (3, 5)
    assert load_values(LoadSpace(minimum=1, maximum=6)) == (1, 2, 4, 6)


def test_a_space_of_too_many_variants_is_refused() -> None:
    dimensions = tuple(Dimension("m", name, tuple("0123456789")) for name in "abcdef")

    with pytest.raises(ServingError, match=f"at most {VARIANTS_MAX}"):
        Grid(SearchSpace((FACTS,), dimensions))


@pytest.mark.parametrize(
    ("load", "delays_us", "most"),
    [
        # Of 7 variants (with the default one), each: 4 loads, 5 steps to each of two edges; then 9 x 6 repeats.
        (LoadSpace(maximum=8), (), 7 * (2 * 4 + 10) + 54),
        (LoadSpace(maximum=8, batch_sizes=(1, 2), binary_steps_max=1), (), 7 * (2 * 4 + 2) * 2 + 54),
        (LoadSpace(maximum=8, formula=True), (), 7 * (2 * 1 + 10) + 54),
        (LoadSpace(values=(3, 5)), (100, 500), 7 * (2 * 2 + 10) + 54 + 4 * 2),
    ],
)
def test_the_number_of_measurements_has_a_bound(load: LoadSpace, delays_us: tuple[int, ...], most: int) -> None:
    facts = ModelFacts("m", max_batch_size=8, queue_delays_us=delays_us)
    dimensions = automatic_dimensions(facts, instance_counts=(1, 2), batch_sizes=(1, 4, 8))

    assert Search(SearchSpace((facts,), dimensions, load), Goal((ModelGoal("m"),)), SearchOptions()).trials_left == most
