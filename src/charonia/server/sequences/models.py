"""Runners of sequence models: how they are made, replaced without loss of live sequences, and shown."""

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from charonia.busy_poll import BusyPoll
from charonia.config.model import ModelConfig, SequenceBatching, SequenceDirect
from charonia.core.errors import invalid
from charonia.core.tensor import Array
from charonia.server.execution.deadlock import DeadlockDetector
from charonia.server.execution.executor import Executor
from charonia.server.rate_limiter.limiter import Claim
from charonia.server.scheduling.api import Scheduler
from charonia.server.scheduling.schedulers import QUEUE_SIZE_MAX, adapts_delay
from charonia.server.sequences.api import SequenceKey, SequencePolicy, SequenceView
from charonia.server.sequences.runner import SequenceRunner
from charonia.server.sequences.scheduler import Sequencer
from charonia.server.sequences.tensors import SequenceTensors


@dataclass(frozen=True, slots=True)
class SequenceStatus:
    """A live sequence.

    Attributes:
        sequence_id: Its correlation id.
        slot: Its slot, None while it waits for one.
        queued: Number of its waiting requests.
        is_running: Whether one of its requests runs.
        executions: Number of executions of its requests.
        quiet_us: Microseconds that it has been idle, or has waited in the backlog.
    """

    sequence_id: int | str
    slot: int | None
    queued: int
    is_running: bool
    executions: int
    quiet_us: int


@dataclass(frozen=True, slots=True)
class ModelSequences:
    """The sequences of a model version.

    Attributes:
        model: Its name.
        version: The version, as text.
        strategy: "direct" or "oldest".
        idle_us_max: Microseconds after which an idle sequence is ended.
        slots: Number of slots of each instance.
        instances: The sequences with a slot, by name of the instance.
        backlog: The sequences that wait for a slot, in order.
        ended: Number of ended sequences by reason.
    """

    model: str
    version: str
    strategy: str
    idle_us_max: int
    slots: int
    instances: Mapping[str, Sequence[SequenceStatus]]
    backlog: Sequence[SequenceStatus]
    ended: Mapping[str, int]


def sequences_json(shown: ModelSequences) -> dict[str, object]:
    """Return the sequences of a model version as a JSON document."""
    return {
        "model_name": shown.model,
        "model_version": shown.version,
        "strategy": shown.strategy,
        "max_sequence_idle_microseconds": shown.idle_us_max,
        "instances": [
            {
                "name": name,
                "slots": shown.slots,
                "sequences": [{"slot": each.slot, **_common(each), "idle_us": each.quiet_us} for each in sequences],
            }
            for name, sequences in shown.instances.items()
        ],
        "backlog": [{**_common(each), "waiting_us": each.quiet_us} for each in shown.backlog],
        "ended": dict(shown.ended),
    }


def _common(state: SequenceStatus) -> dict[str, object]:
    return {
        "sequence_id": state.sequence_id,
        "queued": state.queued,
        "running": state.is_running,
        "executions": state.executions,
    }


_NS_PER_US = 1000


def sequence_policy(config: ModelConfig, state_key: Hashable = None) -> SequencePolicy:
    """Return the policy for the `sequence_batching` section of a validated configuration."""
    sequence = config.sequence_batching or SequenceBatching()
    size_max = max(1, config.max_batch_size)
    common = SequencePolicy(
        idle_ns=sequence.max_sequence_idle_microseconds * _NS_PER_US,
        rows=size_max,
        size_max=size_max,
        queue_max=QUEUE_SIZE_MAX,
        adapts=True,
        adapt_delay=adapts_delay(config),
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


Target = tuple[str, str]
"""Model name and version as text, "" for the version policy's choice."""


class Shared(Protocol):
    """Objects that the runners of all models of a server share."""

    deadlocks: DeadlockDetector
    busy_poll: BusyPoll | None

    def observed(self, scheduler: Scheduler) -> Scheduler:
        """Return the scheduler; tests wrap it."""


def make_sequence_runner(
    config: ModelConfig,
    version: str,
    initial: Mapping[str, Array],
    *,
    executors: Sequence[Executor],
    labels: dict[str, tuple[str, ...]],
    shared: Shared,
    claim: Claim | None = None,
) -> SequenceRunner:
    """Return the runner of a version with `sequence_batching`; to be called on the event loop.

    Args:
        config: The complete configuration.
        version: The version, as text.
        initial: Initial states, by name of the state's input.
        executors: The instances.
        labels: Class labels by output.
        shared: Objects that all models of the server share.
        claim: The claim of the instances to resources.
    """
    tensors = SequenceTensors(config, initial)
    state_key = tensors.shapes(tensors.initial_states()) if tensors.has_variable_states else None
    sequencer = Sequencer(sequence_policy(config, state_key), len(executors))
    return SequenceRunner(
        config,
        version,
        scheduler=shared.observed(sequencer if claim is None else claim.scheduler(sequencer, wants=sequencer.wants)),
        sequencer=sequencer,
        tensors=tensors,
        executors=executors,
        labels=labels,
        loop=asyncio.get_running_loop(),
        deadlocks=shared.deadlocks,
        busy_poll=shared.busy_poll,
        claim=claim,
    )


def hand_over(before: Mapping[Target, object], after: Mapping[Target, object]) -> None:
    """Let live sequences continue with their runners when routes get new ones."""
    for target, runner in after.items():
        previous = before.get(target)
        if isinstance(runner, SequenceRunner) and isinstance(previous, SequenceRunner):
            runner.follow(previous)


def sequences_of(runner: object, name: str) -> ModelSequences:
    """Return the sequences of a model version.

    Raises:
        ServingError: INVALID_ARG: the model has no `sequence_batching`.
    """
    if not isinstance(runner, SequenceRunner):
        raise invalid(f"model '{name}' does not work on sequences", hint="its configuration has no sequence_batching")
    view = runner.view()
    batching = runner.config.sequence_batching or SequenceBatching()
    return ModelSequences(
        model=runner.config.name,
        version=runner.version,
        strategy="direct" if batching.oldest is None else "oldest",
        idle_us_max=batching.max_sequence_idle_microseconds,
        slots=view.rows,
        instances={runner.instance_name(slot): [_state(s) for s in each] for slot, each in enumerate(view.instances)},
        backlog=[_state(sequence) for sequence in view.backlog],
        ended={reason.value: count for reason, count in view.ended},
    )


def open_sequences(routes: Mapping[Target, object]) -> set[tuple[str, SequenceKey]]:
    """Return the sequences that have begun and not ended: model and id."""
    runners = {runner for runner in routes.values() if isinstance(runner, SequenceRunner) and not runner.is_iterative}
    views = ((each.config.name, each.view()) for runner in runners for each in runner.lineage())
    return {
        (name, sequence.key)
        for name, view in views
        for sequences in (*view.instances, view.backlog)
        for sequence in sequences
    }


def _state(view: SequenceView) -> SequenceStatus:
    return SequenceStatus(view.key, view.row, view.queued, view.is_running, view.requests, view.quiet_ns // _NS_PER_US)
