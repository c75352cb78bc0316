"""Requests of different shapes as one array, and back."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.config.kinds import BatchInputKind
from charonia.config.model import BatchInput, BatchOutput, ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.ragged.batch import compute_input, gather_flat, ragged_plan, scatter_like


def request(array: "np.ndarray") -> InferRequest:
    return InferRequest("m", {"X": Tensor("X", DataType.FP32, array)})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (BatchInputKind.BATCH_ELEMENT_COUNT, [6, 2, 12]),
        (BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT, [6, 8, 20]),
        (BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, [0, 6, 8, 20]),
        (BatchInputKind.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE, [0] * 12),
        (BatchInputKind.BATCH_ITEM_SHAPE, [[2, 3], [1, 2], [3, 2], [3, 2]]),
        (BatchInputKind.BATCH_ITEM_SHAPE_FLATTEN, [2, 3, 1, 2, 3, 2, 3, 2]),
    ],
)
@pytest.mark.parametrize("datatype", [DataType.INT32, DataType.FP32])
def test_each_kind_of_batch_input(kind: BatchInputKind, expected: list[int], datatype: DataType) -> None:
    found = compute_input(kind, [(1, 2, 3), (1, 1, 2), (2, 3, 2)], datatype)

    assert found.dtype == datatype.numpy
    assert found.tolist() == expected


def test_the_shape_of_an_item_without_dimensions_is_empty() -> None:
    assert compute_input(BatchInputKind.BATCH_ITEM_SHAPE, [(2,), (1,)], DataType.INT32).shape == (3, 0)


def test_elements_are_put_one_after_the_other() -> None:
    requests = [request(np.array([[1, 2, 3]], "f4")), request(np.array([[4], [5]], "f4"))]

    flat = gather_flat(requests, "X")

    assert flat is not None
    assert flat.tolist() == [1, 2, 3, 4, 5]
    assert gather_flat(requests, "Y") is None


SHAPES = st.integers(1, 3).flatmap(
    lambda rank: st.lists(st.lists(st.integers(0, 4), min_size=rank, max_size=rank).map(tuple), min_size=1, max_size=5)
)


@settings(max_examples=50)
@given(SHAPES)
def test_what_is_put_together_comes_apart_again(shapes: list[tuple[int, ...]]) -> None:
    arrays = [np.arange(prod(shape), dtype="f4").reshape(shape) + index for index, shape in enumerate(shapes)]

    flat = gather_flat([request(array) for array in arrays], "X")
    assert flat is not None
    parts = scatter_like("Y", flat, shapes)

    for array, part in zip(arrays, parts, strict=True):
        np.testing.assert_array_equal(array, part)


def test_an_output_with_another_number_of_elements_is_an_error() -> None:
    with pytest.raises(ServingError, match=r"output 'Y': expected 5 elements.*got an array of shape \[4\]") as caught:
        scatter_like("Y", np.zeros(4), [(1, 2), (1, 3)])
    assert caught.value.code is Code.INTERNAL


def test_the_plan_says_what_the_configuration_says() -> None:
    config = ModelConfig(
        name="m",
        max_batch_size=4,
        input=(
            ModelInput("X", DataType.FP32, dims=(-1,), allow_ragged_batch=True),
            ModelInput("Z", DataType.FP32, dims=(1,)),
        ),
        batch_input=(
            BatchInput(BatchInputKind.BATCH_ELEMENT_COUNT, ("N", "M"), DataType.INT32, ("X",)),
            BatchInput(BatchInputKind.BATCH_ITEM_SHAPE, ("S",), DataType.FP32, ("Z",)),
        ),
        batch_output=(BatchOutput(("Y",), source_input=("X",)),),
    )

    plan = ragged_plan(config)

    assert plan.inputs == {"X"}
    assert plan.sources == {"X", "Z"}
    assert plan.targets == {"N": DataType.INT32, "M": DataType.INT32, "S": DataType.FP32}
    assert plan.scattered == {"Y": "X"}


def test_a_configuration_that_was_not_validated_is_our_own_fault() -> None:
    with pytest.raises(ValueError, match="was not validated"):
        ragged_plan(ModelConfig(batch_input=(BatchInput(target_name=("N",), source_input=("X",)),)))
