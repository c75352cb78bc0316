"""The checks of a model configuration: all of its problems at once, and the features that the server does not support.

`validate` expects a complete configuration (`charonia.config.complete.normalise`). The checks of a feature are in the
`configuration.py` of its folder. The messages keep the well-known fragments of Triton's, because clients and tests
search for them. `unsupported` finds features that the server does not have: they are refused at load, never ignored.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from charonia.config.backends import ENSEMBLE, backend_of_platform, record_of
from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelInput, ModelOutput, ModelWarmup, WarmupInput
from charonia.config.parameters import CUSTOM_BATCHING, HTTP_ROUTE, PYTHON_STRATEGY, route_of
from charonia.config.problems import Problem
from charonia.config.tensors import dim_problems, tensor_problems
from charonia.server.ensembles.configuration import ensemble_problems
from charonia.server.lifecycle.front_end_placement import front_end_problems
from charonia.server.lifecycle.repository.scan import is_inside
from charonia.server.metrics.metric_families import bucket_problems, tag_problems
from charonia.server.ragged.configuration import padding_problems
from charonia.server.scaling.rule import scaling_problems
from charonia.server.scheduling.configuration import scheduling_problems
from charonia.server.traffic.state import traffic_problems

INSTANCE_COUNT_MAX = 1024
"""Limit of instances of one group; each is a thread or a process."""


def unsupported(config: ModelConfig) -> list[Problem]:
    """Return all unsupported features that the model uses, each with its path."""
    found = [*_of_model(config)]
    for index, tensor in enumerate(config.input):
        found += _of_tensor(config, tensor, f"input[{index}]")
        if tensor.allow_ragged_batch and not record_of(config.backend).ragged:
            backend = config.backend
            feature = f"ragged batching of input '{tensor.name}' in a model of backend '{backend}'"
            found.append((f"input[{index}].allow_ragged_batch", feature))
    for index, output in enumerate(config.output):
        found += _of_tensor(config, output, f"output[{index}]")
    for index, group in enumerate(config.instance_group):
        found += _of_group(config, group, f"instance_group[{index}]")
    return [Problem(path, f"{feature} is not available in this version of the server") for path, feature in found]


def _of_model(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield path and feature."""
    record = record_of(config.backend)
    if config.runtime not in ("", f"libtriton_{config.backend}.so", *record.runtimes):
        yield "runtime", f"runtime '{config.runtime}'"
    for field in ("batch_input", "batch_output"):
        if getattr(config, field) and not record.ragged:
            yield field, f"{field} in a model of backend '{config.backend}'"
    if config.cc_model_filenames and not record.plans:
        yield "cc_model_filenames", "choosing the file by compute capability"
    if CUSTOM_BATCHING in config.parameters and PYTHON_STRATEGY not in config.parameters:
        feature = f"a batching strategy from a library, unlike one in Python (parameter {PYTHON_STRATEGY}),"
        yield f"parameters[{CUSTOM_BATCHING}]", feature


def _of_tensor(config: ModelConfig, tensor: ModelInput | ModelOutput, path: str) -> Iterator[tuple[str, str]]:
    if tensor.is_shape_tensor and not record_of(config.backend).plans:
        yield f"{path}.is_shape_tensor", f"shape tensor '{tensor.name}'"
    if tensor.is_non_linear_format_io:
        yield f"{path}.is_non_linear_format_io", f"the non-linear format of '{tensor.name}'"


def _of_group(config: ModelConfig, group: InstanceGroup, path: str) -> Iterator[tuple[str, str]]:
    if group.passive:
        yield f"{path}.passive", "a passive instance"
    if group.secondary_devices:
        yield f"{path}.secondary_devices", "a secondary device"
    if group.profile and not record_of(config.backend).plans:
        yield f"{path}.profile", "an optimization profile"


def warmup_problems(config: ModelConfig) -> Iterator[Problem]:
    """Yield all problems of `model_warmup`, sample by sample."""
    names = Counter(sample.name for sample in config.model_warmup)
    for index, sample in enumerate(config.model_warmup):
        path = f"model_warmup[{index}]"
        if not sample.name:
            yield Problem(f"{path}.name", "a warm-up sample must specify 'name'")
        elif names[sample.name] > 1:
            yield Problem(f"{path}.name", f"warm-up sample '{sample.name}' is given more than once")
        if sample.batch_size > max(1, config.max_batch_size):
            message = f"warm-up sample '{sample.name}' must not exceed max_batch_size {config.max_batch_size}"
            yield Problem(f"{path}.batch_size", f"{message}, got {sample.batch_size}")
        yield from _input_problems(sample, path)
        if sample.batch_size and sample.inputs and config.input:
            yield from _fit_problems(config, sample, path)


