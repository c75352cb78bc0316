"""The error that the client raises.

Answers that say why there is no result.
"""

import time

from charonia.core.errors import Code, ServingError
from charonia.wire.transport import Answer, Failure

CODES = {
    Failure.REFUSED: Code.UNAVAILABLE,
    Failure.RESET: Code.UNAVAILABLE,
    Failure.TIMEOUT: Code.UNAVAILABLE,
    Failure.EXHAUSTED: Code.UNAVAILABLE,
    Failure.CLOSED: Code.UNAVAILABLE,
    Failure.GARBLED: Code.INTERNAL,
    Failure.OVERSIZE: Code.INTERNAL,
}
"""Code of every failure that is not the server's own word."""


def failed(answer: Answer, failure: Failure, message: str) -> Answer:
    """Make an answer one of a failure that is not the server's own word, and return it."""
    answer.failure = failure
    answer.code = CODES[failure]
    answer.message = message
    answer.final = True
    answer.done_ns = time.monotonic_ns()
    return answer


class ClientError(ServingError):
    """A request that has no result.

    Attributes:
        failure: What kind of failure it is; `Failure.STATUS` where the server answered with an error.
        status: HTTP or gRPC status of the answer, 0 where there was none.
    """

    def __init__(self, code: Code, message: str, failure: Failure, status: int = 0) -> None:
        super().__init__(code, message)
        self.failure = failure
        self.status = status


def error_of(answer: Answer) -> ClientError | None:
    """Return what an answer says went wrong, None for success."""
    if answer.failure is None:
        return None
    return ClientError(answer.code, answer.message, answer.failure, answer.status)
