"""Makes what runs a model that works on sequences, hands sequences over and shows them."""

import asyncio
from collections.abc import Mapping, Sequence

from charonia.config.model import ModelConfig, SequenceBatching
from charonia.core.errors import invalid
from charonia.core.tensor import Array
from charonia.engine.backends import Backends
from charonia.engine.lanes import AsyncLane, BlockingLane
from charonia.engine.limits import Claim
from charonia.engine.schedulers import sequence_policy
from charonia.engine.sequence_runner import SequenceRunner
from charonia.engine.sequence_tensors import SequenceTensors
from charonia.sched.sequence_api import SequenceView
from charonia.sched.sequences import Sequencer
from charonia.stats.sequences import ModelSequences, SequenceState

Target = tuple[str, str]
"""Model name and version as text, "" for the one that the version policy chooses."""

_NS_PER_US = 1000


def make_sequence_runner(
    config: ModelConfig,
    version: str,
    initial: Mapping[str, Array],
    *,
    lanes: Sequence[BlockingLane | AsyncLane],
    labels: dict[str, tuple[str, ...]],
    backends: Backends,
    claim: Claim | None = None,
) -> SequenceRunner:
    """Return the runner of a version with `sequence_batching`; to be called on the event loop.

    Args:
        config: The complete configuration.
        version: The version, as text.
        initial: What states start from, by name of the state's input.
        lanes: The instances.
        labels: Class labels by output.
        backends: What all models share.
        claim: Resources of the instances.
    """
    tensors = SequenceTensors(config, initial)
    state_key = tensors.shapes(tensors.initial_states()) if tensors.has_variable_states else None
    sequencer = Sequencer(sequence_policy(config, state_key), len(lanes))
    return SequenceRunner(
        config,
        version,
        scheduler=sequencer if claim is None else claim.scheduler(sequencer, wants=sequencer.wants),
        sequencer=sequencer,
        tensors=tensors,
        lanes=lanes,
        labels=labels,
        loop=asyncio.get_running_loop(),
        calls=backends.calls,
        busy_poll=backends.busy_poll,
        claim=claim,
    )


def hand_over(before: Mapping[Target, object], after: Mapping[Target, object]) -> None:
    """Let sequences that began with the runners of some routes go on there when others take their places.

    Args:
        before: Runner by model name and version.
        after: The same, from now on.
    """
    for target, runner in after.items():
        previous = before.get(target)
        if isinstance(runner, SequenceRunner) and isinstance(previous, SequenceRunner):
            runner.follow(previous)


def sequences_of(runner: object, name: str) -> ModelSequences:
    """Return the sequences of a model version.

    Raises:
        ServingError: INVALID_ARG where the model does not work on sequences.
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
        instances={runner.slot_name(slot): [_state(s) for s in each] for slot, each in enumerate(view.instances)},
        backlog=[_state(sequence) for sequence in view.backlog],
        ended={reason.value: count for reason, count in view.ended},
    )


def _state(view: SequenceView) -> SequenceState:
    return SequenceState(view.key, view.row, view.queued, view.is_running, view.requests, view.quiet_ns // _NS_PER_US)
