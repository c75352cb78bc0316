"""The host of a model in a worker process: encodes and dispatches the messages between the model and the server.

`ChannelReader` reads messages, in any thread that waits for one; `ChannelWriter` sends them. The connection tracks open
work: unanswered batches, calls of other models, and control requests.
"""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

from . import channel, datatypes
from .errors import TritonError, TritonModelException
from .host import Inbox, ModelBatch
from .reader import SERVER_GONE, ChannelReader
from .references import Refused
from .tensor import received
from .writer import ChannelWriter

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Sequence
    from typing import Any

    from .host import Answer, Failure, Fields, ModelCall, Result
    from .tensor import Tensor

    Task = tuple[Any, ...]
    """A header for the main thread, or ("execute", batch, fields and inputs of each request)."""


class WorkerConnection:
    """A `Host` whose server is at the other end of two sockets.

    Args:
        receiving: The socket that the server writes to, blocking.
        sending: The socket that the server reads from, blocking.
        name: Name of the instance.

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
        """Return when the inbox holds something; takes part in reading until then."""
        self.reader.wait(inbox)

    def poll(self) -> None:
        self.reader.poll()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reader.attach(loop)

    def respond(self, batch: ModelBatch, index: int, result: Result | None, final: bool) -> None:
        self.respond_together(((batch, index, result, final),))

    def respond_together(self, answers: Sequence[Answer]) -> None:
        """Answer requests through their senders, in one message."""
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
        """Start a request of another model."""
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

    def end(self, call: ModelCall) -> None:
        if call.number in self._calls:  # it stays there until its last reply, which comes in any case
            self.writer.send(("call_cancel", call.number))

    def log(self, level: int, message: str, file: str, line: int) -> None:
        """Write to the server's log; in a process that the model has forked, to the output."""
        if self.writer.is_child:
            print(f"{message} ({file}:{line})", file=sys.stderr, flush=True)
        else:
            self.writer.send(("log", level, message, file, line))

    def raised(self, request_ids: list[str], traceback: str) -> None:
        """Report an exception of `execute`."""
        self.writer.send(("raised", request_ids, traceback))

    def control(self, action: str, model_name: str, options: dict[str, object]) -> Any:
        """Do something with a model and return the answer."""
        number = next(self._numbers)
        return self._ask(number, ("control", number, action, model_name, options))

    def make_number(self) -> int:
        return next(self._numbers)

    def ask_metrics(self, update: tuple[Any, ...]) -> Any:
        """Make a family of metrics known, or return the value of a metric."""
        return self._ask(update[1], ("metrics", [update]))

    def metrics(self, updates: list[tuple[object, ...]]) -> None:
        self.writer.send(("metrics", updates))

    def later(self, action: Callable[[], None]) -> None:
        """Run an action soon: now, unless a thread is sending, which then runs it afterwards."""
        self.writer.defer(action)

    # Inside

    def _ask(self, number: int, header: tuple[object, ...]) -> Any:
        """Send a request with this number, and return the answer."""
        answer: Inbox[tuple[Any, ...]] = Inbox()
        self._answers[number] = answer
        self.writer.send(header)
        self.reader.wait(answer)
        outcome = answer.items.popleft()
        if outcome[0] == "error":
            raise TritonModelException(str(outcome[2]))
        return outcome[1]

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
