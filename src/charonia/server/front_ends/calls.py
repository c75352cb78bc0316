"""The calls of front ends to the engine: its interface, and what each call changes.

A call is a method of a service. Its type hints say how arguments and the result travel, so that neither end needs code
for it: `remote_call` makes the method of the front end, `Call.read` and `Call.plain` convert for the engine.
"""

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from inspect import signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_args, get_type_hints

from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.server.directory import Directory, ModelRequests, Target
from charonia.server.execution.version_runner import Runner
from charonia.server.facade import Engine, LoadReports, LogControl, Services, TrafficControl
from charonia.server.front_ends.messages import plain, record
from charonia.server.lifecycle.front_end_placement import Offer
from charonia.server.metrics.key_usage import Usage
from charonia.server.metrics.model_metrics import Increase
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.server.tracing.requests import Tracing

P = ParamSpec("P")
T = TypeVar("T")


class Offering(Protocol):
    """The versions that front ends load, too: see `lifecycle.offers.Offers`."""

    def now(self) -> Mapping[Target, Offer]:
        """Return the current offers, by where requests go."""

    def reason(self, runner: Runner) -> str:
        """Return why a version stays in the engine, "" if it is offered."""

    def number_of(self, runner: Runner) -> int:
        """Return the number of a loaded version."""

    def count(self, number: int, more: Increase) -> None:
        """Add the counts of a front end for an offer."""


class TransferredTraffic(TrafficControl, Protocol):
    """Traffic that the next engine continues."""

    def restore(self, key: str, text: str) -> None:
        """Continue from the state that a previous engine has kept of a model."""

    def engine_ended(self) -> None:
        """The previous engine has crashed, or was killed. Called after `restore`."""


class ServedEngine(Engine, Protocol):
    """An engine whose models other processes know."""

    @property
    def offers(self) -> Offering:
        """The versions that front ends load, too."""

    @property
    def usage(self) -> Usage:
        """Counts the requests of API keys."""

    def infer_together(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServingError]:
        """Run requests that came together and differ in ids, deadlines and elements of tensors only.

        Returns:
            The outcomes of the first of them; none if they need `infer`.
        """

    def directory(self) -> Directory:
        """Return the current models."""

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call a function whenever readiness, or what `directory` returns, may have changed."""

    def keep_changes(self, engine_changes: ModelRequests) -> None:
        """Report the changes that requests make from now on, before they are answered."""

    @property
    def traffic(self) -> TransferredTraffic | None:
        """The traffic that the next engine continues."""


class Effect(Enum):
    """What a call changes."""

    NOTHING = 0
    ENGINE = 1
    """The engine's state. All front ends know it before the call is answered."""
    EVERYWHERE = 2
    """Every process. The call is made in all of them, or in none."""


_FILES = Mapping[str, bytes] | None


@dataclass(frozen=True, slots=True)
class Call:
    """A call to the engine.

    Attributes:
        owner: The service.
        method: Name of the method, or of the field of `Services`.
        effect: What it changes.
        arguments: Types of the arguments.
        result: Type of the result.
        counts: Whether the counts of front ends are collected first.
    """

    owner: type
    method: str
    effect: Effect
    arguments: tuple[Any, ...]
    result: Any
    counts: bool = False

    @property
    def question(self) -> str:
        return f"{self.owner.__name__}.{self.method}"

    @property
    def undo(self) -> "Call | None":
        """The call that undoes a registration."""
        return CALLS.get(f"{self.owner.__name__}.un{self.method}")

    def plain(self, values: Sequence[object]) -> tuple[list[object], list[bytes]]:
        """Return arguments as plain values, and the contents of files."""
        arguments: list[object] = []
        blobs: list[bytes] = []
        for kind, value in zip(self.arguments, values, strict=True):
            if kind == _FILES and isinstance(value, Mapping):
                blobs += value.values()
                value = list(value)
            arguments.append(plain(value))
        return arguments, blobs

    def read(self, values: Sequence[Any], blobs: Sequence[bytes] = ()) -> list[Any]:
        """Return the arguments that `plain` has returned as plain values."""
        return [
            (None if each is None else dict(zip(each, blobs, strict=True))) if kind == _FILES else record(kind, each)
            for kind, each in zip(self.arguments, values, strict=True)
        ]


def _call(owner: type, method: str, effect: Effect = Effect.NOTHING, *, counts: bool = False) -> Call:
    if owner is Services:
        function = next(each for each in get_args(get_type_hints(Services)[method]) if get_args(each))
        arguments, awaited = get_args(function)
        return Call(owner, method, effect, tuple(arguments), get_args(awaited)[0], counts)
    hints = get_type_hints(getattr(owner, method))
    result = hints.pop("return")
    return Call(owner, method, effect, tuple(hints.values()), result, counts)


CALLS = {
    call.question: call
    for call in (
        _call(Engine, "model_ready"),
        _call(Engine, "model_statistics", counts=True),
        _call(Engine, "repository_index"),
        _call(Engine, "load_model", Effect.ENGINE),
        _call(Engine, "unload_model", Effect.ENGINE),
        _call(Services, "rate_limits"),
        _call(Services, "sequences"),
        _call(Services, "explain"),
        _call(Services, "folders"),
        _call(Services, "count_tokens"),
        _call(TrafficControl, "show"),
        _call(TrafficControl, "change", Effect.ENGINE),
        _call(TrafficControl, "reset", Effect.ENGINE),
        _call(Tracing, "settings"),
        _call(Tracing, "change", Effect.ENGINE),
        _call(LoadReports, "report"),
        _call(LogControl, "change", Effect.EVERYWHERE),
        _call(RegionRegistry, "register_system", Effect.EVERYWHERE),
        _call(RegionRegistry, "register_cuda", Effect.EVERYWHERE),
        _call(RegionRegistry, "unregister_system", Effect.EVERYWHERE),
        _call(RegionRegistry, "unregister_cuda", Effect.EVERYWHERE),
        Call(Services, "demand", Effect.ENGINE, (str, str), type(None)),
    )
}
"""The calls by their questions."""

LOG_CHANGE = "LogControl.change"

OFFERED = ("tracing", "demand", "rate_limits", "sequences", "explain", "folders", "traffic")
"""The services that front ends have if the engine has them."""


class EngineRpc(Protocol):
    """What answers questions: the engine in another process."""

    async def ask(self, question: str, *arguments: object, blobs: Sequence[bytes] = ()) -> Any:
        """Ask it. Raises as `Link.ask`."""


async def ask(engine: EngineRpc, call: Call, *values: object) -> Any:
    """Let an engine make a call, and return the result. Raises ServingError."""
    arguments, blobs = call.plain(values)
    return record(call.result, await engine.ask(call.question, *arguments, blobs=blobs))


def remote_call(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method with the signature of a service's, which asks the attribute `engine` of its object."""
    call, form = CALLS[method.__qualname__], signature(method)

    async def call_engine(self: Any, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        bound = form.bind(self, *arguments, **keywords)
        bound.apply_defaults()
        return await ask(self.engine, call, *list(bound.arguments.values())[1:])  # type: ignore[no-any-return]

    return call_engine


def service(engine: EngineRpc, name: str) -> Callable[..., Awaitable[Any]]:
    """Return a function of `Services` that asks an engine."""
    call = CALLS[f"{Services.__name__}.{name}"]

    async def call_engine(*arguments: object) -> Any:
        return await ask(engine, call, *arguments)

    return call_engine
