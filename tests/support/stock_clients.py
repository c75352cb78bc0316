"""Inputs for Triton's own clients."""

from typing import Any

from tritonclient.utils import np_to_triton_dtype


def infer_input(module: Any, name: str, array: Any, **encoding: bool) -> Any:
    """Return an input of `tritonclient.http` or `tritonclient.grpc` with the shape, datatype and values of an array.

    Args:
        encoding: Further arguments of `set_data_from_numpy`.
    """
    tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array, **encoding)
    return tensor
