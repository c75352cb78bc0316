"""What is wrong with a complete configuration, as far as one configuration alone can tell: everything at once.

`validate` expects a configuration with its defaults in place (`charonia.config.complete.normalise`). The parts of it
are in `tensors`, `scheduling` and `ensemble`. Well-known key fragments of Triton's sentences are kept, as clients and
tests look for them.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePosixPath

from charonia.config.ensemble import ensemble_problems
from charonia.config.kinds import InstanceKind
from charonia.config.metrics import bucket_problems, tag_problems
from charonia.config.model import InstanceGroup, ModelConfig
from charonia.config.padding import padding_problems
from charonia.config.platforms import BACKEND_OF_PLATFORM, ENSEMBLE
from charonia.config.problems import Problem
from charonia.config.scheduling import scheduling_problems
from charonia.config.tensors import tensor_problems
from charonia.config.warmup import warmup_problems

INSTANCE_COUNT_MAX = 1024
"""Most instances of one group; each is a thread or a process."""


def validate(config: ModelConfig, *, gpu_count: int) -> list[Problem]:
    """Return everything that is wrong with a configuration, in the order of its fields.

    Args:
        config: The configuration, completed and normalised.
        gpu_count: GPUs of this machine, numbered from 0.
    """
    return [
        *_identity_problems(config),
        *_version_policy_problems(config),
        *_batch_size_problems(config),
        *tensor_problems(config),
        *padding_problems(config),
        *scheduling_problems(config),
        *_instance_problems(config, gpu_count),
        *warmup_problems(config),
        *_cache_problems(config),
        *_metric_problems(config),
        *ensemble_problems(config),
    ]


def _identity_problems(config: ModelConfig) -> Iterator[Problem]:
    name, platform, backend = config.name, config.platform, config.backend
    if not name:
        yield Problem("name", "model configuration must specify 'name'")
    if not platform and not backend:
        yield Problem("backend", f"must specify 'platform' or 'backend' for '{name}'")
    elif platform == ENSEMBLE:
        if backend:
            message = f"Ensemble model '{name}' must have platform type 'ensemble' and empty backend type"
            yield Problem("backend", f"{message}, got backend '{backend}'")
    elif not backend:
        yield Problem("platform", f"unexpected platform type '{platform}' for {name}")
    elif platform and (platform in BACKEND_OF_PLATFORM or backend in BACKEND_OF_PLATFORM.values()):
        expected = BACKEND_OF_PLATFORM.get(platform)
        if expected != backend:
            yield Problem("platform", f"unexpected 'platform' and 'backend' pair, got: {platform}, {backend}")
    path = PurePosixPath(config.default_model_filename)
    if path.is_absolute() or ".." in path.parts or "\0" in config.default_model_filename:
        yield Problem("default_model_filename", f"must stay within the version's folder, got '{path}'")


def _version_policy_problems(config: ModelConfig) -> Iterator[Problem]:
    policy = config.version_policy
    if policy is None or policy == type(policy)():
        yield Problem("version_policy", f"must specify 'version policy' for {config.name}: latest, all or specific")
        return
    if sum(choice is not None for choice in (policy.latest, policy.all, policy.specific)) > 1:
        yield Problem("version_policy", "at most one of latest, all and specific may be given")
    if policy.latest is not None and policy.latest.num_versions < 1:
        yield Problem("version_policy.latest.num_versions", f"must be at least 1, got {policy.latest.num_versions}")
    if policy.specific is not None:
        if not policy.specific.versions:
            yield Problem("version_policy.specific.versions", "must name at least one version")
        for index, version in enumerate(policy.specific.versions):
            if version < 1:
                path = f"version_policy.specific.versions[{index}]"
                yield Problem(path, f"versions are numbers from 1 on, got {version}")


def _batch_size_problems(config: ModelConfig) -> Iterator[Problem]:
    if config.max_batch_size < 0:
        message = f"'max_batch_size' must be non-negative value for {config.name}, got {config.max_batch_size}"
        yield Problem("max_batch_size", message)


def _instance_problems(config: ModelConfig, gpu_count: int) -> Iterator[Problem]:
    groups = config.instance_group
    if config.platform == ENSEMBLE:
        return
    if not groups:
        yield Problem("instance_group", f"must specify one or more 'instance group's for {config.name}")
        return
    batches = config.dynamic_batching is not None or config.sequence_batching is not None
    if batches and all(group.passive for group in groups):
        message = f"at least one group of {config.name} must not be passive, or its batcher has nothing to run on"
        yield Problem("instance_group", message)
    for index, group in enumerate(groups):
        yield from _group_problems(config, group, f"instance_group[{index}]", gpu_count)


def _group_problems(config: ModelConfig, group: InstanceGroup, path: str, gpu_count: int) -> Iterator[Problem]:
    subject = f"instance group {group.name} of model {config.name}"
    kind = group.kind.name
    if not 1 <= group.count <= INSTANCE_COUNT_MAX:
        yield Problem(f"{path}.count", f"{subject} must have 1 to {INSTANCE_COUNT_MAX} instances, got {group.count}")
    if group.kind in (InstanceKind.KIND_CPU, InstanceKind.KIND_MODEL) and group.gpus:
        yield Problem(f"{path}.gpus", f"{subject} has kind {kind} but specifies one or more GPUs")
    if group.kind is InstanceKind.KIND_GPU:
        if gpu_count == 0:
            yield Problem(f"{path}.kind", f"{subject} has kind KIND_GPU but no GPUs are available")
        elif not group.gpus:
            yield Problem(f"{path}.gpus", f"{subject} has kind KIND_GPU but specifies no GPUs")
        else:
            for position, gpu in enumerate(group.gpus):
                if not 0 <= gpu < gpu_count:
                    known = ", ".join(str(device) for device in range(gpu_count))
                    message = f"{subject} specifies invalid or unsupported gpu id {gpu}. GPUs here are {known}"
                    yield Problem(f"{path}.gpus[{position}]", message)
    if group.profile and config.backend != "tensorrt":
        yield Problem(f"{path}.profile", f"{subject} has a profile, which only TensorRT models can have")
    for position, resource in enumerate(group.rate_limiter.resources if group.rate_limiter else ()):
        if not resource.name:
            yield Problem(f"{path}.rate_limiter.resources[{position}].name", f"{subject} has a resource without a name")


def _cache_problems(config: ModelConfig) -> Iterator[Problem]:
    if config.response_cache is None or not config.response_cache.enable:
        return
    refusal = f"Response Cache does not currently support model {config.name} with"
    if config.sequence_batching is not None:
        message = f"{refusal} sequence batching scheduler. Please disable the response cache."
        yield Problem("response_cache.enable", message)
    if config.is_decoupled:
        message = f"{refusal} 'decoupled' transaction policy. Please disable the response cache."
        yield Problem("response_cache.enable", message)


def _metric_problems(config: ModelConfig) -> Iterator[Problem]:
    for index, control in enumerate(config.model_metrics.metric_control if config.model_metrics else ()):
        path = f"model_metrics.metric_control[{index}]"
        if control.metric_identifier is None or not control.metric_identifier.family:
            yield Problem(f"{path}.metric_identifier.family", "a metric control must specify the metric 'family'")
        buckets = control.histogram_options.buckets if control.histogram_options else ()
        if not buckets:
            yield Problem(f"{path}.histogram_options.buckets", "a metric control must specify 'buckets'")
        elif math.isnan(buckets[0]) or not all(low < high for low, high in pairwise(buckets)):
            yield Problem(f"{path}.histogram_options.buckets", f"buckets must be ascending, got {list(buckets)}")
    yield from bucket_problems(config)
    yield from tag_problems(config)
