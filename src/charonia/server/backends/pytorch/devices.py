"""Devices of instances: whether PyTorch can use a GPU, and copies of arrays to the device and back.

Copies to and from a GPU go through pinned memory, host memory that the GPU accesses by DMA while instances compute. It
cannot be swapped out, so its total is limited. Blocks come in powers of two and are kept for the next batch. At the
limit, arrays are copied through pageable memory, which is slower; nothing waits for a block.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch

from charonia.core.errors import ServingError, unsupported
from charonia.core.tensor import Array, DeviceContent
from charonia.server.backends.block_pool import Block, BlockPool


def gpu_count() -> int:
    """Return the number of GPUs that the installed PyTorch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_gpu(instance: str, index: int, api: Any = torch.cuda) -> None:
    """Check that an instance can run on GPU `index`. Raises ServingError: UNSUPPORTED with the reason."""
    if torch.version.cuda is None and torch.version.hip is None:
        raise _missing(
            instance, f"the installed PyTorch {torch.__version__} is a build for the CPU", "install a CUDA build of it"
        )
    if not api.is_available():
        raise _missing(
            instance,
            f"CUDA {torch.version.cuda} of the installed PyTorch does not start",
            "check that this process sees a GPU, and that its driver is new enough",
        )
    if index >= api.device_count():
        raise _missing(instance, f"PyTorch sees {api.device_count()} GPUs", "correct `gpus`, or CUDA_VISIBLE_DEVICES")


def _missing(instance: str, reason: str, hint: str) -> ServingError:
    return unsupported(
        f"instance '{instance}' needs a GPU: {reason}",
        hint=f"{hint}; or use instances of KIND_CPU. `charonia doctor` shows what this machine offers",
    )


def pinned(size: int) -> Array:
    """Return new pinned memory."""
    array: Array = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return array


class ComputeDevice(Protocol):
    """Where an instance computes. Used by one thread at a time."""

    def running(self) -> AbstractContextManager[object]:
        """Return the context for all work of a batch."""

    def put(self, parts: Sequence[Array]) -> torch.Tensor:
        """Return the arrays, concatenated, as a tensor that the model may change."""

    def adopt(self, contents: Sequence[DeviceContent]) -> torch.Tensor | None:
        """Return contents of GPUs, concatenated without a copy to the CPU; None where they need one."""

    def wait(self) -> None:
        """Return when all work that was started is done."""

    @property
    def keeps(self) -> bool:
        """Whether outputs may stay on the device."""

    def take(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        """Return the tensors as arrays, in memory that later batches do not overwrite."""

    def trim(self) -> None:
        """Release cached memory."""


def joined(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if len(parts) > 1 else np.array(parts[0], order="C")


class CpuDevice:
    """The memory of the CPU."""

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()

    def put(self, parts: Sequence[Array]) -> torch.Tensor:
        """Copy: received bytes may have other readers, and a model may change its inputs."""
        return torch.from_numpy(joined(parts))

    def adopt(self, contents: Sequence[DeviceContent]) -> torch.Tensor | None:
        return None

    @property
    def keeps(self) -> bool:
        """False: outputs are arrays."""
        return False

    def wait(self) -> None:
        """Do nothing: calls on the CPU are synchronous."""

    def take(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        """Return views; a module that chooses its own devices may return tensors on a GPU."""
        return [tensor.cpu().contiguous().numpy() for tensor in tensors]

    def trim(self) -> None:
        """Do nothing."""


class GpuDevice:
    """A GPU, with a stream of its own, so that copies of one instance overlap with computation of another.

    Inputs are gathered in pinned memory; while one is copied to the GPU, the next is gathered. Outputs are copied once,
    to pinned memory that belongs to the response until it has been sent.

    Args:
        api: `torch.cuda`, or a replacement in tests.
    """

    def __init__(self, device: torch.device, pool: BlockPool, api: Any = torch.cuda) -> None:
        self._device = device
        self._pool = pool
        self._api = api
        self._stream = api.Stream(device)
        self._busy: list[Block] = []

    def running(self) -> AbstractContextManager[object]:
        """Make the stream current in this thread."""
        entered: AbstractContextManager[object] = self._api.stream(self._stream)
        return entered

    def put(self, parts: Sequence[Array]) -> torch.Tensor:
        """Copy through pinned memory; the copy may continue after this returns."""
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:]) if len(parts) > 1 else parts[0].shape
        datatype = parts[0].dtype
        size = int(np.prod(shape)) * datatype.itemsize
        block = self._pool.take(size)
        if block is None or size == 0:
            if block is not None:
                self._pool.release(block)
            return torch.from_numpy(joined(parts)).to(self._device)
        self._busy.append(block)
        host = block.array(size).view(datatype).reshape(shape)
        if len(parts) > 1:
            np.concatenate(parts, out=host)
        else:
            host[...] = parts[0]
        return torch.from_numpy(host).to(self._device, non_blocking=True)

    def adopt(self, contents: Sequence[DeviceContent]) -> torch.Tensor | None:
        """Copy within the GPU, or from another one: the model may change its inputs."""
        natives: list[Any] = [content.native for content in contents]
        own = [n if isinstance(n, torch.Tensor) else torch.utils.dlpack.from_dlpack(n) for n in natives]
        tensors = [tensor.to(self._device, non_blocking=True) for tensor in own]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0].clone()

    @property
    def keeps(self) -> bool:
        return True

    def wait(self) -> None:
        """Wait for the stream, then release the pinned memory of the inputs."""
        try:
            self._stream.synchronize()
        finally:
            for block in self._busy:
                self._pool.release(block)
            self._busy.clear()

    def take(self, tensors: Sequence[torch.Tensor]) -> list[Array]:
        """Start all copies, then wait for them."""
        taken = [self._begin_copy(tensor.contiguous()) for tensor in tensors]
        self._stream.synchronize()
        return taken

    def _begin_copy(self, tensor: torch.Tensor) -> Array:
        size = tensor.numel() * tensor.element_size()
        block = self._pool.take(size) if size else None
        if block is None:
            return tensor.cpu().numpy()
        raw = block.array(size)
        # Views keep it alive: the block is free when the last one is gone.
        weakref.finalize(raw, self._pool.release, block)
        host = raw.view(torch.empty(0, dtype=tensor.dtype).numpy().dtype).reshape(tuple(tensor.shape))
        torch.from_numpy(host).copy_(tensor, non_blocking=True)
        return host

    def trim(self) -> None:
        """Return cached memory of the GPU to the driver."""
        self._api.empty_cache()


class TorchContent:
    """An output that stays on its GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def native(self) -> object:
        return self._tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def to_host(self) -> Array:
        """Return a copy in the memory of the CPU; for BF16 its bits."""
        tensor = self._tensor.cpu().contiguous()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(np.uint16)
        return tensor.numpy()
