"""Makes the scheduler that a model configuration asks for."""

from collections.abc import Hashable
from dataclasses import replace

from charonia.config.kinds import TimeoutAction
from charonia.config.model import DynamicBatching, ModelConfig, QueuePolicy, SequenceBatching, SequenceDirect
from charonia.config.parameters import ADAPT_DELAY
from charonia.sched.api import BatchPolicy, QueueLimits, Scheduler
from charonia.sched.default import DefaultScheduler
from charonia.sched.dynamic import DynamicBatcher
from charonia.sched.sequence_api import SequencePolicy
from charonia.sched.strategy import Strategy

QUEUE_SIZE_MAX = 16_384
"""Most requests that wait for one model where its configuration sets no limit."""

_NS_PER_US = 1000


def make_scheduler(config: ModelConfig, strategy: Strategy | None = None) -> Scheduler:
    """Return the dynamic batcher where the configuration has `dynamic_batching` and a batch dimension, else FIFO.

    Args:
        config: A validated configuration.
        strategy: The model's own batching strategy, for the dynamic batcher.
    """
    dynamic = config.dynamic_batching
    if dynamic is None or config.max_batch_size < 1:
        return DefaultScheduler(QueueLimits(size_max=QUEUE_SIZE_MAX))
    return DynamicBatcher(batch_policy(dynamic, config.max_batch_size, adapt_delay=_adapts_delay(config)), strategy)


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


def sequence_policy(config: ModelConfig, state_key: Hashable = None) -> SequencePolicy:
    """Return the policy for the `sequence_batching` section of a validated configuration.

    Args:
        config: The configuration.
        state_key: What the states of a new sequence must have in common with those of others to share a batch.
    """
    sequence = config.sequence_batching or SequenceBatching()
    size_max = max(1, config.max_batch_size)
    common = SequencePolicy(
        idle_ns=sequence.max_sequence_idle_microseconds * _NS_PER_US,
        rows=size_max,
        size_max=size_max,
        queue_max=QUEUE_SIZE_MAX,
        adapt_delay=_adapts_delay(config),
        state_key=state_key,
    )
    oldest = sequence.oldest
    if oldest is None:
        direct = sequence.direct or SequenceDirect()
        return replace(
            common,
            delay_ns=direct.max_queue_delay_microseconds * _NS_PER_US,
            utilization_min=direct.minimum_slot_utilization,
        )
    return replace(
        common,
        rows=oldest.max_candidate_sequences or size_max,
        keeps_rows=False,
        preferred_sizes=tuple(sorted(set(oldest.preferred_batch_size))),
        delay_ns=oldest.max_queue_delay_microseconds * _NS_PER_US,
    )


def _adapts_delay(config: ModelConfig) -> bool:
    return config.parameters.get(ADAPT_DELAY, "true").strip().lower() not in ("false", "0", "no", "off")