def _input_problems(sample: ModelWarmup, path: str) -> Iterator[Problem]:
    if not sample.inputs:
        yield Problem(f"{path}.inputs", f"warm-up sample '{sample.name}' must specify 'inputs'")
    for name, warmup_input in sample.inputs.items():
        where = f"{path}.inputs[{name}]"
        subject = _subject(sample, name)
        if warmup_input.data_type is None:
            yield Problem(f"{where}.data_type", f"{subject} must specify 'data_type'")
        # Warm-up data has a fixed shape, so -1 is not allowed.
        yield from dim_problems(warmup_input.dims, f"{where}.dims", subject, wildcard=False)
        sources = (warmup_input.zero_data, warmup_input.random_data, warmup_input.input_data_file)
        if sum(source is not None for source in sources) != 1:
            yield Problem(where, f"{subject} must specify one of zero_data, random_data and input_data_file")


def _fit_problems(config: ModelConfig, sample: ModelWarmup, path: str) -> Iterator[Problem]:
    inputs = {tensor.name: tensor for tensor in config.input}
    internal = _internal_inputs(config)
    for name, warmup_input in sample.inputs.items():
        where, subject = f"{path}.inputs[{name}]", _subject(sample, name)
        tensor = inputs.get(name)
        if tensor is None:
            if name not in internal:
                known = ", ".join([*inputs, *sorted(internal)])
                yield Problem(where, f"{subject} is not an input of the model, which has {known}")
        elif warmup_input.data_type is not None and warmup_input.data_type is not tensor.data_type:
            expected = tensor.data_type.config if tensor.data_type is not None else "another"
            yield Problem(f"{where}.data_type", f"{subject} must be {expected}, got {warmup_input.data_type.config}")
        elif not _fits(warmup_input, tensor.dims):
            message = f"{subject} must have dims {list(tensor.dims)}, got {list(warmup_input.dims)}"
            yield Problem(f"{where}.dims", message)
    missing = [name for name, tensor in inputs.items() if not tensor.optional and name not in sample.inputs]
    if missing:
        names = ", ".join(f"'{name}'" for name in missing)
        yield Problem(f"{path}.inputs", f"warm-up sample '{sample.name}' lacks input {names}")


def _internal_inputs(config: ModelConfig) -> set[str]:
    """Return inputs that the scheduler adds to a client's request and that a sample must include itself."""
    sequences = config.sequence_batching
    if sequences is None:
        return set()
    return {c.name for c in sequences.control_input} | {state.input_name for state in sequences.state}


def _fits(warmup_input: WarmupInput, dims: Sequence[int]) -> bool:
    return len(warmup_input.dims) == len(dims) and all(
        d in (-1, g) for d, g in zip(dims, warmup_input.dims, strict=True)
    )


def _subject(sample: ModelWarmup, name: str) -> str:
    return f"warm-up input '{name}' of sample '{sample.name}'"


def validate(config: ModelConfig, *, gpu_count: int) -> list[Problem]:
    """Return all problems of a configuration, in the order of its fields."""
    return [
        *_identity_problems(config),
        *_version_policy_problems(config),
        *_batch_size_problems(config),
        *tensor_problems(config),
        *padding_problems(config),
        *scheduling_problems(config),
        *_instance_problems(config, gpu_count),
        *scaling_problems(config, INSTANCE_COUNT_MAX),
        *warmup_problems(config),
        *_cache_problems(config),
        *_metric_problems(config),
        *ensemble_problems(config),
        *front_end_problems(config),
        *traffic_problems(config),
        *_route_problems(config),
    ]


def _route_problems(config: ModelConfig) -> Iterator[Problem]:
    try:
        route_of(config)
    except ValueError as error:
        yield Problem(f"parameters[{HTTP_ROUTE}]", f"parameter {HTTP_ROUTE}: {error}")


def _identity_problems(config: ModelConfig) -> Iterator[Problem]:
    name, platform, backend = config.name, config.platform, config.backend
    platforms = backend_of_platform()
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
    elif platform and (platform in platforms or backend in platforms.values()):
        expected = platforms.get(platform)
        if expected != backend:
            yield Problem("platform", f"unexpected 'platform' and 'backend' pair, got: {platform}, {backend}")
    path = config.default_model_filename
    if path and not is_inside(path):
        yield Problem("default_model_filename", f"must stay within the version's folder, got '{path}'")


def _version_policy_problems(config: ModelConfig) -> Iterator[Problem]:
    policy = config.version_policy
    if policy is None or policy == type(policy)():
        yield Problem("version_policy", f"must specify 'version policy' for {config.name}: latest, all or specific")
        return
    if sum(choice is not None for choice in (policy.latest, policy.all, policy.specific)) > 1:
        yield Problem("version_policy", "at most one of latest, all and specific is allowed")
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
            message = f"{subject} has kind KIND_GPU but no GPUs are available"
            yield Problem(
                f"{path}.kind", f"{message}; KIND_CPU or no kind runs it here, `charonia doctor` looks for GPUs"
            )
        elif not group.gpus:
            yield Problem(f"{path}.gpus", f"{subject} has kind KIND_GPU but specifies no GPUs")
        else:
            for position, gpu in enumerate(group.gpus):
                if not 0 <= gpu < gpu_count:
                    known = ", ".join(str(device) for device in range(gpu_count))
                    message = f"{subject} specifies invalid or unsupported gpu id {gpu}. GPUs here are {known}"
                    yield Problem(f"{path}.gpus[{position}]", message)
    if group.profile and not record_of(config.backend).plans:
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
