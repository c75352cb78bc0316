import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.tensor import Array, DeviceTensor


class Content:
    native = "elements of a GPU"
    shape = (2, 3)

    def __init__(self) -> None:
        self.copies = 0

    def to_host(self) -> Array:
        self.copies += 1
        return np.zeros(self.shape, np.float32)


def test_a_tensor_of_a_gpu_is_copied_once_when_somebody_looks_at_its_elements() -> None:
    content = Content()
    tensor = DeviceTensor("x", DataType.FP32, content)

    assert tensor.shape == (2, 3)
    assert repr(tensor) == "DeviceTensor('x', FP32, [2, 3])"
    assert content.copies == 0
    assert tensor.array is tensor.array
    assert content.copies == 1


def test_a_tensor_under_another_name_shares_the_copy() -> None:
    content = Content()
    tensor = DeviceTensor("x", DataType.FP32, content)

    renamed = tensor.renamed("y")

    assert (renamed.name, renamed.content, content.copies) == ("y", content, 0)
    assert renamed.array is tensor.array
    assert content.copies == 1
