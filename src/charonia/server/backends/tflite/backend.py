"""Completes configurations from TensorFlow Lite models, loads them, and runs batches."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from charonia.config.complete import Signature, check_signature
from charonia.config.model import ModelConfig
from charonia.config.problems import raise_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.errors import Code, ServingError
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Array
from charonia.server.backends.api import ModelFiles, Placement
from charonia.server.backends.array_backend import ArrayBackend, plain_error
from charonia.server.backends.array_instance import ArrayInstance
from charonia.server.backends.tflite.options import PARAMETERS, TflitePlan, read_plan
from charonia.server.backends.tflite.program import TfliteProgram, interpreter_of, quantised, read_program
from charonia.server.machine.memory import release_freed_memory


class TfliteInstance(ArrayInstance):
    """An instance.

    Args:
        native: Its interpreter.
        program: The model.
        config: The complete configuration.
    """

    def __init__(self, native: Any, program: TfliteProgram, config: ModelConfig) -> None:
        super().__init__(config)
        self._native = native
        self._program = program  # the interpreter reads the content of its file
        self._subgraph = program.subgraph
        self._inputs = {port.name: port.index for port in program.inputs}
        self._outputs = {port.name: port.index for port in program.outputs}
        self._shapes: list[tuple[int, ...]] = []

    def close(self) -> None:
        """Release the interpreter."""
        super().close()
        self._native = None

    def run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        """Run the interpreter, after resizing its inputs where the shapes differ from the last ones."""
        native, subgraph = self._native, self._subgraph
        try:
            shapes = [array.shape for array in feed.values()]
            if shapes != self._shapes:
                self._shapes = []
                for name, array in feed.items():
                    native.ResizeInputTensor(self._inputs[name], np.array(array.shape, np.int32), False, subgraph)
                native.AllocateTensors(subgraph)
                self._shapes = shapes
            for name, array in feed.items():
                native.SetTensor(self._inputs[name], array, subgraph)
            native.Invoke(subgraph)
            return [native.GetTensor(self._outputs[name], subgraph) for name in names]  # copies
        except (ValueError, RuntimeError) as error:
            self._shapes = []
            failure = plain_error("LiteRT failed", error, Code.INTERNAL)
            given = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            hint = f"the inputs were {given}; a network may need other sizes than its signature says"
            raise ServingError(failure.code, failure.message, hint=hint) from error


class TfliteModel:
    """A loaded version.

    Args:
        program: The model.
        config: The complete configuration.
        threads: Threads of an instance, 0 for its share of the thread budget.
    """

    def __init__(self, program: TfliteProgram, config: ModelConfig, threads: int) -> None:
        self._program = program
        self._config = config
        self._threads = threads
        self._count = 0

    async def create_instance(self, placement: Placement) -> TfliteInstance:
        """Make one more instance, with an interpreter of its own.

        Raises:
            ServingError: LiteRT refuses.
        """
        threads = self._threads or placement.threads
        native = await asyncio.to_thread(interpreter_of, self._program, threads, self._config.max_batch_size)
        self._count += 1
        return TfliteInstance(native, self._program, self._config)

    def memory(self) -> list[MemoryUsage]:
        """Return the size of the file, and as much for each instance, whose kernels have the weights in their order."""
        return [MemoryUsage("CPU", 0, (1 + self._count) * len(self._program.content))]

    async def aclose(self) -> None:
        await asyncio.to_thread(release_freed_memory)


class TfliteBackend(ArrayBackend[TflitePlan, TfliteModel]):
    """The `tflite` backend, which is also `armnn_tflite`."""

    name = "tflite"
    parameters = PARAMETERS
    read_plan = staticmethod(read_plan)

    async def inspect(
        self, files: ModelFiles, config: ModelConfig, plan: TflitePlan
    ) -> tuple[Signature, Sequence[str]]:
        """Return the inputs and outputs, and which of them are quantised."""
        program = await asyncio.to_thread(read_program, self.path(files, config), config, plan.signature)
        return program.signature, quantised(program)

    async def open(self, files: ModelFiles, config: ModelConfig, plan: TflitePlan) -> TfliteModel:
        """Load a version."""
        config = seen_by_model(config)
        program = await asyncio.to_thread(read_program, self.path(files, config), config, plan.signature)
        problems = check_signature(config, program.signature)
        if problems:
            raise_problems(config.name, problems)
        return TfliteModel(program, config, plan.threads)
