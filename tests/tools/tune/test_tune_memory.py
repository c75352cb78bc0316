"""The memory that one instance takes, and the free memory."""

import pytest

from charonia.tools.tune.profile import SHARED_MB, of_one_instance


@pytest.mark.parametrize(
    ("before", "after", "count", "expected"),
    [
        (100.0, 100.0 + SHARED_MB + 3000, 1, 3000.0),
        (100.0, 100.0 + SHARED_MB + 3000, 2, 1500.0),
        (100.0, 120.0, 1, 0.0),  # no more than the libraries that others would share
        (None, 500.0, 1, 0.0),
        (500.0, None, 1, 0.0),
        (500.0, 400.0, 1, 0.0),  # it was loaded already
    ],
)
def test_an_instance_takes_what_loading_took_without_what_all_share(
    before: float | None, after: float | None, count: int, expected: float
) -> None:
    assert of_one_instance(before, after, count) == expected


def test_on_a_gpu_a_process_s_context_is_not_the_instance_s() -> None:
    assert of_one_instance(0.0, 2600.0, 1, on_gpu=True) == 2000.0
