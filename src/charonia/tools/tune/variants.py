"""Applies a variant to the configurations of its models, and names the resulting configurations. Pure.

A variant is the model's own configuration with its changes. Configurations are numbered in the
order in which they are first used; variants with the same text share a number.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.json_format import MessageToJson

from charonia.config.backends import record_of
from charonia.config.convert import to_message
from charonia.config.json_form import from_json, to_json
from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, InstanceGroup, ModelConfig
from charonia.config.parameters import INSTANCES_MAX, INSTANCES_MIN
from charonia.config.pbtxt import render
from charonia.core.errors import ServingError, invalid
from charonia.tools.tune.api import ModelChange, Variant

DEFAULT_SUFFIX = "_config_default"


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A model as it was found.

    Attributes:
        config: The base of variants: the text of its config.pbtxt, or the completed configuration.
        has_gpu: Whether instances may run on a GPU; elsewhere, variants for a GPU run on the CPU.
        instance_memory_mb: Least memory that one more instance takes, 0 for unknown.
    """

    name: str
    config: ModelConfig
    complete: ModelConfig
    kind: InstanceKind = InstanceKind.KIND_CPU
    has_gpu: bool = True
    instance_memory_mb: float = 0.0

    @property
    def composing(self) -> tuple[str, ...]:
        """Its composing models; none unless it is an ensemble."""
        scheduling = self.complete.ensemble_scheduling
        return tuple(dict.fromkeys(step.model_name for step in scheduling.step)) if scheduling is not None else ()

    @property
    def instance_count(self) -> int:
        """Instances of its configuration, all groups together."""
        return sum(max(1, group.count) * max(1, len(group.gpus)) for group in self.complete.instance_group) or 1

    @property
    def batches_dynamically(self) -> bool:
        """Whether dynamic batching is legal: not for ensembles, sequences and models without batching."""
        complete = self.complete
        return (
            complete.max_batch_size > 0 and complete.sequence_batching is None and complete.ensemble_scheduling is None
        )


def instance_kind(complete: ModelConfig, *, cpu_only: bool) -> InstanceKind:
    """Return where a variant's instances run: where the model's run, KIND_CPU on a server without a GPU."""
    kinds = {group.kind for group in complete.instance_group}
    if cpu_only or not kinds:
        return InstanceKind.KIND_CPU
    for kind in (InstanceKind.KIND_GPU, InstanceKind.KIND_MODEL, InstanceKind.KIND_CPU):
        if kind in kinds:
            return kind
    # KIND_AUTO does not reveal whether the server has GPUs, and one without them refuses KIND_GPU.
    return InstanceKind.KIND_CPU


def wants_gpu(config: ModelConfig) -> bool:
    """Return whether a configuration names GPUs for its instances."""
    return any(group.kind is InstanceKind.KIND_GPU or group.gpus for group in config.instance_group)


def on_cpu(config: ModelConfig) -> ModelConfig:
    """Return a configuration whose instances for GPUs run on the CPU, in the same number for each group."""
    groups = tuple(
        replace(group, kind=InstanceKind.KIND_CPU, gpus=())
        if group.kind is InstanceKind.KIND_GPU or group.gpus
        else group
        for group in config.instance_group
    )
    return replace(config, instance_group=groups)


def apply_change(base: BaseModel, change: ModelChange) -> ModelConfig:
    """Return the configuration of a model with a change.

    Raises:
        ServingError: INVALID_ARG for a field with an invalid value.
    """
    config = base.config
    if change.instance_count is not None:
        first = config.instance_group[0] if config.instance_group else InstanceGroup()
        gpus = first.gpus if base.kind is InstanceKind.KIND_GPU else ()
        # The number that is tried stays, also where that of the model follows the load.
        kept = {name: text for name, text in config.parameters.items() if name not in (INSTANCES_MIN, INSTANCES_MAX)}
        group = replace(first, count=change.instance_count, kind=base.kind, gpus=gpus)
        config = replace(config, instance_group=(group,), parameters=kept)
    config = _with_batching(config, base, change)
    if change.thread_count is not None:
        parameter = record_of(base.complete.backend, base.complete.platform).thread_parameter
        config = replace(config, parameters={**config.parameters, parameter: str(change.thread_count)})
    config = _with_fields(config, change.fields)
    return config if base.has_gpu else on_cpu(config)


def apply_variant(bases: Mapping[str, BaseModel], variant: Variant) -> dict[str, ModelConfig]:
    """Return the configuration of each model in a variant; an ensemble batches no more than its composing models."""
    configs = {name: apply_change(base, variant.change(name)) for name, base in bases.items()}
    for name, base in bases.items():
        limits = [
            configs[step].max_batch_size
            for step in base.composing
            if step in configs and configs[step].max_batch_size != bases[step].config.max_batch_size
        ]
        if limits and configs[name].max_batch_size > min(limits):
            configs[name] = replace(configs[name], max_batch_size=min(limits))
    return configs


