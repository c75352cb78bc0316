"""The connection to one worker process, with the accounts of who still looks at which shared memory."""

from charonia.server.backends.python.process import WorkerProcess
from charonia.server.backends.python.worker.charonia_channel import Outgoing

RELEASES_HELD_MAX = 8
"""Regions of the worker that are done with and that wait for the next message to it; more are given back at once."""


class WorkerLink:
    """Messages to one worker process, and the regions that both ends give back with them.

    Attributes:
        process: The process.
        is_open: Whether it is still the one to talk to.
    """

    __slots__ = ("_dropped", "_released", "is_open", "process")

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.is_open = True
        self._released: list[int] = []  # regions of the worker that nobody here looks at any more
        self._dropped: list[int] = []  # regions of ours that were given up

    def outgoing(self) -> Outgoing:
        """Return an empty message to place tensors in."""
        return Outgoing(self.process.pool)

    def send(self, header: tuple[object, ...], outgoing: Outgoing | None = None, *, at_once: bool = False) -> None:
        """Send a message that has the regions to give back at its end.

        Args:
            header: Kind and content.
            outgoing: Its tensors.
            at_once: Whether no other is likely to follow in the same round of the event loop.

        Raises:
            ChannelError: It cannot be written.
        """
        released, dropped = self._released.copy(), self._dropped
        self.process.send((*header, released, dropped), outgoing, at_once=at_once)
        # In place: arrays that somebody still looks at append to this list, perhaps in other threads.
        del self._released[: len(released)]
        self._dropped = []

    def release(self, region: int) -> None:
        """Nobody here looks at a region of the worker any more. Callable from any thread."""
        self._released.append(region)

    def give_back(self, loan: int) -> None:
        """Nobody here looks at a tensor of a GPU any more that the worker has lent. Callable from any thread.

        It is told soon, not with the next message: the memory of a GPU is dear, and the worker may be idle for long.
        """
        self._released.append(loan)
        self.process.soon(self._give_back)

    def _give_back(self) -> None:
        if self.is_open and self._released:
            self.send(("release",))

    def given_back(self, released: list[int], dropped: list[int]) -> None:
        """Take in what came with a message: regions of ours that are free again, and regions that the worker gave up.

        To be called when the message's own tensors have been found.
        """
        self._dropped += self.process.pool.release(released)
        self.process.drop(dropped)

    def flush(self) -> None:
        """Give regions back where many have gathered: a worker that only sends would take ever more."""
        if len(self._released) >= RELEASES_HELD_MAX:
            self.send(("release",))
