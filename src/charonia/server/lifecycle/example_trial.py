"""Finds an example request that the model of a file accepts, when it is loaded: its signature may allow too much.

For example, the signature of a network for text lines has variable height and width, but the network accepts no height
other than 48. Where it refuses the usual sizes of variable dimensions, others are tried. The result is kept in the
configuration as a warm-up sample that is never run, where `wire/example_inputs.py` finds it.
"""

import time
from collections.abc import Mapping
from dataclasses import replace

from charonia.config.model import ModelConfig, ModelWarmup, WarmupInput
from charonia.config.parameters import EXAMPLE_REFUSED, TRY_EXAMPLE
from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.tensor import Tensor
from charonia.server.execution.executor import Executor
from charonia.server.lifecycle.warmup import WarmupBatch
from charonia.wire.example_inputs import example_inputs

SIZES = (32, 48, 64, 224, 640)
"""Sizes that are tried in turn for all variable dimensions together, after the usual ones."""

ELEMENTS_MAX = 1 << 22
"""Largest example that is tried, in elements of all inputs."""

SECONDS_MAX = 5.0
"""Time after which no further size is tried."""


async def with_example(config: ModelConfig, version: str, executor: Executor) -> ModelConfig:
    """Return the configuration of a model with an example that it accepts, or with its error if it refuses all.

    Args:
        config: The complete configuration; without the parameter `TRY_EXAMPLE` it is returned unchanged.
        version: The version that is loaded.
        executor: Runs the requests, as for a warm-up.
    """
    if TRY_EXAMPLE not in config.parameters:
        return config
    config = replace(config, parameters={k: v for k, v in config.parameters.items() if k != TRY_EXAMPLE})
    if _shapes(example_inputs(config, 1)) == _shapes(example_inputs(config, 2)):
        return config  # nothing is guessed
    end_s = time.monotonic() + SECONDS_MAX
    refusal = ""
    for size in (0, *SIZES):
        inputs = example_inputs(config, size)
        if sum(tensor.array.size for tensor in inputs.values()) > ELEMENTS_MAX:
            continue
        error = await _run(config, version, executor, inputs)
        if error is None:
            return replace(config, model_warmup=(_sample(config, inputs),)) if size else config
        refusal = refusal or error.message
        if time.monotonic() > end_s:
            break
    return replace(config, parameters={**config.parameters, EXAMPLE_REFUSED: refusal}) if refusal else config


async def _run(
    config: ModelConfig, version: str, executor: Executor, inputs: Mapping[str, Tensor]
) -> ServingError | None:
    batch = WarmupBatch([InferRequest(config.name, dict(inputs), model_version=version)], config.name, version)
    executor.run(batch)
    return await batch.done


def _sample(config: ModelConfig, inputs: Mapping[str, Tensor]) -> ModelWarmup:
    """Return a sample with the shapes of inputs; its batch size of 0 means that it is not run."""
    lead = 1 if config.max_batch_size > 0 else 0
    given = {n: WarmupInput(data_type=t.datatype, dims=t.shape[lead:], zero_data=True) for n, t in inputs.items()}
    return ModelWarmup("example", 0, given)


def _shapes(inputs: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
    return [tensor.shape for tensor in inputs.values()]
