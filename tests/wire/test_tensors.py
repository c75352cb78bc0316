from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError
from charonia.core.tensor import Tensor
from charonia.wire.tensors import (
    COPY_BELOW_BYTES,
    bytes_array,
    decode_elements,
    decode_tensor,
    encode_elements,
    encode_tensor,
)

FIXED = [d for d in DataType if d is not DataType.BYTES]
SHAPES = st.lists(st.integers(0, 4), max_size=3)


@settings(max_examples=60)
@given(datatype=st.sampled_from(FIXED), shape=SHAPES, data=st.data())
def test_every_fixed_size_datatype_survives_the_way_to_bytes_and_back(
    datatype: DataType, shape: list[int], data: st.DataObject
) -> None:
    size = int(np.prod(shape)) * datatype.byte_size
    wire = data.draw(st.binary(min_size=size, max_size=size))

    tensor = decode_tensor("x", datatype, shape, wire)

    assert tensor.shape == tuple(shape)
    assert tensor.array.dtype == datatype.numpy
    assert bytes(encode_tensor(tensor)) == wire


@settings(max_examples=60)
@given(elements=st.lists(st.binary(max_size=20), max_size=8))
def test_byte_strings_survive_the_way_to_bytes_and_back(elements: list[bytes]) -> None:
    tensor = Tensor("x", DataType.BYTES, bytes_array("x", [len(elements)], elements))

    decoded = decode_tensor("x", DataType.BYTES, [len(elements)], encode_tensor(tensor))

    assert decoded.array.tolist() == elements


def test_a_decoded_tensor_is_a_view_of_the_buffer() -> None:
    buffer = bytearray(8)

    tensor = decode_tensor("x", DataType.INT32, [2], memoryview(buffer))
    buffer[0] = 7

    assert tensor.array.tolist() == [7, 0]


def test_a_view_at_an_odd_offset_is_decoded() -> None:
    buffer = b"!" + np.arange(4, dtype="<f4").tobytes()

    tensor = decode_tensor("x", DataType.FP32, [2, 2], memoryview(buffer)[1:])

    assert tensor.array.tolist() == [[0, 1], [2, 3]]


def test_a_large_tensor_is_encoded_without_a_copy() -> None:
    array = np.zeros(COPY_BELOW_BYTES, np.uint8)

    encoded = encode_tensor(Tensor("x", DataType.UINT8, array))
    array[0] = 9

    assert isinstance(encoded, memoryview)
    assert encoded[0] == 9


@pytest.mark.parametrize("size", [4, COPY_BELOW_BYTES])
def test_an_array_in_another_order_is_encoded_row_by_row(size: int) -> None:
    array = np.arange(2 * size, dtype="<i4").reshape(size, 2)

    assert bytes(encode_tensor(Tensor("x", DataType.INT32, array.T))) == np.ascontiguousarray(array.T).tobytes()


def test_an_array_of_another_byte_order_is_encoded_little_endian() -> None:
    assert encode_tensor(Tensor("x", DataType.INT16, np.array([1, 2], ">i2"))) == b"\x01\x00\x02\x00"


@pytest.mark.parametrize(
    ("datatype", "shape", "buffer", "fragment"),
    [
        (
            DataType.FP32,
            [2],
            b"1234567",
            "input byte size mismatch for input 'x' for model 'm'. Expected 8, got 7",
        ),
        (DataType.INT8, [1] * 70, b"1", "too many or too large dimensions"),
        (DataType.INT8, [2**62, 2**62, 0], b"", "too many or too large dimensions"),
        (DataType.BYTES, [2**62, 2**62, 0], b"", "too many or too large dimensions"),
        (DataType.BYTES, [10**12], b"1234", "expected 1000000000000 string elements for inference input 'x'"),
        (DataType.BYTES, [1], b"\x01\x00\x00\x00ab", "incomplete string length indicator"),
        (DataType.BYTES, [1], b"\x05\x00\x00\x00ab", "incomplete string data for input 'x': 5 bytes expected, 2 left"),
        (DataType.BYTES, [1], b"\x00\x00\x00\x00" * 2, "unexpected number of string elements for input 'x'"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(datatype: DataType, shape: list[int], buffer: bytes, fragment: str) -> None:
    with pytest.raises(ServingError) as caught:
        decode_tensor("x", datatype, shape, buffer, "m")

    assert caught.value.code is Code.INVALID_ARG
    assert fragment in caught.value.message


@settings(max_examples=60)
@given(st.binary(max_size=40))
def test_any_bytes_decode_to_elements_or_to_an_error(data: bytes) -> None:
    try:
        elements = decode_elements("x", data)
    except ServingError:
        pass
    else:
        assert sum(len(element) + 4 for element in elements) == len(data)


@pytest.mark.parametrize("sizes", [(), (0,), range(300), (255, 256, 1 << 16, (1 << 16) + 3)], ids=str)
def test_strings_of_any_length_have_the_same_wire_form(sizes: Sequence[int]) -> None:
    elements = [bytes([n % 256]) * size for n, size in enumerate(sizes)]

    encoded = encode_elements(elements)

    assert encoded == b"".join(len(element).to_bytes(4, "little") + element for element in elements)
    assert decode_elements("x", encoded) == elements


def test_elements_that_are_not_bytes_are_refused() -> None:
    elements: list[Any] = [b"a", "b"]

    with pytest.raises(TypeError):
        encode_elements(elements)
