"""The methods that register shared memory of clients."""

from collections.abc import Awaitable, Callable

from charonia.server.facade import Services
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.wire import grpc_messages as messages
from charonia.wire.grpc_framing import Buffer
from charonia.wire.shared_memory import disabled


def system_status(services: Services, message: Buffer) -> bytes:
    """Answer SystemSharedMemoryStatus."""
    name = messages.decode_region_name("SystemSharedMemoryStatusRequest", message)
    return messages.encode_system_status(_offered(services).system(name)) if name or services.regions else b""


def cuda_status(services: Services, message: Buffer) -> bytes:
    """Answer CudaSharedMemoryStatus."""
    name = messages.decode_region_name("CudaSharedMemoryStatusRequest", message)
    return messages.encode_cuda_status(_offered(services).cuda(name)) if name or services.regions else b""


def system_unregister(services: Services, message: Buffer) -> bytes:
    """Answer SystemSharedMemoryUnregister."""
    _offered(services).unregister_system(messages.decode_region_name("SystemSharedMemoryUnregisterRequest", message))
    return b""


def cuda_unregister(services: Services, message: Buffer) -> bytes:
    """Answer CudaSharedMemoryUnregister."""
    _offered(services).unregister_cuda(messages.decode_region_name("CudaSharedMemoryUnregisterRequest", message))
    return b""


async def system_register(services: Services, message: Buffer) -> bytes:
    """Answer SystemSharedMemoryRegister."""
    await _offered(services).register_system(messages.decode_system_register(message))
    return b""


async def cuda_register(services: Services, message: Buffer) -> bytes:
    """Answer CudaSharedMemoryRegister."""
    await _offered(services).register_cuda(messages.decode_cuda_register(message))
    return b""


ANSWERS: dict[str, Callable[[Services, Buffer], bytes]] = {
    "SystemSharedMemoryStatus": system_status,
    "CudaSharedMemoryStatus": cuda_status,
    "SystemSharedMemoryUnregister": system_unregister,
    "CudaSharedMemoryUnregister": cuda_unregister,
}
"""What is answered at once, by method."""

WORKS: dict[str, Callable[[Services, Buffer], Awaitable[bytes]]] = {
    "SystemSharedMemoryRegister": system_register,
    "CudaSharedMemoryRegister": cuda_register,
}
"""What takes a while, by method."""


def _offered(services: Services) -> RegionRegistry:
    if services.regions is None:
        raise disabled()
    return services.regions
