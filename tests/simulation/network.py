"""The simulated network: ports, and connections whose bytes travel with delays, in pieces, until they are cut."""

import asyncio
import contextvars
import itertools
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.simulation.machine import PROCESS, SimulatedLoop

WINDOW_BYTES = 65536
"""Bytes that travel or wait at a receiver which does not read: the kernel's buffers."""

SPLIT = 0.02
"""Share of writes that arrive in pieces."""


class End(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: "Network", protocol: Any, peername: tuple[str, int]) -> None:
        super().__init__()
        self.process = PROCESS.get()
        self.peer: End
        self.context = contextvars.copy_context()
        self._loop, self._chance = network.loop, network.chance
        self._protocol, self._peername = protocol, peername
        self._is_buffered = isinstance(protocol, asyncio.BufferedProtocol)
        self._unsent = bytearray()
        self._in_flight = 0
        self._held: deque[bytes] = deque()
        self._high = 65536
        self._last_s = 0.0
        self._is_full = self._is_paused = self._is_closing = self._is_ending = self._has_ended = self._is_gone = False
        self._may_receive = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._peername if name == "peername" else default

    def get_protocol(self) -> Any:
        return self._protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return not self._is_paused

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 65536 if high is None else high

    def get_write_buffer_size(self) -> int:
        return len(self._unsent) + self._in_flight

    def write(self, data: Any) -> None:
        if self._is_gone or self._has_ended or self._is_ending or (self._is_closing and not data):
            return
        self._unsent += data
        self._pump()
        if not self._is_full and len(self._unsent) > self._high:
            self._is_full = True
            self._protocol.pause_writing()

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._is_ending = True
        self._pump()

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._loop.call_soon(self._feed)

    def close(self) -> None:
        """Send what waits, then the end."""
        if not self._is_closing:
            self._is_closing = self._is_ending = True
            self._may_receive = False
            self._pump()
            if not self._unsent:
                self._loop.call_soon(self.lose, None)

    def abort(self) -> None:
        """Drop everything; the peer learns of it."""
        if not self._is_gone:
            self._is_closing = True
            self._loop.call_soon(self.lose, None)
            self._travel(self.peer.lose, ConnectionResetError("reset"))

    def lose(self, error: Exception | None) -> None:
        """The connection has ended, at this end."""
        if not self._is_gone:
            self._is_gone = self._is_closing = True
            self._unsent.clear()
            self._held.clear()
            self._protocol.connection_lost(error)

    @property
    def is_gone(self) -> bool:
        return self._is_gone

    def _travel(self, callback: Callable[..., None], *args: Any) -> None:
        self._last_s = max(self._last_s, self._loop.time() + (5e-5 + (5e-3 - 5e-5) * self._chance.random() ** 6)) + 1e-9
        self._loop.call_at(self._last_s, callback, *args, context=self.peer.context)

    def _pump(self) -> None:
        while self._unsent and self._in_flight < WINDOW_BYTES:
            size = min(len(self._unsent), WINDOW_BYTES - self._in_flight)
            if size > 1 and self._chance.random() < SPLIT:
                size = self._chance.randint(1, size)
            piece = bytes(self._unsent[:size])
            del self._unsent[:size]
            self._in_flight += size
            self._travel(self.peer.arrive, piece)
        if not self._unsent:
            if self._is_full:
                self._is_full = False
                self._loop.call_soon(self._protocol.resume_writing)
            if self._is_ending and not self._has_ended:
                self._has_ended = True
                self._travel(self.peer.arrive, b"")
                if self._is_closing and not self._is_gone:
                    self._loop.call_soon(self.lose, None)

    def arrive(self, piece: bytes) -> None:
        if self._is_gone or not self._may_receive:
            if piece and not self.peer.is_gone:  # nobody reads here any more
                self._travel(self.peer.lose, ConnectionResetError("reset"))
            return
        self._held.append(piece)
        self._feed()

    def _feed(self) -> None:
        while self._held and not self._is_paused and not self._is_gone and self._may_receive:
            piece = self._held.popleft()
            if piece:
                self._deliver(piece)
                self._loop.call_soon(self.peer.taken, len(piece), context=self.peer.context)
            elif not self._protocol.eof_received():
                self.close()

    def _deliver(self, piece: bytes) -> None:
        if not self._is_buffered:
            self._protocol.data_received(piece)
            return
        while piece and not self._is_gone:
            buffer = self._protocol.get_buffer(-1)
            size = min(len(buffer), len(piece))
            buffer[:size] = piece[:size]
            piece = piece[size:]
            self._protocol.buffer_updated(size)

    def taken(self, size: int) -> None:
        self._in_flight -= size
        if not self._is_gone:
            self._pump()


class Listener:
    """What `create_server` returns."""

    def __init__(self, network: "Network", factory: Any, port: int) -> None:
        self._network, self.factory, self.port = network, factory, port
        self.process = PROCESS.get()

        self.context = contextvars.copy_context()
        self.sockets = [SimpleNamespace(getsockname=lambda: ("127.0.0.1", port))]

    def close(self) -> None:
        if self in self._network.listeners:
            self._network.listeners.remove(self)


class Network:
    """All ports and connections."""

    def __init__(self, loop: SimulatedLoop, seed: int) -> None:
        self.loop = loop
        self.chance = random.Random(f"network {seed}")
        self.listeners: list[Listener] = []
        self.ends: list[End] = []
        self._tidy_at = 16
        self._ports = itertools.count()
        self._hosts = self.chance.choice((1, 1, 3))  # addresses of clients
        loop.network = self

    def listen(self, factory: Any, port: int, start_serving: bool = True, **options: object) -> Listener:
        listener = Listener(self, factory, port)
        if start_serving:
            self.listeners.append(listener)
        return listener

    def connect(self, port: int, protocol: Any) -> End | None:
        """Connect a client; None where nobody listens."""
        found = [each for each in self.listeners if each.port == port]
        if not found:
            return None
        listener = self.chance.choice(found)

        ours = End(self, protocol, ("127.0.0.1", port))
        number = next(self._ports)
        peer = f"127.0.0.{1 + number % self._hosts}", 40000 + number % 20000
        theirs = listener.context.run(End, self, listener.factory(), peer)
        ours.peer, theirs.peer = theirs, ours
        self.ends.append(theirs)
        if len(self.ends) > self._tidy_at:
            self.ends = [each for each in self.ends if not each._is_gone]
            self._tidy_at = 2 * len(self.ends) + 16
        protocol.connection_made(ours)
        ours._travel(theirs.get_protocol().connection_made, theirs)
        return ours

    def cut(self, end: End) -> None:
        """Break a connection: both ends learn of it some time, what travels is lost."""
        end._travel(end.peer.lose, ConnectionResetError("cut"))
        end.peer._travel(end.lose, ConnectionResetError("cut"))

    def kill(self, process: str) -> None:
        self.listeners = [each for each in self.listeners if each.process != process]
        for end in self.ends:
            if end.process == process and not end.is_gone:
                end._is_gone = True
                end._travel(end.peer.lose, ConnectionResetError("reset"))
