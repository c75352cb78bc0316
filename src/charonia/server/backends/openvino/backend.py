"""Completes configurations from models that OpenVINO reads, loads them, and runs batches."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from charonia.config.complete import Signature, check_signature
from charonia.config.model import ModelConfig
from charonia.config.problems import raise_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.errors import Code, ServingError, unsupported
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Array
from charonia.server.backends.api import ModelFiles, Placement
from charonia.server.backends.array_backend import ArrayBackend, plain_error
from charonia.server.backends.array_instance import ArrayInstance
from charonia.server.backends.model_file import model_file, weights_bytes
from charonia.server.backends.openvino.network import (
    SOURCE,
    Network,
    compile_network,
    follows_batch,
    loses_errors,
    new_core,
    read,
    signature_of,
)
from charonia.server.backends.openvino.options import PARAMETERS, OpenVinoPlan, read_plan
from charonia.server.machine.memory import release_freed_memory

# Beneath `infer` of the request's own class, which looks at the types of all inputs once more.
_infer = next(c for c in openvino.InferRequest.__mro__ if c.__module__.endswith("_pyopenvino")).infer


class OpenVinoInstance(ArrayInstance):
    """An instance.

    Args:
        request: Its inference request.
        network: The model.
        config: The complete configuration.
        is_async: Whether runs are asynchronous.
        learns: Whether they need not be for sizes of batches that have run.
    """

    def __init__(
        self, request: Any, network: Network, config: ModelConfig, *, is_async: bool, learns: bool = False
    ) -> None:
        super().__init__(config)
        self._is_async = is_async
        self._learns = learns
        self._proven: set[int] = set()
        self._request = request
        self._batch = network.batch
        self._inputs = {port.name: port for port in network.inputs}
        self._outputs = {port.name: port for port in network.outputs}
        self._datatypes = {plan.name: plan.datatype.numpy for plan in self.outputs}
        lead = 1 if self.is_batched else 0
        # Index, type, name and dims of the outputs whose shape is known before it is computed.
        self._own = [
            (port.index, port.kind, port.name, port.shape[lead:])
            for port in network.outputs
            if port.name in self._datatypes and port.shape is not None and -1 not in port.shape[lead:]
        ]

    def close(self) -> None:
        """Release the inference request."""
        super().close()
        self._request = None

    def run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        """Run the request."""
        request = self._request
        size = next(iter(feed.values())).shape[0] if self.is_batched else 0
        rows = max(size, self._batch) if self.is_batched else 0
        own: dict[str, Array] = {}
        try:
            # A tensor of OpenVINO does not keep the array alive that it lies in: the dictionaries do.
            for name, array in feed.items():
                port = self._inputs[name]
                if size != rows:
                    array = feed[name] = np.concatenate([array, np.repeat(array[-1:], rows - size, 0)])
                elif not (array.flags.c_contiguous and array.flags.aligned):
                    array = feed[name] = array.copy()
                request.set_input_tensor(port.index, openvino.Tensor(array, array.shape, port.kind))
            for index, kind, name, dims in self._own:
                shape = (rows, *dims) if self.is_batched else dims
                array = own[name] = np.empty(shape, self._datatypes[name])
                request.set_output_tensor(index, openvino.Tensor(array, shape, kind))
            if self._is_async and rows not in self._proven:
                request.start_async()
                request.wait()
                if self._learns:
                    self._proven.add(rows)
            else:
                _infer(request, {}, True, False)
        except RuntimeError as error:
            failure = plain_error("OpenVINO failed", error, Code.INTERNAL, SOURCE)
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            hint = f"the inputs were {shapes}; a network may need other sizes than its signature says"
            raise ServingError(failure.code, failure.message, hint=hint) from error
        arrays = [own[name] if name in own else self._copied(name) for name in names]
        return arrays if size == rows else [array[:size] for array in arrays]

    def _copied(self, name: str) -> Array:
        view = self._request.get_output_tensor(self._outputs[name].index).data
        array: Array = view.view(self._datatypes[name]).copy()
        return array


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


class OpenVinoBackend(ArrayBackend[OpenVinoPlan, OpenVinoModel]):
    """The `openvino` backend."""

    name = "openvino"
    parameters = PARAMETERS
    read_plan = staticmethod(read_plan)
    gpu_hint = "use KIND_CPU, and the parameter TARGET_DEVICE for an Intel GPU"

    def path(self, files: ModelFiles, config: ModelConfig) -> Path:
        """Return the model's file, or the folder of a TensorFlow SavedModel."""
        folder = files.version_dir / (config.default_model_filename or DEFAULT_FILE)
        return folder if (folder / "saved_model.pb").is_file() else model_file(files, config, DEFAULT_FILE)

    def remarks(self, config: ModelConfig, plan: OpenVinoPlan) -> Iterator[str]:
        """Yield nothing: only the device knows all of its properties."""
        return iter(())

    async def inspect(
        self, files: ModelFiles, config: ModelConfig, plan: OpenVinoPlan
    ) -> tuple[Signature, Sequence[str]]:
        """Return the inputs and outputs of the network."""
        path = self.path(files, config)

        def inspect() -> Signature:
            try:
                return signature_of(read(new_core(plan), path, config, plan), config)
            finally:
                release_freed_memory()

        return await asyncio.to_thread(inspect), ()

    async def open(self, files: ModelFiles, config: ModelConfig, plan: OpenVinoPlan) -> OpenVinoModel:
        """Load a version; its first instance compiles the model."""
        if config.model_operations is not None and config.model_operations.op_library_filename:
            raise unsupported(
                f"model '{config.name}': the openvino backend has no model_operations",
                hint="the parameter CPU_EXTENSION_PATH names a library with operators",
            )
        return OpenVinoModel(self.path(files, config), seen_by_model(config), plan)
