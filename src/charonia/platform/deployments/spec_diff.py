"""Describes the changes between two specifications of a deployment in words. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from charonia.platform.deployments.spec import DeployedModel, DeploymentSpec


def changes(before: DeploymentSpec | None, after: DeploymentSpec) -> Sequence[str]:
    """Return the changes, a sentence each.

    Args:
        before: The current specification, None for a new deployment.
    """
    if before is None:
        return [f"deployment '{after.name}' is created at '{after.target}'", *_new(after)]
    return [*_of_deployment(before, after), *_of_models(before, after)]


def changes_traffic_only(before: DeploymentSpec, after: DeploymentSpec) -> bool:
    """Whether two specifications differ only in the traffic split."""
    return _without_traffic(before) == _without_traffic(after)


def _without_traffic(spec: DeploymentSpec) -> DeploymentSpec:
    return replace(spec, models=tuple(replace(model, traffic={}) for model in spec.models))


def _new(spec: DeploymentSpec) -> Iterator[str]:
    for model in spec.models:
        yield f"model '{model.name}' {_versions(model)} is deployed"
    yield from _of_deployment(DeploymentSpec(spec.name, spec.target), spec)
    for model in spec.models:
        yield from _of_model(DeployedModel(model.name, model.versions), model)


def _of_deployment(before: DeploymentSpec, after: DeploymentSpec) -> Iterator[str]:
    yield from _changed("environment", before.environment or "none", after.environment or "none")
    yield from _changed("CPU cores", before.cpu_cores or "all", after.cpu_cores or "all")
    yield from _changed("GPUs", _numbers(before.gpus), _numbers(after.gpus))
    yield from _changed("memory", _mib(before.memory_mib), _mib(after.memory_mib))
    yield from _changed("memory of each GPU", _mib(before.gpu_memory_mib), _mib(after.gpu_memory_mib))
    yield from _changed("replicas", _replicas(before), _replicas(after))
    yield from _changed("API keys", *("needed" if spec.keys else "not needed" for spec in (before, after)))
    yield from _changed("time to be ready", f"{before.ready_within_s:g} s", f"{after.ready_within_s:g} s")


def _of_models(before: DeploymentSpec, after: DeploymentSpec) -> Iterator[str]:
    old = {model.name: model for model in before.models}
    new = {model.name: model for model in after.models}
    for name, model in new.items():
        if name not in old:
            yield f"model '{name}' {_versions(model)} is added"
            yield from _of_model(DeployedModel(name, model.versions), model)
        else:
            yield from _of_model(old[name], model)
    for name in old:
        if name not in new:
            yield f"model '{name}' is removed"


def _of_model(before: DeployedModel, after: DeployedModel) -> Iterator[str]:
    name = f"model '{after.name}':"
    yield from _changed(name, _versions(before), _versions(after))
    yield from _changed(f"{name} traffic", _traffic(before.traffic), _traffic(after.traffic))
    yield from _changed(f"{name} instances", _instances(before), _instances(after))
    yield from _changed(f"{name} largest batch", *(_configured(model.max_batch_size) for model in (before, after)))
    delays = (_configured(model.max_queue_delay_us, " us") for model in (before, after))
    yield from _changed(f"{name} longest wait for a fuller batch", *delays)
    for field in sorted(before.config.keys() | after.config.keys()):
        old, new = (model.config.get(field) for model in (before, after))
        if old != new:
            yield from _changed(f"{name} configuration, {field}", _json(old), _json(new))


def _changed(what: str, before: object, after: object) -> Iterator[str]:
    if before != after:
        yield f"{what} {before} -> {after}"


def _versions(model: DeployedModel) -> str:
    if not model.versions:
        return "latest version"
    return f"version{'s' if len(model.versions) > 1 else ''} {', '.join(map(str, model.versions))}"


def _traffic(traffic: Mapping[str, Any]) -> str:
    """Return traffic settings in words."""
    if not traffic:
        return "to the latest version"
    parts = []
    for key, value in traffic.items():
        if key == "weights" and isinstance(value, Mapping):
            parts.append(", ".join(f"version {version}: {_short(weight)}" for version, weight in sorted(value.items())))
        elif key == "shadow" and isinstance(value, Mapping):
            parts += [f"{_share(shadow)} copied to version {version}" for version, shadow in sorted(value.items())]
        else:
            parts.append(f"{key} {_short(value)}")
    return "; ".join(parts)


def _share(shadow: Any) -> str:
    share: float = shadow.get("share", 1.0) if isinstance(shadow, Mapping) else shadow
    return f"{100 * share:g} %"


def _short(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, int | float) else _json(value)


def _instances(model: DeployedModel) -> str:
    if not model.instances_min and not model.instances_max:
        return "as configured"
    return (
        f"{model.instances_min} to {model.instances_max} by load" if model.instances_max else f"{model.instances_min}"
    )


def _configured(value: int | None, unit: str = "") -> str:
    return "as configured" if value is None else f"{value}{unit}"


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _mib(mib: int) -> str:
    return f"{mib} MiB" if mib else "no limit"


def _replicas(spec: DeploymentSpec) -> str:
    if spec.replicas_min == spec.replicas_max:
        return str(spec.replicas_min)
    return f"{spec.replicas_min} to {spec.replicas_max}"


def _json(value: object) -> str:
    return "as the model has it" if value is None else json.dumps(value, sort_keys=True)
