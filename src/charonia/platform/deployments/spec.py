"""The specification of a deployment: its form in files and the API, and its changes in words. Pure.

`docs/platform_deployments.md` has an example with every field.
"""

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Gt, Le
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.config import JsonDict

from charonia.core.errors import ServingError, invalid
from charonia.platform.values import (
    RequestBody,
    Whole,
    errors_at,
    expected,
    problems_of,
    refused,
    shown,
)
from charonia.wire.traffic import CANARY, REPLACE, SETTINGS, STRATEGIES, read_plan, read_settings

MODELS_MAX = 100
"""Most models of a deployment."""

VERSIONS_MAX = 16
"""Most versions of one of its models."""

COUNT_MAX = 10_000
"""Most instances, replicas and cores."""

VARIABLES_MAX = 64
"""Most environment variables of a deployment, and most of them that are secrets."""

VARIABLE_CHARS_MAX = 32 * 1024

MEMORY_MIB_MAX = 2**40

DELAY_US_MAX = 10**9

IDLE_S_MAX = 31 * 86_400

READY_S_MAX = 24 * 3600.0
"""Largest time limit for a revision to be ready."""

LATEST = "latest"
"""In place of versions: the latest one that is ready."""

_OWN_VARIABLE = re.compile(
    r"(LD_|PYTHON|CHARONIA_|UV_|PIP_|XDG_)|(HOME|PATH|TMPDIR|CUDA_VISIBLE_DEVICES|ENV|BASH_ENV)\Z"
)
"""Variables that the platform sets itself, or that decide which programs a server runs."""


class SpecPart(RequestBody):
    """A part of a specification. It is written without the fields that have their defaults, except for `WRITTEN`."""

    model_config = ConfigDict(frozen=True)

    WRITTEN: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        written: dict[str, Any] = write(self)
        kept = [name for name in written if name in self.WRITTEN or getattr(self, name) != defaults[name]]
        return {name: written[name] for name in kept}


def _each_once(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(numbers)) < len(numbers):
        raise refused("each number once", list(numbers))
    return numbers


def _read_versions(value: object) -> object:
    if value == LATEST:
        return ()
    if not isinstance(value, list | tuple):
        raise refused(f"a list of numbers, or '{LATEST}'", value)
    return value


class Bounds(SpecPart):
    """Bounds of a number that the load sets."""

    WRITTEN = frozenset({"min", "max"})

    min: Annotated[int, Whole(0, COUNT_MAX)] = 1
    max: Annotated[int, Whole(0, COUNT_MAX)] = Field(default_factory=lambda given: given.get("min", 1))

    @field_validator("max")
    @classmethod
    def _not_below(cls, most: int, info: ValidationInfo) -> int:
        least = info.data.get("min", 0)
        if most < least:
            raise refused(f"at least min, {least}", most)
        return most


class Replicas(Bounds):
    """Servers of a deployment."""

    min: Annotated[int, Whole(1, COUNT_MAX)] = 1


class Instances(Bounds):
    """Instances of each version; 0 for the number of the configuration."""

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"min": self.min, "max": self.max} if self.max > self.min else {"min": self.min}


def _number_or_bounds(least: int) -> WrapValidator:
    """Read bounds that are given as one number, or as `{min, max}`."""
    adapter = TypeAdapter(Annotated[int, Whole(least, COUNT_MAX)])

    def read(value: object, read_bounds: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, Mapping | Bounds):
            number = adapter.validate_python(value, strict=True)
            value = {"min": number, "max": number}
        return read_bounds(value)

    bounds = Replicas if least else Instances
    return WrapValidator(read, json_schema_input_type=Annotated[int, Field(ge=least, le=COUNT_MAX)] | bounds)


class Batching(SpecPart):
    """Batches of a model. None for the value of the configuration."""

    max_batch_size: Annotated[int, Whole(1, COUNT_MAX)] | None = None
    max_queue_delay_microseconds: Annotated[int, Whole(0, DELAY_US_MAX)] | None = Field(
        default=None, description="Longest wait for a fuller batch."
    )


Versions = Annotated[
    tuple[Annotated[int, Whole(1, COUNT_MAX)], ...],
    Field(strict=False, max_length=VERSIONS_MAX),
    AfterValidator(_each_once),
    AfterValidator(lambda numbers: tuple(sorted(numbers))),
    BeforeValidator(
        _read_versions, json_schema_input_type=Literal["latest"] | list[Annotated[int, Field(ge=1, le=COUNT_MAX)]]
    ),
    PlainSerializer(lambda numbers: list(numbers) or LATEST),
]


