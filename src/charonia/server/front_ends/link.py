"""One end of a connection between a front end and the engine: messages, and calls with their answers.

Plain requests and responses are collected: the results of messages read together, or of one iteration of the event
loop, are sent as one message, see `bursts.py`.

Either end asks questions. The answer to a question about the engine may be any plain value; the answer to one that
announces a change, such as a new table of models, says that the change is in force at the other end.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from charonia.clock import now_ns
from charonia.core.errors import ServingError, internal, unavailable
from charonia.server.channel.channel import Incoming, Outgoing
from charonia.server.channel.end import SOCKET_BYTES, ChannelEnd, TensorLink
from charonia.server.channel.regions import ChannelError
from charonia.server.facade import LoadReports
from charonia.server.front_ends.bursts import RequestWriter, ResponseWriter
from charonia.server.front_ends.messages import decode_error, encode_error

LOAD_AGE_NS = 50_000_000
"""Shortest time between two reports to a front end, in nanoseconds."""

LOAD_WANTED_NS = 60_000_000_000
"""Time for which a front end gets reports after a request that needed one, in nanoseconds."""


class LoadSender:
    """Sends the engine's load to a front end while its requests need it.

    Args:
        load: The load; None where it is not reported.
        send: Sends a message.

    Attributes:
        is_wanted: Whether to call `send` before a response.
    """

    def __init__(self, load: LoadReports | None, send: Callable[[tuple[object, ...]], None]) -> None:
        self.is_wanted = False
        self._load = load
        self._send = send
        self._sent_ns = 0
        self._until_ns = 0

    def wanted(self) -> None:
        """A request of the front end needs a report."""
        self.is_wanted = self._load is not None
        self._until_ns = now_ns() + LOAD_WANTED_NS
        self.send()

    def send(self) -> None:
        """Send a report if it is still needed and the last one is old."""
        now = now_ns()
        if now >= self._until_ns:
            self.is_wanted = False
        elif now - self._sent_ns >= LOAD_AGE_NS and self._load is not None:
            self._sent_ns = now
            self._send(("load", dict(self._load.latest())))


_log = logging.getLogger(__name__)

UNSENT_BYTES_MAX = 256 * 2**20
"""Bytes that may wait for the other end to read before requests, and responses of streams, are refused."""

Writer = TypeVar("Writer", RequestWriter, ResponseWriter)
Blobs = Sequence[bytes]
Answer = Callable[[str, list[object], list[bytes]], Awaitable[object]]
"""Answers a question: its name, its plain arguments, and bytes that are too long to be among them."""


class Link(Generic[Writer]):
    """One end of a connection. Not thread-safe: use it on the event loop's thread.

    Args:
        sock: The connected socket.
        name: Who is at the other end.
        burst: Collects plain requests or responses; call `burst_begun` after adding to it.
        take: Called with each message that is no question or answer.
        answer: Answers the questions of the other end.
        ended: Called once with the reason when the connection has ended, unless by `close`.

    Attributes:
        burst: The given one.
        is_open: Whether the other end is still there.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        burst: Writer,
        *,
        take: Callable[[Incoming], None],
        answer: Answer,
        ended: Callable[[str], None],
    ) -> None:
        self.burst: Writer = burst
        self.is_open = True
        self._is_burst_due = False  # whether `_send_burst` is going to be called
        self._name = name
        self._take = take
        self._answer = answer
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[object]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self._end = ChannelEnd(
            name,
            sock, sock,
            on_message=self._received,
            on_broken=self._broken,
            on_end=lambda: self._broken("it has closed the connection"),
            on_read=self._send_burst,
            shares=True,
        )  # fmt: skip
        self._tensors = TensorLink(self._end)
        self.outgoing = self._tensors.outgoing
        self.release = self._tensors.release

    @property
    def is_full(self) -> bool:
        return self._end.unsent_bytes > UNSENT_BYTES_MAX

    def lend(self, size: int) -> memoryview | None:
        """Return memory whose content is sent without a copy, None if there is none. See `RegionPool.lend`."""
        return self._end.pool.lend(size)

    def send(self, header: tuple[object, ...], outgoing: Outgoing | None = None) -> None:
        """Send a message, unless the other end is gone.

        Raises:
            ChannelError: It is too large, or holds what cannot be sent.
        """
        if self.is_open:
            self._complete_burst(at_once=False)
            self._tensors.send(header, outgoing)

    def burst_begun(self) -> bool:
        """Send the collected messages at the end of this iteration of the event loop, or of the current read.

        Returns:
            Whether this is the first call since then.
        """
        if self._is_burst_due:
            return False
        self._is_burst_due = True
        self._loop.call_soon(self._send_burst)
        return True

    def flush_burst(self) -> None:
        if self.is_open:
            self._complete_burst(at_once=True)

    def _send_burst(self) -> None:
        self._is_burst_due = False
        self.flush_burst()

    def _complete_burst(self, *, at_once: bool) -> None:
        if self.burst:
            outgoing = self.outgoing()
            self._tensors.send(self.burst.take(outgoing), outgoing, at_once=at_once)

    async def ask(self, question: str, *arguments: object, blobs: Blobs = ()) -> object:
        """Ask the other end, and return its answer.

        Raises:
            ServingError: The other end refuses, or UNAVAILABLE when it is gone.
        """
        if not self.is_open:
            raise self._gone()
        number = next(self._numbers)
        outgoing = self.outgoing()
        places = [outgoing.place(blob) for blob in blobs]
        try:
            self.send(("ask", number, question, arguments, places), outgoing)
        except ChannelError as error:
            outgoing.withdraw()
            raise internal(f"'{question}' cannot be asked: {error}") from error
        answer = self._asked[number] = self._loop.create_future()
        try:
            return await answer
        finally:
            self._asked.pop(number, None)

    def close(self) -> None:
        """Close the connection."""
        self.is_open = self._tensors.is_open = False
        self._end.close()
        for task in self._tasks:
            task.cancel()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(self._gone())

    def _received(self, message: Incoming) -> None:
        header = message.header
        self._is_burst_due = True  # at the end of the read
        match header[0]:
            case "infers" | "outcomes":
                self._take(message)
            case "ask":
                _, number, question, arguments, places, *_ = header
                blobs = [bytes(message.find(place)) for place in places]
                for region in message.regions:
                    self.release(region)
                task = self._loop.create_task(self._reply(number, question, list(arguments), blobs))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "answer" | "refused":
                answer = self._asked.get(header[1])
                if answer is not None and not answer.done():
                    if header[0] == "answer":
                        answer.set_result(header[2])
                    else:
                        answer.set_exception(decode_error(header[2]))
            case "release":
                pass
            case _:
                self._take(message)
        released, freed = header[-2:]
        if released or freed:
            self._tensors.handle_lists(released, freed)
        if self.is_open:
            self._tensors.flush()

    async def _reply(self, number: int, question: str, arguments: list[object], blobs: list[bytes]) -> None:
        try:
            self.send(("answer", number, await self._answer(question, arguments, blobs)))
        except ServingError as error:
            self.send(("refused", number, encode_error(error)))
        except Exception as error:  # a bug: the asker would wait for ever
            _log.exception("the question '%s' of %s cannot be answered", question, self._name)
            self.send(("refused", number, encode_error(internal(f"the request failed: {type(error).__name__}"))))

    def _broken(self, reason: str) -> None:
        if self.is_open:
            self.close()
            self._ended(reason)

    def _gone(self) -> ServingError:
        return unavailable(f"{self._name} has gone", hint="try again")
