"""The events that a search reports while it runs. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from charonia.tools.tune.api import Outcome, Skipped, Trial
from charonia.tools.tune.decision import Decision, Ranked


@dataclass(frozen=True, slots=True)
class TrialBegun:
    """A measurement begins.

    Attributes:
        trial: Which.
        name: Name of the variant's folder, or of the variant.
        trials_left: Most trials to come, this one included.
        left_s: Time left of the budget, None without one.
    """

    trial: Trial
    name: str
    trials_left: int
    left_s: float | None


@dataclass(frozen=True, slots=True)
class TrialDone:
    """A measurement ended.

    Attributes:
        trial: Which.
        outcome: What came of it.
        best: Best so far, None where nothing was measured yet.
        resumed: Whether the outcome is from the journal.
    """

    trial: Trial
    outcome: Outcome
    best: Ranked | None
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Noted:
    """A note for the user.

    Attributes:
        text: A sentence.
    """

    text: str


@dataclass(frozen=True, slots=True)
class SearchDone:
    """The search ended.

    Attributes:
        decision: Its verdict.
        skipped: Variants that were not measured, with reasons.
    """

    decision: Decision
    skipped: tuple[Skipped, ...] = ()


Event = TrialBegun | TrialDone | Noted | SearchDone
Progress = Callable[[Event], None]
"""Called with each event."""
