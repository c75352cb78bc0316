"""The engine as the port for front ends in other processes sees it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.server.directory import Directory, ModelRequests, Target
from charonia.server.execution.version_runner import Runner
from charonia.server.facade import Engine, TrafficControl
from charonia.server.lifecycle.in_front import Offer
from charonia.server.metrics.model_metrics import Increase


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


class KeptTraffic(TrafficControl, Protocol):
    """Traffic that the next engine continues.

    Attributes:
        keep: Called after every change with the key of a model and the persistent state of its traffic, "" for none.
    """

    keep: Callable[[str, str], None] | None

    def restore(self, key: str, text: str) -> None:
        """Continue from the state that a previous engine has kept of a model."""

    def engine_ended(self) -> None:
        """The previous engine has crashed, or was killed. Called after `restore`."""


class ServedEngine(Engine, Protocol):
    """An engine whose models other processes know."""

    @property
    def offers(self) -> Offering:
        """The versions that front ends load, too."""

    def infer_together(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServingError]:
        """Run requests that came together and differ in ids, deadlines and elements of tensors only.

        Returns:
            The outcomes of the first of them; none if they need `infer`.
        """

    def directory(self) -> Directory:
        """Return the current models."""

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call a function whenever readiness, or what `directory` returns, may have changed."""

    requests: ModelRequests | None

    @property
    def traffic(self) -> KeptTraffic | None:
        """The traffic that the next engine continues."""
