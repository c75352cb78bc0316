"""Runs a compiled model before it is ready: compiling takes seconds to minutes, and no request is to wait for it."""

import logging
from collections.abc import Iterator

import numpy as np

from charonia.backends.pytorch.instance import PyTorchInstance
from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, invalid
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor

SIZES = (16, 24)
"""Sizes that stand for variable dimensions: the second one makes PyTorch compile code for any size."""

_COMPILER_FAULTS = ("BackendCompilerFailed", "torch._dynamo", "Unsupported", "CppCompileError", "InductorError")

_log = logging.getLogger(__name__)


def warm_up(instance: PyTorchInstance, config: ModelConfig) -> None:
    """Run zeros of the batch sizes and shapes that code is compiled for.

    Raises:
        ServingError: The model cannot be compiled. Inputs that it refuses are only logged: zeros are not valid
            everywhere.
    """
    for request in requests(config):
        try:
            instance.execute([request])
        except ServingError as error:
            cause = error.__cause__
            kind = f"{type(cause).__module__}.{type(cause).__qualname__}"
            if error.code is Code.UNAVAILABLE or any(fault in kind for fault in _COMPILER_FAULTS):
                raise invalid(f"torch.compile: {error.message}", hint=error.hint) from error
            _log.warning("model '%s': its warm-up on zeros failed, so it is compiled later: %s", config.name, error)
            return


def requests(config: ModelConfig) -> Iterator[InferRequest]:
    """Yield a request of zeros for each batch size and size of variable dimensions."""
    largest = config.max_batch_size
    batches = sorted({largest, max(1, largest - 1), 1}, reverse=True) if largest > 0 else [0]
    has_variable = any(-1 in tensor.dims for tensor in config.input)
    for size in SIZES if has_variable else SIZES[:1]:
        for batch in batches:
            tensors = {}
            for tensor in config.input:
                shape = [batch] * bool(batch) + [size if dim == -1 else dim for dim in tensor.dims]
                datatype = tensor.data_type or DataType.FP32
                array = np.full(shape, b"", object) if datatype is DataType.BYTES else np.zeros(shape, datatype.numpy)
                tensors[tensor.name] = Tensor(tensor.name, datatype, array)
            yield InferRequest(config.name, tensors)
