"""The server's end of a worker's connection, for tests that play the server."""

import socket
from typing import Any

from charonia.server.channel import channel
from charonia.server.channel.channel import Incoming, Outgoing, Receiver
from charonia.server.channel.regions import Mappings, RegionPool

FIELDS = ("", 0, 0, 0, 0, "{}", ("OUT",), "")
"""What requests carry besides tensors."""


class ServerEnd:
    """Sends what a test says, and collects what arrives.

    Attributes:
        theirs: The sockets that the worker receives from and sends to.
    """

    def __init__(self, timeout_s: float) -> None:
        self.out, theirs_in = socket.socketpair()
        theirs_out, self.incoming = socket.socketpair()
        self.incoming.settimeout(timeout_s)
        self.theirs = (theirs_in, theirs_out)
        self.pool = RegionPool()
        self.mappings = Mappings()
        self.receiver = Receiver(self.mappings, self.pool)
        self.waiting: list[Incoming] = []

    def send(self, header: tuple[object, ...], outgoing: Outgoing | None = None) -> None:
        outgoing = outgoing or Outgoing(self.pool)
        channel.send_all(self.out, outgoing.frame(header), outgoing.fds)

    def execute(self, number: int, *arrays: Any) -> None:
        outgoing = Outgoing(self.pool)
        requests = [(FIELDS, [place("IN", array, outgoing)]) for array in arrays]
        self.send(("execute", [(number, requests)], [], []), outgoing)

    def receive(self) -> Incoming:
        while not self.waiting:
            # Not with the channel's own function: its buffer may belong to the other end, in this process.
            data, fds, _, _ = socket.recv_fds(self.incoming, 1 << 18, channel.FDS_MAX)
            assert data, "the worker's end is closed"
            self.waiting += self.receiver.feed(data, fds)
        return self.waiting.pop(0)

    def hang_up(self) -> None:
        self.out.close()
        self.incoming.close()

    def close(self) -> None:
        for sock in (*self.theirs, self.out, self.incoming):
            sock.close()
        self.receiver.close()
        self.pool.close()
        self.mappings.close()


def place(name: str, array: Any, outgoing: Outgoing) -> tuple[object, ...]:
    """Return an array of float32 as a message holds it."""
    return (name, "FP32", array.shape, outgoing.place(memoryview(array).cast("B") if array.size else b""))
