import numpy as np
import pytest

from charonia.core.dtypes import DataType
from charonia.core.tensor import Tensor, to_bfloat16
from charonia.tools.perf.sending import mismatch
from charonia.wire.tensors import bytes_array

D = DataType


def tensor(values: object, datatype: DataType = D.FP32, name: str = "Y") -> dict[str, Tensor]:
    return {name: Tensor(name, datatype, np.array(values, datatype.numpy))}


def text(*values: bytes) -> dict[str, Tensor]:
    return {"Y": Tensor("Y", D.BYTES, bytes_array("Y", [len(values)], values))}


def test_equal_outputs_pass_and_others_are_not_looked_at() -> None:
    assert mismatch(tensor([1, 2]), tensor([1, 2]) | tensor([9], name="Z")) == ""
    assert mismatch(text(b"a"), text(b"a")) == ""


@pytest.mark.parametrize(
    ("expected", "got", "problem"),
    [
        (tensor([1, 2]), {}, "output 'Y': expected in the answer, got none"),
        (tensor([1, 2]), tensor([[1, 2]]), "output 'Y': expected FP32 of shape [2], got FP32 of shape [1, 2]"),
        (tensor([1]), tensor([1], D.FP64), "output 'Y': expected FP32 of shape [1], got FP64 of shape [1]"),
        (
            tensor([[1, 2], [3, 4]]),
            tensor([[1, 2], [3, 5]]),
            "output 'Y'[1][1]: expected 4.0, got 5.0 (1 of 4 elements differ)",
        ),
        (tensor([7], D.INT64), tensor([8], D.INT64), "output 'Y'[0]: expected 7, got 8 (1 of 1 elements differ)"),
        (text(b"a"), text(b"b"), "output 'Y'[0]: expected b'a', got b'b' (1 of 1 elements differ)"),
    ],
)
def test_a_difference_is_named(expected: dict[str, Tensor], got: dict[str, Tensor], problem: str) -> None:
    assert mismatch(expected, got) == problem


def test_the_tolerance_is_absolute_and_relative_for_floats_only() -> None:
    assert mismatch(tensor([0.0, 1000.0]), tensor([0.009, 1009.0]), 0.01) == ""
    assert mismatch(tensor([0.0]), tensor([0.011]), 0.01) != ""
    assert mismatch(tensor([100], D.INT32), tensor([101], D.INT32), 0.5) != ""


def test_numbers_that_are_not_finite_equal_themselves_only() -> None:
    special = [float("nan"), float("inf"), float("-inf")]

    assert mismatch(tensor(special), tensor(special)) == ""
    assert mismatch(tensor([1.0]), tensor([float("nan")]), 1e9) != ""
    assert mismatch(tensor([1.0]), tensor([float("inf")]), 1e9) != ""
    assert mismatch(tensor([float("inf")]), tensor([1.0]), 1e9) != ""


def test_bf16_is_compared_by_value() -> None:
    one = {"Y": Tensor("Y", D.BF16, to_bfloat16(np.array([1.0], np.float32)))}
    near = {"Y": Tensor("Y", D.BF16, to_bfloat16(np.array([1.01], np.float32)))}

    assert mismatch(one, near) == "output 'Y'[0]: expected 1.0, got 1.0078125 (1 of 1 elements differ)"
    assert mismatch(one, near, 0.01) == ""
