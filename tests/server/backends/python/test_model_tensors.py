"""Tensors as Python models see them: numpy, strings, BF16, dlpack."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from charonia.core.dtypes import DataType
from charonia.core.tensor import DeviceTensor
from charonia.server.backends.python.thread import shown, taken
from charonia.server.backends.python.worker.errors import TritonError
from charonia.server.backends.python.worker.requests import InferenceRequest, InferenceResponse
from charonia.server.backends.python.worker.tensor import Tensor, received
from charonia.server.backends.python.worker.triton_python_backend_utils import Logger
from charonia.server.channel import dlpack
from charonia.server.channel.datatypes import (
    DTYPES,
    NUMBERS,
    NUMPY_BY_TYPE,
    WIRE,
    TritonModelException,
    array_of,
    bytes_of,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)

BF16_ONE = 0x3F80


def bf16(*bits: int) -> Tensor:
    return received("B", "BF16", np.array(bits, np.uint16))


@pytest.mark.parametrize("dtype", list(WIRE))
def test_a_tensor_tells_what_it_was_made_of(dtype: "np.dtype[np.generic]") -> None:
    array = np.zeros((2, 3), dtype)

    tensor = Tensor("X", array)

    assert tensor.name() == "X"
    assert tensor.as_numpy() is array
    assert tensor.shape() == [2, 3]
    assert tensor.is_cpu()
    assert tensor.triton_dtype() == NUMBERS[WIRE[dtype]] == numpy_to_triton_type(dtype)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "ü"]),
        np.array([b"a", "ü".encode()]),
        np.array(["a", "ü"], object),
        np.array([b"a", "ü".encode()], object),
        np.array(["a", "ü"], np.dtypes.StringDType()),
    ],
)
def test_strings_may_be_given_in_every_form(array: "np.ndarray[tuple[int], np.dtype[np.generic]]") -> None:
    tensor = Tensor("S", array)

    assert tensor.triton_dtype() == 13
    assert tensor.as_numpy().dtype == object
    assert bytes(serialize_byte_tensor(tensor.as_numpy())) == b"\x01\0\0\0a\x02\0\0\0" + "ü".encode()
    assert array_of("BYTES", (2,), memoryview(bytes_of("BYTES", tensor.as_numpy()))).tolist() == [b"a", "ü".encode()]


def test_an_array_of_the_other_byte_order_is_converted() -> None:
    tensor = Tensor("X", np.array([1, 2], ">i4"))

    assert tensor.as_numpy().dtype == np.dtype("<i4")
    assert tensor.as_numpy().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        ([1, 2], "expected a numpy array, got list"),
        (np.zeros(2, np.complex64), "complex64 is none of the tensor datatypes"),
        (np.zeros(2, "datetime64[s]"), "none of the tensor datatypes"),
    ],
)
def test_what_is_no_tensor_is_refused(array: object, message: str) -> None:
    with pytest.raises(TritonModelException, match=message):
        Tensor("X", array)  # type: ignore[arg-type]


def test_bf16_has_no_numpy_form_but_is_exchanged_by_dlpack() -> None:
    tensor = bf16(BF16_ONE, 0)

    with pytest.raises(TritonModelException, match="BF16"):
        tensor.as_numpy()
    again = Tensor.from_dlpack("C", tensor)

    assert tensor.triton_dtype() == 14
    assert again.triton_dtype() == 14
    assert again._array.tolist() == [BF16_ONE, 0]


def test_dlpack_shares_memory_in_both_directions() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)

    seen = np.from_dlpack(Tensor("X", array))
    tensor = Tensor.from_dlpack("Y", array)

    assert Tensor("X", array).__dlpack_device__() == (1, 0)
    assert np.shares_memory(seen, array)
    assert np.shares_memory(tensor.as_numpy(), array)
    assert tensor.shape() == [2, 3]


def test_a_capsule_is_read_once() -> None:
    capsule = Tensor("X", np.ones(3, np.int64)).to_dlpack()

    assert Tensor.from_dlpack("Y", capsule).as_numpy().tolist() == [1, 1, 1]
    with pytest.raises(TritonModelException, match="only once"):
        Tensor.from_dlpack("Z", capsule)


def test_an_array_that_cannot_be_written_to_is_copied_for_dlpack() -> None:
    array = np.ones(3, np.float32)
    array.flags.writeable = False

    seen = np.from_dlpack(Tensor("X", array))

    assert seen.tolist() == [1, 1, 1]
    assert not np.shares_memory(seen, array)


def test_a_copy_by_dlpack_can_be_asked_for() -> None:
    array = np.ones(3, np.float32)

    seen = Tensor.from_dlpack("Y", Tensor("X", array).__dlpack__(copy=True))

    assert not np.shares_memory(seen.as_numpy(), array)


def test_another_device_cannot_be_asked_for() -> None:
    with pytest.raises(BufferError, match="memory of the CPU"):
        Tensor("X", np.ones(1, np.float32)).__dlpack__(dl_device=(2, 0))


def test_strings_are_not_exchanged_by_dlpack() -> None:
    with pytest.raises(TritonModelException, match="strings cannot be exchanged"):
        Tensor("S", np.array([b"a"], object)).to_dlpack()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("text", "expected a dlpack capsule or an object with __dlpack__, got str"),
        (np.ones(2, np.complex64), "complex64 is none of the tensor datatypes"),
    ],
)
def test_what_dlpack_cannot_bring_is_refused(source: object, message: str) -> None:
    with pytest.raises(TritonModelException, match=message):
        Tensor.from_dlpack("X", source)


class OnGpu:
    """An array that lies elsewhere."""

    def __dlpack__(self) -> object:
        raise AssertionError("nobody reads it there")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class Movable(OnGpu):
    def cpu(self) -> object:
        return np.array([7], np.int32)


def test_what_is_on_a_gpu_is_copied_where_it_can_and_else_refused() -> None:
    assert Tensor.from_dlpack("X", Movable()).as_numpy().tolist() == [7]
    with pytest.raises(TritonModelException, match="memory of a CUDA GPU"):
        Tensor.from_dlpack("X", OnGpu())


class OfAGpu:
    """As torch has a tensor on a GPU: it tells shape and datatype, and copies itself to the CPU when asked."""

    def __init__(self) -> None:
        self.copies = 0
        self.shape = (2, 1)

    def __dlpack__(self, *, stream: object = None) -> object:
        capsule = Tensor("X", np.array([[5], [6]], np.int16)).to_dlpack()
        dlpack._head(capsule).device_type = 2
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 1)

    def cpu(self) -> object:
        self.copies += 1
        return np.array([[5], [6]], np.int16)


def test_a_tensor_of_a_gpu_stays_there_until_somebody_looks_at_it() -> None:
    source = OfAGpu()

    tensor = Tensor.from_dlpack("X", source)

    assert (tensor.is_cpu(), tensor.shape(), tensor.triton_dtype()) == (False, [2, 1], 7)
    assert tensor.__dlpack_device__() == (2, 1)
    assert dlpack._head(tensor.to_dlpack()).device_type == 2
    assert source.copies == 0
    assert tensor.as_numpy().tolist() == [[5], [6]]
    assert tensor.as_numpy().dtype == np.int16
    assert source.copies == 1


def test_a_tensor_of_a_gpu_is_given_as_a_copy_where_the_cpu_is_asked_for() -> None:
    tensor = Tensor.from_dlpack("X", OfAGpu())

    capsule = tensor.__dlpack__(dl_device=dlpack.CPU)

    assert Tensor.from_dlpack("Y", capsule).as_numpy().tolist() == [[5], [6]]


def test_a_tensor_of_a_gpu_crosses_a_thread_of_the_server_as_it_is() -> None:
    source = OfAGpu()

    produced = taken(Tensor.from_dlpack("X", source))
    seen = shown(produced, True)

    assert isinstance(produced, DeviceTensor)
    assert produced.content.native is source
    assert (produced.shape, produced.datatype) == ((2, 1), DataType.INT16)
    assert (seen.is_cpu(), seen.shape()) == (False, [2, 1])
    assert source.copies == 0
    assert shown(produced, False).is_cpu()
    assert produced.array.tolist() == [[5], [6]]


def test_a_capsule_of_a_gpu_is_refused() -> None:
    capsule = Tensor("X", np.ones(1, np.float32)).to_dlpack()
    dlpack._head(capsule).device_type = 2

    with pytest.raises(TritonModelException, match="memory of a CUDA GPU"):
        Tensor.from_dlpack("X", capsule)


@given(
    array=arrays.arrays(
        st.sampled_from([dtype for dtype in WIRE if dtype.kind != "f"]), arrays.array_shapes(min_dims=0, max_side=4)
    ),
    transposed=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_any_array_has_the_bytes_of_its_elements_in_order(
    array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]", transposed: bool
) -> None:
    if transposed:
        array = array.T

    data = bytes_of(WIRE[array.dtype], array)

    assert bytes(data) == array.tobytes()
    np.testing.assert_array_equal(array_of(WIRE[array.dtype], array.shape, memoryview(bytes(data))), array)


@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 100_000])
def test_the_bytes_of_arrays_of_any_size_are_right(count: int) -> None:
    array = np.arange(2 * count, dtype=np.float32)[::2]

    assert bytes(bytes_of("FP32", array)) == array.tobytes()


@given(elements=st.lists(st.one_of(st.binary(max_size=20), st.text(max_size=20)), max_size=8))
@settings(max_examples=50, deadline=None)
def test_strings_have_one_wire_form(elements: list[bytes | str]) -> None:
    array = np.empty(len(elements), object)
    array[:] = elements

    decoded = deserialize_bytes_tensor(serialize_byte_tensor(array))

    assert decoded.tolist() == [e.encode("utf-8", "surrogatepass") if isinstance(e, str) else e for e in elements]


@pytest.mark.parametrize("dtype", [np.object_, np.str_, np.bytes_, np.dtypes.StringDType()])
def test_strings_of_every_dtype_are_strings(dtype: Any) -> None:
    assert numpy_to_triton_type(dtype) == NUMBERS["STRING"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tensor("x", None), "expected a numpy array"),  # type: ignore[arg-type]
        (lambda: Tensor(None, np.ones(1)), "expected a string as name"),  # type: ignore[arg-type]
        (lambda: Tensor.from_dlpack(None, np.ones(1)), "expected a string as name"),  # type: ignore[arg-type]
        (lambda: InferenceRequest(), "argument 'model_name' is missing"),
        (lambda: InferenceRequest(model_name=1, inputs=[], requested_output_names=[]), "a string as model_name"),  # type: ignore[arg-type]
        (lambda: InferenceResponse([None]), "expected Tensor objects"),  # type: ignore[list-item]
        (lambda: InferenceResponse([], error="no"), "expected a TritonError"),  # type: ignore[arg-type]
        (lambda: Logger.log("m", None), "expected one of its levels"),  # type: ignore[arg-type]
        (lambda: TritonError("m", "x"), "expected one of its codes"),  # type: ignore[arg-type]
    ],
)
def test_arguments_of_another_type_are_type_errors(make: Callable[[], object], message: str) -> None:
    for kind in (TypeError, TritonModelException):
        with pytest.raises(kind, match=message):
            make()


def test_a_tensor_has_a_name() -> None:
    with pytest.raises(TritonModelException, match="expected a name, got an empty string"):
        Tensor("", np.ones(1))


def test_datatypes_have_their_names_and_numbers() -> None:
    assert triton_string_to_numpy("TYPE_FP32") is np.float32
    assert triton_string_to_numpy("TYPE_BF16") is None
    assert triton_to_numpy_type(13) is np.object_
    assert triton_to_numpy_type(14) is None
    assert numpy_to_triton_type(np.bytes_) == 13
    assert {name[5:] for name in NUMPY_BY_TYPE} - {"STRING"} == set(DTYPES) - {"BF16"}
