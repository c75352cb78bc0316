"""From the warm-up samples of a configuration to requests. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from charonia.config.model import ModelConfig, ModelWarmup, WarmupInput
from charonia.core.dtypes import DataType
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.engine.raw_data import from_file, zeros

RANDOM_SEED = 20_260
"""Random data is the same at every load, so that a load that works once works again."""


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
        subject = f"{path}.input_data_file: '{given.input_data_file}'"
        return from_file(files[given.input_data_file], datatype, given.dims, subject)
    # Strings are empty: nobody could say what random ones should look like.
    if given.random_data and datatype is not DataType.BYTES:
        return _random(datatype, prod(given.dims), random)
    return zeros(datatype, (prod(given.dims),))


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
