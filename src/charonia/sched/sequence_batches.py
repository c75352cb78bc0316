"""Which sequences of an instance run together, and when."""

from collections.abc import Iterable

from charonia.sched.api import CloseReason
from charonia.sched.sequence_api import SequencePolicy
from charonia.sched.sequence_slots import Instance, Sequence


def next_batch(
    instance: Instance, policy: SequencePolicy, now_ns: int, *, waits: bool
) -> tuple[list[Sequence], CloseReason | None]:
    """Return the sequences whose next requests make the next batch, and why it is sent, None where it may wait.

    Args:
        instance: Has ready sequences. Until when the batch waits is noted there.
        policy: The policy.
        now_ns: The time.
        waits: Whether a batch waits for others at all.
    """
    if policy.keeps_rows:
        chosen = _alike(instance.ready, policy.rows)
        if len(chosen) == policy.rows:
            return chosen, CloseReason.FULL
        if not policy.utilization_min:
            return chosen, CloseReason.QUEUE_EMPTY
        if len(chosen) >= policy.utilization_min * policy.rows:
            return chosen, CloseReason.PREFERRED
    else:
        chosen = _alike(instance.ready, policy.size_max)
        if len(chosen) == policy.size_max:
            return chosen, CloseReason.FULL
        preferred = max((size for size in policy.preferred_sizes if size <= len(chosen)), default=0)
        if preferred:
            return chosen[:preferred], CloseReason.PREFERRED
    return chosen, _end_of_wait(instance, policy, chosen[0], now_ns) if waits else CloseReason.QUEUE_EMPTY


def _end_of_wait(instance: Instance, policy: SequencePolicy, first: Sequence, now_ns: int) -> CloseReason | None:
    """Return why a batch that could still grow is sent, or None if it may wait, which is noted."""
    due_ns = first.queue[0].ready_ns + policy.delay_ns
    if not policy.delay_ns:
        return CloseReason.QUEUE_EMPTY
    if now_ns >= due_ns:
        return CloseReason.DELAY
    if policy.adapt_delay and len(instance.ready) == instance.count:
        return CloseReason.QUEUE_EMPTY
    instance.due_ns = due_ns
    return None


def _alike(ready: Iterable[Sequence], count: int) -> list[Sequence]:
    """Return up to `count` sequences that share a batch with the first."""
    chosen: list[Sequence] = []
    for sequence in ready:
        if not chosen or sequence.batch_key == chosen[0].batch_key:
            chosen.append(sequence)
            if len(chosen) == count:
                break
    return chosen
