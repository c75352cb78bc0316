"""What a configuration may ask for and this version of the server does not have: refused at load, never ignored."""

from collections.abc import Iterator

from charonia.config.model import ModelConfig
from charonia.config.problems import Problem

_HINT = "is not available in this version of the server"


def unsupported(config: ModelConfig) -> list[Problem]:
    """Return everything that the model needs and that is not there, each with its path."""
    return list(_problems(config))


def _problems(config: ModelConfig) -> Iterator[Problem]:
    if config.platform == "ensemble" or config.ensemble_scheduling is not None:
        yield Problem("ensemble_scheduling", f"an ensemble {_HINT}")
    if config.sequence_batching is not None:
        yield Problem("sequence_batching", f"sequence batching {_HINT}")
    if config.is_decoupled:
        yield Problem("model_transaction_policy.decoupled", f"a decoupled model {_HINT}")
    if config.response_cache is not None and config.response_cache.enable:
        yield Problem("response_cache.enable", f"the response cache {_HINT}")
    if config.model_warmup:
        yield Problem("model_warmup", f"warm-up {_HINT}")
    if config.batch_input:
        yield Problem("batch_input", f"a batch input {_HINT}")
    if config.batch_output:
        yield Problem("batch_output", f"a batch output {_HINT}")
    if config.model_repository_agents is not None and config.model_repository_agents.agents:
        yield Problem("model_repository_agents", f"a repository agent {_HINT}")
    if config.model_metrics is not None and config.model_metrics.metric_control:
        yield Problem("model_metrics", f"changing the buckets of a metric {_HINT}")
    yield from _tensor_problems(config)
    yield from _group_problems(config)


def _tensor_problems(config: ModelConfig) -> Iterator[Problem]:
    for index, tensor in enumerate(config.input):
        path = f"input[{index}]"
        if tensor.allow_ragged_batch:
            yield Problem(f"{path}.allow_ragged_batch", f"ragged batching {_HINT}")
        if tensor.is_shape_tensor:
            yield Problem(f"{path}.is_shape_tensor", f"a shape tensor {_HINT}")
        if tensor.is_non_linear_format_io:
            yield Problem(f"{path}.is_non_linear_format_io", f"a non-linear tensor format {_HINT}")
    for index, output in enumerate(config.output):
        path = f"output[{index}]"
        if output.is_shape_tensor:
            yield Problem(f"{path}.is_shape_tensor", f"a shape tensor {_HINT}")
        if output.is_non_linear_format_io:
            yield Problem(f"{path}.is_non_linear_format_io", f"a non-linear tensor format {_HINT}")


def _group_problems(config: ModelConfig) -> Iterator[Problem]:
    for index, group in enumerate(config.instance_group):
        path = f"instance_group[{index}]"
        if group.passive:
            yield Problem(f"{path}.passive", f"a passive instance {_HINT}")
        if group.host_policy:
            yield Problem(f"{path}.host_policy", f"a host policy {_HINT}")
        if group.secondary_devices:
            yield Problem(f"{path}.secondary_devices", f"a secondary device {_HINT}")
        if group.profile:
            yield Problem(f"{path}.profile", f"an optimization profile {_HINT}")
