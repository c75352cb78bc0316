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
