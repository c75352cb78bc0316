"""Requests of different shapes made equal, and outputs cut back."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.tensor import Array, Tensor
from charonia.server.ragged.padding import (
    Companion,
    CutOutput,
    PaddedInput,
    PaddedSize,
    PaddingPlan,
    cut,
    pad,
    pad_batch,
    padded_size,
)

FP32, INT64, BOOL = DataType.FP32, DataType.INT64, DataType.BOOL


def tensor(name: str, array: object, datatype: DataType = FP32) -> Tensor:
    return Tensor(name, datatype, np.array(array, datatype.numpy))


def arrays(inputs: Mapping[str, Tensor]) -> dict[str, object]:
    return {name: each.array.tolist() for name, each in inputs.items()}


@pytest.mark.parametrize(("longest", "size"), [(0, 4), (3, 4), (4, 4), (5, 8), (8, 8), (9, 9)])
def test_a_size_is_the_next_bucket_and_beyond_the_last_its_own(longest: int, size: int) -> None:
    assert padded_size(longest, (4, 8)) == size
    assert padded_size(longest, ()) == longest


def test_an_array_is_filled_up_at_the_end() -> None:
    assert pad(np.array([[[1, 2]]]), {0: 2, 1: 3}, 9).tolist() == [[[1, 2, 9], [9, 9, 9]]]


def test_strings_are_padded_with_a_string() -> None:
    assert pad(np.array([[b"a"]], object), {0: 2}, b"").tolist() == [[b"a", b""]]


def test_an_array_that_has_the_size_is_not_copied() -> None:
    array = np.zeros((1, 3))

    assert pad(array, {0: 3}, 0) is array


def test_requests_get_the_shape_of_the_longest_with_mask_and_lengths() -> None:
    plan = PaddingPlan((PaddedInput("x", (0,), -1, (), Companion("mask", BOOL), Companion("length", INT64)),))

    inputs, lengths = pad_batch(plan, [{"x": tensor("x", [[1, 2, 3]])}, {"x": tensor("x", [[4], [5]])}])

    assert [arrays(each) for each in inputs] == [
        {"x": [[1, 2, 3]], "mask": [[True, True, True]], "length": [[3]]},
        {"x": [[4, -1, -1], [5, -1, -1]], "mask": [[True, False, False]] * 2, "length": [[1], [1]]},
    ]
    assert lengths == [{"x": (3,)}, {"x": (1,)}]


def test_a_mask_covers_the_variable_dimensions() -> None:
    plan = PaddingPlan((PaddedInput("x", (1, 2), 0, (2,), Companion("mask", FP32), Companion("size", INT64)),))

    (inputs,), lengths = pad_batch(plan, [{"x": Tensor("x", FP32, np.ones((1, 3, 1, 2), "f4"))}])

    assert inputs["x"].array.shape == (1, 3, 2, 2)
    assert inputs["mask"].array.tolist() == [[[1, 1], [0, 0]]]
    assert inputs["size"].array.tolist() == [[1, 2]]
    assert lengths == [{"x": (1, 2)}]


def test_what_a_client_brings_of_its_own_stays_and_is_padded_with_nothing() -> None:
    plan = PaddingPlan((PaddedInput("x", (0,), 7, (3,), Companion("mask", INT64), Companion("length", INT64)),))
    given_inputs = {
        "x": tensor("x", [[1, 2]]),
        "mask": tensor("mask", [[1, 0]], INT64),
        "length": tensor("length", [[1]], INT64),
    }

    (inputs,), _ = pad_batch(plan, [given_inputs])

    assert arrays(inputs) == {"x": [[1, 2, 7]], "mask": [[1, 0, 0]], "length": [[1]]}


def test_an_optional_input_that_no_request_has_is_left_out() -> None:
    plan = PaddingPlan((PaddedInput("x", (0,), mask=Companion("mask", INT64)),), (CutOutput("y", "x", (0,), (0,)),))
    y = tensor("y", [[1, 2]])

    inputs, lengths = pad_batch(plan, [{"z": tensor("z", [[1]])}])

    assert arrays(inputs[0]) == {"z": [[1]]}
    assert cut(plan, lengths[0], [y]) == [y]


def test_outputs_are_cut_to_the_lengths_of_their_request() -> None:
    plan = PaddingPlan(
        (PaddedInput("image", (1, 2)),),
        (CutOutput("map", "image", (0, 1), (0, 1)), CutOutput("steps", "image", (0,), (1,), stride=4)),
    )
    other = tensor("other", [[1, 2, 3]])

    outputs = cut(
        plan,
        {"image": (2, 5)},
        [tensor("map", np.ones((1, 4, 8))), tensor("steps", np.ones((1, 2, 10))), other],
    )

    assert [each.array.shape for each in outputs] == [(1, 2, 5), (1, 2, 10), (1, 3)]
    assert cut(plan, {"image": (2, 3)}, [tensor("steps", np.ones((1, 2, 10)))])[0].array.shape == (1, 1, 10)


@pytest.mark.parametrize("shape", [(1,), (1, 2)])
def test_an_output_that_is_too_short_to_be_cut_is_an_error(shape: tuple[int, ...]) -> None:
    plan = PaddingPlan((PaddedInput("x", (0,)),), (CutOutput("y", "x", (0,), (0,)),))

    with pytest.raises(ServingError, match="output 'y': expected at least 3 in dimension 0") as caught:
        cut(plan, {"x": (3,)}, [tensor("y", np.ones(shape))])
    assert caught.value.code is Code.INTERNAL


def test_the_plan_knows_which_inputs_may_differ_in_shape() -> None:
    plan = PaddingPlan(
        (PaddedInput("x", (0,), mask=Companion("m", BOOL), length=Companion("l", INT64)), PaddedInput("z", (0,)))
    )

    assert plan.companions == {"m", "l"}
    assert plan.free == {"x", "z", "m", "l"}


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=6),
    st.sampled_from([(), (4,), (2, 6)]),
)
def test_the_size_that_is_foreseen_is_the_size_that_comes_about(
    shapes: list[tuple[int, int]], buckets: tuple[int, ...]
) -> None:
    padded = PaddedInput("x", (0,), 0, buckets)
    size = PaddedSize(padded)

    foreseen = [size.add(np.zeros(shape, "f4")) for shape in shapes]
    inputs, _ = pad_batch(PaddingPlan((padded,)), [{"x": Tensor("x", FP32, np.zeros(shape, "f4"))} for shape in shapes])

    assert foreseen[-1] == np.concatenate([each["x"].array for each in inputs]).nbytes


def masked_model(x: Array, mask: Array) -> tuple[Array, Array]:
    """A model that respects its mask: the mean of what is real, and each element less that."""
    real = x.astype("f8") * mask
    mean = real.sum(1, keepdims=True) / np.maximum(mask.sum(1, keepdims=True), 1)
    return mean, (x - mean) * mask


BATCHES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12)), min_size=1, max_size=6)


@settings(max_examples=100)
@given(BATCHES, st.sampled_from([(), (4, 8), (1,)]), st.integers(-5, 5), st.integers(0, 2**32 - 1))
def test_a_padded_batch_is_answered_as_its_requests_alone_are(
    shapes: list[tuple[int, int]], buckets: tuple[int, ...], value: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    plan = PaddingPlan(
        (PaddedInput("x", (0,), value, buckets, Companion("mask", INT64)),), (CutOutput("y", "x", (0,), (0,)),)
    )
    requests = [random.integers(-9, 9, shape).astype("f4") for shape in shapes]

    inputs, lengths = pad_batch(plan, [{"x": Tensor("x", FP32, array)} for array in requests])
    together = np.concatenate([each["x"].array for each in inputs])
    mean, rest = masked_model(together, np.concatenate([each["mask"].array for each in inputs]))

    end = 0
    for array, found in zip(requests, lengths, strict=True):
        begin, end = end, end + array.shape[0]
        (y,) = cut(plan, found, [Tensor("y", DataType.FP64, rest[begin:end])])
        alone_mean, alone_rest = masked_model(array, np.ones(array.shape, "i8"))
        np.testing.assert_array_equal(y.array, alone_rest)
        np.testing.assert_array_equal(mean[begin:end], alone_mean)
