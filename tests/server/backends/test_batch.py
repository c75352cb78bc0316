import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.batch import batch_sizes, gather, scatter


def request(array: Array, name: str = "x") -> InferRequest:
    return InferRequest("m", {name: Tensor(name, DataType.FP32, array)})


def test_a_lone_request_is_not_copied() -> None:
    array = np.ones((2, 3), np.float32)

    assert gather([request(array)], "x") is array
    assert scatter("y", array, [2])[0] is array


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_what_is_gathered_is_scattered_back(sizes: list[int]) -> None:
    requests = [request(np.full((size, 2), index, np.float32)) for index, size in enumerate(sizes)]

    together = gather(requests, "x")
    assert together is not None
    parts = scatter("y", together, batch_sizes(requests))

    assert [part.shape[0] for part in parts] == sizes
    assert [part[0, 0] for part in parts] == list(range(len(sizes)))
    assert all(np.shares_memory(part, together) for part in parts)


def test_strings_are_gathered_too() -> None:
    requests = [request(np.array([[b"a\xff"]], object)), request(np.array([[b""], [b"c"]], object))]

    together = gather(requests, "x")

    assert together is not None
    assert together.tolist() == [[b"a\xff"], [b""], [b"c"]]


def test_an_input_that_all_left_out_is_none() -> None:
    assert gather([request(np.ones(1)), request(np.ones(1))], "mask") is None


@pytest.mark.parametrize("shape", [(), (2,), (4, 3)])
def test_an_output_needs_a_row_for_each_row_that_came_in(shape: tuple[int, ...]) -> None:
    with pytest.raises(ServingError, match="output 'y': expected 3 rows for a batch of 3"):
        scatter("y", np.zeros(shape), [1, 2])