def effective_text(bases: Mapping[str, BaseModel], variant: Variant) -> str:
    """Return a text that is equal for variants with the same effect, since a change may spell out the default."""
    complete = {name: replace(base, config=base.complete) for name, base in bases.items()}
    configs = apply_variant(complete, variant)
    return "\n".join(render(_with_written_groups(config, bases[name].kind)) for name, config in configs.items())


def _with_written_groups(config: ModelConfig, kind: InstanceKind) -> ModelConfig:
    """Return a configuration whose instance groups spell out the server's defaults, without their names."""
    groups = tuple(
        replace(
            group,
            name="",
            count=max(1, group.count),
            kind=kind if group.kind is InstanceKind.KIND_AUTO else group.kind,
        )
        for group in config.instance_group
    )
    return replace(config, instance_group=groups)


def serving_text(config: ModelConfig) -> str:
    """Return config.pbtxt for a folder of any name: without the model's name, which is the folder's."""
    return render(replace(config, name=""))


@dataclass(slots=True)
class Names:
    """The names of configurations: `add_sub_config_default`, `add_sub_config_0` and so on.

    Attributes:
        numbers: Number by text of a configuration, by model.
    """

    numbers: dict[str, dict[str, int]] = field(default_factory=dict)

    def name(self, base: BaseModel, config: ModelConfig, below: Sequence[str] = ()) -> str:
        """Return the name of a configuration of a model.

        Args:
            below: Names of the configurations of the models that it is made of or calls: with others, it is another.
        """
        if config == base.config and all(name.endswith(DEFAULT_SUFFIX) for name in below):
            return f"{base.name}{DEFAULT_SUFFIX}"
        numbers = self.numbers.setdefault(base.name, {})
        text = "\n".join([*below, serving_text(config)])
        return f"{base.name}_config_{numbers.setdefault(text, len(numbers))}"

    def names(
        self, bases: Mapping[str, BaseModel], configs: Mapping[str, ModelConfig], profiled: Sequence[str]
    ) -> dict[str, str]:
        """Return the name of each configuration of a variant, by model; composing models come first."""
        found: dict[str, str] = {}
        for model in sorted(configs, key=lambda model: (model in profiled, depth(bases, model))):
            base = bases[model]
            below = base.composing or tuple(name for name in configs if model in profiled and name not in profiled)
            found[model] = self.name(base, configs[model], [found[name] for name in below if name in found])
        return found


def depth(bases: Mapping[str, BaseModel], name: str) -> int:
    """Return the depth of a model: 1, or for an ensemble one more than its deepest composing model."""
    below = [inner for inner in bases[name].composing if inner in bases and inner != name]
    return 1 + max((depth(bases, inner) for inner in below), default=0)


def instance_group_text(config: ModelConfig) -> str:
    """Return the instances in the form of the tables: `2:CPU`, groups of a kind together."""
    counts: dict[str, int] = {}
    for group in config.instance_group:
        kind = group.kind.name.removeprefix("KIND_")
        counts[kind] = counts.get(kind, 0) + max(1, group.count) * max(1, len(group.gpus))
    return ",".join(f"{count}:{kind}" for kind, count in counts.items())


def load_text(config: ModelConfig) -> str:
    """Return a configuration as the JSON of a load request, without unset fields.

    A server of another version may not know every field, and refuses unknown fields.
    """
    return MessageToJson(to_message(config), preserving_proto_field_name=True, indent=None)


def config_of(document: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration that a server reported."""
    return from_json(json.dumps(document))


def _with_batching(config: ModelConfig, base: BaseModel, change: ModelChange) -> ModelConfig:
    batching = config.dynamic_batching
    if change.max_batch_size is not None:
        config = replace(config, max_batch_size=change.max_batch_size)
        if batching is None and base.batches_dynamically and change.max_batch_size > 0:
            batching = DynamicBatching()
        if batching is not None:
            fitting = tuple(size for size in batching.preferred_batch_size if size <= change.max_batch_size)
            batching = replace(batching, preferred_batch_size=fitting)
    if change.queue_delay_us is not None:
        batching = replace(batching or DynamicBatching(), max_queue_delay_microseconds=change.queue_delay_us)
    return replace(config, dynamic_batching=batching)


def _parameter(value: object) -> dict[str, str]:
    """Return a value as a parameter; a value that is not text becomes JSON, as engines read it."""
    return {"string_value": value if isinstance(value, str) else json.dumps(value)}


def _with_fields(config: ModelConfig, fields: Sequence[tuple[str, str]]) -> ModelConfig:
    if not fields:
        return config
    document: dict[str, Any] = dict(to_json(config))
    for name, text in fields:
        value = json.loads(text)
        if name == "parameters" and isinstance(value, dict):
            value = {key: inner if isinstance(inner, dict) else _parameter(inner) for key, inner in value.items()}
            value = {**dict(document.get(name) or {}), **value}  # the model's other parameters stay
        document[name] = value
        if name == "backend":  # the platform says the same of the backend that it was
            document.pop("platform", None)
    try:
        return from_json(json.dumps(document))
    except ServingError as error:
        raise invalid(f"model_config_parameters: {error.message}", hint=error.hint) from None
