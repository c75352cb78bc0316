"""Custom batching: the dynamic batcher's queries to a model's own strategy, in addition to its own rules. Pure.

While the batcher forms a batch, it asks the strategy (`Gathering`) for each request in turn whether the request joins.
The first request always joins, since a batch cannot be empty. If the queue changes before the batch is sent, the
batcher may discard the batch and form it again, so a strategy must not keep totals across batches.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol


class JoinDecision(Enum):
    """Whether a request joins a batch."""

    JOINS = "joins"
    STAYS_OUT = "stays_out"
    FAILED = "failed"


class Gathering(Protocol):
    """A batch while it is formed. No method raises."""

    def take(self, id: int) -> JoinDecision:
        """Decide whether a request joins; FAILED leads to its `Drop`."""

    def end(self) -> None:
        """The batch is sent or discarded. Called once."""


Strategy = Callable[[], Gathering]
"""Starts a batch."""


def all_of(strategies: Sequence[Strategy]) -> Strategy | None:
    """Return a strategy that lets a request join if all of these do; None if there are none."""
    if len(strategies) < 2:
        return strategies[0] if strategies else None
    return lambda: _AllOf([begin() for begin in strategies])


class _AllOf:
    __slots__ = ("_gatherings",)

    def __init__(self, gatherings: Sequence[Gathering]) -> None:
        self._gatherings = gatherings

    def take(self, id: int) -> JoinDecision:
        for gathering in self._gatherings:
            decision = gathering.take(id)
            if decision is not JoinDecision.JOINS:
                return decision
        return JoinDecision.JOINS

    def end(self) -> None:
        for gathering in self._gatherings:
            gathering.end()
