import numpy as np
import pytest

from charonia.core.classification import ELEMENTS_MAX, classify
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.tensor import Tensor


def test_the_largest_values_come_first_with_index_and_label() -> None:
    scores = Tensor("y", DataType.FP32, np.array([[0.1, 0.7, 0.2], [0.5, 0.25, 0.25]], "<f4"))

    top = classify(scores, 2, ["cat", "dog"], batched=True)

    assert top.datatype is DataType.BYTES
    assert top.shape == (2, 2)
    assert top.array.tolist() == [[b"0.700000:1:dog", b"0.200000:2"], [b"0.500000:0:cat", b"0.250000:1:dog"]]


def test_no_more_classes_than_elements_are_returned() -> None:
    top = classify(Tensor("y", DataType.INT64, np.array([3, -1], "<i8")), 5, [], batched=False)

    assert top.array.tolist() == [b"3:0", b"-1:1"]


def test_a_tensor_of_higher_rank_is_flattened_within_its_batch_entry() -> None:
    top = classify(Tensor("y", DataType.UINT8, np.arange(8, dtype="u1").reshape(2, 2, 2)), 1, [], batched=True)

    assert top.array.tolist() == [[b"3:3"], [b"7:3"]]


def test_not_a_number_counts_as_the_smallest_value() -> None:
    top = classify(Tensor("y", DataType.FP64, np.array([np.nan, 1.0, np.inf])), 3, [], batched=False)

    assert top.array.tolist() == [b"inf:2", b"1.000000:1", b"nan:0"]


def test_bfloat16_is_read_as_numbers() -> None:
    top = classify(Tensor("y", DataType.BF16, np.array([0x3F80, 0xC000], "<u2")), 2, [], batched=False)

    assert top.array.tolist() == [b"1.000000:0", b"-2.000000:1"]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_an_empty_output_has_no_classes(shape: tuple[int, int]) -> None:
    top = classify(Tensor("y", DataType.FP32, np.empty(shape, "<f4")), 2, [], batched=True)

    assert top.array.size == 0
    assert top.shape[0] == shape[0]


def test_a_scalar_of_a_batching_model_is_one_row() -> None:
    assert classify(Tensor("y", DataType.INT32, np.array(4, "<i4")), 1, [], batched=True).array.tolist() == [[b"4:0"]]


def test_strings_cannot_be_classified() -> None:
    with pytest.raises(ServingError, match="class result not available") as caught:
        classify(Tensor("y", DataType.BYTES, np.array([b"a"], object)), 1, [], batched=False)
    assert caught.value.code is Code.INVALID_ARG


def test_too_large_an_output_is_refused() -> None:
    with pytest.raises(ServingError, match="at most 1000000"):
        classify(Tensor("y", DataType.INT8, np.zeros(ELEMENTS_MAX + 1, "i1")), 1, [], batched=False)
