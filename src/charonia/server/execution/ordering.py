"""Outcomes in the order in which their requests arrived, for models with `preserve_ordering`. Pure."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from charonia.core.response import Outcome

HELD_RESPONSES_MAX = 1024
"""Most responses of one request that are held back until its turn."""

_T = TypeVar("_T")


class OrderedOutcomes(Generic[_T]):
    """Holds outcomes back until every request that arrived earlier is over.

    Outcomes of the oldest request that is not over are delivered immediately. Every request, even if refused or
    cancelled, needs a final outcome, or the requests behind it wait forever. Requests are opaque, and known by an id.
    """

    __slots__ = ("_due", "_is_passing_on", "_open")

    def __init__(self) -> None:
        self._open: OrderedDict[int, tuple[_T, list[tuple[Outcome, bool]]]] = OrderedDict()  # with held-back outcomes
        self._due: deque[tuple[_T, Outcome, bool]] = deque()
        self._is_passing_on = False

    def submitted(self, id: int, request: _T) -> None:
        """Add a request that arrived. Ids may not repeat."""
        self._open[id] = (request, [])

    def holds(self, id: int) -> bool:
        """Return whether a request arrived and its final outcome is not due yet."""
        return id in self._open

    def is_full(self, id: int) -> bool:
        """Whether no more responses of a request can be held back."""
        return len(self._open[id][1]) >= HELD_RESPONSES_MAX

    def pass_on(self, id: int, outcome: Outcome, final: bool, deliver: Callable[[_T, Outcome, bool], None]) -> None:
        """Take in an outcome and deliver all due outcomes, in order: request, outcome, whether it is final.

        Outcomes that a delivery causes, such as of requests that it cancels, are delivered after the outcomes that
        were already due.

        Raises:
            KeyError: The request did not arrive, or had its final outcome.
        """
        self._open[id][1].append((outcome, final))
        self._collect_due()
        if self._is_passing_on:
            return
        self._is_passing_on = True
        try:
            while self._due:
                deliver(*self._due.popleft())
        finally:
            self._is_passing_on = False

    def _collect_due(self) -> None:
        while self._open:
            oldest, (request, held) = next(iter(self._open.items()))
            self._due.extend((request, outcome, final) for outcome, final in held)
            if not held or not held[-1][1]:
                held.clear()
                return
            del self._open[oldest]
