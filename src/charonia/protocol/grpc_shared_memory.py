"""Requests and responses of the methods that register shared memory, as gRPC messages.

Source: Triton's system and CUDA shared memory extensions.
"""

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError

from charonia.protocol.grpc_framing import Buffer
from charonia.protocol.grpc_status import RpcError, Status
from charonia.protocol.shared_memory import CudaRegion, SystemRegion
from charonia.schema.pool import message_class


def decode_region_name(message: str, data: Buffer) -> str:
    """Return the name in a request such as `SystemSharedMemoryStatusRequest`, which is named in `message`.

    Raises:
        RpcError: INTERNAL when the bytes are no such message.
    """
    name: str = _parsed(message, data).name
    return name


def decode_system_register(data: Buffer) -> SystemRegion:
    """Return the region in a SystemSharedMemoryRegisterRequest. Raises as `decode_region_name`."""
    request = _parsed("SystemSharedMemoryRegisterRequest", data)
    return SystemRegion(request.name, request.key, request.offset, request.byte_size)


def decode_cuda_register(data: Buffer) -> CudaRegion:
    """Return the region in a CudaSharedMemoryRegisterRequest. Raises as `decode_region_name`."""
    request = _parsed("CudaSharedMemoryRegisterRequest", data)
    return CudaRegion(request.name, request.raw_handle, request.device_id, request.byte_size)


def encode_system_status(regions: Iterable[SystemRegion]) -> bytes:
    """Return a SystemSharedMemoryStatusResponse."""
    message: Any = message_class("inference.SystemSharedMemoryStatusResponse")()
    for region in regions:
        entry = message.regions[region.name]
        entry.name, entry.key, entry.offset, entry.byte_size = region
    data: bytes = message.SerializeToString()
    return data


def encode_cuda_status(regions: Iterable[CudaRegion]) -> bytes:
    """Return a CudaSharedMemoryStatusResponse."""
    message: Any = message_class("inference.CudaSharedMemoryStatusResponse")()
    for region in regions:
        entry = message.regions[region.name]
        entry.name, entry.device_id, entry.byte_size = region.name, region.device_id, region.byte_size
    data: bytes = message.SerializeToString()
    return data


def _parsed(name: str, data: Buffer) -> Any:
    try:
        return message_class(f"inference.{name}").FromString(data)  # type: ignore[arg-type]  # any buffer
    except DecodeError as error:
        raise RpcError(Status.INTERNAL, f"the bytes received are no {name}") from error
