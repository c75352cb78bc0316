"""Completes configurations from models that OpenVINO reads, and loads them."""

import asyncio
from pathlib import Path
from typing import Any

from charonia.config.complete import Signature, check_signature, merge_signature
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.problems import raise_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.errors import unsupported
from charonia.core.statistics import MemoryUsage
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles, Placement
from charonia.server.backends.model_file import model_file, weights_bytes
from charonia.server.backends.openvino.instance import OpenVinoInstance
from charonia.server.backends.openvino.network import (
    Network,
    compile_network,
    follows_batch,
    loses_errors,
    new_core,
    read,
    signature_of,
)
from charonia.server.backends.openvino.options import OpenVinoPlan, read_plan
from charonia.server.machine.memory import release_freed_memory

DEFAULT_FILE = "model.xml"


class OpenVinoModel:
    """A loaded version, with the compiled model of all its instances.

    Args:
        path: The model's file.
        config: The complete configuration.
        plan: Options.
    """

    def __init__(self, path: Path, config: ModelConfig, plan: OpenVinoPlan) -> None:
        self._path = path
        self._config = config
        self._plan = plan
        self._compiled: asyncio.Task[tuple[Network, Any]] | None = None

    async def create_instance(self, placement: Placement) -> OpenVinoInstance:
        """Make one more instance: an inference request of the compiled model, which the first instance compiles.

        Raises:
            ServingError: The model cannot be loaded, or contradicts the configuration.
        """
        if self._compiled is None:
            self._compiled = asyncio.create_task(asyncio.to_thread(self._compile, placement.threads))
        network, compiled = await asyncio.shield(self._compiled)
        is_async = loses_errors(compiled, network, self._plan)
        learns = is_async and self._config.max_batch_size > 0 and follows_batch(network)
        request = compiled.create_infer_request()
        return OpenVinoInstance(request, network, self._config, is_async=is_async, learns=learns)

    def memory(self) -> list[MemoryUsage]:
        """Return the size of the weights, which is that of their files."""
        return [MemoryUsage("CPU", 0, weights_bytes(self._path))] if self._compiled is not None else []

    async def aclose(self) -> None:
        """Release the compiled model, and return its memory to the system."""
        self._compiled = None
        await asyncio.to_thread(release_freed_memory)

    def _compile(self, threads: int) -> tuple[Network, Any]:
        core = new_core(self._plan)
        network = read(core, self._path, self._config, self._plan)
        problems = check_signature(self._config, signature_of(network, self._config))
        if problems:
            raise_problems(self._config.name, problems)
        compiled = compile_network(core, network, self._config, self._plan, threads)
        release_freed_memory()
        return network, compiled


class OpenVinoBackend:
    """The `openvino` backend."""

    name = "openvino"

    def uses_gpus(self) -> bool:
        """Return False: the parameter TARGET_DEVICE names another device than the CPU."""
        return False

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        if config.input and config.output:
            return Completion(config)
        plan = _plan(config, settings)
        path = _path(files, config)

        def inspect() -> Signature:
            try:
                return signature_of(read(new_core(plan), path, config, plan), config)
            finally:
                release_freed_memory()

        signature = await asyncio.to_thread(inspect)
        merged, notes = merge_signature(
            config, signature, default_max_batch_size=settings.default_max_batch_size, model_name=config.name
        )
        return Completion(merged, tuple(notes))

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> OpenVinoModel:
        """Load a version; its first instance compiles the model.

        Raises:
            ServingError: A setting is wrong or not supported, or the file is missing.
        """
        plan = _plan(config, settings)
        if any(group.kind is InstanceKind.KIND_GPU for group in config.instance_group):
            raise unsupported(
                f"model '{config.name}': the openvino backend has no instances of KIND_GPU",
                hint="use KIND_CPU, and the parameter TARGET_DEVICE for an Intel GPU",
            )
        if config.model_operations is not None and config.model_operations.op_library_filename:
            raise unsupported(
                f"model '{config.name}': the openvino backend has no model_operations",
                hint="the parameter CPU_EXTENSION_PATH names a library with operators",
            )
        return OpenVinoModel(_path(files, config), seen_by_model(config), plan)

    async def aclose(self) -> None: ...


def _plan(config: ModelConfig, settings: BackendSettings) -> OpenVinoPlan:
    plan, problems = read_plan(config, settings.values)
    if problems:
        raise_problems(config.name, problems)
    return plan


def _path(files: ModelFiles, config: ModelConfig) -> Path:
    """Return the model's file, or the folder of a TensorFlow SavedModel."""
    folder = files.version_dir / (config.default_model_filename or DEFAULT_FILE)
    return folder if (folder / "saved_model.pb").is_file() else model_file(files, config, DEFAULT_FILE)
