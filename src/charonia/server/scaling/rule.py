"""Decides when a model gets one more instance, and when it has one too many. Pure.

Every `SAMPLE_NS` it gets a sample of the instances, and answers with at most one change at a time:

1. One is added when, in every sample of the last `GROW_AFTER_NS`, a request waited and no instance was free; but not
   while the machine has no room for it (see `Headroom`), nor while another one is starting.
2. One is closed when, in every sample of the last `idle_for_ns`, an instance had nothing to do. That is
   `SHRINK_AFTER_NS`, and at least `START_FACTOR` times as long as an instance takes to start: one that is expensive
   stays for longer.
3. Where one is added within `idle_for_ns` after one was closed, that was too early: the time doubles, up to
   `SHRINK_AFTER_NS_MAX`. It returns to its first value when load was steady for `STEADY_FACTOR` times as long.
4. After one that fails to start, the next is tried after `BACK_OFF_NS`, which doubles with each failure that follows.

An instance helps only where something is idle that it could use. While one computes on the CPU, that is a core; while
instances wait for something else, such as a GPU, a disk or another server, the cores are idle, too. So a core that
the server may use and nothing uses is the room, whatever the instances do.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from charonia.config.backends import ENSEMBLE, record_of
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.parameters import INSTANCES_MAX, INSTANCES_MIN, InstanceBounds
from charonia.config.problems import Problem
from charonia.core.statistics import MemoryUsage, WorkerState

_NS_PER_S = 1_000_000_000

SAMPLE_NS = _NS_PER_S // 4
"""Time between two samples."""

GROW_AFTER_NS = _NS_PER_S
"""Time for which requests wait before an instance is added."""

SHRINK_AFTER_NS = 10 * _NS_PER_S
"""Time for which an instance has nothing to do before one is closed."""

SHRINK_AFTER_NS_MAX = 600 * _NS_PER_S

START_FACTOR = 10
STEADY_FACTOR = 4

BACK_OFF_NS = _NS_PER_S
"""Pause after an instance that failed to start."""

BACK_OFF_NS_MAX = 300 * _NS_PER_S


@dataclass(frozen=True, slots=True)
class InstanceSample:
    """The load of the instances of a model.

    Attributes:
        count: Number of instances.
        free: Number of idle instances.
        waited_ns: Time that the oldest waiting request has waited, 0 where none waits.
        obstacle: Why the machine has no room for another instance, "" where it has.
    """

    count: int
    free: int
    waited_ns: int = 0
    obstacle: str = ""


class Change(Enum):
    """A decision."""

    ADD = "add"
    CLOSE = "close"


class ChangeReason(Enum):
    """Why the number of instances changed, or did not, as label values of the counter."""

    WAITING = "requests_waited"
    IDLE = "idle"
    FAILED = "start_failed"


class InstanceRule:
    """The rule for one model version.

    Args:
        count: Instances that there are, 0 for the fewest.

    Attributes:
        idle_for_ns: Time for which an instance has nothing to do before one is closed.
        changes: Changes so far, by reason.
    """

    def __init__(self, bounds: InstanceBounds, count: int = 0) -> None:
        self.bounds = bounds
        self.idle_for_ns = SHRINK_AFTER_NS
        self.changes: Counter[ChangeReason] = Counter()
        self._base_ns = SHRINK_AFTER_NS
        self._count = count or bounds.least
        self._sampled_ns: int | None = None
        self._waiting_since_ns: int | None = None
        self._spare_since_ns: int | None = None
        self._starting_since_ns: int | None = None
        self._closed_ns: int | None = None  # when the last one was closed
        self._failures = 0
        self._retry_ns = 0
        self._failure = ""
        self._obstacle = ""  # what kept the last sample from adding one
        self._waited_ns = 0  # of the request for which the last one was added
        self._last: tuple[str, int] | None = None  # the last change in words, and when

    def wake_at(self) -> int | None:
        """Return when to send the next sample, None for immediately."""
        return None if self._sampled_ns is None else self._sampled_ns + SAMPLE_NS

    def explanation(self, now_ns: int) -> str:
        """Return the number of instances and why it is that, in words."""
        bounds = self.bounds
        text = f"{self._count} of {bounds.least} to {bounds.most} instances"
        if self._last is not None:
            said, at_ns = self._last
            text += f"; {said.format(ago=_ago(now_ns - at_ns))}"
        if self._starting_since_ns is not None:
            text += f"; another one has been starting for {_time(now_ns - self._starting_since_ns)}"
        elif self._failure:
            text += f"; the last attempt to add one failed: {self._failure}"
            if now_ns < self._retry_ns:
                text += f"; not tried again for {_time(self._retry_ns - now_ns)}"
        elif self._obstacle:
            text += f"; requests wait, and none is added: {self._obstacle}"
        return text

    def check_invariants(self) -> None:
        assert self.bounds.least <= self._count <= self.bounds.most
        assert self._base_ns <= self.idle_for_ns <= max(self._base_ns, SHRINK_AFTER_NS_MAX)
        assert self._waiting_since_ns is None or self._spare_since_ns is None

    def decide(self, sample: InstanceSample, now_ns: int) -> Change | None:
        """Return the decision at this monotonic time, None for no change."""
        self._sampled_ns = now_ns
        self._count = sample.count
        waits = bool(sample.waited_ns) and not sample.free
        if not waits:
            self._waiting_since_ns = None
        elif self._waiting_since_ns is None:
            self._waiting_since_ns = now_ns
        if not sample.free:
            self._spare_since_ns = None
        elif self._spare_since_ns is None:
            self._spare_since_ns = now_ns
        self._obstacle = ""
        if self._starting_since_ns is not None:
            return None
        if self._waiting_since_ns is not None and now_ns - self._waiting_since_ns >= GROW_AFTER_NS:
            return self._add(sample, now_ns)
        if sample.count > self.bounds.least and self._spare_since_ns is not None:
            return Change.CLOSE if now_ns - self._spare_since_ns >= self.idle_for_ns else None
        return None

    def _add(self, sample: InstanceSample, now_ns: int) -> Change | None:
        if sample.count >= self.bounds.most or now_ns < self._retry_ns:
            return None
        if sample.obstacle:
            self._obstacle = sample.obstacle
            return None
        self._starting_since_ns, self._waited_ns = now_ns, sample.waited_ns
        if self._closed_ns is not None and now_ns - self._closed_ns < self.idle_for_ns:
            self.idle_for_ns = min(2 * self.idle_for_ns, max(SHRINK_AFTER_NS_MAX, self._base_ns))
            self._closed_ns = None  # this one has been counted
        return Change.ADD

    def closed(self, now_ns: int) -> None:
        """The closing instance gets no more batches."""
        idle_ns = now_ns - self._spare_since_ns if self._spare_since_ns is not None else 0
        if self._closed_ns is not None and now_ns - self._closed_ns > STEADY_FACTOR * self.idle_for_ns:
            self.idle_for_ns = self._base_ns
        self.changes[ChangeReason.IDLE] += 1
        self._last = f"one was closed {{ago}} because it had had nothing to do for {_time(idle_ns)}", now_ns
        self._closed_ns = now_ns
        self._spare_since_ns = None
        self._failure = ""
        self._count -= 1

    def started(self, took_ns: int, now_ns: int) -> None:
        """The added instance is ready, `took_ns` after the decision."""
        self._count += 1
        self._failures, self._failure = 0, ""
        self.changes[ChangeReason.WAITING] += 1
        said = f"a {_ordinal(self._count)} was added {{ago}} because requests waited {_time(self._waited_ns)}"
        self._last = said, now_ns
        self._base_ns = max(SHRINK_AFTER_NS, START_FACTOR * took_ns)
        self.idle_for_ns = max(self.idle_for_ns, self._base_ns)
        self._reset_observations()

    def failed(self, reason: str, now_ns: int) -> None:
        """The instance that was to be added could not be made."""
        self._failures += 1
        self._failure = reason
        self._retry_ns = now_ns + min(BACK_OFF_NS << min(self._failures - 1, 32), BACK_OFF_NS_MAX)
        self.changes[ChangeReason.FAILED] += 1
        self._reset_observations()

    def _reset_observations(self) -> None:
        """Discard earlier observations: they say nothing about the time after an attempt to add an instance."""
        self._starting_since_ns = self._waiting_since_ns = self._spare_since_ns = None


_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def _ordinal(number: int) -> str:
    return _ORDINALS[number - 1] if number <= len(_ORDINALS) else f"number {number}"


def _ago(ns: int) -> str:
    return f"{_time(ns)} ago" if ns >= _NS_PER_S else "just now"


def _time(ns: int) -> str:
    if ns >= _NS_PER_S:
        return f"{ns / _NS_PER_S:.0f} s"
    return f"{max(1, round(ns / 1e6))} ms"


CORE_ROOM = 0.5
"""Idle cores, at least, for one more instance."""

MEMORY_KEPT = 0.05
"""Share of a memory that stays free."""

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """A memory that instances use.

    Attributes:
        name: Its name in messages.
        free: Free bytes.
        kept: Bytes of it that stay free.
        gpu: Number of the GPU, None for memory of the machine.
    """

    name: str
    free: int
    kept: int
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Headroom:
    """The free capacity of the machine.

    Attributes:
        cores: Cores that the server may use.
        idle_cores: The idle ones among them.
    """

    cores: int
    idle_cores: float = 0.0
    memories: tuple[FreeMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """What one more instance of a model takes.

    Attributes:
        memory: Bytes of the machine's memory.
        gpu: Number of its GPU, None for an instance on the CPU.
        gpu_memory: Bytes of the memory of that GPU.
        on_event_loop: Whether instances compute on the event loop, which is one thread.
        resources: Resources of the rate limiter that instances wait for now.
    """

    memory: int = 0
    gpu: int | None = None
    gpu_memory: int = 0
    on_event_loop: bool = False
    resources: tuple[str, ...] = ()


def demand_of(
    usages: Sequence[MemoryUsage], workers: Sequence[WorkerState], gpu: int | None, resources: tuple[str, ...] = ()
) -> Demand:
    """Return the demand of one more instance, estimated from the largest existing one.

    Args:
        usages: FreeMemory that the model has reported; what instances share is there already.
        workers: The worker processes of its instances, none where it computes in the server.
        gpu: Number of the GPU of its instances, None for the CPU.
        resources: Resources of the rate limiter that instances wait for.
    """
    own = [usage for usage in usages if usage.instance]
    cpu = [usage.byte_size for usage in own if usage.type == "CPU"] + [worker.memory_bytes for worker in workers]
    on_gpu = [usage.byte_size for usage in own if usage.type == "GPU" and usage.id == gpu]
    return Demand(max(cpu, default=0), gpu, max(on_gpu, default=0), resources=resources)


def obstacle(room: Headroom, demand: Demand) -> str:
    """Return the obstacle to one more instance, "" for none."""
    if demand.on_event_loop:
        return "the model computes on the event loop, which all instances share"
    if demand.resources:
        return f"its instances wait for {', '.join(demand.resources)} of the rate limiter"
    if room.idle_cores < CORE_ROOM:
        return f"{room.idle_cores:.1f} of {room.cores} cores are idle"
    for memory in room.memories:
        if memory.gpu is not None and memory.gpu != demand.gpu:
            continue
        needed = demand.memory if memory.gpu is None else demand.gpu_memory
        if memory.free - needed < memory.kept:
            takes = f"another one takes about {-(-needed // _MIB):,} MiB of {memory.name}"
            return f"{takes}, of which {max(0, memory.free - memory.kept) // _MIB:,} MiB may be taken"
    return ""


def threads_of(idle_cores: float, threads: int) -> int:
    """Return the threads of one more instance: one for each idle core, at most as many as the first ones have."""
    return max(1, min(threads, int(idle_cores)))


def idle_cores(budget: int, machine: int, own: float, others: float) -> float:
    """Return the cores of the budget that nothing uses.

    Args:
        budget: Cores that the server may use.
        own: Cores that the server and its workers use.
        others: Cores that everything else uses. Those outside of the budget come first.
    """
    return max(0.0, budget - own - max(0.0, others - max(0, machine - budget)))


def scaling_problems(config: ModelConfig, count_max: int) -> Iterator[Problem]:
    """Yield all problems of the two parameters of a normalised configuration."""
    fields = {
        name: config.parameters[name].strip() for name in (INSTANCES_MIN, INSTANCES_MAX) if name in config.parameters
    }
    if not fields:
        return
    if config.platform == ENSEMBLE:
        yield Problem(
            f"parameters[{next(iter(fields))}]", "an ensemble has no instances; set it in the models of its steps"
        )
        return
    bad = [
        name for name, text in fields.items() if not (text.isascii() and text.isdigit() and 1 <= int(text) <= count_max)
    ]
    for name in bad:
        yield Problem(
            f"parameters[{name}]", f"expected a number of instances from 1 to {count_max}, got '{fields[name]}'"
        )
    if bad or not config.instance_group:
        return
    if INSTANCES_MAX not in fields:
        yield Problem(
            f"parameters[{INSTANCES_MIN}]", f"needs {INSTANCES_MAX}; a fixed number is the count of instance_group"
        )
        return
    count, most = config.instance_group[0].count, int(fields[INSTANCES_MAX])
    least = int(fields.get(INSTANCES_MIN, count))
    if least > most:
        source = INSTANCES_MIN if INSTANCES_MIN in fields else "the count of instance_group"
        yield Problem(f"parameters[{INSTANCES_MAX}]", f"must be at least {source}, which is {least}, got {most}")
    elif count != least:
        message = f"contradicts the count {count} of instance_group: leave that out, or set both to one number"
        yield Problem(f"parameters[{INSTANCES_MIN}]", f"{least} {message}")
    elif least < most and (reason := _obstacle(config)):
        yield Problem(f"parameters[{INSTANCES_MAX}]", f"the number of instances is fixed: {reason}")


def _obstacle(config: ModelConfig) -> str:
    """Return why the number of instances cannot change, "" where it can."""
    if config.sequence_batching is not None:
        return "a sequence is bound to its instance (sequence_batching)"
    if len(config.instance_group) > 1:
        return f"expected one instance_group, got {len(config.instance_group)}"
    group = config.instance_group[0]
    if group.kind is InstanceKind.KIND_GPU and len(group.gpus) > 1:
        return f"expected one GPU, got {len(group.gpus)}; gpus: [ {group.gpus[0]} ] chooses one"
    return record_of(config.backend).fixed_instances
