"""The configuration of a deployed model: that of its version, with what the deployment changes. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from charonia.config import pbtxt
from charonia.config.json_form import from_json, to_json
from charonia.core.errors import invalid
from charonia.platform.deployments.spec import DeployedModel

TRAFFIC = "traffic"
INSTANCES_MIN = "INSTANCES_MIN"
INSTANCES_MAX = "INSTANCES_MAX"


def configured(text: str, model: DeployedModel, versions: Sequence[int]) -> str:
    """Return a model's config.pbtxt.

    Args:
        text: The config.pbtxt of its newest version, "" if it has none: the server completes it from the model.
        model: What the deployment says.
        versions: The versions that are served.

    Raises:
        ServingError: INVALID_ARG if the configuration is invalid, or cannot be changed so.
    """
    members = to_json(pbtxt.parse(text))
    members["name"] = model.name
    members["version_policy"] = {"specific": {"versions": list(versions)}}
    _set_batching(members, model)
    _set_instances(members, model)
    if model.traffic:
        _parameters(members)[TRAFFIC] = {"string_value": json.dumps(model.traffic, sort_keys=True)}
    return pbtxt.render(from_json(json.dumps(_merged(members, model.config))))


def _set_batching(members: dict[str, Any], model: DeployedModel) -> None:
    if model.max_batch_size is not None:
        members["max_batch_size"] = model.max_batch_size
    if model.max_queue_delay_us is not None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in members:
                raise invalid(
                    f"model '{model.name}': batching.max_queue_delay_microseconds is for models with dynamic batching, "
                    f"and this one has {other}",
                    hint="set its own fields in 'config'",
                )
        batching = members.setdefault("dynamic_batching", {})
        batching["max_queue_delay_microseconds"] = model.max_queue_delay_us


def _set_instances(members: dict[str, Any], model: DeployedModel) -> None:
    least = model.instances_min or (1 if model.instances_max else 0)
    if not least:
        return
    groups: list[dict[str, Any]] = members.setdefault("instance_group", [])
    if not groups:
        groups.append({})
    if len(groups) > 1:
        raise invalid(
            f"model '{model.name}': expected one instance group to set the number of instances, got {len(groups)}",
            hint="set 'instance_group' in 'config'",
        )
    groups[0]["count"] = least
    if model.instances_max:
        _parameters(members)[INSTANCES_MIN] = {"string_value": str(least)}
        _parameters(members)[INSTANCES_MAX] = {"string_value": str(model.instances_max)}


def _parameters(members: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = members.setdefault("parameters", {})
    return parameters


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with changes: objects are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        before = merged.get(key)
        is_object = isinstance(value, Mapping) and isinstance(before, Mapping)
        merged[key] = _merged(before, value) if is_object else value  # type: ignore[arg-type] # both are mappings
    return merged
