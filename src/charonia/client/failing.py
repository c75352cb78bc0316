"""Answers that say why there is no result."""

import time

from charonia.client.wire import Answer, Failure
from charonia.core.errors import Code

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
