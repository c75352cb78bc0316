"""Runs batches of a PyTorch model."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch

from charonia.config.model import ModelConfig, ModelInput
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal, invalid, unavailable
from charonia.core.request import DeviceRequest, InferRequest
from charonia.core.tensor import Array, DeviceTensor, Tensor
from charonia.server.backends.api import Execution, Outputs
from charonia.server.backends.array_backend import BatchInstance, decoded
from charonia.server.backends.batch import TensorPlan, batch_sizes, scatter
from charonia.server.backends.pytorch.devices import ComputeDevice, TorchContent
from charonia.server.backends.pytorch.naming import MISSING, ParameterKind, ResultNames
from charonia.server.backends.pytorch.program import (
    PROTOCOL,
    TORCH,
    DeviceLostError,
    Program,
    RunPlan,
    plain_error,
)

_LAYOUT_DIMENSIONS = 4


class PyTorchInstance(BatchInstance):
    """An instance. Raises ServingError: INVALID_ARG when the inputs do not fit the model."""

    def __init__(
        self, name: str, program: Program, config: ModelConfig, plan: RunPlan, device: ComputeDevice, threads: int
    ) -> None:
        super().__init__(config)
        self._name = name
        self._program: Program | None = program
        self._plan = plan
        self._device = device
        self._threads = threads
        self._arguments = program.interface.bind([plan.name for plan in self.inputs])
        self._results = ResultNames([plan.name for plan in self.outputs])
        kinds = program.interface.kinds(self._arguments)
        for index, tensor in enumerate(config.input):
            if tensor.optional and index in self._arguments.positional:
                raise invalid(f"input '{tensor.name}' has no default in the model, so it cannot be optional")
            _check_kind(tensor, kinds.get(index, ParameterKind.TENSOR), self.is_batched)
        self._numbers = {config.input[i].name for i, kind in kinds.items() if kind is ParameterKind.NUMBER}

    def close(self) -> None:
        super().close()
        self._program = None

    def _execute(self, requests: Sequence[InferRequest]) -> Execution:
        program = self._program
        if program is None:
            raise internal(f"instance '{self._name}' is closed")
        if self.problem:
            raise unavailable(f"instance '{self._name}' cannot run: {self.problem}")
        torch.set_num_threads(self._threads)
        try:
            with self._guard(), self._device.running():
                return self._run(program, requests)
        except ServingError:
            raise
        except Exception as error:  # PyTorch's errors have no common base class
            raise self._failed(error) from error

    def _run(self, program: Program, requests: Sequence[InferRequest]) -> Execution:
        device = self._device
        try:
            args, kwargs = self._arguments.fill([self._input(plan, requests) for plan in self.inputs])
            input_end_ns = time.monotonic_ns()
            result = program.call(*args, **kwargs)
        finally:
            device.wait()
        output_start_ns = time.monotonic_ns()
        answers = self._answers(requests, program, self._results.select(result))
        if self._plan.cleans_cache:
            device.trim()
        return Execution(answers, input_end_ns, output_start_ns)

    def _guard(self) -> AbstractContextManager[object]:
        return torch.inference_mode() if self._plan.uses_inference_mode else torch.no_grad()

    def _failed(self, error: Exception) -> ServingError:
        """Return the error to answer with, and note a lost device."""
        found = plain_error("the model failed", error)
        if isinstance(found, DeviceLostError):
            self.problem = found.message
        elif found.code is Code.UNAVAILABLE:
            self._device.trim()
        return found

    def _input(self, plan: TensorPlan, requests: Sequence[InferRequest]) -> Any:
        if plan.name not in requests[0].inputs:
            return MISSING
        tensor = self._adopted(plan, requests)
        if tensor is not None:
            return self._converted(tensor)
        parts = [request.inputs[plan.name].array for request in requests]
        if plan.datatype is DataType.BYTES:
            return [text for part in parts for text in decoded(plan.name, part, "PyTorch")]
        if plan.name in self._numbers:
            return _number(plan.name, parts[0])
        tensor = self._device.put([plan.reshape(part, self.is_batched) for part in parts])
        return self._converted(tensor.view(torch.bfloat16) if plan.datatype is DataType.BF16 else tensor)

    def _adopted(self, plan: TensorPlan, requests: Sequence[InferRequest]) -> torch.Tensor | None:
        """Return an input that lies on a GPU in every request; None for arrays."""
        if plan.name in self._numbers:
            return None
        tensors = [request.inputs[plan.name] for request in requests]
        contents = [tensor.content for tensor in tensors if isinstance(tensor, DeviceTensor)]
        if len(contents) != len(tensors):
            return None
        tensor = self._device.adopt(contents)
        # The plan uses only `shape` and `reshape`, which tensors share with arrays.
        return None if tensor is None else cast(torch.Tensor, plan.reshape(cast(Array, tensor), self.is_batched))

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input in the model's precision and layout."""
        precision = self._plan.precision
        if precision is not None and tensor.is_floating_point():
            tensor = tensor.to(TORCH[precision])
        if self._plan.is_channels_last and tensor.dim() == _LAYOUT_DIMENSIONS:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def _answers(self, requests: Sequence[InferRequest], program: Program, values: Sequence[Any]) -> list[Outputs]:
        wanted = self._wanted(requests)
        tensors = []
        for plan, value in zip(self.outputs, values, strict=True):
            if plan.name in wanted and plan.datatype is not DataType.BYTES:
                tensors.append(self._output(plan, value, program))
        stays = self._device.keeps and all(type(request) is DeviceRequest for request in requests)
        if stays:
            self._device.wait()  # their readers use another stream, or are in another process
        # Where outputs stay, tensors replace arrays: both have a shape, slices and `reshape`.
        arrays = iter(cast(list[Array], tensors) if stays else self._device.take(tensors))
        sizes = batch_sizes(requests) if self.is_batched else None
        columns = []
        for plan, value in zip(self.outputs, values, strict=True):
            if plan.name not in wanted:
                continue
            if plan.datatype is DataType.BYTES:
                array = _strings(plan, value, is_batched=self.is_batched)
            else:
                array = next(arrays)
                if plan.datatype is DataType.BF16 and not stays:
                    array = array.view(np.uint16)
            array = plan.reshape(array, self.is_batched)
            parts = scatter(plan.name, array, sizes) if sizes is not None else [array]
            columns.append([_answer(plan, part) for part in parts])
        return [Outputs(list(tensors)) for tensors in zip(*columns, strict=True)]

    def _output(self, plan: TensorPlan, value: Any, program: Program) -> torch.Tensor:
        """Return a result as a tensor of the configured datatype that later calls do not change."""
        if isinstance(value, (bool, int, float)):
            value = torch.tensor(value, dtype=TORCH[plan.datatype])
        if not isinstance(value, torch.Tensor):
            raise internal(f"output '{plan.name}': expected a tensor, the model returned {_kind(value)}")
        if value.layout != torch.strided or value.is_quantized:
            value = value.dequantize() if value.is_quantized else value.to_dense()
        if value.dtype != TORCH[plan.datatype]:
            if self._plan.precision is None or value.dtype != TORCH[self._plan.precision]:
                found = PROTOCOL.get(value.dtype)
                raise internal(
                    f"output '{plan.name}': configuration expects datatype {plan.datatype.config}, "
                    f"model provides {found.config if found else value.dtype}"
                )
            value = value.to(TORCH[plan.datatype])
        if value.untyped_storage().data_ptr() in program.storages:
            value = value.clone()
        tensor: torch.Tensor = value.detach().resolve_conj().resolve_neg()
        return tensor.view(torch.int16) if plan.datatype is DataType.BF16 else tensor


