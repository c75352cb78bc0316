"""The host of a model in a worker process: encodes and dispatches the messages between the model and the server.

`ChannelReader` reads messages, in any thread that waits for one (leader/followers pattern: there is no reader thread);
`ChannelWriter` sends them. Messages are decoded immediately, because descriptors belong to messages in order of
arrival. The connection tracks open work: unanswered batches, calls of other models, and control requests.

Any thread of the model may send, and a finalizer may interrupt a thread that holds the lock of the writer. Messages of
finalizers are therefore deferred: they are sent at once if the lock is free, else by the thread that holds it.

Memory with references at this end must not change at the other end. So messages in both directions list the references
that their sender has dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import sys
import threading
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ....channel import channel, datatypes
from ....channel.cuda_driver import CudaError
from ....channel.cuda_ipc import GpuArray, imported_array
from ....channel.datatypes import TritonModelException
from ....channel.regions import ChannelError, Mappings, RegionPool
from .errors import TritonError
from .host import Inbox, ModelBatch, value_of
from .tensor import GpuTensor, received

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from typing import Any

    from ....channel.regions import Mapped
    from .host import Answer, Failure, Fields, ModelCall, Result
    from .tensor import Tensor

    Task = tuple[Any, ...]
    """A header for the main thread, or ("execute", batch, fields and inputs of each request)."""


POLL_READS_MAX = 16
"""Reads of one look at the connection that does not wait, so that a busy server cannot keep a model from its work."""

THREADS_ALONE = 2
"""Threads of a worker whose model has started none: the main thread, and the one that watches for the server's end."""

SERVER_GONE = "the server has gone"


class Disconnected(TritonModelException):
    """The server has gone."""


