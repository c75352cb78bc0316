"""The error that the client raises."""

from charonia.client.wire import Answer, Failure
from charonia.core.errors import Code, ServingError


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
