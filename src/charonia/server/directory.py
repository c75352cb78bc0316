"""The models that answer, by name and version, and why others do not. Pure.

The engine asks it about its own table; a front end in another process asks it about the copy that the engine sends.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from charonia.config.model import ModelConfig
from charonia.config.parameters import HTTP_ROUTE
from charonia.core.dtypes import DataType
from charonia.core.errors import NAMES_SHOWN, ServingError, invalid, models_hint, not_found, unavailable
from charonia.core.metadata import ModelMetadata, ModelState, TensorMetadata, name_of, namespace_of
from charonia.wire.plain_values import PlainValues, facts_of, plain_values

Target = tuple[str, str]
"""Name and version of a model, "" for the highest version that is ready."""

_VERSION = re.compile(r"[0-9]{1,18}")


class KnownVersion(Protocol):
    """The state of a version of a model, and the reason for it."""

    @property
    def state(self) -> ModelState: ...

    @property
    def reason(self) -> str:
        """Why it does not answer, "" where it does."""


class KnownModel(Protocol):
    """The state of a model that was ever requested."""

    @property
    def failure(self) -> str:
        """Why the model as a whole could not be loaded, "" when it could."""

    @property
    def versions(self) -> Mapping[int, KnownVersion]: ...


class ModelRequests(Protocol):
    """Observes the changes of models that requests make."""

    def traffic_changed(self, model: str, text: str) -> None:
        """The persistent state of a model's traffic has changed; "" for none."""

    def model_change(self, name: str) -> AbstractAsyncContextManager[None]:
        """Return what surrounds a change of a model by request, and telling of it.

        Raises:
            ServingError: UNAVAILABLE when another engine has taken over.
        """

    async def model_loaded(
        self, name: str, config: str | None, files: Mapping[str, bytes] | None, is_overridden: bool
    ) -> None:
        """A model was loaded, as by `Engine.load_model`; whether it has the configuration of a request."""

    def model_unloaded(self, name: str, with_dependents: bool) -> None:
        """A model was unloaded, maybe with its dependents."""


async def change_model(requests: ModelRequests | None, name: str, change: Callable[[], Awaitable[None]]) -> None:
    """Change a model by request.

    Args:
        requests: Who observes such changes.
        name: Name of the model.
        change: Makes the change, and tells the observer of it.

    Raises:
        ServingError: As `ModelRequests.model_change` and `change`.
    """
    async with requests.model_change(name) if requests is not None else nullcontext():
        await change()


@dataclass(frozen=True, slots=True)
class VersionView:
    """A `KnownVersion` as a record."""

    state: ModelState
    reason: str


@dataclass(frozen=True, slots=True)
class ModelView:
    """A `KnownModel` as a record."""

    failure: str
    versions: Mapping[int, VersionView]


@dataclass(slots=True)
class Directory:
    """The models of a server.

    Attributes:
        configs: Configuration of each version that answers.
        models: Every model that was ever requested, by key.
        unread: Why the repositories could not be read, "" when they could.
    """

    configs: dict[Target, ModelConfig] = field(default_factory=dict)
    models: dict[str, ModelView] = field(default_factory=dict)
    unread: str = ""

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        """Return a model's complete configuration. Raises as `Engine.model_metadata`."""
        config = self.configs.get(target_of(name, version))
        if config is None:
            raise missing(name, version, self.configs, self.models, self.unread)
        return config

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        """Return a model's tensors and ready versions. Raises as `Engine.model_metadata`."""
        return metadata_of(self.model_config(name, version), name, version, self.configs)


def models_at(path: str, configs: Iterable[tuple[Target, ModelConfig]]) -> dict[bytes, str]:
    """Return the models whose own route has this path, by HTTP method; the first name counts."""
    end, found = f" {path}", dict[bytes, str]()
    for (name, version), config in configs:
        route = config.parameters.get(HTTP_ROUTE, "") if not version else ""
        if route.endswith(end):
            method = route.partition(" ")[0].encode()
            found[method] = min(name, found.get(method, name))
    return found


def is_version(version: str) -> bool:
    return not version or _VERSION.fullmatch(version) is not None


def target_of(name: str, version: str) -> Target:
    """Return where a request goes.

    Raises:
        ServingError: INVALID_ARG for a version that is not a number.
    """
    if not version:
        return name, ""
    if not is_version(version):
        raise bad_version(version)
    return name, str(int(version))


def bad_version(version: str) -> ServingError:
    return invalid(
        f"failed to get model version from specified version string '{version}'", hint="a version is a number"
    )


def ambiguity(name: str, keys: list[str]) -> ServingError:
    """Return the error for a request by a name that several models have."""
    places = ", ".join(map(namespace_of, keys))
    return invalid(
        f"There are {len(keys)} models named '{name}', in {places}: a request by name alone is an ambiguity",
        hint=f"name the repository, too: '{keys[0]}'",
    )


def missing(
    name: str, version: str, ready: Iterable[Target], models: Mapping[str, KnownModel], unread: str
) -> ServingError:
    """Return why a version of a model does not answer.

    Args:
        name: Name of the model.
        version: Its version, a number as text, "" for any.
        ready: Every version that answers.
        models: Every model that was ever requested.
        unread: Why the repositories could not be read, "" when they could.
    """
    if unread:
        return unavailable("Server not ready", hint=unread)
    model = models.get(name)
    if model is None:
        same = [key for key in models if name_of(key) == name]
        if len(same) > 1:
            return ambiguity(name, same)
        model = models[same[0]] if same else None
    if model is None:
        known = sorted({n for n, _ in ready})
        return not_found(f"Request for unknown model: '{name}' is not found", hint=models_hint(name, known))
    if not version:
        if any(v.state is ModelState.LOADING for v in model.versions.values()):
            return unavailable(f"Request for unknown model: '{name}' is not at ready state: it is being loaded")
        versions = [f"version {n}: {v.reason or 'is being unloaded'}" for n, v in sorted(model.versions.items())]
        return not_found(
            f"Request for unknown model: '{name}' has no available versions",
            hint=model.failure or "; ".join(versions),
        )
    entry = model.versions.get(int(version))
    if entry is None:
        numbers = sorted(number for number, known in model.versions.items() if known.state is ModelState.READY)
        return not_found(
            f"Request for unknown model: '{name}' version {int(version)} is not found",
            hint=f"versions that are ready: {', '.join(map(str, numbers[:NAMES_SHOWN]))}" if numbers else "",
        )
    return unavailable(
        f"Request for unknown model: '{name}' version {int(version)} is not at ready state", hint=entry.reason
    )


def metadata_of(config: ModelConfig, name: str, version: str, ready: Iterable[Target]) -> ModelMetadata:
    """Return the metadata of a model."""
    lead = (-1,) if config.max_batch_size > 0 else ()
    schemas = plain_values(config) or PlainValues()
    versions = (str(int(version)),) if version else tuple(sorted((v for n, v in ready if n == name and v), key=int))
    return ModelMetadata(
        config.name,
        versions,
        config.platform or config.backend,
        tuple(
            TensorMetadata(i.name, _datatype(i.data_type), lead + i.dims, facts_of(schemas.inputs.get(i.name, {})))
            for i in config.input
        ),
        tuple(
            TensorMetadata(o.name, _datatype(o.data_type), lead + o.dims, facts_of(schemas.outputs.get(o.name, {})))
            for o in config.output
        ),
    )


def _datatype(datatype: DataType | None) -> DataType:
    if datatype is None:
        raise ValueError("a tensor has no data type: the configuration was not validated")
    return datatype
