"""Outcomes in the order in which their requests arrived, for models that ask for it."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from charonia.core.calls import Outcome
from charonia.server.scheduling.order import InOrderRelease

HELD_RESPONSES_MAX = 1024
"""Most responses of one request that are kept until it is its turn."""

_T = TypeVar("_T")


class OrderedOutcomes(Generic[_T]):
    """Holds outcomes back until every request that arrived before theirs is over.

    The first request that is not over has its outcomes passed on at once. Requests are whatever the caller uses, known
    by an id.
    """

    __slots__ = ("_due", "_held", "_is_passing_on", "_order", "_requests")

    def __init__(self) -> None:
        self._order = InOrderRelease()
        self._requests: dict[int, _T] = {}
        self._held: dict[int, list[tuple[Outcome, bool]]] = {}
        self._due: deque[tuple[_T, Outcome, bool]] = deque()
        self._is_passing_on = False

    def submitted(self, id: int, request: _T) -> None:
        """Note that a request arrived."""
        self._order.submitted(id)
        self._requests[id] = request

    def holds(self, id: int) -> bool:
        """Return whether a request arrived that is not over."""
        return id in self._requests

    def is_full(self, id: int) -> bool:
        """Whether no more responses of a request can be held."""
        return len(self._held.get(id, ())) >= HELD_RESPONSES_MAX

    def pass_on(self, id: int, outcome: Outcome, final: bool, deliver: Callable[[_T, Outcome, bool], None]) -> None:
        """Take an outcome and deliver what is due, in order: request, outcome, whether it is its last.

        What a delivery leads to, as new requests and cancelled ones, is delivered behind what was due before.
        """
        self._due += self._take(id, outcome, final)
        if self._is_passing_on:
            return
        self._is_passing_on = True
        try:
            while self._due:
                deliver(*self._due.popleft())
        finally:
            self._is_passing_on = False

    def _take(self, id: int, outcome: Outcome, final: bool) -> list[tuple[_T, Outcome, bool]]:
        """Take an outcome; return what is to be passed on now."""
        self._held.setdefault(id, []).append((outcome, final))
        due = list(self._order.done(id)) if final else []
        first = self._order.first
        if first is not None:
            due.append(first)
        released = [(self._requests[d], *held) for d in due for held in self._held.pop(d, ())]
        for over in due if first is None else due[:-1]:
            del self._requests[over]
        return released
