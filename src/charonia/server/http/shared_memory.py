"""The routes that register shared memory of clients."""

from collections.abc import Callable, Sequence

from charonia.server.http.exchange import Exchange
from charonia.server.http.routes import Handler, Route, Target
from charonia.server.http.work import Work
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.wire.json_text import dump
from charonia.wire.shared_memory import (
    decode_cuda_register,
    decode_system_register,
    describe_cuda,
    describe_system,
    disabled,
)

Describe = Callable[[RegionRegistry, str], Sequence[object]]
Unregister = Callable[[RegionRegistry, str], None]


class SharedMemoryHandlers:
    """The routes of system and of CUDA shared memory."""

    def __init__(self, regions: RegionRegistry | None, work: Work) -> None:
        """Make the handlers.

        Args:
            regions: What is registered; None where shared memory is not offered: then there are no regions.
            work: Runs what takes a while.
        """
        self._regions = regions
        self._work = work

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            *_kind_routes(
                "/v2/systemsharedmemory",
                self._status(lambda regions, name: describe_system(regions.system(name))),
                self._register_system,
                self._unregister(RegionRegistry.unregister_system),
            ),
            *_kind_routes(
                "/v2/cudasharedmemory",
                self._status(lambda regions, name: describe_cuda(regions.cuda(name))),
                self._register_cuda,
                self._unregister(RegionRegistry.unregister_cuda),
            ),
        ]

    def _status(self, describe: Describe) -> Handler:
        def handler(exchange: Exchange, target: Target) -> None:
            if self._regions is None and target.model:
                raise disabled()
            exchange.respond(200, [dump(describe(self._regions, target.model) if self._regions is not None else [])])

        return handler

    def _unregister(self, unregister: Unregister) -> Handler:
        def handler(exchange: Exchange, target: Target) -> None:
            unregister(self._offered(), target.model)
            exchange.respond(200, [])

        return handler

    def _register_system(self, exchange: Exchange, target: Target) -> None:
        regions = self._offered()

        async def answer() -> None:
            await regions.register_system(decode_system_register(target.model, await self._work.body(exchange)))
            exchange.respond(200, [])

        self._work.start(exchange, answer())

    def _register_cuda(self, exchange: Exchange, target: Target) -> None:
        regions = self._offered()

        async def answer() -> None:
            await regions.register_cuda(decode_cuda_register(target.model, await self._work.body(exchange)))
            exchange.respond(200, [])

        self._work.start(exchange, answer())

    def _offered(self) -> RegionRegistry:
        if self._regions is None:
            raise disabled()
        return self._regions


def _kind_routes(base: str, status: Handler, register: Handler, unregister: Handler) -> list[Route]:
    region = base + "/region/{region}"
    return [
        Route(base + "/status", {b"GET": status}),
        Route(region + "/status", {b"GET": status}),
        Route(region + "/register", {b"POST": register}),
        Route(region + "/unregister", {b"POST": unregister}),
        Route(base + "/unregister", {b"POST": unregister}),
    ]
