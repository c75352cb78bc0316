"""Creates the scheduler for a model configuration, and the replacement of a failed scheduler. Pure."""

from typing import Final

from charonia.config.kinds import TimeoutAction
from charonia.config.model import ModelConfig, QueuePolicy
from charonia.config.parameters import ADAPT_DELAY
from charonia.server.scheduling.api import BatchPolicy, Command, Drop, DropReason, Event, QueueLimits, Scheduler, Submit
from charonia.server.scheduling.dynamic import DynamicBatcher, Strategy

QUEUE_SIZE_MAX: Final = 16_384
"""Most requests that wait for one model whose configuration sets no limit."""

_NS_PER_US: Final = 1000


def make_scheduler(config: ModelConfig, strategy: Strategy | None = None) -> Scheduler:
    """Return the batcher of a model that does not work on sequences.

    Args:
        config: A validated configuration.
        strategy: The model's own batching strategy.
    """
    return DynamicBatcher(batch_policy(config), strategy)


def batch_policy(config: ModelConfig) -> BatchPolicy:
    """Return the policy for a configuration; without `dynamic_batching` or a batch dimension, requests run alone."""
    dynamic = config.dynamic_batching
    if dynamic is None:
        return BatchPolicy(limits=_limits(QueuePolicy()))
    return BatchPolicy(
        size_max=max(1, config.max_batch_size),
        preferred_sizes=tuple(sorted(set(dynamic.preferred_batch_size))),
        # A request that no other can join waits for none.
        delay_ns=dynamic.max_queue_delay_microseconds * _NS_PER_US if config.max_batch_size > 1 else 0,
        priority_levels=dynamic.priority_levels,
        default_level=dynamic.default_priority_level,
        limits=_limits(dynamic.default_queue_policy or QueuePolicy()),
        level_limits=tuple((level, _limits(policy)) for level, policy in sorted(dynamic.priority_queue_policy.items())),
        adapt_delay=adapts_delay(config),
    )


def _limits(policy: QueuePolicy) -> QueueLimits:
    return QueueLimits(
        size_max=policy.max_queue_size or QUEUE_SIZE_MAX,
        timeout_ns=policy.default_timeout_microseconds * _NS_PER_US,
        timeout_override=policy.allow_timeout_override,
        delay_expired=policy.timeout_action is TimeoutAction.DELAY,
        adapts=not (policy.max_queue_size or policy.default_timeout_microseconds),
    )


def adapts_delay(config: ModelConfig) -> bool:
    """Whether a lone request may skip the queue delay (parameter `ADAPT_QUEUE_DELAY`)."""
    return config.parameters.get(ADAPT_DELAY, "true").strip().lower() not in ("false", "0", "no", "off")


class FailedScheduler:
    """Replaces a scheduler that raised an exception; drops every request."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<FailedScheduler>"

    @property
    def queued(self) -> int:
        """0: no request waits."""
        return 0

    def wake_at(self) -> None:
        """Return None: there are no timeouts."""

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        return [Drop(event.id, DropReason.SCHEDULER_FAILED)] if isinstance(event, Submit) else []

    def check_invariants(self) -> None:
        """Do nothing: there is no state."""
