"""The response of a language model as it came, which is decoded when it is complete. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Received:
    """The response to a request, as it came.

    Attributes:
        arrivals: int64 [parts, 2] as bytes: the monotonic time of each part, and the size of the body with it.
        body: The body; over gRPC, the messages one after the other, each of them a part.
        history: Earlier replies of the session.
    """

    arrivals: bytes
    body: bytes
    history: tuple[str, ...] = ()
