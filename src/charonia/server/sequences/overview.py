"""The sequences of a model and their slots, as records and as JSON. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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
