"""Makes what runs a model that works on sequences."""

import asyncio
from collections.abc import Mapping, Sequence

from charonia.config.model import ModelConfig
from charonia.core.tensor import Array
from charonia.engine.backends import Backends
from charonia.engine.lanes import AsyncLane, BlockingLane
from charonia.engine.limits import Claim
from charonia.engine.schedulers import sequence_policy
from charonia.engine.sequence_runner import SequenceRunner
from charonia.engine.sequence_tensors import SequenceTensors
from charonia.sched.sequences import Sequencer


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
        scheduler=sequencer if claim is None else claim.scheduler(sequencer),
        sequencer=sequencer,
        tensors=tensors,
        lanes=lanes,
        labels=labels,
        loop=asyncio.get_running_loop(),
        calls=backends.calls,
        busy_poll=backends.busy_poll,
        claim=claim,
    )
