"""Outcomes in the order in which their requests arrived, for models that ask for it."""

from typing import Generic, TypeVar

from charonia.core.calls import Outcome
from charonia.sched.order import InOrderRelease

HELD_RESPONSES_MAX = 1024
"""Most responses of one request that are kept until it is its turn."""

_T = TypeVar("_T")


class OrderedOutcomes(Generic[_T]):
    """Holds outcomes back until every request that arrived before theirs is over.

    The first request that is not over has its outcomes passed on at once. Requests are whatever the caller uses, known
    by an id.
    """

    __slots__ = ("_held", "_order", "_requests")

    def __init__(self) -> None:
        self._order = InOrderRelease()
        self._requests: dict[int, _T] = {}
        self._held: dict[int, list[tuple[Outcome, bool]]] = {}

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

    def take(self, id: int, outcome: Outcome, final: bool) -> list[tuple[_T, Outcome, bool]]:
        """Take an outcome; return what is to be passed on now, in order: request, outcome, whether it is its last."""
        self._held.setdefault(id, []).append((outcome, final))
        due = list(self._order.done(id)) if final else []
        first = self._order.first
        if first is not None:
            due.append(first)
        released = [(self._requests[d], *held) for d in due for held in self._held.pop(d, ())]
        for over in due if first is None else due[:-1]:
            del self._requests[over]
        return released
