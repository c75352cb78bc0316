"""Names and namespaces: which models a name means, and where requests by it go.

With namespaces a model's key is its repository and its name; without, its name. A name that only one model has reaches
that model; the steps of an ensemble mean the models of its own repository first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, invalid
from charonia.core.names import model_key, name_of, namespace_of
from charonia.engine.entries import ModelEntry
from charonia.engine.loader import Runner
from charonia.repository.scan import Scan

Routes = dict[tuple[str, str], Runner]
"""Runner by model and version as text, "" for the highest that is ready."""


def keys_of(name: str, found: Scan) -> list[str]:
    """Return the keys that a name, or a key, means among the models that were found."""
    if name in found.models or name in found.ambiguous:
        return [name]
    return [key for key in found.models if name_of(key) == name]


def ambiguity(name: str, keys: Sequence[str]) -> ServingError:
    """Return the error for a request by a name that several models have."""
    places = ", ".join(map(namespace_of, keys))
    return invalid(
        f"There are {len(keys)} models named '{name}', in {places}: a request by name alone could mean any of them",
        hint=f"name the repository, too: '{keys[0]}'",
    )


def routes_of(models: Mapping[str, ModelEntry], key: str, routes: Routes) -> Routes:
    """Return the routes after a model has changed.

    Args:
        models: Every model by key.
        key: The one that has changed.
        routes: Those before.
    """
    name = name_of(key)
    changed = {key, name}
    new = {target: runner for target, runner in routes.items() if target[0] not in changed}
    _add(new, key, models[key])
    if name != key:
        same = [k for k, model in models.items() if name_of(k) == name and model.wanted]
        if len(same) == 1:
            _add(new, name, models[same[0]])
    return new


def with_namespaces(config: ModelConfig, namespace: str, found: Scan) -> ModelConfig:
    """Return an ensemble's configuration with the namespace of the model of each step.

    Raises:
        ServingError: INVALID_ARG for a step that names a namespace where there are none.
    """
    scheduling = config.ensemble_scheduling
    if scheduling is None:
        return config
    steps = []
    for index, step in enumerate(scheduling.step):
        if step.model_namespace and not namespace:
            raise invalid(
                f"ensemble_scheduling.step[{index}].model_namespace: there is no namespace '{step.model_namespace}'",
                hint="--model-namespacing=true makes a namespace of every repository",
            )
        own = step.model_namespace or namespace
        if namespace and not step.model_namespace and model_key(own, step.model_name) not in found.models:
            others = keys_of(step.model_name, found)
            own = namespace_of(others[0]) if len(others) == 1 else own
        steps.append(replace(step, model_namespace=own))
    return replace(config, ensemble_scheduling=replace(scheduling, step=tuple(steps)))


def _add(routes: Routes, name: str, model: ModelEntry) -> None:
    ready = {version: v.loaded.runner for version, v in model.versions.items() if v.loaded is not None}
    for version, runner in ready.items():
        routes[name, str(version)] = runner
    if ready:
        routes[name, ""] = ready[max(ready)]
