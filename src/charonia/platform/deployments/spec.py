"""The specification of a deployment: its form in files and the API, and its changes in words. Pure.

name: reader                    # its name for clients and in the console
target: local
environment: pytorch            # optional
models:
  - name: detection
    versions: [1, 2]            # or: latest
    traffic: {weights: {1: 90, 2: 10}}   # as POST /v2/models/M/traffic takes it
    instances: {min: 1, max: 4}
    batching: {max_batch_size: 8, max_queue_delay_microseconds: 100}
    config: {}                  # any other field of the model configuration, as JSON
device: {cpu_cores: 2, gpus: [0], memory_mib: 2048, gpu_memory_mib: 4096}
replicas: {min: 1, max: 1}
keys: true                      # whether clients need an API key
ready_within_s: 600
idle_unload_s: 900              # optional: models that are not used for this time are unloaded until their next request
variables: {LOG_LEVEL: debug}   # environment variables of its servers
secrets: {HF_TOKEN: hub}        # more of them, each with the name of a secret of the project
strategy: replace               # how new versions get requests, of a change: replace, beside or canary; not recorded
"""

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from charonia.core.errors import ServingError, invalid
from charonia.wire.traffic import read_plan, read_settings


@dataclass(frozen=True, slots=True)
class DeployedModel:
    """A model of a deployment.

    Attributes:
        name: Its name in the registry and in the server.
        versions: The versions to load; empty for the latest one that is ready.
        traffic: The split of requests that name no version, in the form of the server's API; empty for the latest.
        instances_min: Instances of each version, 0 for the configuration's number.
        instances_max: Upper bound of scaling by load, 0 for no more than the minimum.
        max_batch_size: Largest batch, None for the configuration's.
        max_queue_delay_us: Longest wait for a fuller batch in microseconds, None for the configuration's.
        config: Other fields of the model configuration, in the form of its JSON.
    """

    name: str
    versions: tuple[int, ...] = ()
    traffic: Mapping[str, Any] = field(default_factory=dict)
    instances_min: int = 0
    instances_max: int = 0
    max_batch_size: int | None = None
    max_queue_delay_us: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """A deployment.

    Attributes:
        models: Its models; a pipeline has several.
        environment: Name of its environment, "" for the platform's own Python.
        cpu_cores: Cores that its models may use, 0 for all.
        gpus: Numbers of the GPUs that it sees.
        memory_mib: Memory that each of its servers may use, 0 for no limit.
        gpu_memory_mib: Memory that each of them may use on each of these GPUs, 0 for no limit.
        ready_within_s: A revision that is not ready after this time has failed.
        idle_unload_s: Unused models are unloaded after this time, and loaded for their next request; 0 for never.
        variables: Environment variables of its servers.
        secrets: More of them, whose values are secrets of the project: their names.
    """

    name: str
    target: str = "local"
    models: tuple[DeployedModel, ...] = ()
    environment: str = ""
    cpu_cores: int = 0
    gpus: tuple[int, ...] = ()
    memory_mib: int = 0
    gpu_memory_mib: int = 0
    replicas_min: int = 1
    replicas_max: int = 1
    keys: bool = False
    ready_within_s: float = 600.0
    idle_unload_s: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)


