"""The services beside an engine in another process, as a front end offers them."""

import logging
import time
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, cast

from charonia.core.errors import ServingError, internal
from charonia.core.trace import RemoteParent, TraceLevel, TraceTree
from charonia.core.usage import TokenUsage
from charonia.server.facade import Document, LogControl, Services
from charonia.server.front_ends.load_sender import LOAD_AGE_NS
from charonia.server.front_ends.records import plain
from charonia.server.front_ends.state import EngineState
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.wire.log_settings import LogOptions
from charonia.wire.orca import Load
from charonia.wire.shared_memory import CudaRegion, SystemRegion
from charonia.wire.trace_settings import Change

_log = logging.getLogger(__name__)


class Asked(Protocol):
    """An engine in another process, as far as services need it."""

    def lend(self, size: int) -> memoryview | None:
        """Return memory to receive a request in. See `RemoteEngine.lend`."""
        ...

    @property
    def state(self) -> EngineState:
        """What is known of its state."""
        ...

    @property
    def load(self) -> Load:
        """Its latest report of its load."""
        ...

    async def ask(self, question: str, *arguments: object) -> Any:
        """Ask it. Raises as `Link.ask`."""
        ...

    def want_load(self) -> None:
        """Let it report its load now, and with responses. See `RemoteEngine.want_load`."""
        ...


class SharedRegions(RegionRegistry):
    """The regions of all front ends, mapped in this one. A registration is in force in all of them, or in none."""

    def __init__(self, bytes_max: int, engine: Asked) -> None:
        super().__init__(bytes_max)
        self._engine = engine

    async def register_system(self, region: SystemRegion) -> None:
        await self._engine.ask("register_system", *region)

    async def register_cuda(self, region: CudaRegion) -> None:
        await self._engine.ask("register_cuda", *region)

    async def unregister_system(self, name: str = "") -> None:
        await self._engine.ask("unregister_system", name)

    async def unregister_cuda(self, name: str = "") -> None:
        await self._engine.ask("unregister_cuda", name)

    async def take(self, change: str, arguments: list[Any]) -> None:
        """Apply a change here that the engine applies in every process."""
        match change:
            case "register_system":
                await super().register_system(SystemRegion(*arguments))
            case "register_cuda":
                await super().register_cuda(CudaRegion(*arguments))
            case "unregister_system":
                await super().unregister_system(*arguments)
            case "regions":
                system, cuda = arguments
                await self._follow([SystemRegion(*each) for each in system], [CudaRegion(*each) for each in cuda])
            case "unregister_cuda":
                await super().unregister_cuda(*arguments)
            case _:
                raise internal(f"there is no change '{change}'")

    async def _follow(self, system: list[SystemRegion], cuda: list[CudaRegion]) -> None:
        """Replace the regions by these. Those that are here already stay mapped: requests may be using them."""
        for known in self.system():
            if known not in system:
                await super().unregister_system(known.name)
        for memory in self.cuda():
            if memory not in cuda:
                await super().unregister_cuda(memory.name)
        regions: list[SystemRegion | CudaRegion] = [*system, *cuda]
        for region in regions:
            if region in (*self.system(), *self.cuda()):
                continue
            try:
                if isinstance(region, SystemRegion):
                    await super().register_system(region)
                else:
                    await super().register_cuda(region)
            except ServingError as error:  # its owner may have removed it meanwhile
                _log.warning("this front end cannot use shared memory region '%s': %s", region.name, error)


class SharedLog:
    """The log of all processes of the server.

    Attributes:
        own: The log of this process.
    """

    def __init__(self, own: LogControl, engine: Asked) -> None:
        self.own = own
        self._engine = engine

    @property
    def options(self) -> LogOptions:
        return self.own.options

    async def change(self, options: LogOptions) -> None:
        await self._engine.ask("log", plain(options))


class _NoIds:
    """Numbers of traces that the engine will number."""

    def trace_id(self) -> int:
        return 0

    def span_id(self) -> int:
        return 0