def _check_kind(tensor: ModelInput, kind: ParameterKind, is_batched: bool) -> None:
    """Check that strings, and only strings, go to arguments of strings, and that batched requests share no number."""
    is_text = tensor.data_type is DataType.BYTES
    if is_text != (kind is ParameterKind.STRINGS):
        datatype = tensor.data_type.config if tensor.data_type else "none"
        raise invalid(f"input '{tensor.name}' is {datatype}: the model's argument takes {kind.value}")
    if is_batched and kind is ParameterKind.NUMBER:
        raise invalid(
            f"input '{tensor.name}': the model's argument takes {kind.value}, which requests of a batch cannot share",
            hint="set max_batch_size to 0",
        )


def _answer(plan: TensorPlan, part: Any) -> Tensor:
    if not isinstance(part, torch.Tensor):
        return Tensor(plan.name, plan.datatype, part)
    own = part.view(torch.bfloat16) if plan.datatype is DataType.BF16 else part
    return DeviceTensor(plan.name, plan.datatype, TorchContent(own))


def _number(name: str, array: Array) -> int | float | bool:
    if array.size != 1:
        raise invalid(f"input '{name}': the model takes one number, got an array of shape {list(array.shape)}")
    number: int | float | bool = array.reshape(-1)[0].item()
    return number


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _strings(plan: TensorPlan, value: object, *, is_batched: bool) -> Array:
    """Return a list of strings as a string tensor: one for each row of a batch."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise internal(f"output '{plan.name}': expected a list of strings, the model returned {_kind(value)}")
    array = np.empty(len(texts), object)
    array[:] = [text.encode() for text in texts]
    return array.reshape(-1, 1) if is_batched and plan.source else array
