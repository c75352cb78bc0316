"""How an engine hands its front ends over to the next one without losing a request or a change.

1. Changes wait, such as registrations of memory or loads of models; changes in progress are finished. Then this engine
   makes no more changes (`EngineChanges.close`).
2. Every front end connects to the next engine, which makes the changes of this one before it answers.
3. The socket of the next engine takes the name of this one's. Every front end sends new requests to the next engine,
   and the requests of open sequences here.
4. Changes that waited are refused with `MOVED`, and the front ends ask the next engine.

Without a next engine, front ends hold new requests until there is one.

A front end sends a request where its sequence is, and the requests of one sequence may come through several front ends.
So each of them must know of a sequence that begins here after all, because its first request was on the way, and of one
that ends here, before the client has the answer and sends the next request.
"""

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from charonia.core.errors import ServingError, unavailable
from charonia.core.request import SEQUENCE_END, InferRequest
from charonia.core.response import Outcome, Reply
from charonia.server.front_ends.engine_changes import LOOK_S, EngineChanges
from charonia.server.front_ends.messages import MOVED
from charonia.server.front_ends.reconnect import Sequence

_log = logging.getLogger(__name__)

SOCKET_NAME = "engine.sock"

BACKLOG = 64
"""Front ends that may wait to be accepted."""


class DrainingSequences:
    """The sequences of an engine that has handed over, as its front ends know them."""

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        self._known = set(sequences)
        self._numbers = itertools.count()
        self._latest: dict[Sequence, int] = {}

    @property
    def ids(self) -> set[int | str]:
        """Their ids: several models may have sequences of one id, which all stay."""
        return {key for _, key in self._known}

    def record_request(self, sequence: Sequence) -> int:
        """Note a request of a sequence, and return its number."""
        number = self._latest[sequence] = next(self._numbers)
        return number

    def record_response(
        self, sequence: Sequence, number: int, *, ends: bool, is_refused: bool
    ) -> tuple[int | str, bool] | None:
        """Note the answer of a request.

        Args:
            ends: Whether it is the last request of the sequence.
            is_refused: Whether it has failed.

        Returns:
            What front ends have to know before the client has the answer: the id, and whether its requests belong
            here; None for no change.
        """
        _, key = sequence
        was_here = key in self.ids
        is_latest = self._latest.get(sequence) == number
        if is_latest:
            del self._latest[sequence]
        if ends and is_latest:  # else it has begun again
            self._known.discard(sequence)
        elif not ends and not is_refused:
            self._known.add(sequence)
        is_here = key in self.ids
        return (key, is_here) if is_here != was_here else None


