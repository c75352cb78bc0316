"""When the answer to a copy differs from the one that was given."""

import numpy as np
import pytest

from charonia.core.dtypes import DataType
from charonia.core.tensor import Tensor
from charonia.server.traffic.split import differs
from charonia.wire.traffic import Shadow

SHADOW = Shadow(relative_tolerance=0.01, absolute_tolerance=0.001)


def tensor(values: object, datatype: DataType = DataType.FP32, name: str = "OUT") -> Tensor:
    return Tensor(name, datatype, np.array(values, datatype.numpy))


@pytest.mark.parametrize(
    ("given", "copied", "is_different"),
    [
        ([1.0, 2.0], [1.0, 2.0], False),
        ([1.0, 2.0], [1.005, 2.0], False),
        ([1.0, 2.0], [1.02, 2.0], True),
        ([0.0, 2.0], [0.0009, 2.0], False),
        ([0.0, 2.0], [0.0011, 2.0], True),
        ([float("nan")], [float("nan")], False),
        ([float("nan")], [1.0], True),
        ([float("inf")], [float("inf")], False),
        ([float("inf")], [float("-inf")], True),
        ([1.0, 2.0], [[1.0, 2.0]], True),
        ([], [], False),
    ],
)
def test_numbers_may_differ_by_the_tolerances(given: object, copied: object, is_different: bool) -> None:
    assert differs([tensor(given)], [tensor(copied)], SHADOW) is is_different


@pytest.mark.parametrize("datatype", [DataType.INT64, DataType.BOOL, DataType.BYTES, DataType.FP16, DataType.BF16])
def test_every_datatype_is_compared(datatype: DataType) -> None:
    one, other = ([b"a", b"b"], [b"a", b"c"]) if datatype is DataType.BYTES else ([1, 0], [1, 1])
    if datatype is DataType.BF16:  # bit patterns: 1.0, 0.0 and 1.0078125
        one, other = [0x3F80, 0x0000], [0x3F80, 0x3F81]

    assert not differs([tensor(one, datatype)], [tensor(one, datatype)], SHADOW)
    assert differs([tensor(one, datatype)], [tensor(other, datatype)], SHADOW)


def test_bf16_numbers_are_compared_with_the_tolerances() -> None:
    assert not differs([tensor([0x3F80], DataType.BF16)], [tensor([0x3F81], DataType.BF16)], SHADOW)


def test_integers_must_be_equal() -> None:
    assert differs([tensor([1000], DataType.INT32)], [tensor([1001], DataType.INT32)], SHADOW)


def test_outputs_are_compared_by_name_in_any_order() -> None:
    one, two = tensor([1.0], name="A"), tensor([2.0], name="B")

    assert not differs([one, two], [two, one], SHADOW)
    assert differs([one, two], [one], SHADOW)
    assert differs([one], [tensor([1.0], name="B")], SHADOW)


def test_another_datatype_is_a_difference() -> None:
    assert differs([tensor([1], DataType.INT32)], [tensor([1], DataType.INT64)], SHADOW)
