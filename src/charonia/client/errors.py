"""The error that the client raises, and answers that stand for failures."""

import time

from charonia.core.errors import Code, ServingError
from charonia.wire.answer import Answer, Failure

CODES = {
    Failure.REFUSED: Code.UNAVAILABLE,
    Failure.RESET: Code.UNAVAILABLE,
    Failure.TIMEOUT: Code.UNAVAILABLE,
    Failure.EXHAUSTED: Code.UNAVAILABLE,
    Failure.CLOSED: Code.UNAVAILABLE,
    Failure.GARBLED: Code.INTERNAL,
    Failure.OVERSIZE: Code.INTERNAL,
}
"""Code of every failure that the server did not report itself."""

_UNSENT = (Failure.REFUSED, Failure.EXHAUSTED)


def failed(answer: Answer, failure: Failure, message: str) -> Answer:
    """Turn an answer into a failure that the server did not report itself, and return it."""
    answer.failure = failure
    answer.code = CODES[failure]
    answer.message = message
    # Without a time of sending, the server has at most a part of the request.
    answer.is_unexecuted = failure in _UNSENT or (failure is Failure.RESET and not answer.send_end_ns)
    answer.final = True
    answer.done_ns = time.monotonic_ns()
    return answer


class ClientError(ServingError):
    """The failure of a request.

    Attributes:
        failure: The kind of failure; `Failure.STATUS` if the server responded with an error.
        status: HTTP or gRPC status of the response, 0 if there was none.
    """

    def __init__(self, code: Code, message: str, failure: Failure, status: int = 0) -> None:
        super().__init__(code, message)
        self.failure = failure
        self.status = status


def error_of(answer: Answer) -> ClientError | None:
    """Return the error in an answer, None for success."""
    if answer.failure is None:
        return None
    return ClientError(answer.code, answer.message, answer.failure, answer.status)
