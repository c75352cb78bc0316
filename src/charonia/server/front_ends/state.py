"""The state of the engine that a front end caches: readiness, and the models. Pure.

The engine sends the differences from the previous state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from charonia.config.model import ModelConfig
from charonia.server.directory import Directory, ModelView, Target
from charonia.server.front_ends.messages import plain, record
from charonia.server.lifecycle.in_front import Offer


@dataclass(frozen=True, slots=True)
class ServerReadiness:
    """The state of the server.

    Attributes:
        is_live: Value of `Engine.is_live`.
        is_ready: Value of `Engine.is_ready`.
        is_exiting: Value of `Engine.is_exiting`.
        is_tracing: Whether requests may be picked to be traced.
    """

    is_live: bool = False
    is_ready: bool = False
    is_exiting: bool = False
    is_tracing: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """How a state differs from the previous one.

    Attributes:
        readiness: The state of the server.
        unread: Why the repositories could not be read.
        configs: Configurations of versions that answer, if they are new.
        gone: Versions that answer no more.
        models: Models whose state has changed.
        offers: Versions that the front end loads, too, if they are new.
        withdrawn: Versions that it drops, unless there is a new one.
        sticky: By model, the headers that keep a client on a version.
    """

    readiness: ServerReadiness
    unread: str
    configs: Mapping[Target, ModelConfig]
    gone: tuple[Target, ...]
    models: Mapping[str, ModelView]
    offers: Mapping[Target, Offer]
    withdrawn: tuple[Target, ...]
    sticky: Mapping[str, tuple[bytes, ...]]


@dataclass(slots=True)
class EngineState:
    """The state of an engine.

    Attributes:
        readiness: The state of the server.
        directory: The models.
        offers: Versions that front ends load, too.
        sticky: By model, the headers that keep a client on a version.
    """

    readiness: ServerReadiness = field(default_factory=ServerReadiness)
    directory: Directory = field(default_factory=Directory)
    offers: dict[Target, Offer] = field(default_factory=dict)
    sticky: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)

    def difference(self, before: "EngineState") -> object:
        """Return the plain values of the difference from an earlier state, None for no difference."""
        now, old = self.directory, before.directory
        configs = {target: c for target, c in now.configs.items() if old.configs.get(target) is not c}
        gone = tuple(target for target in old.configs if target not in now.configs)
        models = {key: model for key, model in now.models.items() if old.models.get(key) != model}
        offers = {target: offer for target, offer in self.offers.items() if before.offers.get(target) != offer}
        withdrawn = tuple(target for target in before.offers if target not in self.offers)
        is_same = self.readiness == before.readiness and now.unread == old.unread and self.sticky == before.sticky
        if is_same and not (configs or gone or models or offers or withdrawn):
            return None
        changed = [plain(self.readiness), now.unread, _pairs(configs), gone, plain(models), _pairs(offers), withdrawn]
        return [*changed, plain(self.sticky)]

    def apply(self, difference: object) -> None:
        """Apply a difference."""
        change = _difference(difference)
        self.readiness = change.readiness
        directory = self.directory
        directory.unread = change.unread
        for target in change.gone:
            directory.configs.pop(target, None)
        directory.configs.update(change.configs)
        directory.models.update(change.models)
        for target in change.withdrawn:
            self.offers.pop(target, None)
        self.offers.update(change.offers)
        self.sticky = change.sticky


def _pairs(values: Mapping[Target, object]) -> list[tuple[Target, object]]:
    """Return a mapping as pairs: a message cannot have targets as keys."""
    return [(target, plain(value)) for target, value in values.items()]


def _difference(values: object) -> Difference:
    assert isinstance(values, list)
    readiness, unread, configs, gone, models, offers, withdrawn, sticky = values
    return Difference(
        record(ServerReadiness, readiness),
        unread,
        {tuple(target): record(ModelConfig, config) for target, config in configs},
        tuple(tuple(target) for target in gone),
        {key: record(ModelView, model) for key, model in models.items()},
        {tuple(target): record(Offer, offer) for target, offer in offers},
        tuple(tuple(target) for target in withdrawn),
        {model: tuple(headers) for model, headers in sticky.items()},
    )
