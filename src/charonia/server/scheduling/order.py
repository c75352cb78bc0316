"""Answers in the order of arrival, whatever the order in which they become ready. Pure."""

from collections import deque


class InOrderRelease:
    """Holds back what is done until everything that arrived before it is done too.

    Every id that was submitted must be reported done once, also if it was refused or cancelled, or those behind it are
    never released. Each id is released once, and memory is held for those not yet released only.
    """

    __slots__ = ("_arrived", "_done")

    def __init__(self) -> None:
        self._arrived: deque[int] = deque()
        self._done: dict[int, bool] = {}  # of every id not yet released, whether it is done

    def submitted(self, id: int) -> None:
        """Note that a request arrived. Ids may not repeat."""
        self._arrived.append(id)
        self._done[id] = False

    def done(self, id: int) -> tuple[int, ...]:
        """Note that a request is answered, refused or cancelled.

        Returns:
            The ids whose answers go out now, in order of arrival. Empty while an earlier request is not done.

        Raises:
            KeyError: The id was never submitted, or is already released.
        """
        if id not in self._done:
            raise KeyError(id)
        self._done[id] = True
        released = []
        while self._arrived and self._done[self._arrived[0]]:
            first = self._arrived.popleft()
            del self._done[first]
            released.append(first)
        return tuple(released)

    @property
    def first(self) -> int | None:
        """The request that arrived first of those that are not released, None where there is none."""
        return self._arrived[0] if self._arrived else None

    def __len__(self) -> int:
        """Number of requests that are not released."""
        return len(self._arrived)
