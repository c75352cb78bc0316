"""Example inputs that fit a model's signature: for a page, a start message, or a command without inputs.

Shapes: as in the model's first warm-up sample, else 1 for a batch, and for other variable dimensions the size
that models of such a rank and datatype most often take: 224 pixels, 512 audio samples, 8 tokens. A model that is
served from a file has such a sample where it takes another size (`server/lifecycle/loader.py`).
Values: the model parameter `EXAMPLE`, else one value for a whole input: 1 for integers, which is a valid id, mask and
count, 0 for the type of a token and for a state, a half for floating-point numbers, and a word for text.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from charonia.config.model import ModelConfig, ModelInput
from charonia.config.parameters import EXAMPLE
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError
from charonia.core.tensor import Array, Tensor
from charonia.wire.v2_generate import decode_generate

PIXELS = 224
SAMPLES = 512
TOKENS = 8
COLOURS = 3
SIDE_MIN = 8
"""Fewest pixels of a picture's side: the state of a recurrent network has a dimension of 1 there."""

WORD = b"hello"

SAMPLE_RATE_HZ = 16000

BYTES_MAX = 1 << 28
"""Limit of an example tensor in bytes."""

_HALF_BITS = 0x3F00
"""A half as the bit pattern of BF16."""


def example_inputs(config: ModelConfig, size: int = 0) -> dict[str, Tensor]:
    """Return a tensor for each required input of a model, with a batch of one if it has a batch dimension.

    Args:
        config: The model's complete configuration.
        size: Size of variable dimensions, apart from batches, colours and states; 0 for the usual ones.
    """
    made = _declared(config)
    return {
        tensor.name: made.get(tensor.name) or example_tensor(config, tensor, size)
        for tensor in config.input
        if tensor.data_type is not None and (tensor.name in made or not tensor.optional)
    }


def example_tensor(config: ModelConfig, model_input: ModelInput, size: int = 0) -> Tensor:
    """Return a tensor for one input of a model; `size` as in `example_inputs`."""
    datatype = model_input.data_type or DataType.FP32
    warm = config.model_warmup[0].inputs.get(model_input.name) if config.model_warmup else None
    if warm is not None and -1 not in warm.dims and len(warm.dims) == len(model_input.dims):
        dims = warm.dims
    else:
        dims = example_dims(model_input.dims, datatype, batched=config.max_batch_size > 0, size=size)
    shape = (1, *dims) if config.max_batch_size > 0 else dims
    return Tensor(model_input.name, datatype, filled(shape, datatype, model_input.name))


def example_dims(dims: Sequence[int], datatype: DataType, *, batched: bool, size: int = 0) -> tuple[int, ...]:
    """Return the dimensions of an input with a size for each variable one.

    Args:
        dims: The dimensions, -1 for variable ones.
        datatype: Datatype of the input.
        batched: Whether the server adds a batch dimension, so that it is not the first of `dims`.
        size: As in `example_inputs`.
    """
    lead = 0 if batched else 1
    inner = dims[lead:]
    if not dims or datatype is DataType.BYTES:
        return tuple(1 if dim == -1 else dim for dim in dims)
    if len(dims) == lead:
        return tuple((size or TOKENS) if dim == -1 else dim for dim in dims)
    is_state = not batched and dims[0] > 1
    sizes = [dim if dim != -1 else _inner_size(inner, at, datatype, is_state, size) for at, dim in enumerate(inner)]
    return (*(1 if dim == -1 else dim for dim in dims[:lead]), *sizes)


def _inner_size(inner: Sequence[int], index: int, datatype: DataType, is_state: bool, size: int) -> int:
    """Return the size of a variable dimension behind that of the batch."""
    if len(inner) == 3 and _is_picture(datatype):
        channels = 2 if inner[2] in (1, COLOURS, 4) else 0
        return COLOURS if index == channels else size or PIXELS
    if len(inner) == 1 and datatype.numpy.kind == "f":
        return size or SAMPLES
    if is_state and index == 0:
        return 1  # [layers, batch, hidden]
    return size or TOKENS


def takes_picture(config: ModelConfig, model_input: ModelInput) -> bool:
    """Return whether an input is three-dimensional, behind the batch, with channels and sides as pictures have them."""
    inner = model_input.dims if config.max_batch_size > 0 or len(model_input.dims) == 3 else model_input.dims[1:]
    if len(inner) != 3:
        return False
    layouts = ((inner[0], inner[1:]), (inner[2], inner[:2]))
    is_image = any(
        channels in (1, COLOURS, 4) and all(side == -1 or side >= SIDE_MIN for side in sides)
        for channels, sides in layouts
    )
    return is_image and model_input.data_type is not None and _is_picture(model_input.data_type)


def _is_picture(datatype: DataType) -> bool:
    return datatype.numpy.kind == "f" or datatype in (DataType.UINT8, DataType.BF16)


def filled(shape: Sequence[int], datatype: DataType, name: str) -> Array:
    """Return an array of one value that suits a datatype and the name of an input."""
    value: object = 1
    lower = name.lower()
    if datatype is DataType.BYTES:
        value = WORD
    elif datatype is DataType.BF16:
        value = _HALF_BITS
    elif "state" in lower or "token_type" in lower or "segment" in lower:
        value = 0
    elif datatype.numpy.kind == "f":
        value = 0.5
    elif lower in ("sr", "sample_rate", "sampling_rate") and datatype.byte_size > 1:
        value = SAMPLE_RATE_HZ
    array: Array = np.empty(tuple(shape), datatype.numpy)
    array.fill(value)
    return array


def _declared(config: ModelConfig) -> Mapping[str, Tensor]:
    """Return the tensors of the model parameter, none if there is none or it does not fit."""
    text = config.parameters.get(EXAMPLE, "")
    if not text:
        return {}
    try:
        inputs = decode_generate(config, "", text.encode(), BYTES_MAX).request.inputs
    except ServingError:
        return {}  # the value of a parameter is the author's: a page that shows an example must not fail for it
    return inputs
