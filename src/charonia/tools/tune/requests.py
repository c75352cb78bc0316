"""The models of a run as YAML and the command line have them: names, or names with settings of their own."""

import json
from collections.abc import Mapping
from dataclasses import replace

from charonia.config.model import ModelConfig
from charonia.tools.tune.goals import constraints, objectives
from charonia.tools.tune.nearest import unknown
from charonia.tools.tune.options import ModelRequest
from charonia.tools.tune.values import Read, flag, integers, names, number, numbers, pairs, shown

_FIELDS: dict[str, tuple[str, Read]] = {
    "objectives": ("objectives", objectives),
    "constraints": ("constraints", constraints),
    "weighting": ("weight", number(0, above=True)),
    "cpu_only": ("cpu_only", flag),
    "perf_analyzer_flags": ("perf_flags", pairs),
}
_ONE_SERVER = "all models are measured on one server; at the top of the file it is set for all of them"
_NO_CONTAINER = "no container is needed: a server is started as a process"
WITHOUT_EFFECT = {
    "triton_server_flags": _ONE_SERVER,
    "triton_server_environment": _ONE_SERVER,
    "triton_docker_args": _NO_CONTAINER,
    "triton_docker_labels": _NO_CONTAINER,
    "genai_perf_flags": "models are measured by requests, not by tokens",
}
"""Settings of a model that are accepted without an effect, and why they have none."""

_LOADS: dict[str, Read] = {
    "concurrency": integers(1),
    "request_rate": numbers(0),
    "batch_sizes": integers(1),
}
_SECTIONS = ("parameters", "model_config_parameters", *_FIELDS, *WITHOUT_EFFECT)
_CONFIG_FIELDS = tuple(ModelConfig.__dataclass_fields__)


def model_requests(value: object) -> tuple[ModelRequest, ...]:
    """Read the models to tune: names, a list of names and of models with settings, or settings by name.

    Raises:
        ValueError: It is none of them, or a setting is wrong.
    """
    if isinstance(value, str):
        return tuple(ModelRequest(name) for name in names(value))
    if isinstance(value, Mapping):
        value = [{name: settings} for name, settings in value.items()]
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected names of models, or settings by name, got {shown(value)}")
    found = []
    for part in value:
        if isinstance(part, Mapping):
            found += [_request(str(name), settings) for name, settings in part.items()]
        else:
            found.append(ModelRequest(names([part])[0]))
    return tuple(found)


def composing_models(value: object) -> tuple[ModelRequest, ...]:
    """Read models that compose others: as `model_requests`, without load of their own.

    Raises:
        ValueError: As `model_requests`, and where a model has loads.
    """
    found = model_requests(value)
    for request in found:
        if request.concurrency or request.request_rate or request.batch_sizes:
            raise ValueError(f"{request.name}.parameters: a model that is called by others gets no load of its own")
    return found


def _request(name: str, settings: object) -> ModelRequest:
    if settings is None:
        return ModelRequest(name)
    if not isinstance(settings, Mapping):
        raise ValueError(f"{name}: expected settings by name, got {shown(settings)}")
    request = ModelRequest(name)
    for key, value in settings.items():
        where = f"{name}.{key}"
        if key == "parameters":
            request = _with_loads(request, value, where)
        elif key == "model_config_parameters":
            request = replace(request, config_parameters=_config_parameters(value, where))
        elif key in _FIELDS:
            field, read = _FIELDS[key]
            request = _with(request, field, read, value, where)
        elif key in WITHOUT_EFFECT:
            request = replace(request, without_effect=(*request.without_effect, str(key)))
        else:
            raise ValueError(f"{name}: {unknown('key', str(key), _SECTIONS)}")
    return request


def _with_loads(request: ModelRequest, value: object, where: str) -> ModelRequest:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected {', '.join(_LOADS)}, got {shown(value)}")
    for key, loads in value.items():
        if key not in _LOADS:
            raise ValueError(f"{where}: {unknown('key', str(key), tuple(_LOADS))}")
        request = _with(request, str(key), _LOADS[key], loads, f"{where}.{key}")
    return request


def _config_parameters(value: object, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected fields of config.pbtxt, got {shown(value)}")
    for key in value:
        if key not in _CONFIG_FIELDS:
            raise ValueError(f"{where}: {unknown('field of config.pbtxt', str(key), _CONFIG_FIELDS)}")
    try:
        return tuple((str(key), json.dumps(inner)) for key, inner in value.items())
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _with(request: ModelRequest, field: str, read: Read, value: object, where: str) -> ModelRequest:
    try:
        changes: dict[str, object] = {field: read(value)}
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return replace(request, **changes)  # type: ignore[arg-type]  # the field is one of the tables above
