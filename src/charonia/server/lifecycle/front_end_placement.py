"""Which models run in the processes of front ends, beside the engine, which has every model. Pure.

A model that keeps no state and computes in microseconds costs less than the way to the engine and back. So each front
end loads such a model, too, and answers requests for it. The model parameter `front_end` decides: "no" keeps it in the
engine; with "auto", the default, front ends load it when the engine has measured that a request is short
(`scheduling/in_place.py`); with "yes", immediately.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from charonia.config.backends import ENSEMBLE, record_of
from charonia.config.kinds import InstanceKind
from charonia.config.model import DynamicBatching, ModelConfig
from charonia.config.parameters import CUSTOM_BATCHING, FRONT_END, INSTANCES_MAX, PYTHON_STRATEGY, bounds_of
from charonia.config.problems import Problem

BYTES_MAX = 64 * 2**20
"""Largest model that front ends load, in bytes of its weights: each process has a copy."""


class Choice(Enum):
    """Values of the parameter."""

    YES = "yes"
    NO = "no"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Offer:
    """A version that front ends load: the files and the configuration are those from which the engine has loaded it.

    Attributes:
        number: Its number, different for each load.
        version: The version.
        name: The model.
        folder: Its folder, "" for an ensemble.
        files: Fingerprint of its files; a front end that finds another one does not use them.
        is_immutable: Whether change times of the files mean nothing.
        labels: Class labels by output.
        steps: The numbers of the versions of its steps, in their order; none unless it is an ensemble.
    """

    number: int
    version: int
    name: str = ""
    folder: str = ""
    files: str = ""
    is_immutable: bool = False
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecutionPlacement:
    """Where the requests of a version run, in a server with front ends in processes of their own.

    Attributes:
        front_ends: Number of front ends that have the model, too.
        reason: Why it stays in the engine, "" if it is offered to front ends.
    """

    front_ends: int
    reason: str


def choice_of(config: ModelConfig) -> Choice:
    return Choice(config.parameters.get(FRONT_END, Choice.AUTO.value))


def front_end_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield all problems of the parameter."""
    text = config.parameters.get(FRONT_END, Choice.AUTO.value)
    if text not in {choice.value for choice in Choice}:
        yield Problem(f"parameters[{FRONT_END}]", f"must be yes, no or auto, got '{text}'")
    elif text == Choice.YES.value and config.platform != ENSEMBLE:
        reason = obstacle(config)
        if reason:
            yield Problem(f"parameters[{FRONT_END}]", f"the model cannot run in front ends: {reason}")


def obstacle(config: ModelConfig) -> str:
    """Return what in a complete configuration keeps a model in the engine, "" where nothing does."""
    if choice_of(config) is Choice.NO:
        return f"parameter {FRONT_END} is 'no'"
    if config.platform != ENSEMBLE and not record_of(config.backend).in_front_ends:
        return f"models of backend '{config.backend}' exist once"
    if any(group.kind is not InstanceKind.KIND_CPU for group in config.instance_group):
        return "it does not run on the CPU"
    if any(group.host_policy for group in config.instance_group):
        return "its instances are bound to cores (host_policy)"
    if any(group.rate_limiter is not None for group in config.instance_group):
        return "its instances share resources (rate_limiter)"
    if bounds_of(config) is not None:
        return f"the number of its instances follows the load ({INSTANCES_MAX})"
    if config.sequence_batching is not None:
        return "it works on sequences"
    if config.is_decoupled:
        return "it is decoupled"
    if config.response_cache is not None and config.response_cache.enable:
        return "its responses are cached"
    if CUSTOM_BATCHING in config.parameters or PYTHON_STRATEGY in config.parameters:
        return "it has its own batching strategy"
    return _queue_obstacle(config.dynamic_batching) if config.dynamic_batching is not None else ""


def _queue_obstacle(batching: DynamicBatching) -> str:
    fields = {
        "max_queue_delay_microseconds": batching.max_queue_delay_microseconds,
        "preserve_ordering": batching.preserve_ordering,
        "priority_levels": batching.priority_levels,
        "default_queue_policy": batching.default_queue_policy,
    }
    found = next((name for name, value in fields.items() if value), "")
    return f"{found} needs one queue for all clients" if found else ""


def reason_to_stay(
    config: ModelConfig,
    size_bytes: int = 0,
    *,
    is_limited: bool = False,
    has_short_requests: bool = False,
    steps: Sequence[tuple[str, str]] = (),
) -> str:
    """Return why a version that the engine has loaded runs in the engine only, "" if it runs in front ends, too.

    Args:
        config: Its complete configuration.
        size_bytes: Memory that it takes.
        is_limited: Whether the rate limiter counts its executions.
        has_short_requests: Whether the engine has measured that a request computes in microseconds.
        steps: The models of the steps of an ensemble, and why each stays in the engine, "" if it does not.
    """
    reason = obstacle(config)
    if reason:
        return reason
    for model, reason in steps:
        if reason:
            return f"its step '{model}' stays there: {reason}"
    if is_limited:
        return "the rate limiter counts its executions"
    if size_bytes > BYTES_MAX:
        return f"it takes {size_bytes >> 20} MiB, of at most {BYTES_MAX >> 20} for a copy in each front end"
    is_composed = config.platform == ENSEMBLE
    if not is_composed and choice_of(config) is Choice.AUTO and not has_short_requests:
        return "it has not been measured to compute in microseconds"
    return ""


def placing_text(config: ModelConfig) -> str:
    """Return a line on where a model with a complete configuration runs if front ends run in other processes."""
    reason = obstacle(config)
    if reason:
        return f"With --front-ends: in the engine only, as {reason}."
    if config.platform == ENSEMBLE:
        return "With --front-ends: in front ends, if the models of all of its steps run there."
    when = "at once" if choice_of(config) is Choice.YES else "when it is measured to compute in microseconds"
    return f"With --front-ends: in front ends, {when}."


def for_front_end(config: ModelConfig) -> ModelConfig:
    """Return the configuration for a copy in a front end: one instance, as the front end is one thread."""
    groups = tuple(replace(group, count=1) for group in config.instance_group[:1])
    return replace(config, instance_group=groups)
