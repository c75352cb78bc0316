"""What a configuration may ask for that this version of the server does not have: refused at load, never ignored."""

from collections.abc import Iterator

from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput
from charonia.config.problems import Problem

CUSTOM_BATCHING = "TRITON_BATCH_STRATEGY_PATH"
"""Model parameter that names a library with a batching strategy of its own."""

PYTHON_STRATEGY = "BATCHING_STRATEGY"
"""Model parameter that names a Python file with one: its path, relative to the model's folder."""

_RUNTIMES = {"pytorch": ("model.py",)}
"""Values of `runtime` by backend, beside the backend's own library."""

_RAGGED = ("onnxruntime", "python", "identity")
"""Backends that take requests of different shapes in one batch. The last two get each request for itself anyway."""


def unsupported(config: ModelConfig) -> list[Problem]:
    """Return everything that the model asks for and that is not there, each with its path."""
    found = [*_of_model(config)]
    for index, given in enumerate(config.input):
        found += _of_tensor(given, f"input[{index}]")
        if given.allow_ragged_batch and config.backend not in _RAGGED:
            backend = config.backend
            feature = f"ragged batching of input '{given.name}' in a model of backend '{backend}'"
            found.append((f"input[{index}].allow_ragged_batch", feature))
    for index, output in enumerate(config.output):
        found += _of_tensor(output, f"output[{index}]")
    for index, group in enumerate(config.instance_group):
        found += _of_group(group, f"instance_group[{index}]")
    return [Problem(path, f"{feature} is not available in this version of the server") for path, feature in found]


def _of_model(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield path and feature."""
    if config.runtime not in ("", f"libtriton_{config.backend}.so", *_RUNTIMES.get(config.backend, ())):
        yield "runtime", f"runtime '{config.runtime}'"
    for field in ("batch_input", "batch_output"):
        if getattr(config, field) and config.backend not in _RAGGED:
            yield field, f"{field} in a model of backend '{config.backend}'"
    if config.cc_model_filenames:
        yield "cc_model_filenames", "choosing the file by compute capability"
    if CUSTOM_BATCHING in config.parameters and PYTHON_STRATEGY not in config.parameters:
        feature = f"a batching strategy from a library, unlike one in Python (parameter {PYTHON_STRATEGY}),"
        yield f"parameters[{CUSTOM_BATCHING}]", feature


def _of_tensor(tensor: ModelInput | ModelOutput, path: str) -> Iterator[tuple[str, str]]:
    if tensor.is_shape_tensor:
        yield f"{path}.is_shape_tensor", f"shape tensor '{tensor.name}'"
    if tensor.is_non_linear_format_io:
        yield f"{path}.is_non_linear_format_io", f"the non-linear format of '{tensor.name}'"


def _of_group(group: InstanceGroup, path: str) -> Iterator[tuple[str, str]]:
    if group.passive:
        yield f"{path}.passive", "a passive instance"
    if group.secondary_devices:
        yield f"{path}.secondary_devices", "a secondary device"
    if group.profile:
        yield f"{path}.profile", "an optimization profile"