REPLACE, BESIDE, CANARY = STRATEGIES = ("replace", "beside", "canary")
"""How new versions of a model get requests: all of them when they are ready, none yet, or step by step."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """How new versions get requests.

    Attributes:
        kind: One of `STRATEGIES`; "" for what the specification says.
        plan: Members of the canary plan, without its version.
    """

    kind: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)


NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
"""Valid names of deployments: they are part of addresses and folders."""

MODELS_MAX = 100
"""Most models of a deployment."""

VERSIONS_MAX = 16
"""Most versions of one of its models."""

COUNT_MAX = 10_000
"""Most instances, replicas and cores."""

VARIABLES_MAX = 64
"""Most environment variables of a deployment, and most of them that are secrets."""

VARIABLE_CHARS_MAX = 32 * 1024

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_OWN_VARIABLE = re.compile(
    r"(LD_|PYTHON|CHARONIA_|UV_|PIP_|XDG_)|(HOME|PATH|TMPDIR|CUDA_VISIBLE_DEVICES|ENV|BASH_ENV)\Z"
)
"""Variables that the platform sets itself, or that decide which programs a server runs."""

IDLE_S_MAX = 31 * 86_400
READY_S_MAX = 24 * 3600.0
"""Largest time limit for a revision to be ready."""

LATEST = "latest"
"""In place of versions: the latest one that is ready."""

_MEMBERS = (
    "name",
    "target",
    "environment",
    "models",
    "device",
    "replicas",
    "keys",
    "ready_within_s",
    "idle_unload_s",
    "variables",
    "secrets",
)
_MODEL = ("name", "versions", "traffic", "instances", "batching", "config")
_BATCHING = ("max_batch_size", "max_queue_delay_microseconds")
_DEVICE = ("cpu_cores", "gpus", "memory_mib", "gpu_memory_mib")
_BOUNDS = ("min", "max")
_TRAFFIC = ("weights", "sticky", "shadow")


def read_spec(value: object) -> DeploymentSpec:
    """Return a deployment."""
    return read_change(value)[0]


def read_change(value: object) -> tuple[DeploymentSpec, Strategy]:
    """Return a deployment, and how its new versions get requests."""
    reader = _Reader()
    strategy = Strategy()
    if isinstance(value, Mapping) and "strategy" in value:
        strategy = reader.strategy(value["strategy"])
        value = {name: member for name, member in value.items() if name != "strategy"}
    spec = reader.spec(value)
    for index, model in enumerate(spec.models if strategy.kind not in ("", REPLACE) else ()):
        if model.traffic.get("weights"):
            reader.problems.append(
                f"models[{index}].traffic.weights: expected none with the strategy '{strategy.kind}', which sets them"
            )
    if reader.problems:
        raise invalid("\n".join(reader.problems))
    return spec, strategy


def rolled_out(
    before: DeploymentSpec, after: DeploymentSpec, strategy: Strategy, under_way: Container[str] = ()
) -> tuple[DeploymentSpec, Mapping[str, int]]:
    """Return the specification that a strategy makes of a change, and the versions that begin as canaries, by model.

    A version is new if it gets no requests yet. Versions that get some stay beside it; the others leave.

    Args:
        after: The change, with numbers in place of "latest".
        under_way: Models with a canary plan that has not ended: nothing changes in them.
    """
    present = {model.name: model for model in before.models}
    models, canaries = list[DeployedModel](), dict[str, int]()
    for model in after.models:
        old = present.get(model.name)
        if old is None or not strategy.kind:
            models.append(model)
            continue
        weights = {version: weight for version, weight in old.traffic.get("weights", {}).items() if weight}
        weights = weights or {str(max(old.versions)): 100}
        traffic = {**old.traffic, **model.traffic}
        versions = model.versions
        if strategy.kind == REPLACE:
            traffic["weights"] = model.traffic.get("weights", {})
        else:
            new = [version for version in model.versions if str(version) not in weights]
            if strategy.kind == CANARY and new and model.name not in under_way:
                canaries[model.name] = max(new)
            is_loaded = set(new) <= set(old.versions)
            versions = old.versions if is_loaded else tuple(sorted({*model.versions, *map(int, weights)}))
            traffic["weights"] = old.traffic.get("weights", {}) if is_loaded else weights
        kept = {version: shadow for version, shadow in traffic.get("shadow", {}).items() if int(version) in versions}
        traffic = {key: value for key, value in {**traffic, "shadow": kept}.items() if value}
        models.append(replace(model, versions=versions, traffic=traffic))
    return replace(after, models=tuple(models)), canaries


def write_spec(spec: DeploymentSpec) -> dict[str, Any]:
    """Return the plain values of a deployment, without unset fields."""
    memory = {"memory_mib": spec.memory_mib, "gpu_memory_mib": spec.gpu_memory_mib}
    return {
        "name": spec.name,
        "target": spec.target,
        **_set(environment=spec.environment),
        "models": [_model(model) for model in spec.models],
        **_set(device=_set(cpu_cores=spec.cpu_cores, gpus=list(spec.gpus), **memory)),
        "replicas": {"min": spec.replicas_min, "max": spec.replicas_max},
        "keys": spec.keys,
        "ready_within_s": spec.ready_within_s,
        **_set(idle_unload_s=spec.idle_unload_s, variables=dict(spec.variables), secrets=dict(spec.secrets)),
    }


def _model(model: DeployedModel) -> dict[str, Any]:
    batching = {"max_batch_size": model.max_batch_size, "max_queue_delay_microseconds": model.max_queue_delay_us}
    members = {
        "traffic": dict(model.traffic),
        "instances": _set(min=model.instances_min, max=model.instances_max),
        "batching": {key: number for key, number in batching.items() if number is not None},
        "config": dict(model.config),
    }
    return {"name": model.name, "versions": list(model.versions) or LATEST, **_set(**members)}


def _set(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value}


class _Reader:
    """Reads values, and collects problems; the return value for an invalid one does not matter."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def spec(self, value: object) -> DeploymentSpec:
        given = self._members("", value, _MEMBERS)
        device = self._members("device", given.get("device", {}), _DEVICE)
        least, most = self._bounds("replicas", given.get("replicas", 1), least=1)
        models = self._models(given.get("models"))
        name = self._text("name", given.get("name", ""))
        if not NAME.fullmatch(name):
            self._wrong("name", "up to 63 of a-z, 0-9, - and _, with a letter or digit first", name)
        return DeploymentSpec(
            name=name,
            target=self._text("target", given.get("target", "local")),
            models=models,
            environment=self._text("environment", given.get("environment", "")),
            cpu_cores=self._integer("device.cpu_cores", device.get("cpu_cores", 0)),
            gpus=self._integers("device.gpus", device.get("gpus", ())),
            memory_mib=self._integer("device.memory_mib", device.get("memory_mib", 0), most=2**40),
            gpu_memory_mib=self._integer("device.gpu_memory_mib", device.get("gpu_memory_mib", 0), most=2**40),
            replicas_min=least,
            replicas_max=max(least, most),
            keys=self._flag("keys", given.get("keys", False)),
            ready_within_s=self._seconds("ready_within_s", given.get("ready_within_s", 600.0)),
            idle_unload_s=self._integer("idle_unload_s", given.get("idle_unload_s", 0), most=IDLE_S_MAX),
            variables=self._variables("variables", given.get("variables", {})),
            secrets=self._variables("secrets", given.get("secrets", {}), given.get("variables", {})),
        )

    def _variables(self, path: str, value: object, others: object = ()) -> dict[str, str]:
        found = self._object(path, value)
        if len(found) > VARIABLES_MAX:
            self._wrong(path, f"at most {VARIABLES_MAX} of them", len(found))
        for name, text in found.items():
            if not _VARIABLE.fullmatch(str(name)) or _OWN_VARIABLE.match(str(name)):
                self._wrong(path, "letters, digits and _, and none of the server's own variables", name)
            elif isinstance(others, Mapping) and name in others:
                self._wrong(path, "a variable that is not among 'variables'", name)
            if not isinstance(text, str) or not text or {"\0", "\n"} & set(text) or len(text) > VARIABLE_CHARS_MAX:
                self.problems.append(f"{path}.{name}: expected a line of 1 to {VARIABLE_CHARS_MAX} characters")
        return {str(name): str(text) for name, text in found.items()}

    def strategy(self, value: object) -> Strategy:
        if isinstance(value, Mapping) and list(value) == [CANARY]:
            plan = self._object(f"strategy.{CANARY}", value[CANARY])
            try:
                read_plan({"version": 1, **plan})  # as the server does
            except ServingError as error:
                self.problems.append(f"strategy: {error.message}")
            return Strategy(CANARY, plan)
        kind = self._text("strategy", value)
        if kind not in ("", *STRATEGIES):
            self._wrong("strategy", f"one of {', '.join(STRATEGIES)}, or {{canary: {{...}}}}", kind)
        return Strategy(kind)

    def _models(self, value: object) -> tuple[DeployedModel, ...]:
        entries = self._list("models", value, MODELS_MAX)
        if not entries:
            self._wrong("models", "at least one model", value)
        models = tuple(self._model(f"models[{index}]", entry) for index, entry in enumerate(entries))
        names = [model.name for model in models]
        for name in sorted({name for name in names if names.count(name) > 1}):
            self._wrong("models", "each model once, with all its versions", name)
        return models

    def _model(self, path: str, value: object) -> DeployedModel:
        given = self._members(path, value, _MODEL)
        batching = self._members(f"{path}.batching", given.get("batching", {}), _BATCHING)
        least, most = self._bounds(f"{path}.instances", given.get("instances", 0), least=0)
        versions = given.get("versions", LATEST)
        numbers = () if versions == LATEST else self._integers(f"{path}.versions", versions, least=1, or_text=LATEST)
        name = self._text(f"{path}.name", given.get("name", ""))
        if not name:
            self._wrong(f"{path}.name", "the name of a model", given.get("name"))
        batch = batching.get("max_batch_size")
        delay = batching.get("max_queue_delay_microseconds")
        return DeployedModel(
            name=name,
            versions=tuple(sorted(numbers)),
            traffic=self._traffic(f"{path}.traffic", given.get("traffic", {}), numbers),
            instances_min=least,
            instances_max=most if most > least else 0,
            max_batch_size=None if batch is None else self._integer(f"{path}.batching.max_batch_size", batch, least=1),
            max_queue_delay_us=None
            if delay is None
            else self._integer(f"{path}.batching.max_queue_delay_microseconds", delay, most=10**9),
            config=dict(self._object(f"{path}.config", given.get("config", {}))),
        )

    def _traffic(self, path: str, value: object, versions: Sequence[int]) -> dict[str, Any]:
        known = len(self.problems)
        traffic = dict(self._members(path, value, _TRAFFIC))
        for part in ("weights", "shadow"):
            if isinstance(by_version := traffic.get(part), Mapping):
                traffic[part] = {str(version): what for version, what in by_version.items()}
                for version in traffic[part]:
                    if versions and version not in map(str, versions):
                        self._wrong(f"{path}.{part}", f"versions of {list(versions)}", version)
        if len(self.problems) == known:
            try:
                read_settings(traffic)  # as the server does
            except ServingError as error:
                self.problems.append(f"{path}.{error.message}")
        return traffic

    def _bounds(self, path: str, value: object, *, least: int) -> tuple[int, int]:
        """Return the bounds of a number: given as one number, or as `{min, max}`."""
        if not isinstance(value, Mapping):
            number = self._integer(path, value, least=least)
            return number, number
        given = self._members(path, value, _BOUNDS)
        low = self._integer(f"{path}.min", given.get("min", 1), least=least)
        high = self._integer(f"{path}.max", given.get("max", low), least=least)
        if high < low:
            self._wrong(f"{path}.max", f"at least min, {low}", high)
        return low, high

    def _members(self, path: str, value: object, known: Sequence[str]) -> Mapping[str, Any]:
        given = self._object(path, value)
        for name in given:
            if name not in known:
                self._wrong(f"{path}.{name}" if path else str(name), f"one of {', '.join(known)}", "this name")
        return given

    def _object(self, path: str, value: object) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return value
        self._wrong(path or "deployment", "an object", value)
        return {}

    def _list(self, path: str, value: object, most: int) -> Sequence[object]:
        if not isinstance(value, list | tuple):
            self._wrong(path, "a list", value)
            return ()
        if len(value) > most:
            self._wrong(path, f"at most {most} of them", len(value))
        return value

    def _integers(self, path: str, value: object, *, least: int = 0, or_text: str = "") -> tuple[int, ...]:
        if or_text and not isinstance(value, list | tuple):
            self._wrong(path, f"a list of numbers, or '{or_text}'", value)
            return ()
        numbers = [self._integer(path, entry, least=least) for entry in self._list(path, value, VERSIONS_MAX)]
        if len(set(numbers)) < len(numbers):
            self._wrong(path, "each number once", value)
        return tuple(numbers)

    def _integer(self, path: str, value: object, *, least: int = 0, most: int = COUNT_MAX) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        self._wrong(path, f"a whole number from {least} to {most}", value)
        return least

    def _seconds(self, path: str, value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= READY_S_MAX:
            return float(value)
        self._wrong(path, f"seconds, above 0 and up to {READY_S_MAX:.0f}", value)
        return READY_S_MAX

    def _text(self, path: str, value: object) -> str:
        if isinstance(value, str):
            return value
        self._wrong(path, "a text", value)
        return ""

    def _flag(self, path: str, value: object) -> bool:
        if isinstance(value, bool):
            return value
        self._wrong(path, "true or false", value)
        return False

    def _wrong(self, path: str, expected: str, got: object) -> None:
        self.problems.append(f"{path}: expected {expected}, got {_shown(got)}")


def _shown(value: object) -> str:
    text = f"'{value}'" if isinstance(value, str) and value != "this name" else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def changes(before: DeploymentSpec | None, after: DeploymentSpec) -> Sequence[str]:
    """Return the changes, a sentence each.

    Args:
        before: The current specification, None for a new deployment.
    """
    if before is None:
        return [f"deployment '{after.name}' is created at '{after.target}'", *_new(after)]
    return [*_of_deployment(before, after), *_of_models(before, after)]


def changes_traffic_only(before: DeploymentSpec, after: DeploymentSpec) -> bool:
    return _without_traffic(before) == _without_traffic(after)


def _without_traffic(spec: DeploymentSpec) -> DeploymentSpec:
    return replace(spec, models=tuple(replace(model, traffic={}) for model in spec.models))


def _new(spec: DeploymentSpec) -> Iterator[str]:
    for model in spec.models:
        yield f"model '{model.name}' {_versions(model)} is deployed"
    yield from _of_deployment(DeploymentSpec(spec.name, spec.target), spec)
    for model in spec.models:
        yield from _of_model(DeployedModel(model.name, model.versions), model)


_WORDS: Mapping[str, Callable[[DeploymentSpec], object]] = {
    "environment": lambda spec: spec.environment or "none",
    "CPU cores": lambda spec: spec.cpu_cores or "all",
    "GPUs": lambda spec: ", ".join(map(str, spec.gpus)) or "none",
    "memory": lambda spec: _mib(spec.memory_mib),
    "memory of each GPU": lambda spec: _mib(spec.gpu_memory_mib),
    "replicas": lambda spec: " to ".join(dict.fromkeys((str(spec.replicas_min), str(spec.replicas_max)))),
    "API keys": lambda spec: "needed" if spec.keys else "not needed",
    "variables": lambda spec: ", ".join(f"{name}={text!r}" for name, text in sorted(spec.variables.items())) or "none",
    "secrets": lambda spec: ", ".join(f"{to} from '{name}'" for to, name in sorted(spec.secrets.items())) or "none",
    "unloading of idle models": lambda spec: f"after {spec.idle_unload_s} s" if spec.idle_unload_s else "never",
    "time to be ready": lambda spec: f"{spec.ready_within_s:g} s",
}
"""What changes of a deployment say of it; of a model, the next."""

_MODEL_WORDS: Mapping[str, Callable[[DeployedModel], object]] = {
    "": lambda model: _versions(model),
    " traffic": lambda model: _traffic(model.traffic),
    " instances": lambda model: _instances(model),
    " largest batch": lambda model: _configured(model.max_batch_size),
    " longest wait for a fuller batch": lambda model: _configured(model.max_queue_delay_us, " us"),
}


def _of_deployment(before: DeploymentSpec, after: DeploymentSpec) -> Iterator[str]:
    for what, text in _WORDS.items():
        yield from _changed(what, text(before), text(after))


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
    for what, text in _MODEL_WORDS.items():
        yield from _changed(f"{name}{what}", text(before), text(after))
    for name_of_field in sorted(before.config.keys() | after.config.keys()):
        old, new = (model.config.get(name_of_field) for model in (before, after))
        if old != new:
            yield from _changed(f"{name} configuration, {name_of_field}", _json(old), _json(new))


def _changed(what: str, before: object, after: object) -> Iterator[str]:
    if before != after:
        yield f"{what} {before} -> {after}"


def _versions(model: DeployedModel) -> str:
    if not model.versions:
        return "latest version"
    return f"version{'s' if len(model.versions) > 1 else ''} {', '.join(map(str, model.versions))}"


def _traffic(traffic: Mapping[str, Any]) -> str:
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


def _mib(mib: int) -> str:
    return f"{mib} MiB" if mib else "no limit"


def _json(value: object) -> str:
    return "as the model has it" if value is None else json.dumps(value, sort_keys=True)
