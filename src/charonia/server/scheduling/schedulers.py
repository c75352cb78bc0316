"""Makes the scheduler for a model configuration. Pure."""

from charonia.config.kinds import TimeoutAction
from charonia.config.model import DynamicBatching, ModelConfig, QueuePolicy
from charonia.config.parameters import ADAPT_DELAY
from charonia.server.scheduling.api import BatchPolicy, QueueLimits, Scheduler
from charonia.server.scheduling.default import DefaultScheduler
from charonia.server.scheduling.dynamic import DynamicBatcher
from charonia.server.scheduling.strategy import Strategy

QUEUE_SIZE_MAX = 16_384
"""Most requests that wait for one model whose configuration sets no limit."""

_NS_PER_US = 1000


def make_scheduler(config: ModelConfig, strategy: Strategy | None = None) -> Scheduler:
    """Return a dynamic batcher if the configuration has `dynamic_batching` and a batch dimension, else a FIFO queue.

    Args:
        config: A validated configuration.
        strategy: The model's own batching strategy, for the dynamic batcher.
    """
    dynamic = config.dynamic_batching
    if dynamic is None or config.max_batch_size < 1:
        return DefaultScheduler(QueueLimits(size_max=QUEUE_SIZE_MAX))
    return DynamicBatcher(batch_policy(dynamic, config.max_batch_size, adapt_delay=adapts_delay(config)), strategy)


def batch_policy(dynamic: DynamicBatching, size_max: int, *, adapt_delay: bool) -> BatchPolicy:
    """Return the batcher's policy for a `dynamic_batching` section."""
    return BatchPolicy(
        size_max=size_max,
        preferred_sizes=tuple(sorted(set(dynamic.preferred_batch_size))),
        delay_ns=dynamic.max_queue_delay_microseconds * _NS_PER_US,
        priority_levels=dynamic.priority_levels,
        default_level=dynamic.default_priority_level,
        limits=_limits(dynamic.default_queue_policy or QueuePolicy()),
        level_limits=tuple((level, _limits(policy)) for level, policy in sorted(dynamic.priority_queue_policy.items())),
        adapt_delay=adapt_delay,
    )


def _limits(policy: QueuePolicy) -> QueueLimits:
    return QueueLimits(
        size_max=policy.max_queue_size or QUEUE_SIZE_MAX,
        timeout_ns=policy.default_timeout_microseconds * _NS_PER_US,
        timeout_override=policy.allow_timeout_override,
        delay_expired=policy.timeout_action is TimeoutAction.DELAY,
    )


def adapts_delay(config: ModelConfig) -> bool:
    """Whether a lone request may skip the queue delay, as the parameter `ADAPT_QUEUE_DELAY` says."""
    return config.parameters.get(ADAPT_DELAY, "true").strip().lower() not in ("false", "0", "no", "off")
