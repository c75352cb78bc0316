"""Checks a request against a model's configuration before it is queued."""

from collections.abc import Hashable, Iterable, Sequence
from typing import NoReturn, Protocol

from charonia.config.model import ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.core.request import InferRequest
from charonia.server.ragged.configuration import padding_plan


class _InputSpec:
    """An input's configuration, prepared for checks of requests."""

    __slots__ = ("datatype", "dims", "is_fixed", "is_free", "name", "optional")

    def __init__(self, config: ModelInput, is_free: bool) -> None:
        if config.data_type is None:
            raise ValueError(f"input {config.name!r} has no data type: the configuration was not validated")
        self.name = config.name
        self.datatype: DataType = config.data_type
        self.dims = config.dims
        self.is_fixed = -1 not in config.dims
        self.is_free = is_free  # whether requests of different shapes may share a batch
        self.optional = config.optional


class RequestCheck(Protocol):
    """Checks requests."""

    def check(self, request: InferRequest) -> tuple[int, Hashable]:
        """Return the request's batch size and its shape key for the scheduler.

        Raises:
            ServingError: The request is invalid.
        """


class Admission:
    """The checks of one model version, prepared once."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._batch_size_max = config.max_batch_size
        padding = padding_plan(config)
        free = padding.free if padding is not None else frozenset()
        self._computed = padding.companions if padding is not None else frozenset()
        self._inputs = [_InputSpec(i, i.allow_ragged_batch or i.name in free) for i in config.input]
        self._by_name = {spec.name: spec for spec in self._inputs}
        self._has_optional = any(spec.optional for spec in self._inputs)
        self._outputs = frozenset(o.name for o in config.output)

    def check(self, request: InferRequest) -> tuple[int, Hashable]:
        """Return the request's batch size (1 for a model without batching) and the key of its variable shapes.

        Requests with equal keys may share a batch.

        Raises:
            ServingError: INVALID_ARG; the message starts with the request's id, except for an unknown name.
        """
        for output in request.outputs:
            if output.name not in self._outputs:
                raise invalid(
                    f"unexpected inference output '{output.name}' for model '{self._model}'",
                    hint=f"its outputs are {sorted(self._outputs)}",
                )
        inputs = request.inputs
        if len(inputs) != len(self._inputs) and not self._has_optional:
            self._refuse_names(request)
        batches = self._batch_size_max > 0
        batch_size = 0
        key: list[Hashable] | None = None
        for spec in self._inputs:
            tensor = inputs.get(spec.name)
            if tensor is None:
                if not spec.optional:
                    self._refuse_names(request)
                continue
            if tensor.datatype is not spec.datatype:
                _refuse(
                    request,
                    f"inference input '{spec.name}' data-type is '{tensor.datatype.wire}', but model '{self._model}' "
                    f"expects '{spec.datatype.wire}'",
                )
            shape = tensor.shape
            if batches:
                if not shape:
                    _refuse(
                        request,
                        f"input '{spec.name}' has no shape but model requires batch dimension for '{self._model}'",
                    )
                if batch_size == 0:
                    batch_size = shape[0]
                elif shape[0] != batch_size:
                    _refuse(request, f"input '{spec.name}' batch size does not match other inputs for '{self._model}'")
                shape = shape[1:]
            if spec.is_fixed:
                if shape != spec.dims:
                    self._refuse_shape(request, spec, tensor.array.shape)
            else:
                if len(shape) != len(spec.dims) or any(d not in (-1, s) for d, s in zip(spec.dims, shape, strict=True)):
                    self._refuse_shape(request, spec, tensor.array.shape)
                if not spec.is_free:
                    if key is None:
                        key = []
                    key.append(shape)
        if self._has_optional:
            self._check_optional(request)
            key = [*(key or ()), frozenset(inputs) - self._computed]
        if batches and not 1 <= batch_size <= self._batch_size_max:
            self._check_batch_size(request, batch_size)
        return batch_size or 1, (tuple(key) if key is not None else None)

    def _check_batch_size(self, request: InferRequest, batch_size: int) -> None:
        if batch_size > self._batch_size_max:
            _refuse(
                request,
                f"inference request batch-size must be <= {self._batch_size_max} for '{self._model}', got {batch_size}",
                hint="max_batch_size in the configuration sets the limit, --max-batch-size that of files; "
                "or send several requests",
            )
        if batch_size < 1 and request.inputs:
            _refuse(request, f"inference request batch-size must be >= 1 for '{self._model}', got {batch_size}")

    def _check_optional(self, request: InferRequest) -> None:
        if any(name not in self._by_name for name in request.inputs):
            self._refuse_names(request)

    def _refuse_names(self, request: InferRequest) -> NoReturn:
        names = request.inputs.keys()
        required = sum(not s.optional for s in self._inputs)
        hint = f"its inputs are {[s.name for s in self._inputs]}"
        unexpected = next((name for name in names if name not in self._by_name), None)
        if unexpected is not None and required <= len(names) <= len(self._inputs):
            raise invalid(f"unexpected inference input '{unexpected}' for model '{self._model}'", hint=hint)
        missing = [s.name for s in self._inputs if not s.optional and s.name not in request.inputs]
        expected = (
            f"number of inputs between {required} and {len(self._inputs)}"
            if self._has_optional
            else f"{len(self._inputs)} inputs"
        )
        _refuse(
            request,
            f"expected {expected} but got {len(names)} inputs for model '{self._model}'. "
            f"Got input(s) {_listed(names)}, but missing required input(s) {_listed(missing)}. "
            "Please provide all required input(s).",
            hint=hint if unexpected is not None else "",
        )

    def _refuse_shape(self, request: InferRequest, spec: _InputSpec, shape: tuple[int, ...]) -> NoReturn:
        has_batch = self._batch_size_max > 0
        dims = (-1, *spec.dims) if has_batch else tuple(spec.dims)
        _refuse(
            request,
            f"unexpected shape for input '{spec.name}' for model '{self._model}'. "
            f"Expected {_dims(dims)}, got {_dims(shape)}",
            hint=_shape_hint(dims, shape, has_batch=has_batch),
        )


def _shape_hint(dims: tuple[int, ...], shape: tuple[int, ...], *, has_batch: bool) -> str:
    """Return the problem of a shape."""
    if has_batch and _fits(dims[1:], shape):
        return f"the first dimension is the batch: {_dims((1, *shape))} is one row"
    if len(dims) != len(shape):
        return f"it has {len(dims)} dimensions" + (", the first for the batch" if has_batch else "")
    if len(dims) > 2:
        rest = len(dims) - 3
        for order, words in ((-1, "channels first"), (rest, "channels last")):
            # The dimension of the channels moves; the others keep their order.
            others = [*shape]
            moved = others.pop(order)
            others.insert(rest if order == -1 else len(others), moved)
            if _fits(dims, tuple(others)):
                return f"the model takes {words}: transpose the array to {_dims(others)}"
    sizes = enumerate(zip(dims, shape, strict=True))
    return ", ".join(f"dimension {index} is {dim}, not {size}" for index, (dim, size) in sizes if dim not in (-1, size))


def _fits(dims: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(dims) == len(shape) and all(dim in (-1, size) for dim, size in zip(dims, shape, strict=True))


def _dims(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"


def _refuse(request: InferRequest, message: str, *, hint: str = "") -> NoReturn:
    raise with_request_id(invalid(message, hint=hint), request)


def with_request_id(error: ServingError, request: InferRequest) -> ServingError:
    """Return the error with the request's id at the start of its message, where clients expect it."""
    message = f"[request id: {request.id or '<id_unknown>'}] {error.message}"
    return ServingError(error.code, message, hint=error.hint, is_unexecuted=error.is_unexecuted)


def _listed(names: Iterable[str]) -> str:
    return f"[{','.join(map(repr, names))}]"
