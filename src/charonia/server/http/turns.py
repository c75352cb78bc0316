"""Turns of the connections that have more to do than what just arrived.

In each round of the event loop one of them works, besides all connections that had nothing waiting. So clients that
pipeline requests share the time of one client, however many they are.
"""

from collections import deque
from collections.abc import Callable

Callback = Callable[[], None]


class Turns:
    """Calls one of those that wait in each round of the event loop, in the order in which they came."""

    def __init__(self, call_soon: Callable[[Callback], object]) -> None:
        """Start with none.

        Args:
            call_soon: Calls a function in the next round of the event loop.
        """
        self._call_soon = call_soon
        self._waiting: deque[Callback] = deque()

    def wait(self, callback: Callback) -> None:
        """Call a function when its turn comes."""
        self._waiting.append(callback)
        if len(self._waiting) == 1:
            self._call_soon(self._next)

    def _next(self) -> None:
        callback = self._waiting.popleft()
        if self._waiting:
            self._call_soon(self._next)
        callback()
