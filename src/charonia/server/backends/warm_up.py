"""A batch that warms an instance up."""

from collections.abc import Callable, Sequence

from charonia.core.errors import ServingError, internal
from charonia.core.request import CallFrame, InferRequest
from charonia.server.backends.api import Execution, Result


class WarmUpBatch:
    """A run of requests that have no callers: only errors matter, the content of responses is ignored.

    Args:
        requests: The requests.
        frame: The caller of the requests that the model makes during the run.
        done: Called once, when every request has its last response and the executor is idle: None, or the first error.
    """

    def __init__(
        self, requests: Sequence[InferRequest], frame: CallFrame, done: Callable[[ServingError | None], None]
    ) -> None:
        self.requests = requests
        self._frame = frame
        self._done = done
        self._open = set(range(len(requests)))
        self._is_idle = False
        self._error: ServingError | None = None

    def executed(self, execution: Execution | ServingError, start_ns: int, end_ns: int) -> None:
        if isinstance(execution, ServingError):
            self.finish(start_ns, end_ns, execution)
            return
        for index, result in enumerate(execution.results):
            self.respond(index, result, True)
        self.finish(execution.input_end_ns, execution.output_start_ns)

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        if isinstance(result, ServingError):
            self._error = self._error or result
        if final and index in self._open:
            self._open.remove(index)
            self._check_done()

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        if self._open and not leaves_open:
            self._error = self._error or error or internal("the model sent no response")
            self._open.clear()
        self._is_idle = True
        self._check_done()

    def is_cancelled(self, index: int) -> bool:
        return False

    def frame(self) -> CallFrame:
        return self._frame

    def _check_done(self) -> None:
        if self._is_idle and not self._open:
            self._done(self._error)
