"""A request in flight: how its outcomes are reported and how it is cancelled."""

from collections.abc import Callable
from typing import Protocol

from charonia.core.errors import ServingError
from charonia.core.response import InferResponse

Outcome = InferResponse | ServingError | None
"""One outcome. None comes only with `final`: the request ends without a (further) response."""

Reply = Callable[[Outcome, bool], None]
"""Called with each outcome and whether it is the last. May be called before `infer` has returned."""


class Ticket(Protocol):
    """A request in flight."""

    def cancel(self) -> None:
        """Drop the request wherever it is; the reply gets a CANCELLED error or nothing more.

        Safe at any time, even after the last outcome.
        """
        ...


class _Answered:
    """The ticket of a request that had its last outcome before it could be cancelled."""

    def cancel(self) -> None:
        """Do nothing: the request has its answer."""


ANSWERED = _Answered()