class Listener:
    """A Unix socket that accepts front ends.

    Args:
        connect: Called with each connection.

    Attributes:
        path: Its path; another process may move it.
    """

    def __init__(self, path: Path, connect: Callable[[socket.socket], None]) -> None:
        self.path = path
        self._connect = connect
        self._socket: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def open(self) -> None:
        """Listen.

        Raises:
            ServingError: UNAVAILABLE when the socket cannot be made.
        """
        sock = self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path.unlink(missing_ok=True)  # an engine that was killed has left it
            sock.bind(str(self.path))
            os.chmod(self.path, 0o600)
            sock.listen(BACKLOG)
        except OSError as error:
            raise unavailable(
                f"front ends: the socket {self.path} cannot be made: {error}", hint="TMPDIR names another folder"
            ) from error
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._accept, sock)

    def close(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self.path.unlink(missing_ok=True)

    def _accept(self, sock: socket.socket) -> None:
        try:
            self._connect(sock.accept()[0])
        except BlockingIOError:
            return
        except OSError as error:
            _log.error("a front end cannot be accepted: %s", error)


class HandOver:
    """The move of front ends to the next engine.

    Args:
        folder: Private folder of the server.
        listener: Where front ends connect to this engine.
        engine_changes: Keeps the changes of this engine.
        changing: Held while a message goes to all front ends.
        tell_all: Sends all front ends a message, and returns when all have confirmed it; raises the first refusal.
        spawn: Runs something beside the event loop's other work.

    Attributes:
        draining: The sequences that stay here; None before front ends send new requests to the next engine.
        is_done: Whether front ends send no new requests here.
    """

    def __init__(
        self,
        folder: Path,
        listener: Listener,
        engine_changes: EngineChanges,
        changing: asyncio.Lock,
        tell_all: Callable[..., Awaitable[None]],
        spawn: Callable[[Coroutine[object, object, object]], object],
    ) -> None:
        self.draining: DrainingSequences | None = None
        self.is_done = False
        self._folder = folder
        self._listener = listener
        self._engine_changes = engine_changes
        self._changing = changing
        self._tell_all = tell_all
        self._spawn = spawn
        self._may_change = asyncio.Event()
        self._may_change.set()

    def check(self) -> None:
        """Check that this is the engine of new front ends. Raises ServingError, `MOVED`, if it is not."""
        if self.is_done:
            raise unavailable(MOVED)

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Make a change, except while front ends move. Raises as `check`."""
        await self._may_change.wait()
        with self._engine_changes.under_way():
            yield

    async def run(self, next_name: str, open_sequences: Callable[[], set[Sequence]]) -> None:
        """Let all front ends send new requests to the next engine.

        Args:
            next_name: Name of its socket; "" where there is none yet.
            open_sequences: Returns the sequences that have begun and not ended.

        Raises:
            ServingError: UNAVAILABLE when the next engine is gone. Nothing has changed then.
        """
        self._may_change.clear()
        try:
            await self._engine_changes.close()
            async with self._changing:
                if next_name:
                    await self._tell_all("meet", next_name)
                    await self._move(next_name, open_sequences())
                else:
                    self._listener.close()
                    await self._tell_all("pause")
                self.is_done = True
        finally:
            if not self.is_done:
                self._engine_changes.reopen()
            self._may_change.set()

    async def finish(
        self, timeout_s: float, is_busy: Callable[[], bool], open_sequences: Callable[[], set[Sequence]]
    ) -> None:
        """Return when all requests are finished, or at a limit. Front ends then leave this engine.

        Args:
            timeout_s: Seconds that requests, streams and open sequences have.
            is_busy: Whether requests are in flight.
            open_sequences: As for `run`. Sequences do not stay where front ends wait for the next engine.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while loop.time() < end_s and (is_busy() or (self.draining is not None and open_sequences())):
            await asyncio.sleep(LOOK_S)
        await self._tell_all("part", [list(sequence) for sequence in open_sequences()])

    def announce_then_reply(self, request: InferRequest, reply: Reply) -> Reply:
        """Return a reply for a request of a sequence: front ends know where the next one goes before it is answered."""
        draining = self.draining
        assert draining is not None
        sequence, ends = (request.model_name, request.correlation_id), bool(request.flags & SEQUENCE_END)
        number = draining.record_request(sequence)

        def announce(outcome: Outcome, final: bool) -> None:
            is_refused = isinstance(outcome, ServingError)
            news = draining.record_response(sequence, number, ends=ends, is_refused=is_refused) if final else None
            if news is None:
                reply(outcome, final)
            else:
                self._spawn(self._announce_then_reply(news, partial(reply, outcome, final)))

        return announce

    async def _announce_then_reply(self, news: tuple[int | str, bool], reply: Callable[[], None]) -> None:
        with suppress(ServingError):
            await self._tell_all("sequence", *news)
        reply()

    async def _move(self, next_name: str, sequences: set[Sequence]) -> None:
        self._listener.close()
        try:
            (self._folder / next_name).replace(self._folder / SOCKET_NAME)
            self.draining = DrainingSequences(sequences)
            await self._tell_all("move", list(self.draining.ids))
        except (ServingError, OSError) as error:
            self.draining = None
            self._listener.open()
            raise unavailable(f"the next engine has gone: {error}") from error
