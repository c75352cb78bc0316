"""Runs batches in an inference request of OpenVINO."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino

from charonia.config.model import ModelConfig
from charonia.core.errors import Code, ServingError
from charonia.core.tensor import Array
from charonia.server.backends.array_instance import ArrayInstance
from charonia.server.backends.openvino.network import Network, plain_error

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
            failure = plain_error("OpenVINO failed", error, Code.INTERNAL)
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            hint = f"the inputs were {shapes}; a network may need other sizes than its signature says"
            raise ServingError(failure.code, failure.message, hint=hint) from error
        arrays = [own[name] if name in own else self._copied(name) for name in names]
        return arrays if size == rows else [array[:size] for array in arrays]

    def _copied(self, name: str) -> Array:
        view = self._request.get_output_tensor(self._outputs[name].index).data
        array: Array = view.view(self._datatypes[name]).copy()
        return array
