"""Tensors in shared memory with the server (`--shared-memory system`): one memory object for inputs, one for outputs.

The inputs of all requests are written once, before the run. Each step of the data has its own place for outputs, which
its requests share. The regions have unique names, and no other region is registered or unregistered.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from multiprocessing.shared_memory import SharedMemory
from uuid import uuid4

from charonia.client.sync_client import Client
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.core.metadata import ModelMetadata, TensorMetadata
from charonia.python_command import safe_path
from charonia.tools.perf.api import InputSource, MeasuredTarget
from charonia.tools.perf.sequences import Part, steps_once
from charonia.wire.query import SharedMemoryRegion
from charonia.wire.tensors import encode_tensor
from charonia.wire.transport import RequestForm, SharedTensor

SHARED_BYTES_MAX = 4 * 2**30
"""Largest memory object."""

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Locations of the tensors of every request.

    Attributes:
        inputs: Locations of the inputs by stream and step, then by name.
    """

    inputs: dict[tuple[int, int], dict[str, SharedTensor]]
    outputs: dict[tuple[int, int], dict[str, SharedTensor]]

    def form(self, part: Part, form: RequestForm) -> RequestForm:
        """Return the encoding of a request, given the one without shared memory."""
        key = part.stream, part.step
        return replace(form, shared_inputs=self.inputs[key], shared_outputs=self.outputs[key])


@contextmanager
def shared(
    client: Client, source: InputSource, target: MeasuredTarget, metadata: ModelMetadata, batches: bool
) -> Iterator[SharedLayout]:
    """Put the inputs into shared memory and register it with the server; unregister and remove it on exit.

    Args:
        batches: Whether its tensors have a batch dimension.

    Raises:
        ServingError: The server does not support shared memory, or the data does not fit.
    """
    if source.expected(0, 0) is not None:
        raise invalid("validation data: answers in shared memory are not compared", hint="leave --shared-memory out")
    parts = list(steps_once(source))
    sizes = [
        (tensor.name, _output_bytes(tensor, source.batch_size if batches else 0, target)) for tensor in metadata.outputs
    ]
    encoded = {
        (part.stream, part.step): {
            name: bytes(encode_tensor(tensor)) for name, tensor in source.request(part.stream, part.step).inputs.items()
        }
        for part in parts
    }
    unique = f"charonia_perf_{uuid4().hex[:16]}"
    names = f"{unique}_in", f"{unique}_out"
    inputs, input_bytes = _placed(
        names[0], {key: [(name, len(data)) for name, data in blobs.items()] for key, blobs in encoded.items()}
    )
    outputs, output_bytes = _placed(names[1], dict.fromkeys(encoded, sizes))
    with ExitStack() as stack:
        memory = stack.enter_context(_registered(client, names[0], input_bytes))
        stack.enter_context(_registered(client, names[1], output_bytes))
        if memory.buf is None:
            raise RuntimeError("shared memory was closed while it is in use")
        for key, blobs in encoded.items():
            for name, data in blobs.items():
                offset = inputs[key][name].offset
                memory.buf[offset : offset + len(data)] = data
        yield SharedLayout(inputs, outputs)


@contextmanager
def _registered(client: Client, name: str, byte_size: int) -> Iterator[SharedMemory]:
    if byte_size > SHARED_BYTES_MAX:
        raise invalid(f"shared memory: expected at most {SHARED_BYTES_MAX} bytes of tensors, got {byte_size}")
    with safe_path():  # the first one starts an interpreter
        memory = SharedMemory(name, create=True, size=max(byte_size, 1))
    try:
        client.register_shared_memory(SharedMemoryRegion(name, f"/{name}", max(byte_size, 1)))
        try:
            yield memory
        finally:
            # A server that exited has no regions left, and must not cost the results.
            with suppress(ServingError):
                client.unregister_shared_memory(name)
    finally:
        memory.close()
        memory.unlink()


def _placed(
    region: str, wanted: dict[tuple[int, int], list[tuple[str, int]]]
) -> tuple[dict[tuple[int, int], dict[str, SharedTensor]], int]:
    found: dict[tuple[int, int], dict[str, SharedTensor]] = {}
    offset = 0
    for key, sizes in wanted.items():
        places = found[key] = {}
        for name, size in sizes:
            places[name] = SharedTensor(region, size, offset)
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return found, offset


def _output_bytes(tensor: TensorMetadata, batch_size: int, target: MeasuredTarget) -> int:
    """Return the size of an output: by its shape, or the configured size if the shape is variable.

    Args:
        batch_size: Items in a request; 0 for a model without batch dimension.
    """
    item = tensor.shape[1:] if batch_size else tensor.shape
    if tensor.datatype is DataType.BYTES or -1 in item:
        return target.output_bytes * max(batch_size, 1)
    return prod(item) * max(batch_size, 1) * tensor.datatype.numpy.itemsize
