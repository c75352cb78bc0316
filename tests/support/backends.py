"""A model of one of the server's backends without the server: its files, configuration, instances and requests."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from charonia.config.complete import normalise
from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import BY_NUMPY, DataType
from charonia.core.request import InferRequest, RequestedOutput
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import Backend, BackendSettings, BlockingInstance, Completion, ModelFiles, Placement
from charonia.testing.backend_suite import arrays

Specs = Mapping[str, tuple[DataType, tuple[int, ...]]]
CPU = Placement("m_0", InstanceKind.KIND_CPU)


def version_of(folder: Path, **files: bytes | Path) -> ModelFiles:
    """Return version 1 of the model `folder` with these files; `_` stands for a dot in their names."""
    version = folder / "1"
    version.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (version / name.replace("_", ".")).write_bytes(content.read_bytes() if isinstance(content, Path) else content)
    return ModelFiles(folder, 1, version)


def config_of(inputs: Specs, outputs: Specs, max_batch_size: int = 8, *, count: int = 1, **more: Any) -> ModelConfig:
    """Return the configuration of a model `m` with this many instances on the CPU."""
    return ModelConfig(
        name="m",
        max_batch_size=max_batch_size,
        input=tuple(ModelInput(name, datatype, dims=dims) for name, (datatype, dims) in inputs.items()),
        output=tuple(ModelOutput(name, datatype, dims) for name, (datatype, dims) in outputs.items()),
        instance_group=(InstanceGroup("m_0", InstanceKind.KIND_CPU, count=count),),
        **more,
    )


def complete(make: Callable[[], Backend], files: ModelFiles, config: ModelConfig | None = None) -> Completion:
    """Fill in a configuration as a backend does."""
    return asyncio.run(make().complete(files, config or ModelConfig(name="m"), BackendSettings()))


def complete_wholly(make: Callable[[], Backend], files: ModelFiles, config: ModelConfig | None = None) -> Completion:
    """Fill in a configuration as a backend does, and what is left as the server does."""
    done = complete(make, files, config)
    whole = normalise(replace(done.config, backend=make().name), name="m", gpu_count=0, default_instance_count=1)
    return Completion(whole, done.notes)


def load(
    make: Callable[[], Backend],
    files: ModelFiles,
    config: ModelConfig,
    settings: Mapping[str, str] | None = None,
    place: Placement = CPU,
) -> Any:
    """Load a model, and return an instance."""

    async def instance() -> object:
        model = await make().load(files, config, BackendSettings(settings or {}))
        return await model.create_instance(place)

    return asyncio.run(instance())


def request(given: Mapping[str, tuple[DataType, Array]], *outputs: str) -> InferRequest:
    """Return a request for these outputs, or for all."""
    tensors = {name: Tensor(name, datatype, array) for name, (datatype, array) in given.items()}
    return InferRequest("m", tensors, outputs=tuple(map(RequestedOutput, outputs)))


def request_of(*outputs: str, **given: Array) -> InferRequest:
    """Return a request with arrays of the datatypes that numpy has."""
    return request({name: (BY_NUMPY[array.dtype], array) for name, array in given.items()}, *outputs)


def ask(instance: BlockingInstance, *requests: InferRequest, **given: Array) -> dict[str, Array]:
    """Run requests as one batch, or one with these arrays, and return the outputs of the first."""
    return arrays(instance.execute(requests or (request_of(**given),)).results[0])


def assert_close(one: Array, other: Array, tolerance: float = 1e-5) -> None:
    """Check that arrays of whatever datatypes are the same except for rounding."""
    np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), tolerance, tolerance)
