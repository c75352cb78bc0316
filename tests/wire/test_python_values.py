"""Python values to tensors."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.metadata import ModelMetadata, TensorMetadata
from charonia.core.tensor import Tensor, from_bfloat16, to_bfloat16
from charonia.wire.python_values import make_outputs, make_tensors, needs_metadata


def tensor(value: Any, datatype: DataType = DataType.FP32, shape: tuple[int, ...] = (-1, 2)) -> Tensor:
    metadata = ModelMetadata("m", ("1",), "", (TensorMetadata("X", datatype, shape),), ())
    return make_tensors("m", {"X": value}, metadata)["X"]


@pytest.mark.parametrize(
    ("value", "datatype", "array"),
    [
        ([[1, 2]], DataType.FP32, np.array([[1, 2]], np.float32)),
        ([[1, 2]], DataType.UINT8, np.array([[1, 2]], np.uint8)),
        ([[1, 2.5]], DataType.FP16, np.array([[1, 2.5]], np.float16)),
        ([[True, False]], DataType.BOOL, np.array([[True, False]])),
        ([[2**64 - 1, 0]], DataType.UINT64, np.array([[2**64 - 1, 0]], np.uint64)),
        ([], DataType.INT32, np.array([], np.int32)),
        (5, DataType.INT32, np.array([[5]], np.int32)),
        (2.5, DataType.FP64, np.array([[2.5]])),
        (True, DataType.BOOL, np.array([[True]])),
    ],
)
def test_a_list_or_an_element_takes_the_datatype_of_the_model(value: Any, datatype: DataType, array: Any) -> None:
    found = tensor(value, datatype)

    assert found.datatype is datatype
    assert found.array.dtype == array.dtype
    assert np.array_equal(found.array, array)


@pytest.mark.parametrize(
    ("value", "datatype", "message"),
    [
        ([[0, 256]], DataType.UINT8, r"expected an integer from 0 to 255 \(UINT8\), got 256 at index 1$"),
        (
            [[-1, 0]],
            DataType.UINT64,
            r"expected an integer from 0 to 18446744073709551615 \(UINT64\), got -1 at index 0$",
        ),
        ([[1, 2], [1.5, 0]], DataType.INT32, r"to 2147483647 \(INT32\), got 1.5 at index 2$"),
        ([[2, 0]], DataType.BOOL, r"expected true or false \(BOOL\), got 2 at index 0$"),
        ([["a"]], DataType.FP32, r"expected a number \(FP32\), got \"a\"$"),
        ([[2**70]], DataType.UINT64, r"\(UINT64\), got 1180591620717411303424$"),
        (1.5, DataType.INT8, r"expected an integer from -128 to 127 \(INT8\), got 1.5$"),
        ([np.float32(0.5), 1], DataType.INT8, r"\(INT8\), got 0.5 at index 0$"),
        ([1, None], DataType.BF16, r"expected a number \(BF16\), got null at index 1$"),
        ([b"a"], DataType.FP16, r"expected a number \(FP16\), got bytes$"),
        ([[1, 2], [3]], DataType.FP32, "the lists differ in length"),
        ([["a", 1]], DataType.BYTES, "BYTES elements are str or bytes, got int"),
        (np.array([1 + 2j]), DataType.FP32, "no datatype of the protocol matches numpy dtype complex128"),
        ((np.array([1], np.int32), "BF16"), DataType.FP32, "expected an array for BF16, got one of INT32"),
        ((np.array([1], np.int32), "FP32"), DataType.FP32, "expected an array for FP32, got one of INT32"),
        ((np.array([1], np.int32), "FP31"), DataType.FP32, "expected a pair of an array and a datatype"),
        ((1, 2, 3), DataType.FP32, "expected a pair of an array and a datatype"),
    ],
)
def test_what_is_no_tensor_is_refused_with_the_reason(value: Any, datatype: DataType, message: str) -> None:
    with pytest.raises(ServingError, match=message) as caught:
        tensor(value, datatype)

    assert caught.value.code is Code.INVALID_ARG
    assert "input 'X'" in caught.value.message


def test_an_input_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ServingError, match="model 'm' has no input 'Y': it has X"):
        make_tensors("m", {"Y": [1]}, ModelMetadata("m", (), "", (TensorMetadata("X", DataType.FP32, (1,)),), ()))


def test_arrays_and_pairs_need_no_metadata() -> None:
    assert not needs_metadata({"X": np.zeros(1), "Y": (np.zeros(1), "BF16"), "Z": np.float32(1)})
    assert needs_metadata({"X": np.zeros(1), "Y": [1]})


@pytest.mark.parametrize(
    ("array", "elements"),
    [
        (np.array(["a", "bc"]), [b"a", b"bc"]),
        (np.array([b"a", b"bc"]), [b"a", b"bc"]),
        (np.array(["a", b"\x00"], object), [b"a", b"\x00"]),
    ],
)
def test_arrays_of_text_and_bytes_become_bytes(array: Any, elements: list[bytes]) -> None:
    found = make_tensors("m", {"X": array}, None)["X"]

    assert found.datatype is DataType.BYTES
    assert found.array.tolist() == elements


def test_lists_of_bytes_keep_their_zeros() -> None:
    assert tensor([[b"a\x00", "b"]], DataType.BYTES).array.tolist() == [[b"a\x00", b"b"]]


def test_a_big_endian_array_is_turned() -> None:
    found = make_tensors("m", {"X": np.array([1, 2], ">i4")}, None)["X"]

    assert found.array.tobytes() == b"\x01\0\0\0\x02\0\0\0"


def test_a_pair_names_the_datatype_of_an_array() -> None:
    assert make_tensors("m", {"X": (np.ones(1, np.int8), "INT8")}, None)["X"].datatype is DataType.INT8


def test_a_bfloat16_scalar_stays_one() -> None:
    assert make_tensors("m", {"X": (np.array(0.5, np.float32), "BF16")}, None)["X"].shape == ()


def test_bit_patterns_of_bfloat16_are_taken_as_they_are() -> None:
    found = make_tensors("m", {"X": (np.array([0x3FC0], np.uint16), "BF16")}, None)["X"]

    assert found.datatype is DataType.BF16
    assert found.array.tolist() == [0x3FC0]


@given(arrays(np.uint16, st.integers(0, 20)))
def test_every_bfloat16_survives_the_way_to_float32_and_back(bits: Any) -> None:
    numbers = from_bfloat16(bits)
    back = to_bfloat16(numbers)

    is_number = ~np.isnan(numbers)
    assert np.array_equal(back[is_number], bits[is_number])
    assert np.isnan(from_bfloat16(back)[~is_number]).all()


@pytest.mark.parametrize(
    ("number", "bits"), [(1.00390625, 0x3F80), (1.01171875, 0x3F82), (3.4e38, 0x7F80), (float("inf"), 0x7F80)]
)
def test_numbers_are_rounded_to_the_nearest_bfloat16_and_ties_to_even(number: float, bits: int) -> None:
    assert to_bfloat16(np.array([number], np.float32)).tolist() == [bits]


def test_outputs_are_names_or_names_with_classes() -> None:
    assert make_outputs(None) == ()
    assert [(o.name, o.classification) for o in make_outputs(["A"])] == [("A", 0)]
    assert [(o.name, o.classification) for o in make_outputs({"A": 3, "B": 0})] == [("A", 3), ("B", 0)]
    with pytest.raises(ServingError, match="expected a list of names"):
        make_outputs("A")
