"""Runs batches in an ONNX Runtime session."""

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat

import numpy as np
import onnxruntime

from charonia.config.model import ModelConfig
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal, invalid
from charonia.core.request import InferRequest
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import Execution, Outputs, Result
from charonia.server.backends.batch import batch_sizes, gather, input_plans, output_plans, scatter
from charonia.server.backends.onnxruntime.session import Run, Session, plain_error, run_of
from charonia.server.ragged.batch import compute_input, gather_flat, ragged_plan, scatter_like

Convert = Callable[[Array], Array]

_BFLOAT16 = 16
"""ONNX's number of the type."""


class OnnxRuntimeInstance:
    """An instance. Instances may share a session, which is thread-safe.

    Args:
        session: The session.
        config: The complete configuration.
        run_entries: Run configuration entries, by name and value.
    """

    def __init__(self, session: Session, config: ModelConfig, run_entries: Sequence[tuple[str, str]]) -> None:
        self._is_batched = config.max_batch_size > 0
        self._inputs = input_plans(config)
        self._outputs = output_plans(config)
        self._ragged = ragged_plan(config)
        self._names = tuple(plan.name for plan in self._outputs)
        self._by_name = {plan.name: plan for plan in self._outputs}
        has_bfloat16 = any(plan.datatype is DataType.BF16 for plan in (*self._inputs, *self._outputs))
        self._run: Run | None = partial(_run_with_bfloat16, session) if has_bfloat16 else run_of(session)
        self._options: object = None
        if run_entries:
            options = onnxruntime.RunOptions()
            for key, value in run_entries:
                options.add_run_config_entry(key, value)
            self._options = options

    def execute(self, requests: Sequence[InferRequest]) -> Execution:
        """Run the requests as one batch; if it fails, each one alone, so that a bad request fails alone."""
        if len(requests) == 1 or self._is_batched:
            try:
                return self._execute(requests)
            except ServingError:
                if len(requests) == 1:
                    raise
        start = time.monotonic_ns()
        results = [self._execute_alone(request) for request in requests]
        return Execution(results, start, time.monotonic_ns())

    def close(self) -> None:
        """Release the session."""
        self._run = None

    def _execute_alone(self, request: InferRequest) -> Result:
        try:
            return self._execute([request]).results[0]
        except ServingError as error:
            return error

    def _execute(self, requests: Sequence[InferRequest]) -> Execution:
        run = self._run
        if run is None:
            raise internal("the instance is closed")
        feed = self._feed(requests)
        names = self._wanted(requests)
        input_end_ns = time.monotonic_ns()
        try:
            arrays = run(names, feed, self._options)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            failure = plain_error("ONNX Runtime failed", error)
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            hint = f"the inputs were {shapes}; a network may need other sizes than its signature says"
            raise ServingError(
                failure.code, failure.message, hint=hint if failure.code is Code.INTERNAL else ""
            ) from error
        output_start_ns = time.monotonic_ns()
        return Execution(self._answers(requests, names, arrays), input_end_ns, output_start_ns)

    def _feed(self, requests: Sequence[InferRequest]) -> dict[str, Array]:
        feed = {}
        ragged = self._ragged
        for plan in self._inputs:
            is_flat = plan.name in ragged.inputs
            array = gather_flat(requests, plan.name) if is_flat else gather(requests, plan.name)
            if array is not None:
                if not is_flat and plan.target is not None:
                    array = plan.reshape(array, self._is_batched)
                feed[plan.name] = _to_text(plan.name, array) if plan.datatype is DataType.BYTES else array
        for computed in ragged.computed:
            array = compute_input(computed.kind, self._shapes(requests, computed.source), computed.datatype)
            feed.update(dict.fromkeys(computed.names, array))
        return feed

    def _shapes(self, requests: Sequence[InferRequest], name: str) -> list[tuple[int, ...]]:
        """Return the shape of an input in each request, as the model sees it."""
        plan = next(plan for plan in self._inputs if plan.name == name)
        if name not in requests[0].inputs:
            raise invalid(f"input '{name}' cannot be left out: the shapes of others follow from its own")
        return [plan.reshape(request.inputs[name].array, True).shape for request in requests]

    def _wanted(self, requests: Sequence[InferRequest]) -> tuple[str, ...]:
        """Return the outputs that at least one request asks for; the model does not compute the others."""
        if len(self._names) == 1:
            return self._names
        asked: set[str] = set()
        for request in requests:
            if not request.outputs:
                return self._names
            asked.update(output.name for output in request.outputs)
        return tuple(name for name in self._names if name in asked)

    def _answers(
        self, requests: Sequence[InferRequest], names: Sequence[str], arrays: Sequence[Array]
    ) -> list[Outputs]:
        sizes = batch_sizes(requests) if self._is_batched else None
        answers: list[list[Tensor]] = list(map(list, repeat((), len(requests))))
        for name, array in zip(names, arrays, strict=True):
            plan = self._by_name[name]
            datatype = plan.datatype
            if datatype is DataType.BYTES:
                array = _to_bytes(array)
            source = self._ragged.scattered.get(name)
            if source is not None:
                parts = scatter_like(name, array, self._shapes(requests, source))
            else:
                if plan.target is not None:
                    array = plan.reshape(array, self._is_batched)
                parts = scatter(name, array, sizes) if sizes is not None else [array]
            for answer, part in zip(answers, parts, strict=True):
                answer.append(Tensor(name, datatype, part))
        return list(map(Outputs, answers))


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


def _to_text(name: str, array: Array) -> Array:
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


def _to_bytes(array: Array) -> Array:
    encoded = np.empty(array.shape, object)
    encoded.reshape(-1)[:] = [str(element).encode() for element in array.reshape(-1).tolist()]
    return encoded