class ChannelReader:
    """Reads messages: one thread at a time, and always one while any thread waits.

    Args:
        receiver: Assembles messages from bytes.
        on_message: Handles a message. An exception of it ends the connection.
        on_end: Called once when nothing more can be read, with the reason.

    Attributes:
        awake_ns: How long `spin_wait` polls.
        is_over: Whether nothing more can be read.
    """

    def __init__(
        self,
        sock: socket.socket,
        receiver: channel.Receiver,
        on_message: Callable[[channel.Incoming], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.awake_ns = 0
        self.is_over = False
        self._sock = sock
        self._buffer = memoryview(bytearray(channel.RECEIVE_BYTES))  # other connections have threads of their own
        self._receiver = receiver
        self._on_message = on_message
        self._on_end = on_end
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
        self._lead = threading.Lock()
        self._followers: dict[threading.Event, None] = {}
        self._followers_lock = threading.Lock()

    def wait(self, inbox: Inbox[Any]) -> None:
        """Return when the inbox holds something; takes part in reading until then.

        Raises:
            Disconnected: The server has gone. Exceptions of `on_message` propagate, too.
        """
        while not inbox.items:
            if self._lead.acquire(False):
                try:
                    while not inbox.items:
                        self._read(True)
                finally:
                    self._lead.release()
                    self._wake_next()
            else:
                self._follow(inbox)

    def poll(self) -> None:
        """Handle messages that have arrived, without waiting, unless another thread reads."""
        if self.is_over or not self._lead.acquire(False):
            return
        try:
            for _ in range(POLL_READS_MAX):
                self._read(False)
        except BlockingIOError:
            pass  # there is nothing more
        finally:
            self._lead.release()
            self._wake_next()

    def spin_wait(self) -> None:
        """Wait without sleeping, for as long as the server has asked for, until there is something to read."""
        # A polling thread hardly releases the interpreter's lock, which would starve other threads of the model.
        if self.awake_ns and threading.active_count() <= THREADS_ALONE:
            channel.poll_for(self._readable, self.awake_ns)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop not in self._loops:
            self._loops.add(loop)
            loop.add_reader(self._sock.fileno(), self.poll)

    def close(self) -> None:
        """In a process that the model has forked: leave the connection alone."""
        self._sock.close()

    def _read(self, waits: bool) -> None:
        """Read once. Raises BlockingIOError when it is not to wait and there is nothing."""
        if self.is_over:
            raise Disconnected(SERVER_GONE)
        try:
            data, fds = channel.receive(self._sock, 0 if waits else socket.MSG_DONTWAIT, self._buffer)
            if not data:
                self._end(SERVER_GONE)
                if not waits:
                    raise BlockingIOError
            for message in self._receiver.feed(data, fds):
                self._on_message(message)
        except BlockingIOError:
            raise
        except Disconnected:
            self._end(SERVER_GONE)
            raise
        except BaseException as error:  # what follows cannot be understood any more
            self._end(f"a message of the server cannot be read: {type(error).__name__}: {error}")
            raise

    def _end(self, reason: str) -> None:
        if self.is_over:
            return
        self.is_over = True
        for loop in list(self._loops):
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(loop.remove_reader, self._sock.fileno())
        self._on_end(reason)

    def _follow(self, inbox: Inbox[Any]) -> None:
        """Wait until the inbox holds something, or the lead may be free."""
        event = threading.Event()
        with self._followers_lock:
            self._followers[event] = None
        inbox.listen(event.set)
        # A leader that stopped before this look at the lead may not have seen this follower.
        if self._lead.locked() and not inbox.items:
            event.wait()
        with self._followers_lock:
            self._followers.pop(event, None)
        # It may have been woken to take the lead and have no need for it any more.
        if inbox.items:
            self._wake_next()

    def _wake_next(self) -> None:
        """Wake a thread that waits, unless one leads."""
        if self._followers and not self._lead.locked():
            with self._followers_lock:
                for event in self._followers:
                    if not event.is_set():
                        event.set()
                        return


FAILURE_LENGTH = 2
"""Length of what replaces the place of a tensor that cannot be had: number of the `TritonError` code, and why."""


class Refused(Exception):
    """A tensor is not available.

    Attributes:
        failure: The number of the `TritonError` code, and why.
    """

    def __init__(self, failure: tuple[Any, ...]) -> None:
        super().__init__(failure)
        self.failure: tuple[int, str] = (failure[0], failure[1])


class _HeldRegions(Mappings):
    """The server's regions. Messages no longer name those that were released, even if the model has kept an array."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[int] = set()

    def may_name(self, mapped: Mapped) -> bool:
        return super().may_name(mapped) and mapped.id in self.held


class References:
    """The references between both ends.

    The thread that reads notes what comes. All that makes a message happens with the lock of the senders.

    Args:
        release_soon: Called, from any thread, when a handle waits to be released.

    Attributes:
        mappings: The server's regions.
        pool: This end's regions and exports. Belongs to the senders, but for looking up exports.
        released: Regions and handles of the server that nothing here refers to any more; any thread appends to it.
    """

    def __init__(self, release_soon: Callable[[], None]) -> None:
        self.mappings = _HeldRegions()
        self.released: list[int] = []
        self.pool = RegionPool(self.mappings)
        self._release_soon = release_soon
        self._returned: deque[Sequence[int]] = deque()  # regions of ours that the server no longer refers to
        self._freed: list[int] = []  # of these, those that were freed

    def note(self, released: Sequence[int], freed: Sequence[int]) -> None:
        """Note what came with a message: references to ours that were dropped, and regions that the server freed."""
        if released:
            self._returned.append(released)  # to the pool, which belongs to the senders
        if freed:
            self.mappings.drop(freed)

    def hold(self, regions: Sequence[int]) -> None:
        """Note that a message has come whose tensors lie in regions of the server."""
        self.mappings.held.update(regions)

    def counted(self, data: memoryview, region: int) -> memoryview:
        """Return a view of the same bytes that releases the region when the last array over it is gone."""
        # Views of an array keep what it was made over, and numpy does not look through a memoryview to find something
        # else to keep.
        holder = np.frombuffer(data, np.uint8)
        weakref.finalize(holder, self.released.append, region).atexit = False
        return memoryview(holder)  # type: ignore[arg-type] # an array is a buffer

    def open_handle(self, reader: str, entry: tuple[Any, ...]) -> GpuTensor:
        """Return a tensor that the server has sent as a CUDA IPC handle, opened, or one of this process that returns.

        Args:
            reader: Name of the instance, for errors.
            entry: Name, datatype, shape and place as they came.

        Raises:
            Refused: It cannot be had.
            ChannelError: The place leads nowhere.
        """
        name, datatype, shape, place = entry
        if len(place) == FAILURE_LENGTH:
            raise Refused(place)
        source = imported_array(place, shape, datatype, self.pool, self._release_handle)
        if isinstance(source, GpuArray):
            try:
                source.imported.open()
            except CudaError as error:
                reason = f"tensor '{name}' in the memory of a GPU cannot be reached from '{reader}': {error}"
                raise Refused((TritonError.UNAVAILABLE, reason)) from error
        return GpuTensor(name, datatype, source)

    def compose(self) -> channel.Outgoing:
        """Return an empty message; it can use the regions that the server has released."""
        while self._returned:
            self._freed += self.pool.release(self._returned.popleft())
        return channel.Outgoing(self.pool)

    def take(self) -> tuple[list[int], list[int]]:
        """Return what a message tells: references to the server's that were dropped, and ours that were freed."""
        freed, self._freed = self._freed, []
        if not self.released:
            return [], freed
        released = self.released.copy()
        del self.released[: len(released)]  # in place: finalizers append to it
        self.mappings.held.difference_update(released)
        return released, freed

    def _release_handle(self, export_id: int) -> None:
        self.released.append(export_id)
        self._release_soon()


ELEMENT_BYTES_MAX = 4096
"""Largest string that travels in the header of a message, if it is the only element of its tensor."""


class ChannelWriter:
    """Writes messages to the server.

    Attributes:
        lock: To be held from composing a message until it is written.
        is_child: Whether this is a process that the model has forked, which must not write.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.lock = threading.Lock()
        self.references = References(partial(self.defer, self.release))
        self.is_child = False
        self._sock = sock
        self._deferred: deque[Callable[[], None]] = deque()

    def send(self, header: tuple[object, ...]) -> None:
        """Send a message without tensors.

        Raises:
            Disconnected: The server has gone.
            TritonModelException: The message cannot be sent.
        """
        with self.lock:
            self.write(header)
        self.run_deferred()

    def write(self, header: tuple[object, ...], outgoing: channel.Outgoing | None = None) -> None:
        """Send a message, with the lock. Raises as `send`."""
        if self.is_child:
            raise TritonModelException(
                "a process that a model has forked cannot reach the server; call other models and send responses in "
                "'execute' or in threads, and pass the results to the process"
            )
        outgoing = outgoing or self.references.compose()
        try:
            buffers = outgoing.frame(header)
        except ChannelError as error:
            outgoing.withdraw()
            raise TritonModelException(str(error)) from error
        try:
            channel.send_all(self._sock, buffers, outgoing.fds)
        except (BrokenPipeError, ConnectionResetError):
            raise Disconnected(SERVER_GONE) from None

    def encode(
        self, results: Sequence[Result | None], name: str
    ) -> tuple[list[tuple[object, ...] | None], channel.Outgoing]:
        """Return results as they travel, and the message that holds their tensors; with the lock.

        Args:
            results: Responses and failures; None stays None.
            name: Name of the instance, for errors.
        """
        outgoing = self.references.compose()
        try:
            return [None if result is None else _encode(result, outgoing) for result in results], outgoing
        except Exception as error:  # elements of a string tensor may be anything
            outgoing.withdraw()
            failure = (TritonError.INTERNAL, f"a response of model '{name}' cannot be sent: {error}")
            return [None if result is None else failure for result in results], self.references.compose()

    def encode_inputs(self, tensors: Sequence[Tensor]) -> tuple[list[tuple[object, ...]], channel.Outgoing]:
        """Return the inputs of a call as they travel, and the message that holds them; with the lock."""
        outgoing = self.references.compose()
        try:
            return [_encode_tensor(tensor, outgoing) for tensor in tensors], outgoing
        except BaseException:
            outgoing.withdraw()
            raise

    def export_tensors(self) -> None:
        """Send tensors of GPUs as CUDA IPC handles, which the server can open, from now on; before, they are copied."""
        self.references.pool.exports_gpu = True

    def release(self) -> None:
        """Tell the server of dropped references without waiting for another message, and free what it has released."""
        with self.lock:
            outgoing = self.references.compose()
            if self.references.released:
                self.write(("release", *self.references.take()), outgoing)

    def defer(self, action: Callable[[], None]) -> None:
        """Run an action that may send: now, unless a thread is sending, which then runs it afterwards."""
        if not self.is_child:
            self._deferred.append(action)
            self.run_deferred()

    def run_deferred(self) -> None:
        """Run deferred actions, unless a thread is sending."""
        while self._deferred and self.lock.acquire(False):
            self.lock.release()
            with contextlib.suppress(IndexError, Disconnected):  # another thread was faster; or the server has gone
                self._deferred.popleft()()

    def become_child(self) -> None:
        """In a process that the model has forked: leave the connection, which has one worker at its end, alone."""
        self.is_child = True
        self._sock.close()


def _encode_tensor(tensor: Tensor, outgoing: channel.Outgoing) -> tuple[object, ...]:
    """Return name, datatype, shape and place of a tensor, which is placed in a message.

    A short text is its own place.
    """
    if type(tensor) is GpuTensor and outgoing.pool.exports_gpu:
        exported = outgoing.export(tensor._source, tensor._datatype)
        if exported is not None:
            return (tensor._name, tensor._datatype, tuple(tensor.shape()), exported)
    array, datatype = tensor._array, tensor._datatype
    if datatype == "BYTES" and array.size == 1:
        element = array.item()
        if type(element) is bytes and len(element) <= ELEMENT_BYTES_MAX:
            return (tensor._name, datatype, array.shape, element)
    return (tensor._name, datatype, array.shape, outgoing.place(datatypes.bytes_of(datatype, array)))


def _encode(result: Any, outgoing: channel.Outgoing) -> tuple[object, ...]:
    if result[0] >= 0:
        return result  # type: ignore[no-any-return] # a failure
    tensors = []
    for tensor in result[1]:
        tensors.append(_encode_tensor(tensor, outgoing))  # noqa: PERF401
    return (-1, tensors, result[2])


class WorkerConnection:
    """A `Host` whose server is at the other end of two sockets.

    Attributes:
        tasks: For the main thread.
        reader: Where messages come from.
        writer: Where they go.
    """

    def __init__(self, receiving: socket.socket, sending: socket.socket, name: str = "") -> None:
        self.name = name
        self.tasks: Inbox[Task] = Inbox()
        self.writer = ChannelWriter(sending)
        self._references = self.writer.references
        self.reader = ChannelReader(receiving, channel.Receiver(self._references.mappings), self._dispatch, self._ended)
        self._batches: dict[int, ModelBatch] = {}
        self._numbers = itertools.count(1)
        self._calls: dict[int, ModelCall] = {}
        self._answers: dict[int, Inbox[tuple[Any, ...]]] = {}

    def __repr__(self) -> str:
        """Return e.g. `<WorkerConnection 'm_0_0' open batches=1 calls=2>`."""
        state = "closed" if self.reader.is_over else "open"
        return f"<WorkerConnection '{self.name}' {state} batches={len(self._batches)} calls={len(self._calls)}>"

    # Called by the worker

    def done(self, batch: ModelBatch, results: Sequence[Result | None], input_end: int, output_start: int) -> None:
        """Answer a batch whose `execute` has returned."""
        writer = self.writer
        with writer.lock:
            encoded, outgoing = writer.encode(results, self.name)
            self._answered(batch, len(encoded) - encoded.count(None))
            released, freed = self._references.take()
            writer.write(("done", batch.number, encoded, released, freed, input_end, output_start), outgoing)
        writer.run_deferred()

    # Called for the model

    def wait(self, inbox: Inbox[Any]) -> None:
        self.reader.wait(inbox)

    def poll(self) -> None:
        self.reader.poll()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reader.attach(loop)

    def respond(self, batch: ModelBatch, index: int, result: Result | None, final: bool) -> None:
        self.respond_together(((batch, index, result, final),))

    def respond_together(self, answers: Sequence[Answer]) -> None:
        writer = self.writer
        with writer.lock:
            encoded, outgoing = writer.encode([result for _, _, result, _ in answers], self.name)
            responses = []
            for (batch, index, _, final), result in zip(answers, encoded):
                self._answered(batch, final)
                responses.append((batch.number, index, result, final))
            released, freed = self._references.take()
            writer.write(("responses", responses, released, freed), outgoing)
        writer.run_deferred()

    def begin(self, call: ModelCall) -> None:
        call.number = number = next(self._numbers)
        self._calls[number] = call
        writer = self.writer
        try:
            with writer.lock:
                inputs, outgoing = writer.encode_inputs(call.inputs)
                target = (call.batch, call.model_name, call.model_version, call.decoupled, call.on_gpu)
                released, freed = self._references.take()
                writer.write(("call", number, *target, call.fields, inputs, released, freed), outgoing)
        except BaseException:
            self._calls.pop(number, None)
            raise
        writer.run_deferred()

    def end(self, call: ModelCall, *, softly: bool = False) -> None:
        if call.number in self._calls:  # it stays there until its last reply, which comes in any case
            self.writer.send(("call_stop" if softly else "call_cancel", call.number))

    def log(self, level: int, message: str, file: str, line: int) -> None:
        if self.writer.is_child:
            print(f"{message} ({file}:{line})", file=sys.stderr, flush=True)
        else:
            self.writer.send(("log", level, message, file, line))

    def raised(self, request_ids: list[str], traceback: str) -> None:
        self.writer.send(("raised", request_ids, traceback))

    def control(self, action: str, model_name: str, options: dict[str, object]) -> Any:
        number = next(self._numbers)
        return self._ask(number, ("control", number, action, model_name, options))

    def make_number(self) -> int:
        return next(self._numbers)

    def ask_metrics(self, update: tuple[Any, ...]) -> Any:
        return self._ask(update[1], ("metrics", [update]))

    def metrics(self, updates: list[tuple[object, ...]]) -> None:
        self.writer.send(("metrics", updates))

    def later(self, action: Callable[[], None]) -> None:
        self.writer.defer(action)

    # Inside

    def _ask(self, number: int, header: tuple[object, ...]) -> Any:
        """Send a request with this number, and return the answer."""
        answer: Inbox[tuple[Any, ...]] = Inbox()
        self._answers[number] = answer
        self.writer.send(header)
        self.reader.wait(answer)
        return value_of(answer.items.popleft())

    def _ended(self, reason: str) -> None:
        """Nothing more can be read: fail all open calls and requests."""
        if reason != SERVER_GONE:  # the output goes to the server's log
            print(reason, file=sys.stderr, flush=True)
        failure = (TritonError.UNAVAILABLE, reason)
        self.tasks.put(("end",))
        for call in list(self._calls.values()):
            call.inbox.put((failure, True))
        for answer in list(self._answers.values()):
            answer.put(("error", *failure))

    def _dispatch(self, message: channel.Incoming) -> None:
        kind = message.header[0]
        if kind == "execute":
            _, batches, released, freed = message.header
            self._references.note(released, freed)
            for number, sent in batches:
                self._take_batch(message, number, sent)
        elif kind == "reply":
            self._take_reply(message)
        elif kind == "awake":
            _, self.reader.awake_ns = message.header
        elif kind == "cancel":
            _, number, index = message.header
            if number in self._batches:
                self._batches[number].cancel(index)
        elif kind == "answer":
            _, number, value = message.header
            answer = self._answers.pop(number, None)
            if answer is not None:
                answer.put(value)
        elif kind == "release":
            self._references.note(*message.header[1:])
            if self._references.pool.exports_gpu:  # an idle model keeps no GPU memory that nothing refers to
                self.writer.defer(self.writer.release)
        else:
            self.tasks.put(message.header)

    def _take_batch(self, message: channel.Incoming, number: int, sent: Sequence[tuple[Fields, Sequence[Any]]]) -> None:
        """Decode a batch of a message; its tensors follow those of the batches before it."""
        find, array_of = message.find, datatypes.array_of
        regions_before = len(message.regions)
        requests: list[tuple[Fields, list[Tensor]]] = []
        refused: dict[int, Failure] | None = None
        for fields, places in sent:
            inputs: list[Tensor] = []
            for name, datatype, shape, place in places:
                if len(place) == channel.PLACE_LENGTH:
                    inputs.append(received(name, datatype, array_of(datatype, shape, find(place))))
                    continue
                try:
                    inputs.append(self._references.open_handle(self.name, (name, datatype, shape, place)))
                except Refused as reason:
                    refused = refused or {}
                    refused[len(requests)] = reason.failure
            requests.append((fields, inputs))
        batch = ModelBatch(number, len(requests))
        batch.refused = refused
        if len(message.regions) > regions_before:
            batch.regions = message.regions[regions_before:]
            self._references.hold(batch.regions)
        self._batches[number] = batch
        self.tasks.put(("execute", batch, requests))

    def _take_reply(self, message: channel.Incoming) -> None:
        _, number, sent, final, released, freed = message.header
        self._references.note(released, freed)
        result = None if sent is None else self._result(message, sent)
        call = self._calls.pop(number, None) if final else self._calls.get(number)
        if call is None:
            return
        overrun = "" if final else call.overrun()
        if overrun:
            self.end(call)
            del self._calls[number]
            result, final = (TritonError.UNAVAILABLE, overrun), True
        call.inbox.put((result, final))

    def _result(self, message: channel.Incoming, sent: Any) -> Result:
        if sent[0] >= 0:
            return sent  # type: ignore[no-any-return] # a failure
        outputs: list[Tensor] = []
        for name, datatype, shape, place in sent[1]:
            if len(place) != channel.PLACE_LENGTH:
                try:
                    outputs.append(self._references.open_handle(self.name, (name, datatype, shape, place)))
                except Refused as reason:
                    return reason.failure
                continue
            data = message.find(place)
            if place[0]:
                data = self._references.counted(data, place[0])
            outputs.append(received(name, datatype, datatypes.array_of(datatype, shape, data)))
        self._references.hold(message.regions)
        return (-1, outputs, sent[2])

    def _answered(self, batch: ModelBatch, count: int) -> None:
        """Count final answers; with the last one the memory of the inputs goes back."""
        batch.unanswered -= count
        if batch.unanswered <= 0 and self._batches.pop(batch.number, None) is not None:
            self._references.released += batch.regions
