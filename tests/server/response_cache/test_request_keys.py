"""Two requests have the same key only if a model cannot tell them apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest, ParameterValue, RequestedOutput
from charonia.core.tensor import Array, Tensor
from charonia.server.response_cache.api import is_private, request_digest, tensor_bytes

FP32 = DataType.FP32
BYTES = DataType.BYTES


def strings(*values: bytes, shape: tuple[int, ...] | None = None) -> Array:
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array.reshape(shape or (len(values),))


def tensor(array: Array, name: str = "IN", datatype: DataType = FP32) -> Tensor:
    return Tensor(name, datatype, array)


def request(
    *tensors: Tensor,
    outputs: tuple[RequestedOutput, ...] = (),
    parameters: dict[str, ParameterValue] | None = None,
    correlation_id: int | str = 0,
    id: str = "",
) -> InferRequest:
    given = tensors or (tensor(np.zeros(4, "<f4")),)
    return InferRequest(
        "m",
        {t.name: t for t in given},
        id=id,
        outputs=outputs,
        parameters=parameters,
        correlation_id=correlation_id,
    )


def digest(made: InferRequest) -> bytes:
    return request_digest(made, with_parameters=True)


DIFFERENT = [
    request(),
    request(tensor(np.ones(4, "<f4"))),
    request(tensor(np.zeros((2, 2), "<f4"))),  # the same bytes
    request(tensor(np.zeros((4, 1), "<f4"))),
    request(tensor(np.zeros(4, "<i4"), datatype=DataType.INT32)),
    request(tensor(np.zeros(4, "<f4"), "OTHER")),
    request(tensor(-np.zeros(4, "<f4"))),
    request(tensor(np.zeros(2, "<f4"), "A"), tensor(np.zeros(2, "<f4"), "B")),
    request(tensor(np.zeros(2, "<f4"), "B"), tensor(np.zeros(2, "<f4"), "A")),
    request(tensor(np.zeros(1, "<f4"), "A"), tensor(np.zeros(3, "<f4"), "B")),
    request(tensor(strings(b"ab", b"c"), datatype=BYTES)),
    request(tensor(strings(b"a", b"bc"), datatype=BYTES)),
    request(tensor(strings(b"abc"), datatype=BYTES)),
    request(tensor(strings(b"abc", b""), datatype=BYTES)),
    request(tensor(strings(b"abc", b"", shape=(1, 2)), datatype=BYTES)),
    request(tensor(strings(), datatype=BYTES)),
    request(outputs=(RequestedOutput("OUT"),)),
    request(outputs=(RequestedOutput("OUT", 1),)),
    request(outputs=(RequestedOutput("OUT"), RequestedOutput("B"))),
    request(outputs=(RequestedOutput("B"), RequestedOutput("OUT"))),
    request(parameters={"a": 1}),
    request(parameters={"a": 1.0}),
    request(parameters={"a": True}),
    request(parameters={"a": "1"}),
    request(parameters={"a": ""}),
    request(parameters={"a": "1", "b": "2"}),
    request(parameters={"a": "2", "b": "1"}),
    request(parameters={"a1": ""}),
    request(parameters={"a": "\ud800"}),
    request(correlation_id=1),
    request(correlation_id="1"),
]


def test_everything_that_a_model_can_see_is_part_of_the_key() -> None:
    assert len({digest(made) for made in DIFFERENT}) == len(DIFFERENT)


def test_what_it_may_not_see_makes_no_other_key() -> None:
    array = np.arange(12, dtype="<f4").reshape(3, 4)

    assert digest(request(tensor(array))) == digest(request(tensor(array.copy()), id="7"))
    assert digest(request(tensor(array.T))) == digest(request(tensor(np.ascontiguousarray(array.T))))
    assert digest(request(parameters={"a": 1, "b": 2})) == digest(request(parameters={"b": 2, "a": 1}))


def test_a_model_without_parameters_has_keys_without_them() -> None:
    keys = {
        request_digest(made, with_parameters=False)
        for made in (request(), request(parameters={"a": 1}, correlation_id=3))
    }

    assert len(keys) == 1


@pytest.mark.parametrize("datatype", [d for d in DataType if d is not BYTES])
def test_every_datatype_and_empty_tensors_have_keys(datatype: DataType) -> None:
    one, none = (request(tensor(np.zeros(n, datatype.numpy), datatype=datatype)) for n in (1, 0))

    assert digest(one) != digest(none)


def test_a_scalar_has_a_key() -> None:
    assert digest(request(tensor(np.array(1, "<f4")))) != digest(request(tensor(np.array([1], "<f4"))))


PARTS = st.lists(st.lists(st.binary(max_size=3), max_size=3), min_size=1, max_size=3)


@settings(max_examples=200)
@given(PARTS, PARTS)
def test_equal_keys_of_strings_mean_equal_strings(one: list[list[bytes]], other: list[list[bytes]]) -> None:
    first, second = (
        request(*(tensor(strings(*part), f"I{i}", BYTES) for i, part in enumerate(parts))) for parts in (one, other)
    )

    assert (digest(first) == digest(second)) is (one == other)


def test_the_bytes_that_are_hashed_are_estimated() -> None:
    made = [tensor(np.zeros(4, "<f4")), tensor(strings(b"a", b"b"), "S", BYTES)]

    assert tensor_bytes(made) == 16 + 16


def test_only_views_of_received_bytes_are_known_to_stay_as_they_are() -> None:
    received = bytes(16)

    assert is_private(np.frombuffer(received, "<f4"))
    assert is_private(np.ndarray((2, 2), "<f4", memoryview(received)[:]))
    assert is_private(np.frombuffer(received, "<f4").reshape(2, 2)[1:])
    assert not is_private(np.frombuffer(bytearray(16), "<f4"))
    assert not is_private(np.zeros(4, "<f4"))
    assert not is_private(np.ndarray(4, "<f4", memoryview(bytearray(16)).toreadonly()))
