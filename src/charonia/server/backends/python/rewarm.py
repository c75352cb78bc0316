"""Takes the outcome of a warm-up batch that a worker runs after a restart."""

from collections.abc import Callable

from charonia.core.caller import CallFrame
from charonia.core.errors import ServingError
from charonia.server.backends.api import Result


class WarmSink:
    """The `BatchSink` of a warm-up batch.

    Args:
        frame: Who makes the requests that the model makes meanwhile.
        done: Called with what went wrong, "" for nothing, when the worker is done with the batch.
    """

    def __init__(self, frame: CallFrame, done: Callable[[str], None]) -> None:
        self._frame = frame
        self._done = done
        self._problem = ""

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        """Take a response."""
        if isinstance(result, ServingError):
            self._problem = self._problem or result.message

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        """Take the end of the batch."""
        self._done(self._problem or (error.message if error is not None else ""))

    def is_cancelled(self, index: int) -> bool:
        """Nobody leaves."""
        return False

    def frame(self) -> CallFrame:
        """Return who makes requests."""
        return self._frame
