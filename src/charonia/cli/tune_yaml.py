"""The YAML file of `charonia tune -f`: options by name, models with individual settings, objectives and constraints.

Each reader accepts both a YAML value and the text of an argument, and raises ValueError with the expected form.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from charonia.cli.command_line import unknown
from charonia.cli.values import Read, integers, names, number, numbers, pairs, shown, switch
from charonia.config.model import ModelConfig
from charonia.core.errors import invalid
from charonia.tools.tune.api import Constraint, Metric, Objective
from charonia.tools.tune.options import ModelRequest

_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

FILE_BYTES_MAX = 4 * 1024 * 1024
"""Size limit: files are written by hand, so anything larger is not one of them."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, without base-60 numbers (ranges look like them) and without duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is there twice", key.start_mark)
            if isinstance(key.value, str):
                seen.add(key.value)
        return dict(super().construct_mapping(node, deep=deep))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBER_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.[0-9]+)$"),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> dict[str, object]:
    """Return the keys and values of a YAML file. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG, with the path, when it cannot be read or is not a mapping.
    """
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise invalid(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    if len(content) > FILE_BYTES_MAX:
        raise invalid(f"{path}: expected a file of at most {FILE_BYTES_MAX} bytes")
    try:
        document = yaml.load(content, _Loader)  # noqa: S506 # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:  # a date that does not exist is a ValueError
        raise invalid(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise invalid(f"{path}: nested too deeply") from error
    if document is None:
        return {}
    if not isinstance(document, Mapping):
        raise invalid(f"{path}: expected options by name, got {type(document).__name__}")
    return {str(name): value for name, value in document.items()}


_BOUNDS = ("min", "max")
_DEPRECATED_METRICS = {"perf_latency": Metric.LATENCY_P99}


def objectives(value: object) -> tuple[Objective, ...]:
    """Read objectives: names with equal weights, or weights by name."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        value = dict.fromkeys(value, 1)
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"expected names of metrics, or weights by name, got {shown(value)}")
    weight = number(0, above=True)
    return tuple(Objective(metric(name), _named(name, weight, given)) for name, given in value.items())


def constraints(value: object) -> tuple[Constraint, ...]:
    """Read constraints: `min` or `max` by the name of the metric, or a list of such mappings."""
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        value = {name: inner for part in value for name, inner in part.items()}
    if not isinstance(value, Mapping):
        raise ValueError(f"expected limits by the name of the metric, got {shown(value)}")
    found = []
    for name, bounds in value.items():
        known = metric(name)
        if not isinstance(bounds, Mapping) or not bounds or not set(bounds) <= set(_BOUNDS):
            raise ValueError(f"{name}: expected min or max with a number, got {shown(bounds)}")
        limits = {bound: _named(f"{name}.{bound}", number(0), limit) for bound, limit in bounds.items()}
        found.append(Constraint(known, minimum=limits.get("min"), maximum=limits.get("max")))
    return tuple(found)


def metric(name: object) -> Metric:
    """Return the metric of a name, also of one that Model Analyzer has deprecated."""
    try:
        return _DEPRECATED_METRICS.get(str(name)) or Metric(str(name))
    except ValueError:
        raise ValueError(unknown("metric", str(name), [known.value for known in Metric])) from None


def variant_names(value: object) -> tuple[str, ...]:
    """Read names of variants: a list, or Model Analyzer's mapping by name, whose settings are ignored."""
    if isinstance(value, Mapping):
        value = list(value)
    if isinstance(value, list):
        value = [name for part in value for name in (part if isinstance(part, Mapping) else [part])]
    return names(value)


_FIELDS: dict[str, tuple[str, Read]] = {
    "objectives": ("objectives", objectives),
    "constraints": ("constraints", constraints),
    "weighting": ("weight", number(0, above=True)),
    "cpu_only": ("cpu_only", switch),
    "perf_analyzer_flags": ("perf_flags", pairs),
}
_ONE_SERVER = "all models are measured on one server; at the top of the file it is set for all of them"
_NO_CONTAINER = "the server is started as a process, without a container"
SETTINGS_WITHOUT_EFFECT = {
    "triton_server_flags": _ONE_SERVER,
    "triton_server_environment": _ONE_SERVER,
    "triton_docker_args": _NO_CONTAINER,
    "triton_docker_labels": _NO_CONTAINER,
    "genai_perf_flags": "perf_analyzer_flags take the options of charonia perf --llm",
}
"""Settings of a model that are accepted without effect, and the reason."""

_LOADS: dict[str, Read] = {
    "concurrency": integers(1),
    "request_rate": numbers,
    "batch_sizes": integers(1),
}
_SECTIONS = ("parameters", "model_config_parameters", *_FIELDS, *SETTINGS_WITHOUT_EFFECT)
_CONFIG_FIELDS = tuple(ModelConfig.__dataclass_fields__)


def model_requests(value: object) -> tuple[ModelRequest, ...]:
    """Read the models to tune: names, a list of names and of models with settings, or settings by name."""
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
    """Read composing models: as `model_requests`, but without load settings."""
    found = model_requests(value)
    for request in found:
        if request.concurrency or request.request_rate or request.batch_sizes:
            raise ValueError(f"{request.name}.parameters: a model that other models call cannot have load settings")
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
        elif key in SETTINGS_WITHOUT_EFFECT:
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


def _named(name: object, read: Callable[[object], float], value: object) -> float:
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
