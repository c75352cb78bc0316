"""The host of a model in a worker process: speaks with the server over the connection, a socket in each direction.

No thread of its own reads: the thread that waits does, and passes on what is for others: outcomes to the inbox that
somebody waits at, batches to the main thread. Whatever is read is decoded at once, because descriptors belong to
messages in the order in which these arrive. Everything that is sent is placed and written under one lock.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import sys
import threading
import time
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING or __package__:
    from charonia.server.backends.python.worker import charonia_channel as channel
    from charonia.server.backends.python.worker import charonia_datatypes as datatypes
    from charonia.server.backends.python.worker.charonia_accounts import RegionAccounts
    from charonia.server.backends.python.worker.charonia_errors import TritonError, TritonModelException
    from charonia.server.backends.python.worker.charonia_host import Batch, Inbox
    from charonia.server.backends.python.worker.charonia_loans import GpuLoans, Refused
    from charonia.server.backends.python.worker.charonia_reading import SharedReading
    from charonia.server.backends.python.worker.charonia_regions import ChannelError
    from charonia.server.backends.python.worker.charonia_responses import InferenceResponse
    from charonia.server.backends.python.worker.charonia_tensor import GpuTensor, received
else:  # siblings of the worker's script; the package is not there
    import charonia_channel as channel
    import charonia_datatypes as datatypes
    from charonia_accounts import RegionAccounts
    from charonia_errors import TritonError, TritonModelException
    from charonia_host import Batch, Inbox
    from charonia_loans import GpuLoans, Refused
    from charonia_reading import SharedReading
    from charonia_regions import ChannelError
    from charonia_responses import InferenceResponse
    from charonia_tensor import GpuTensor, received

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from typing import Any

    from charonia.server.backends.python.worker.charonia_host import Call, Fields, Result
    from charonia.server.backends.python.worker.charonia_tensor import Tensor

    Task = tuple[Any, ...]
    """A header for the main thread, or ("execute", batch, fields and inputs of each request)."""

METRICS_DELAY_S = 0.05
"""Longest time that updates of metrics wait to travel together, as long as the model reports some."""

THREADS_ALONE = 2
"""Threads of a worker whose model has started none: the main thread, and the one that watches for the server's end."""

METRICS_WAITING_MAX = 1000
"""Updates of metrics that wait at most."""


class Disconnected(TritonModelException):
    """The server has gone."""


