"""Sequences, the slots in which they live, and the backlog in which they wait for one. Pure.

Which sequences of an instance run together, and when.
"""

from collections import deque
from collections.abc import Hashable, Iterable

from charonia.server.scheduling.api import CloseReason
from charonia.server.sequences.api import EndReason, SequenceKey, SequencePart, SequencePolicy, SequenceView


class Waiting:
    """One request of a sequence.

    Attributes:
        id: Its id.
        part: What it is in its sequence.
        ready_ns: Since when nothing but a batch is missing for it to run; before that, when it arrived.
        runs_again: Whether it is to run once more when it has run.
    """

    __slots__ = ("id", "part", "ready_ns", "runs_again")

    def __init__(self, id: int, part: SequencePart, now_ns: int) -> None:
        self.id = id
        self.part = part
        self.ready_ns = now_ns
        self.runs_again = False


class Sequence:
    """A sequence that is not over.

    Attributes:
        number: Its number.
        key: Its correlation id.
        queue: Its requests that wait, in order.
        running: Its request that runs, None while none does.
        instance: Where it has a slot, None while it waits for one.
        row: The slot.
        end: Why it takes no more requests and is over when its last has run; None while it takes some.
        predecessor: The sequence of the same key that has to be over first, None when there is none.
        successor: The sequence of the same key that waits for the end of this one.
        state_key: What else it shares a batch by.
        since_ns: When it last had something to do; in the backlog, when it came there.
        expires_ns: When it leaves the backlog unserved, 0 for never.
        executions: How often requests of it were run.
    """

    __slots__ = (
        "end",
        "executions",
        "expires_ns",
        "instance",
        "key",
        "number",
        "predecessor",
        "queue",
        "row",
        "running",
        "since_ns",
        "state_key",
        "successor",
    )

    def __init__(self, number: int, key: SequenceKey, now_ns: int) -> None:
        self.number = number
        self.key = key
        self.queue: deque[Waiting] = deque()
        self.running: Waiting | None = None
        self.instance: Instance | None = None
        self.row = 0
        self.end: EndReason | None = None
        self.predecessor: Sequence | None = None
        self.successor: Sequence | None = None
        self.state_key: Hashable = None
        self.since_ns = now_ns
        self.expires_ns = 0
        self.executions = 0

    @property
    def batch_key(self) -> Hashable:
        """What it shares a batch by: its next request and its state."""
        return (self.queue[0].part.shape_key, self.state_key)

    def view(self, now_ns: int) -> SequenceView:
        """Return it as it is shown."""
        has_work = self.instance is not None and (self.running is not None or bool(self.queue))
        return SequenceView(
            self.key,
            self.row if self.instance is not None else None,
            len(self.queue),
            self.running is not None,
            0 if has_work else max(0, now_ns - self.since_ns),
            self.executions,
        )


class Instance:
    """An instance of the model and its slots.

    Attributes:
        slot: Its number.
        rows: The sequence in each slot, None where a slot is free.
        count: Sequences in slots.
        ready: Sequences whose next request can run, in the order in which they became so.
        running: Sequences of the batch that runs, and the request of each.
        is_idle: Whether it can take a batch.
        due_ns: When a batch is sent if nothing else happens, None if it need not be looked at.
    """

    __slots__ = ("count", "due_ns", "is_idle", "ready", "rows", "running", "slot")

    def __init__(self, slot: int, rows: int) -> None:
        self.slot = slot
        self.rows: list[Sequence | None] = [None] * rows
        self.count = 0
        self.ready: dict[Sequence, None] = {}
        self.running: tuple[tuple[Sequence, Waiting], ...] = ()
        self.is_idle = False
        self.due_ns: int | None = None

    def bind(self, sequence: Sequence) -> None:
        """Give the sequence the lowest free slot, of which there must be one."""
        sequence.row = self.rows.index(None)
        self.rows[sequence.row] = sequence
        self.count += 1
        sequence.instance = self

    def release(self, sequence: Sequence) -> None:
        """Take the slot of a sequence back."""
        self.rows[sequence.row] = None
        self.count -= 1
        self.ready.pop(sequence, None)
        sequence.instance = None


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
