"""An event loop whose clock stands still while there is something to do, for tests of time limits."""

import asyncio
import selectors


class _Clock(selectors.SelectSelector):
    """Looks without waiting; the time that it should have waited passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0.0)
        if timeout is not None and not ready:
            self.now_s += max(timeout, 0.0)
        return ready


class IdleTimeLoop(asyncio.SelectorEventLoop):
    """Goes from timer to timer whenever nothing is left to do, so that no pause of the machine changes an outcome.

    For what happens within the loop: sockets, threads and processes are not waited for while a timer runs.
    """

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return seconds since the loop was made, of its own clock."""
        return self._clock.now_s

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait until the threads of `to_thread` have ended, as long as that takes: they do not live in this time."""
        await super().shutdown_default_executor()