class DeployedModel(SpecPart):
    """A model of a deployment."""

    WRITTEN = frozenset({"versions"})

    name: Annotated[str, StringConstraints(min_length=1), expected("the name of a model")] = Field(
        description="Its name in the registry and in the server."
    )
    versions: Versions = Field(
        default=(), description="The versions to load, or `latest`: the latest one that is ready."
    )
    traffic: dict[str, Any] = Field(
        default={}, description="The split of requests that name no version, as POST /v2/models/M/traffic takes it."
    )
    instances: Annotated[Instances, _number_or_bounds(0)] = Instances(min=0)
    batching: Batching = Batching()
    config: dict[str, Any] = Field(
        default={}, description="Other fields of the model configuration, in the form of its JSON."
    )

    @field_validator("traffic")
    @classmethod
    def _as_the_server_reads_it(cls, traffic: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Return it with texts as names of versions, as JSON has them."""
        known = f"unknown; expected one of {', '.join(SETTINGS)}"
        found: list[tuple[tuple[str, ...], str]] = [((name,), known) for name in traffic if name not in SETTINGS]
        versions = info.data.get("versions", ())
        for part in ("weights", "shadow"):
            if isinstance(by_version := traffic.get(part), Mapping):
                traffic = {**traffic, part: {str(version): what for version, what in by_version.items()}}
                unlike = [each for each in traffic[part] if versions and each not in map(str, versions)]
                found += [((part,), f"expected versions of {list(versions)}, got '{each}'") for each in unlike]
        try:
            if not found:
                read_settings(traffic)
        except ServingError as error:
            path, _, text = error.message.partition(": ")
            found.append((tuple(path.split(".")), text))
        if found:
            raise errors_at(*found)
        return traffic


class Device(SpecPart):
    """What each server of a deployment may use."""

    cpu_cores: Annotated[int, Whole(0, COUNT_MAX)] = Field(default=0, description="Cores for its models, 0 for all.")
    gpus: Annotated[
        tuple[Annotated[int, Whole(0, COUNT_MAX)], ...],
        Field(strict=False, max_length=VERSIONS_MAX),
        AfterValidator(_each_once),
        PlainSerializer(list),
    ] = Field(default=(), description="Numbers of the GPUs that it sees.")
    memory_mib: Annotated[int, Whole(0, MEMORY_MIB_MAX)] = Field(default=0, description="Memory, 0 for no limit.")
    gpu_memory_mib: Annotated[int, Whole(0, MEMORY_MIB_MAX)] = Field(
        default=0, description="Memory on each of these GPUs, 0 for no limit."
    )


def _not_of_the_server(name: str) -> str:
    if _OWN_VARIABLE.match(name):
        raise refused(_VARIABLE_NAME, name)
    return name


_VARIABLE_NAME = "letters, digits and _, and none of the server's own variables"

VariableName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"),
    AfterValidator(_not_of_the_server),
    expected(_VARIABLE_NAME),
]
VariableText = Annotated[
    str,
    StringConstraints(pattern=r"^[^\x00\n]+$", max_length=VARIABLE_CHARS_MAX),
    expected(f"a text of one line with 1 to {VARIABLE_CHARS_MAX} characters", is_shown=False),
]
Variables = Annotated[dict[VariableName, VariableText], Field(max_length=VARIABLES_MAX)]


def _one_model_each(models: tuple[DeployedModel, ...]) -> tuple[DeployedModel, ...]:
    names = [model.name for model in models]
    if not names:
        raise refused("at least one model", [])
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise refused("each model once, with all its versions", twice[0])
    return models


def _without_default(schema: JsonDict) -> None:
    del schema["default"]


class DeploymentSpec(SpecPart):
    """A deployment."""

    WRITTEN = frozenset({"target", "replicas", "keys", "ready_within_s"})

    name: Annotated[
        str,
        StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$"),
        expected("up to 63 of a-z, 0-9, - and _, with a letter or digit first"),
    ] = Field(
        default="",
        validate_default=True,
        json_schema_extra=_without_default,
        description="Its name, which is part of addresses and folders; PUT has it in its address, too.",
    )
    target: str = "local"
    environment: str = Field(default="", description='Name of its environment, "" for the Python of the platform.')
    models: Annotated[
        tuple[DeployedModel, ...], Field(strict=False, max_length=MODELS_MAX), AfterValidator(_one_model_each)
    ]
    device: Device = Device()
    replicas: Annotated[Replicas, _number_or_bounds(1)] = Replicas()
    keys: bool = Field(default=False, description="Whether clients need an API key.")
    ready_within_s: Annotated[
        float,
        Gt(0),
        Le(READY_S_MAX),
        AllowInfNan(False),
        expected(f"seconds, above 0 and up to {READY_S_MAX:.0f}"),
    ] = Field(default=600.0, description="A revision that is not ready after this time has failed.")
    idle_unload_s: Annotated[int, Whole(0, IDLE_S_MAX)] = Field(
        default=0,
        description="Unused models are unloaded after this time, and loaded for their next request; 0 for never.",
    )
    variables: Variables = Field(default={}, description="Environment variables of its servers.")
    secrets: Variables = Field(default={}, description="More of them: for each, the name of a secret of the project.")

    @field_validator("secrets")
    @classmethod
    def _beside_variables(cls, secrets: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        for name in secrets.keys() & info.data.get("variables", {}).keys():
            raise refused("a variable that is not among 'variables'", name)
        return secrets


class Strategy(SpecPart):
    """How new versions get requests.

    Attributes:
        kind: One of `STRATEGIES`; "" for what the specification says.
        plan: Members of the canary plan, without its version.
    """

    kind: str = ""
    plan: dict[str, Any] = Field(default={})


def _read_strategy(value: object) -> Strategy:
    if isinstance(value, Mapping) and list(value) == [CANARY]:
        plan = value[CANARY]
        if not isinstance(plan, Mapping):
            raise errors_at(((CANARY,), f"expected an object, got {shown(plan)}"))
        try:
            read_plan({"version": 1, **plan})  # as the server does
        except ServingError as error:
            raise errors_at(((), error.message)) from None
        return Strategy(kind=CANARY, plan=dict(plan))
    if not isinstance(value, str) or value not in ("", *STRATEGIES):
        raise refused(f"one of {', '.join(STRATEGIES)}, or {{canary: {{...}}}}", value)
    return Strategy(kind=value)


class DeploymentChange(DeploymentSpec):
    """A deployment, and how its new versions get requests."""

    strategy: Annotated[
        Strategy,
        PlainValidator(
            _read_strategy,
            json_schema_input_type=Literal["", "replace", "beside", "canary"] | dict[Literal["canary"], dict[str, Any]],
        ),
    ] = Field(default=Strategy(), description="How new versions get requests. It is not recorded.")

    @model_validator(mode="after")
    def _sets_weights_once(self) -> Self:
        given = [index for index, model in enumerate(self.models) if model.traffic.get("weights")]
        kind = self.strategy.kind
        if given and kind not in ("", REPLACE):
            text = f"expected none with the strategy '{kind}', which sets them"
            raise errors_at(*((("models", index, "traffic", "weights"), text) for index in given))
        return self


def read_spec(value: object) -> DeploymentSpec:
    """Return a deployment."""
    return read_change(value)[0]


def read_change(value: object) -> tuple[DeploymentSpec, Strategy]:
    """Return a deployment, and how its new versions get requests."""
    try:
        change = DeploymentChange.model_validate(value)
    except ValidationError as error:
        raise invalid("\n".join(problems_of(error.errors(), "deployment"))) from None
    return DeploymentSpec.model_construct(
        **{name: getattr(change, name) for name in DeploymentSpec.model_fields}
    ), change.strategy


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
        models.append(model.model_copy(update={"versions": versions, "traffic": traffic}))
    return after.model_copy(update={"models": tuple(models)}), canaries


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
    models = tuple(model.model_copy(update={"traffic": {}}) for model in spec.models)
    return spec.model_copy(update={"models": models})


def _new(spec: DeploymentSpec) -> Iterator[str]:
    for model in spec.models:
        yield f"model '{model.name}' {_versions(model)} is deployed"
    yield from _of_deployment(DeploymentSpec.model_construct(name=spec.name, target=spec.target), spec)
    for model in spec.models:
        yield from _of_model(DeployedModel(name=model.name, versions=model.versions), model)


_WORDS: Mapping[str, Callable[[DeploymentSpec], object]] = {
    "environment": lambda spec: spec.environment or "none",
    "CPU cores": lambda spec: spec.device.cpu_cores or "all",
    "GPUs": lambda spec: ", ".join(map(str, spec.device.gpus)) or "none",
    "memory": lambda spec: _mib(spec.device.memory_mib),
    "memory of each GPU": lambda spec: _mib(spec.device.gpu_memory_mib),
    "replicas": lambda spec: " to ".join(dict.fromkeys((str(spec.replicas.min), str(spec.replicas.max)))),
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
    " largest batch": lambda model: _configured(model.batching.max_batch_size),
    " longest wait for a fuller batch": lambda model: _configured(model.batching.max_queue_delay_microseconds, " us"),
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
            yield from _of_model(DeployedModel(name=name, versions=model.versions), model)
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
    bounds = model.instances
    if not bounds.max:
        return "as configured"
    return f"{bounds.min} to {bounds.max} by load" if bounds.max > bounds.min else f"{bounds.min}"


def _configured(value: int | None, unit: str = "") -> str:
    return "as configured" if value is None else f"{value}{unit}"


def _mib(mib: int) -> str:
    return f"{mib} MiB" if mib else "no limit"


def _json(value: object) -> str:
    return "as the model has it" if value is None else json.dumps(value, sort_keys=True)