class Connection:
    """A `Host` whose server is at the other end of two sockets.

    Args:
        receiving: The socket that the server writes to, blocking.
        sending: The socket that the server reads from, blocking.
        name: Name of the instance.
    """

    def __init__(self, receiving: socket.socket, sending: socket.socket, name: str = "") -> None:
        self.name = name
        self.tasks: Inbox[Task] = Inbox()
        """For the main thread."""
        self._receiving = receiving
        self._sending = sending
        self._readable = select.poll()
        self._readable.register(receiving, select.POLLIN)
        self._awake_ns = 0
        self._is_child = False
        self._is_over = False
        self._accounts = RegionAccounts()
        self._loans = GpuLoans(self._accounts, partial(self.later, self._settle))
        self._receiver = channel.Receiver(self._accounts.mappings)
        self._reading = SharedReading(self._read)
        self._loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._send_lock = threading.Lock()
        self._later: deque[Callable[[], None]] = deque()
        self._batches: dict[int, Batch] = {}
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._answers: dict[int, Inbox[tuple[Any, ...]]] = {}
        self._updates: list[tuple[object, ...]] = []
        self._updates_sent = 0.0

    # Reading

    def wait(self, inbox: Inbox[Any]) -> None:
        """Return when the inbox holds something; takes part in reading until then."""
        self._reading.wait(inbox)

    def poll(self) -> None:
        """Take in what has arrived, without waiting."""
        if not self._is_over:
            self._reading.poll()

    def stay_awake(self) -> None:
        """Wait without sleeping, for as long as the server has asked for, until there is something to read."""
        # Other threads of the model would have to wait for the interpreter, which a polling thread hardly lets go of.
        if self._awake_ns and threading.active_count() <= THREADS_ALONE:
            channel.poll_for(self._readable, self._awake_ns)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take in messages also while this event loop runs."""
        if loop not in self._loops:
            self._loops.add(loop)
            loop.add_reader(self._receiving.fileno(), self.poll)

    def _read(self, waits: bool) -> None:
        if self._is_over:
            raise Disconnected(_GONE[1])
        try:
            data, fds = channel.receive(self._receiving, 0 if waits else socket.MSG_DONTWAIT)
            if not data:
                self._end()
                if not waits:
                    raise BlockingIOError
            for message in self._receiver.feed(data, fds):
                self._dispatch(message)
        except BlockingIOError:
            raise
        except BaseException:
            self._end()  # what follows cannot be understood any more
            raise

    def _end(self) -> None:
        """The server is gone: nobody waits for it any longer."""
        self._is_over = True
        for loop in list(self._loops):
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(loop.remove_reader, self._receiving.fileno())
        self.tasks.put(("end",))
        for call in list(self._calls.values()):
            call.inbox.put((_failed(_GONE), True))
        for answer in list(self._answers.values()):
            answer.put(("error", *_GONE))

    def _dispatch(self, message: channel.Incoming) -> None:
        kind = message.header[0]
        if kind == "execute":
            _, batches, released, dropped = message.header
            self._accounts.given_back(released, dropped)
            for number, sent in batches:
                self._take_batch(message, number, sent)
        elif kind == "reply":
            self._take_reply(message)
        elif kind == "awake":
            _, self._awake_ns = message.header
        elif kind == "cancel":
            _, number, index = message.header
            if number in self._batches:
                self._batches[number].cancelled.add(index)
        elif kind == "answer":
            _, number, value = message.header
            answer = self._answers.pop(number, None)
            if answer is not None:
                answer.put(value)
        elif kind == "release":
            self._accounts.given_back(*message.header[1:])
            if self._accounts.pool.lends_gpu:  # an idle model keeps no memory of a GPU for nobody
                self.later(self._settle)
        else:
            self.tasks.put(message.header)

    def _take_batch(self, message: channel.Incoming, number: int, sent: Sequence[tuple[Fields, Sequence[Any]]]) -> None:
        """Take in one of the batches of a message, whose tensors follow those of the batches before it."""
        find, array_of = message.find, datatypes.array_of
        regions_before = len(message.regions)
        requests: list[tuple[Fields, list[Tensor]]] = []
        refused: dict[int, tuple[int, str]] | None = None
        for fields, places in sent:
            inputs: list[Tensor] = []
            for name, datatype, shape, place in places:
                if len(place) == channel.PLACE_LENGTH:
                    inputs.append(received(name, datatype, array_of(datatype, shape, find(place))))
                    continue
                try:
                    inputs.append(self._loans.take(self.name, (name, datatype, shape, place)))
                except Refused as reason:
                    refused = refused or {}
                    refused[len(requests)] = reason.failure
            requests.append((fields, inputs))
        batch = Batch(number, len(requests))
        batch.refused = refused
        if len(message.regions) > regions_before:
            batch.regions = message.regions[regions_before:]
            self._accounts.hold(batch.regions)
        self._batches[number] = batch
        self.tasks.put(("execute", batch, requests))

    def _take_reply(self, message: channel.Incoming) -> None:
        _, number, result, final, released, dropped = message.header
        self._accounts.given_back(released, dropped)
        response = None if result is None else self._response(message, result)
        call = self._calls.pop(number, None) if final else self._calls.get(number)
        if call is None:
            return
        overrun = "" if final else call.overrun()
        if overrun:
            self.end(call)
            del self._calls[number]
            response, final = _failed((TritonError.UNAVAILABLE, overrun)), True
        call.inbox.put((response, final))

    def _response(self, message: channel.Incoming, result: Any) -> InferenceResponse:
        if result[0] >= 0:
            return _failed(result)
        outputs: list[Tensor] = []
        for name, datatype, shape, place in result[1]:
            if len(place) != channel.PLACE_LENGTH:
                try:
                    outputs.append(self._loans.take(self.name, (name, datatype, shape, place)))
                except Refused as reason:
                    return _failed(reason.failure)
                continue
            data = message.find(place)
            if place[0]:
                data = self._accounts.leased(data, place[0])
            outputs.append(received(name, datatype, datatypes.array_of(datatype, shape, data)))
        self._accounts.hold(message.regions)
        response = InferenceResponse(outputs)
        response._parameters = result[2]
        return response

    # Sending

    def lend(self) -> None:
        """Lend tensors of GPUs to the server, which can open them, from now on; before, they are copied."""
        self._accounts.pool.lends_gpu = True

    def _settle(self) -> None:
        """Let go of what the server has given back, and give back what nobody here needs, without another message."""
        with self._send_lock:
            outgoing = self._accounts.compose()
            if self._accounts.released:
                self._send(("release", *self._accounts.take()), outgoing)

    def start(self, header: tuple[object, ...]) -> None:
        """Send a message without tensors."""
        with self._send_lock:
            self._send(header)
        self._run_later()

    def done(self, batch: Batch, results: Sequence[Result | None], input_end: int, output_start: int) -> None:
        """Answer a batch whose `execute` has returned."""
        with self._send_lock:
            self._send_updates()
            encoded, outgoing = self._encode(results)
            self._answered(batch, len(encoded) - encoded.count(None))
            released, dropped = self._accounts.take()
            self._send(("done", batch.number, encoded, released, dropped, input_end, output_start), outgoing)
        if self._later:
            self._run_later()

    def respond(self, batch: Batch, index: int, result: Result | None, final: bool) -> None:
        """Answer a request through its sender."""
        with self._send_lock:
            self._send_updates()
            (encoded,), outgoing = self._encode([result])
            self._answered(batch, final)
            released, dropped = self._accounts.take()
            self._send(("response", batch.number, index, encoded, final, released, dropped), outgoing)
        self._run_later()

    def begin(self, call: Call) -> None:
        """Start a request of another model."""
        call.number = number = next(self._numbers)
        self._calls[number] = call
        try:
            with self._send_lock:
                self._begin(call, self._accounts.compose())
        except BaseException:
            self._calls.pop(number, None)
            raise
        self._run_later()

    def _begin(self, call: Call, outgoing: channel.Outgoing) -> None:
        try:
            tensors = [_encode_tensor(tensor, outgoing) for tensor in call.inputs]
        except BaseException:
            outgoing.withdraw()
            raise
        target = (call.batch, call.model_name, call.model_version, call.decoupled, call.on_gpu)
        released, dropped = self._accounts.take()
        self._send(("call", call.number, *target, call.fields, tensors, released, dropped), outgoing)

    def end(self, call: Call) -> None:
        """Give a call up that has no last outcome yet."""
        if call.number in self._calls:  # it stays there until its last reply, which comes in any case
            self.start(("call_cancel", call.number))

    def log(self, level: int, message: str, file: str, line: int) -> None:
        """Write to the server's log; in a process that the model has forked, to the output."""
        if self._is_child:
            print(f"{message} ({file}:{line})", file=sys.stderr, flush=True)
        else:
            self.start(("log", level, message, file, line))

    def control(self, action: str, model_name: str, options: dict[str, object]) -> Any:
        """Do something with a model and return the answer."""
        return self._ask(next(self._numbers), "control", action, model_name, options)

    def make_number(self) -> int:
        """Return a number that nothing else of this host has."""
        return next(self._numbers)

    def declare_family(self, number: int, name: str, description: str, kind: str) -> None:
        """Make a family of metrics known."""
        self._ask(number, "metrics", [("family", number, name, description, kind)])

    def metrics(self, updates: list[tuple[object, ...]]) -> None:
        """Report updates of metrics: at once, or with the next answer when there are many."""
        with self._send_lock:
            self._updates += updates
            now = time.monotonic()
            if now - self._updates_sent > METRICS_DELAY_S or len(self._updates) > METRICS_WAITING_MAX:
                self._updates_sent = now
                self._send_updates()
        self._run_later()

    def later(self, action: Callable[[], None]) -> None:
        """Run an action soon: now, unless somebody sends; then it is up to them."""
        if not self._is_child:
            self._later.append(action)
            self._run_later()

    def become_child(self) -> None:
        """In a process that the model has forked: leave the connection, which has one worker at its end, alone."""
        self._is_child = True
        self._receiving.close()
        self._sending.close()

    def _ask(self, number: int, kind: str, *content: object) -> Any:
        answer: Inbox[tuple[Any, ...]] = Inbox()
        self._answers[number] = answer
        header = (kind, *content) if kind == "metrics" else (kind, number, *content)
        self.start(header)
        self.wait(answer)
        outcome = answer.items.popleft()
        if outcome[0] == "error":
            raise TritonModelException(str(outcome[2]))
        return outcome[1]

    def _send(self, header: tuple[object, ...], outgoing: channel.Outgoing | None = None) -> None:
        """Send a message, with the lock."""
        if self._is_child:
            raise TritonModelException("a process that a model has forked cannot reach the server")
        outgoing = outgoing or self._accounts.compose()
        try:
            buffers = outgoing.frame(header)
        except ChannelError as error:
            outgoing.withdraw()
            raise TritonModelException(str(error)) from error
        try:
            channel.send_all(self._sending, buffers, outgoing.fds)
        except (BrokenPipeError, ConnectionResetError):
            raise Disconnected(_GONE[1]) from None

    def _encode(self, results: Sequence[Result | None]) -> tuple[list[tuple[object, ...] | None], channel.Outgoing]:
        """Return results as they travel, and the message that holds their tensors."""
        outgoing = self._accounts.compose()
        try:
            return [None if result is None else _encode(result, outgoing) for result in results], outgoing
        except Exception as error:  # elements of a string tensor may be anything
            outgoing.withdraw()
            failure = (TritonError.INTERNAL, f"a response of model '{self.name}' cannot be sent: {error}")
            return [None if result is None else failure for result in results], self._accounts.compose()

    def _send_updates(self) -> None:
        if self._updates:
            updates, self._updates = self._updates, []
            self._send(("metrics", updates))

    def _run_later(self) -> None:
        """Run what finalizers have left, unless somebody is sending, who will do so afterwards."""
        while self._later and self._send_lock.acquire(False):
            self._send_lock.release()
            with contextlib.suppress(IndexError, Disconnected):  # another thread was faster; or nobody is there
                self._later.popleft()()

    def _answered(self, batch: Batch, count: int) -> None:
        """Count final answers; with the last one the memory of the inputs goes back."""
        batch.unanswered -= count
        if batch.unanswered <= 0 and self._batches.pop(batch.number, None) is not None:
            self._accounts.released += batch.regions


def _failed(failure: tuple[int, str]) -> InferenceResponse:
    return InferenceResponse(error=TritonError(failure[1], failure[0]))


def _encode(result: Any, outgoing: channel.Outgoing) -> tuple[object, ...]:
    if result[0] >= 0:
        return result  # type: ignore[no-any-return] # a failure
    tensors = []
    for tensor in result[1]:
        tensors.append(_encode_tensor(tensor, outgoing))  # noqa: PERF401
    return (-1, tensors, result[2])


def _encode_tensor(tensor: Tensor, outgoing: channel.Outgoing) -> tuple[object, ...]:
    if type(tensor) is GpuTensor and outgoing.pool.lends_gpu:
        lent = outgoing.lend(tensor._source, tensor._datatype)
        if lent is not None:
            return (tensor._name, tensor._datatype, tuple(tensor.shape()), lent)
    array, datatype = tensor._array, tensor._datatype
    return (tensor._name, datatype, array.shape, outgoing.place(datatypes.bytes_of(datatype, array)))


_GONE = (TritonError.UNAVAILABLE, "the server has gone")
