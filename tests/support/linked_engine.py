"""An engine of a test behind the link that front ends in other processes have to theirs; both ends in this process."""

import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.support.fake_engine import FakeEngine

from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.server.directory import Directory, ModelRequests, Target
from charonia.server.execution.version_runner import Runner
from charonia.server.facade import Services
from charonia.server.front_ends.calls import TransferredTraffic
from charonia.server.front_ends.engine_port import EnginePort
from charonia.server.front_ends.remote_engine import RemoteEngine
from charonia.server.lifecycle.front_end_placement import Offer
from charonia.server.metrics.key_usage import Usage
from charonia.server.metrics.model_metrics import Increase

BOTH_SHAPES = pytest.mark.parametrize("is_linked", [False, True], ids=["one-process", "front-end-apart"])
"""For tests of endpoints: with the engine itself, and with the engine behind a link."""


class FakeOffers:
    def __init__(self, offered: Mapping[Target, Offer]) -> None:
        self._offered = offered

    def now(self) -> Mapping[Target, Offer]:
        return self._offered

    def reason(self, runner: Runner) -> str:
        return "it is pretended"

    def number_of(self, runner: Runner) -> int:
        """Return 1: there is one model."""
        return 1

    def count(self, number: int, more: Increase) -> None:
        """Fail: without offers, front ends count nothing."""
        raise AssertionError(number, more)


class ServedFake(FakeEngine):
    """The engine of a test, whose models other processes know.

    Attributes:
        offered: What front ends are to load, too.
    """

    offered: Mapping[Target, Offer] = MappingProxyType({})
    changed: Callable[[], None] = staticmethod(lambda: None)
    requests: ModelRequests | None = None
    traffic: TransferredTraffic | None = None

    @classmethod
    def of(cls, fake: FakeEngine) -> "ServedFake":
        """Return one that has what another has now, and shares its lists and dictionaries."""
        return cls(**{field.name: getattr(fake, field.name) for field in fields(fake)})

    @property
    def offers(self) -> FakeOffers:
        return FakeOffers(self.offered)

    @property
    def usage(self) -> Usage:
        return Usage(lambda: 0)

    def infer_together(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServingError]:
        """Return nothing: every request goes through `infer`."""
        return []

    def directory(self) -> Directory:
        """Return `models`, each with version 1."""
        return Directory({(name, v): config for name, config in self.models.items() for v in ("", "1")})

    def keep_changes(self, keeper: ModelRequests) -> None:
        """Let the test see what is kept."""
        self.requests = keeper

    def on_change(self, changed: Callable[[], None]) -> None:
        """Let the test report changes with `changed`."""
        self.changed = changed


@asynccontextmanager
async def linked(engine: ServedFake, folder: Path) -> AsyncIterator[RemoteEngine]:
    """Yield an engine as a front end in another process sees it."""

    async def ignore(change: str, arguments: list[object]) -> None:
        """Take what the engine tells all front ends."""

    port = EnginePort(folder)
    await port.start(engine, Services())
    seen = RemoteEngine(take=ignore, ended=lambda reason: None)
    ours, theirs = socket.socketpair()
    port.connect(theirs)
    await seen.connect(ours)
    try:
        yield seen
    finally:
        seen.close()
        await port.close()
