import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.tensor import Tensor
from charonia.wire.json_text import NESTING_MAX, dump
from charonia.wire.v2_data import decode_data, encode_data

MIB = 1024 * 1024
INTEGERS = [d for d in DataType if d.numpy.kind in "iu" and d is not DataType.BF16]


def elements_of(datatype: DataType) -> st.SearchStrategy[object]:
    """Values that JSON can carry for a datatype."""
    if datatype is DataType.BOOL:
        return st.booleans()
    if datatype is DataType.BYTES:
        return st.text(max_size=4)
    if datatype in INTEGERS:
        bits = 8 * datatype.byte_size
        return (
            st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            if datatype.numpy.kind == "i"
            else st.integers(0, 2**bits - 1)
        )
    return st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=100)
@given(
    datatype=st.sampled_from([d for d in DataType if d not in (DataType.FP16, DataType.BF16)]),
    shape=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    nests=st.booleans(),
    data=st.data(),
)
def test_every_datatype_survives_the_way_through_json(
    datatype: DataType, shape: list[int], nests: bool, data: st.DataObject
) -> None:
    count = int(np.prod(shape))
    flat = data.draw(st.lists(elements_of(datatype), min_size=count, max_size=count))
    value = np.array(flat, object).reshape(shape).tolist() if nests else flat

    tensor = decode_data("x", datatype, shape, value, MIB)

    assert tensor.shape == tuple(shape)
    assert tensor.array.dtype == datatype.numpy
    again = decode_data("x", datatype, shape, orjson.loads(dump(encode_data(tensor))), MIB)
    assert again.array.tolist() == tensor.array.tolist()
    assert tensor.array.ravel().tolist() == [v.encode() if isinstance(v, str) else v for v in flat]


@pytest.mark.parametrize(("datatype", "value", "expected"), [(DataType.FP32, 7, [7.0]), (DataType.BYTES, "a", [b"a"])])
def test_a_single_element_needs_no_array(datatype: DataType, value: object, expected: list[object]) -> None:
    assert decode_data("x", datatype, [1], value, MIB).array.tolist() == expected


def test_a_number_beyond_fp32_becomes_infinity() -> None:
    assert decode_data("x", DataType.FP32, [2], [1e300, 1], MIB).array.tolist() == [np.inf, 1]


def test_arrays_of_different_lengths_are_read_in_order() -> None:
    assert decode_data("x", DataType.INT8, [3], [[1], [2, 3]], MIB).array.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("datatype", "shape", "value", "fragment"),
    [
        (DataType.FP16, [1], [1.0], "receiving FP16 data via JSON is not supported"),
        (DataType.BF16, [1], [1.0], "receiving BF16 data via JSON is not supported"),
        (DataType.FP32, [2], [1.0], "Shape does not match true shape of 'data' field: input 'x' of shape [2] has 2"),
        (DataType.FP32, [1], [1.0, 2.0], "Shape does not match true shape of 'data' field"),
        (DataType.FP32, [2], [[1.0], 2.0], "arrays and single elements are mixed"),
        (DataType.FP32, [2], [1.0, [2.0]], "expected a number (FP32), got an array at index 1"),
        (DataType.FP32, [1], ["1.0"], "Unable to parse 'data' of input 'x': expected a number (FP32), got \"1.0\""),
        (DataType.FP32, [1], [True], "expected a number (FP32), got true"),
        (DataType.FP32, [1], [None], "expected a number (FP32), got null"),
        (DataType.FP64, [1], [10**400], f"expected a number (FP64), got 1{39 * '0'}…"),
        (DataType.FP32, [1], {"a": 1}, "expected a number (FP32), got an object"),
        (DataType.INT32, [1], [1.5], "expected an integer from -2147483648 to 2147483647 (INT32), got 1.5"),
        (DataType.INT32, [1], [True], "(INT32), got true"),
        (DataType.INT8, [1], [128], "expected an integer from -128 to 127 (INT8), got 128"),
        (DataType.UINT64, [1], [-1], "expected an integer from 0 to 18446744073709551615 (UINT64), got -1"),
        (DataType.UINT64, [1], [2**64], "(UINT64), got 18446744073709551616"),
        (DataType.BOOL, [1], [1], "expected true or false (BOOL), got 1"),
        (DataType.BYTES, [1], [1], "expected a string (BYTES), got 1"),
        (DataType.BYTES, [1], ["\ud800"], 'expected a string (BYTES), got "\\ud800"'),
        (DataType.INT8, [MIB + 1], [1], "larger than the maximum of 1048576 bytes"),
        (DataType.BYTES, [MIB // 4 + 1], ["a"], "larger than the maximum of 1048576 bytes"),
        (DataType.INT8, [MIB], [1], "has 1048576 elements, got 1"),
        (DataType.BYTES, [MIB // 4], ["a"], "has 262144 elements, got 1"),
        (DataType.INT8, [1] * 100, [1], "has too many or too large dimensions"),
    ],
)
def test_data_that_does_not_fit_is_refused(datatype: DataType, shape: list[int], value: object, fragment: str) -> None:
    with pytest.raises(ServingError) as caught:
        decode_data("x", datatype, shape, value, MIB)

    assert caught.value.code is Code.INVALID_ARG
    assert fragment in caught.value.message


@given(st.lists(st.integers(0, 255), max_size=40), st.integers(256, 300), st.lists(st.integers(0, 300)))
def test_the_first_wrong_element_is_named(before: list[int], wrong: int, after: list[int]) -> None:
    data = [*before, wrong, *after, 0]

    with pytest.raises(ServingError) as caught:
        decode_data("x", DataType.UINT8, [len(data)], data, MIB)

    assert caught.value.message.endswith(f"got {wrong} at index {len(before)}")


@pytest.mark.parametrize(("length", "shown"), [(MIB, f'"{"a" * 39}…'), (38, f'"{"a" * 38}"')])
def test_a_long_string_is_cut_in_the_message(length: int, shown: str) -> None:
    with pytest.raises(ServingError) as caught:
        decode_data("x", DataType.FP32, [1], ["a" * length], MIB)

    assert caught.value.message.endswith(f"got {shown}")


def test_arrays_nested_beyond_the_limit_are_refused() -> None:
    value: object = 1
    for _ in range(NESTING_MAX + 2):
        value = [value]

    with pytest.raises(ServingError, match="got an array"):
        decode_data("x", DataType.INT8, [1], value, MIB)


@pytest.mark.parametrize("datatype", [DataType.FP16, DataType.BF16])
def test_short_floats_have_no_form_in_json(datatype: DataType) -> None:
    tensor = Tensor("y", datatype, np.zeros(1, datatype.numpy))

    with pytest.raises(ServingError, match=f"sending {datatype.wire} data via JSON is not supported"):
        encode_data(tensor)


def test_bytes_that_are_no_text_have_no_form_in_json() -> None:
    with pytest.raises(ServingError, match="output 'y' holds bytes that are not UTF-8 text"):
        encode_data(Tensor("y", DataType.BYTES, np.array([b"\xff"], object)))


def test_an_array_in_another_order_is_written_row_by_row() -> None:
    array = np.array([[1, 2], [3, 4]], "<i4").T

    assert dump(encode_data(Tensor("y", DataType.INT32, array))) == b"[1,3,2,4]"
