"""Server reflection: each question on the stream gets its answer at once."""

from charonia.server.grpc.stream import StreamCall
from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_reflection import answer


class ReflectionStream:
    """What is said on one reflection call."""

    __slots__ = ("_call",)

    def __init__(self, call: StreamCall) -> None:
        self._call = call

    def in_flight(self) -> int:
        """Return 0: no question waits."""
        return 0

    def start(self, message: Buffer) -> None:
        """Answer a question. Raises as `charonia.server.grpc.stream.Conversation.start`."""
        self._call.send([answer(message)])

    def drop(self) -> None:
        """Nothing is in flight."""
