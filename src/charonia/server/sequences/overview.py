"""Which sequence has which slot of a model and which wait for one, as records and as JSON. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceStatus:
    """A sequence that is not over.

    Attributes:
        sequence_id: Its correlation id.
        slot: Its slot, None for one that waits for one.
        queued: Its requests that wait.
        is_running: Whether one of its requests runs.
        executions: How often requests of it were run.
        quiet_us: Microseconds in which it has had nothing to do; for one in the backlog, in which it has waited.
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
        idle_us_max: Microseconds after which a sequence with nothing to do is over.
        slots: Slots that each instance has.
        instances: The sequences that have a slot, by name of the instance.
        backlog: The sequences that wait for a slot, in the order in which they get one.
        ended: How many sequences are over, by reason.
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