class RemoteTracing:
    """Tracing by the engine: it picks the requests, and a trace here only collects the events of this front end."""

    def __init__(self, engine: Asked, *, can_trace: bool) -> None:
        self.can_trace = can_trace
        self._engine = engine
        self._ids = _NoIds()

    @property
    def sampler(self) -> "RemoteTracing | None":
        """What makes traces; None while the engine would trace no request."""
        return self if self._engine.state.readiness.is_tracing else None

    def sample(self, model: str, remote: RemoteParent | None = None) -> TraceTree:
        return TraceTree(TraceLevel.TIMESTAMPS, self._ids, _dropped, remote)

    async def settings(self, model: str = "") -> dict[str, list[str]]:
        return cast(dict[str, list[str]], await self._engine.ask("trace_settings", model))

    async def change(self, model: str, change: Change) -> None:
        """Change the settings of a model, or with "" of the server."""
        numbers = {name: None if value is None else int(value) for name, value in change.items()}
        await self._engine.ask("change_trace", model, numbers)


class RemoteTraffic:
    """Traffic between versions, which the engine divides."""

    def __init__(self, engine: Asked) -> None:
        self._engine = engine

    @property
    def sticky(self) -> Mapping[str, tuple[bytes, ...]]:
        return self._engine.state.sticky

    async def show(self, model: str) -> Document:
        return cast(Document, await self._engine.ask("split", model))

    async def change(self, model: str, document: dict[str, object]) -> Document:
        return cast(Document, await self._engine.ask("change_split", model, document))

    async def reset(self, model: str) -> Document:
        return cast(Document, await self._engine.ask("reset_split", model))


class RemoteLoad:
    """The load of an engine in another process, as it reports it with its responses."""

    def __init__(self, engine: Asked) -> None:
        self._engine = engine
        self._wanted_ns = 0

    def want(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns - self._wanted_ns >= LOAD_AGE_NS:
            self._wanted_ns = now_ns
            self._engine.want_load()

    def latest(self) -> Load:
        return self._engine.load

    async def report(self) -> Load:
        return cast(Load, await self._engine.ask("load_report"))


def _dropped(tree: TraceTree) -> None:
    """The front end is done with a trace whose events have been sent."""


def services_of(
    engine: Asked, offers: frozenset[str], regions: SharedRegions | None, log: LogControl | None
) -> Services:
    """Return the services that the engine offers.

    Args:
        engine: The engine.
        offers: Their names.
        regions: The regions of all front ends; None where shared memory is off.
        log: The log of all processes; None where it cannot be changed.
    """

    async def rate_limits() -> Document:
        return cast(Document, await engine.ask("rate_limits"))

    async def sequences(name: str, version: str) -> Document:
        return cast(Document, await engine.ask("sequences", name, version))

    async def explain(name: str, version: str) -> Document:
        return cast(Document, await engine.ask("explain", name, version))

    async def folders(name: str, version: str) -> list[str]:
        return cast(list[str], await engine.ask("folders", name, version))

    async def count_tokens(name: str, usage: TokenUsage) -> None:
        await engine.ask("count_tokens", name, *usage)

    def demand(name: str, version: str) -> Awaitable[None] | None:
        configs = engine.state.directory.configs
        return None if (name, "") in configs or (name, version) in configs else engine.ask("demand", name, version)

    return Services(
        regions=regions,
        tracing=RemoteTracing(engine, can_trace="traces" in offers) if "tracing" in offers else None,
        log=log,
        rate_limits=rate_limits if "rate_limits" in offers else None,
        demand=demand if "demand" in offers else None,
        sequences=sequences if "sequences" in offers else None,
        explain=explain if "explain" in offers else None,
        folders=folders if "folders" in offers else None,
        count_tokens=count_tokens,
        traffic=RemoteTraffic(engine) if "split" in offers else None,
        lend=engine.lend,
        load=RemoteLoad(engine),
    )
