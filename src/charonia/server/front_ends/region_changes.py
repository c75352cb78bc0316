"""Changes of the shared memory of clients, which are made in the engine and in all front ends, or nowhere."""

from collections.abc import Awaitable, Callable
from typing import Any

from charonia.core.errors import ServingError
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.wire.shared_memory import CudaRegion, SystemRegion, disabled


async def change_regions(
    regions: RegionRegistry | None, tell_all: Callable[..., Awaitable[None]], question: str, arguments: list[Any]
) -> None:
    """Register a region or forget it, here and in all front ends.

    Args:
        regions: The regions of the engine; None where shared memory is off.
        tell_all: Tells all front ends; raises the first refusal.
        question: What a front end asks for, such as "register_system".
        arguments: Its arguments.

    Raises:
        ServingError: It is refused. Then it is refused everywhere.
    """
    if regions is None:
        raise disabled()
    match question:
        case "unregister_system":
            await regions.unregister_system(*arguments)
        case "unregister_cuda":
            await regions.unregister_cuda(*arguments)
        case "register_system":
            await regions.register_system(SystemRegion(*arguments))
        case _:
            await regions.register_cuda(CudaRegion(*arguments))
    try:
        await tell_all(question, *arguments)
    except ServingError:
        undo = question.replace("register", "unregister")
        if question != undo and not question.startswith("un"):
            await change_regions(regions, tell_all, undo, arguments[:1])
        raise
