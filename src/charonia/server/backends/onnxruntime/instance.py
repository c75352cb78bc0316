"""Runs batches in an ONNX Runtime session."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import onnxruntime

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal, invalid
from charonia.core.request import InferRequest
from charonia.core.tensor import Array
from charonia.server.backends.array_instance import ArrayInstance
from charonia.server.backends.batch import gather
from charonia.server.backends.onnxruntime.session import Run, Session, plain_error, run_of
from charonia.server.ragged.batch import compute_input, gather_flat, ragged_plan, scatter_like

Convert = Callable[[Array], Array]

_BFLOAT16 = 16
"""ONNX's number of the type."""


class OnnxRuntimeInstance(ArrayInstance):
    """An instance. Instances may share a session, which is thread-safe.

    Args:
        session: The session.
        config: The complete configuration.
        run_entries: Run configuration entries, by name and value.
    """

    def __init__(self, session: Session, config: ModelConfig, run_entries: Sequence[tuple[str, str]]) -> None:
        super().__init__(config)
        self._ragged = ragged_plan(config)
        self._texts = {plan.name for plan in (*self.inputs, *self.outputs) if plan.datatype is DataType.BYTES}
        has_bfloat16 = any(plan.datatype is DataType.BF16 for plan in (*self.inputs, *self.outputs))
        self._run: Run | None = partial(_run_with_bfloat16, session) if has_bfloat16 else run_of(session)
        self._options: object = None
        if run_entries:
            options = onnxruntime.RunOptions()
            for key, value in run_entries:
                options.add_run_config_entry(key, value)
            self._options = options

    def close(self) -> None:
        self._run = None

    def run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        """Run the session."""
        run = self._run
        if run is None:
            raise internal("the instance is closed")
        try:
            return run(names, feed, self._options)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            failure = plain_error("ONNX Runtime failed", error)
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            hint = f"the inputs were {shapes}; a network may need other sizes than its signature says"
            raise ServingError(
                failure.code, failure.message, hint=hint if failure.code is Code.INTERNAL else ""
            ) from error

    def feed(self, requests: Sequence[InferRequest]) -> dict[str, Array]:
        """Return the inputs, those that a batch computes or concatenates without a batch dimension among them."""
        feed = {}
        ragged = self._ragged
        for plan in self.inputs:
            is_flat = plan.name in ragged.inputs
            array = gather_flat(requests, plan.name) if is_flat else gather(requests, plan.name)
            if array is not None:
                feed[plan.name] = array if is_flat else plan.reshape(array, self.is_batched)
        for computed in ragged.computed:
            array = compute_input(computed.kind, self._shapes(requests, computed.source), computed.datatype)
            feed.update(dict.fromkeys(computed.names, array))
        for name in self._texts & feed.keys():
            feed[name] = to_text(name, feed[name])
        return feed

    def parts(self, name: str, array: Array, requests: Sequence[InferRequest]) -> list[Array]:
        """Return each request's part of an output, which may be as long as the request's part of an input."""
        if name in self._texts:
            array = to_bytes(array)
        source = self._ragged.scattered.get(name)
        if source is not None:
            return scatter_like(name, array, self._shapes(requests, source))
        return super().parts(name, array, requests)

    def _shapes(self, requests: Sequence[InferRequest], name: str) -> list[tuple[int, ...]]:
        """Return the shape of an input in each request, as the model sees it."""
        plan = next(plan for plan in self.inputs if plan.name == name)
        if name not in requests[0].inputs:
            raise invalid(f"input '{name}' cannot be left out: the shapes of others follow from its own")
        return [plan.reshape(request.inputs[name].array, True).shape for request in requests]


def _run_with_bfloat16(
    session: Session, names: Sequence[str], feed: Mapping[str, Array], options: object
) -> list[Array]:
    """Run a model with BF16, which numpy lacks: the bit patterns are passed as `OrtValue`s."""
    kinds = {argument.name: argument.type for argument in session.get_inputs()}
    make = onnxruntime.OrtValue
    values = {
        name: make.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), _BFLOAT16)
        if kinds.get(name) == "tensor(bfloat16)"
        else make.ortvalue_from_numpy(array)
        for name, array in feed.items()
    }
    return [_to_numpy(value) for value in session.run_with_ort_values(names, values, options)]


def _to_numpy(value: onnxruntime.OrtValue) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        array: Array = value.numpy()
        return array
    size = value.tensor_size_in_bytes()
    content = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(content, np.uint16).reshape(value.shape())


def to_text(name: str, array: Array) -> Array:
    """Decode bytes to strings: ONNX Runtime's Python API takes only those."""
    texts = np.empty(array.shape, object)
    flat = texts.reshape(-1)
    for index, element in enumerate(array.reshape(-1).tolist()):
        try:
            flat[index] = element.decode()
        except UnicodeDecodeError as error:
            raise invalid(
                f"input '{name}': element {index} is not UTF-8 (byte {error.start} is 0x{element[error.start]:02x}), "
                "which is what ONNX Runtime takes as a string",
                hint="send binary data as UINT8",
            ) from None
    return texts


def to_bytes(array: Array) -> Array:
    """Encode strings as bytes, which a tensor of the protocol has."""
    encoded = np.empty(array.shape, object)
    encoded.reshape(-1)[:] = [str(element).encode() for element in array.reshape(-1).tolist()]
    return encoded
