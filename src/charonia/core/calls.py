"""A request in flight: how its outcomes are reported and how it is given up."""

from collections.abc import Callable
from typing import Protocol

from charonia.core.errors import ServingError
from charonia.core.response import InferResponse

Outcome = InferResponse | ServingError | None
"""One answer. None comes only with `final`: the request is over and has no (further) response."""

Reply = Callable[[Outcome, bool], None]
"""Called with each outcome and whether it is the last. May be called before `infer` has returned."""


class Ticket(Protocol):
    """A request in flight."""

    def cancel(self) -> None:
        """The caller has gone: drop the request wherever it is; the reply will get a CANCELLED error or nothing more.

        Safe at any time, also after the last outcome.
        """
        ...
