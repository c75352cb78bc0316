"""From the warm-up samples of a configuration to requests. Pure."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from charonia.config.model import ModelConfig, ModelWarmup, WarmupInput
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor

RANDOM_SEED = 20_260
"""Random data is the same at every load, so that a load that works once works again."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch that every instance runs before it gets requests.

    Attributes:
        name: Its name.
        path: Where the configuration has it.
        requests: The batch: as many equal requests as its batch size, of one batch element each.
        count: How often it is run.
    """

    name: str
    path: str
    requests: tuple[InferRequest, ...]
    count: int


def samples(config: ModelConfig, version: str, files: Mapping[str, bytes]) -> list[Sample]:
    """Return the samples of a complete, validated configuration, without those of batch size 0.

    Args:
        config: The configuration.
        version: Version that the requests are for.
        files: Content of the data files, by name.

    Raises:
        ServingError: INVALID_ARG, beginning with the path: a file holds something else than the input needs.
    """
    random = np.random.default_rng(RANDOM_SEED)
    found = []
    for index, sample in enumerate(config.model_warmup):
        if sample.batch_size:
            path = f"model_warmup[{index}]"
            inputs = _inputs(config, sample, path, files, random)
            requests = tuple(
                InferRequest(config.name, dict(inputs), model_version=version) for _ in range(sample.batch_size)
            )
            found.append(Sample(sample.name, path, requests, max(1, sample.count)))
    return found


def _inputs(
    config: ModelConfig, sample: ModelWarmup, path: str, files: Mapping[str, bytes], random: np.random.Generator
) -> dict[str, Tensor]:
    lead = (1,) if config.max_batch_size > 0 else ()
    inputs = {}
    for name, given in sample.inputs.items():
        datatype = given.data_type
        if datatype is None:
            raise ValueError(f"warm-up input {name!r} has no data type: the configuration was not validated")
        array = _array(given, datatype, f"{path}.inputs[{name}]", files, random)
        inputs[name] = Tensor(name, datatype, array.reshape(lead + given.dims))
    return inputs


def _array(
    given: WarmupInput, datatype: DataType, path: str, files: Mapping[str, bytes], random: np.random.Generator
) -> Array:
    if given.input_data_file is not None:
        return _from_file(files[given.input_data_file], given, datatype, f"{path}.input_data_file")
    if datatype is DataType.BYTES:  # empty strings: nobody could say what random ones should look like
        strings: Array = np.full(prod(given.dims), b"", np.object_)
        return strings
    if given.random_data:
        return _random(datatype, prod(given.dims), random)
    zeros: Array = np.zeros(prod(given.dims), datatype.numpy)
    return zeros


def _random(datatype: DataType, count: int, random: np.random.Generator) -> Array:
    """Return numbers from 0 to 1, or any integers."""
    if datatype is DataType.BF16:
        bits: Array = (random.random(count, np.float32).view("<u4") >> 16).astype(datatype.numpy)
        return bits
    if datatype.numpy.kind == "f":
        fractions: Array = random.random(count).astype(datatype.numpy)
        return fractions
    if datatype is DataType.BOOL:
        return random.integers(0, 2, count).astype(datatype.numpy)
    integers: Array = np.frombuffer(random.bytes(count * datatype.byte_size), datatype.numpy)
    return integers


def _from_file(content: bytes, given: WarmupInput, datatype: DataType, path: str) -> Array:
    count = prod(given.dims)
    subject = f"{path}: '{given.input_data_file}'"
    if datatype is DataType.BYTES:
        elements = _elements(content, subject)
        if len(elements) != count:
            raise invalid(f"{subject}: expected {count} strings for dims {list(given.dims)}, got {len(elements)}")
        strings = np.empty(count, np.object_)
        strings[:] = elements
        return strings
    expected = count * datatype.byte_size
    if len(content) < expected:  # what is beyond that is ignored, as by Triton
        raise invalid(f"{subject}: expected {expected} bytes for dims {list(given.dims)}, got {len(content)}")
    numbers: Array = np.frombuffer(content, datatype.numpy, count)
    return numbers


def _elements(content: bytes, subject: str) -> list[bytes]:
    """Return strings, each of which follows its length as 4 bytes, little-endian."""
    elements: list[bytes] = []
    position = 0
    while position < len(content):
        if position + _LENGTH.size > len(content):
            raise invalid(f"{subject}: expected the length of a string as 4 bytes at {position}, got fewer")
        start = position + _LENGTH.size
        position = start + _LENGTH.unpack_from(content, position)[0]
        if position > len(content):
            raise invalid(f"{subject}: expected {position - start} bytes of a string at {start}, got fewer")
        elements.append(content[start:position])
    return elements
