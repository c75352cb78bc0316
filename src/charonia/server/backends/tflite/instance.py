"""Runs batches in an interpreter of LiteRT."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from charonia.config.model import ModelConfig
from charonia.core.errors import Code, ServingError
from charonia.core.tensor import Array
from charonia.server.backends.array_instance import ArrayInstance
from charonia.server.backends.tflite.program import TfliteProgram, plain_error


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
