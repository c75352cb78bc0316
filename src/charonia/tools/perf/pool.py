"""The worker processes that send load, and the messages that control them, pickled over a socket pair.

With `--shared-memory system`, tensors are in memory shared with the server: one object for inputs, one for outputs. The
inputs of all requests are written once, before the run. Each step of the data has its own place for outputs, which its
requests share. The regions have unique names, and no other region is registered or unregistered.
"""

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from multiprocessing.connection import Connection, wait
from multiprocessing.shared_memory import SharedMemory
from uuid import uuid4

from charonia.client.sync_client import Client
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, internal, invalid
from charonia.core.metadata import ModelMetadata, TensorMetadata
from charonia.python_command import python_module, safe_path
from charonia.tools.perf.api import InputSource, MeasuredTarget, RunSettings
from charonia.tools.perf.samples import Chunk
from charonia.tools.perf.sequences import Part, steps_once
from charonia.tools.results.records import LoadLevel
from charonia.wire.query import SharedMemoryRegion
from charonia.wire.tensors import encode_tensor
from charonia.wire.transport import RequestForm, SharedTensor

SHARED_BYTES_MAX = 4 * 2**30
"""Largest memory object."""

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Locations of the tensors of every request.

    Attributes:
        inputs: Locations of the inputs by stream and step, then by name.
    """

    inputs: dict[tuple[int, int], dict[str, SharedTensor]]
    outputs: dict[tuple[int, int], dict[str, SharedTensor]]

    def form(self, part: Part, form: RequestForm) -> RequestForm:
        """Return the encoding of a request, given the one without shared memory."""
        key = part.stream, part.step
        return replace(form, shared_inputs=self.inputs[key], shared_outputs=self.outputs[key])


@contextmanager
def shared(
    client: Client, source: InputSource, target: MeasuredTarget, metadata: ModelMetadata, batches: bool
) -> Iterator[SharedLayout]:
    """Put the inputs into shared memory and register it with the server; unregister and remove it on exit.

    Args:
        batches: Whether its tensors have a batch dimension.

    Raises:
        ServingError: The server does not support shared memory, or the data does not fit.
    """
    if source.expected(0, 0) is not None:
        raise invalid("validation data: answers in shared memory are not compared", hint="leave --shared-memory out")
    parts = list(steps_once(source))
    sizes = [
        (tensor.name, _output_bytes(tensor, source.batch_size if batches else 0, target)) for tensor in metadata.outputs
    ]
    encoded = {
        (part.stream, part.step): {
            name: bytes(encode_tensor(tensor)) for name, tensor in source.request(part.stream, part.step).inputs.items()
        }
        for part in parts
    }
    unique = f"charonia_perf_{uuid4().hex[:16]}"
    names = f"{unique}_in", f"{unique}_out"
    inputs, input_bytes = _placed(
        names[0], {key: [(name, len(data)) for name, data in blobs.items()] for key, blobs in encoded.items()}
    )
    outputs, output_bytes = _placed(names[1], dict.fromkeys(encoded, sizes))
    with ExitStack() as stack:
        memory = stack.enter_context(_registered(client, names[0], input_bytes))
        stack.enter_context(_registered(client, names[1], output_bytes))
        if memory.buf is None:
            raise RuntimeError("shared memory was closed while it is in use")
        for key, blobs in encoded.items():
            for name, data in blobs.items():
                offset = inputs[key][name].offset
                memory.buf[offset : offset + len(data)] = data
        yield SharedLayout(inputs, outputs)


@contextmanager
def _registered(client: Client, name: str, byte_size: int) -> Iterator[SharedMemory]:
    if byte_size > SHARED_BYTES_MAX:
        raise invalid(f"shared memory: expected at most {SHARED_BYTES_MAX} bytes of tensors, got {byte_size}")
    with safe_path():  # the first one starts an interpreter
        memory = SharedMemory(name, create=True, size=max(byte_size, 1))
    try:
        client.register_shared_memory(SharedMemoryRegion(name, f"/{name}", max(byte_size, 1)))
        try:
            yield memory
        finally:
            # A server that exited has no regions left, and must not cost the results.
            with suppress(ServingError):
                client.unregister_shared_memory(name)
    finally:
        memory.close()
        memory.unlink()


def _placed(
    region: str, wanted: dict[tuple[int, int], list[tuple[str, int]]]
) -> tuple[dict[tuple[int, int], dict[str, SharedTensor]], int]:
    found: dict[tuple[int, int], dict[str, SharedTensor]] = {}
    offset = 0
    for key, sizes in wanted.items():
        places = found[key] = {}
        for name, size in sizes:
            places[name] = SharedTensor(region, size, offset)
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return found, offset


def _output_bytes(tensor: TensorMetadata, batch_size: int, target: MeasuredTarget) -> int:
    """Return the size of an output: by its shape, or the configured size if the shape is variable.

    Args:
        batch_size: Items in a request; 0 for a model without batch dimension.
    """
    item = tensor.shape[1:] if batch_size else tensor.shape
    if tensor.datatype is DataType.BYTES or -1 in item:
        return target.output_bytes * max(batch_size, 1)
    return prod(item) * max(batch_size, 1) * tensor.datatype.numpy.itemsize


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """First message to a worker.

    Attributes:
        process: Number of the worker, from 0.
        layout: Locations of tensors in shared memory, None if requests contain them.
    """

    settings: RunSettings
    source: InputSource
    process: int
    process_count: int
    layout: SharedLayout | None = None


@dataclass(frozen=True, slots=True)
class PrepareLoad:
    """Prepare a load: the reply is `WorkerReady`, and `StartLoad` starts it.

    Attributes:
        request_count: Requests of all workers together; 0 for no limit.
    """

    level: LoadLevel
    request_count: int = 0


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Start the prepared load."""

    begin_ns: int


@dataclass(frozen=True, slots=True)
class StopLoad:
    """Stop the load, wait for requests in flight, and send a last `Chunk`.

    Attributes:
        wait_s: Time to wait for answers; requests still in flight are then cancelled.
    """

    wait_s: float


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has opened its connections and is ready to start."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker failed."""

    code: str
    message: str
    hint: str = ""


START_SECONDS_MAX = 60.0
"""Time for all workers to prepare a level, including their connections."""

BEGIN_DELAY_NS = 5_000_000
"""Delay between `StartLoad` and the start, so that every worker has received it."""

END_SECONDS_MAX = 5.0
"""Time for a worker to exit before it is killed."""


class WorkerPool:
    """Worker processes that send load.

    Args:
        layout: Locations of tensors in shared memory, None if requests contain them.
    """

    def __init__(
        self, settings: RunSettings, source: InputSource, count: int, layout: SharedLayout | None = None
    ) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._commands: list[Connection] = []
        self._answers: list[Connection] = []
        for number in range(count):
            self._start(WorkerSetup(settings, source, number, count, layout))

    @property
    def count(self) -> int:
        return len(self._processes)

    def prepare(self, begin: PrepareLoad) -> None:
        """Let all workers prepare a load: open connections and encode requests.

        Raises:
            ServingError: A worker failed, for example because a request cannot be encoded.
        """
        self._send_all(begin)
        waiting = set(range(self.count))
        limit = time.monotonic() + START_SECONDS_MAX
        while waiting:
            if time.monotonic() > limit:
                raise internal(f"worker processes: not ready within {START_SECONDS_MAX:g} s")
            for number, message in self._messages(0.1):
                if isinstance(message, WorkerReady):
                    waiting.discard(number)

    def start(self) -> int:
        """Start the load in all workers at the same time, and return its monotonic start time."""
        begin_ns = time.monotonic_ns() + BEGIN_DELAY_NS
        self._send_all(StartLoad(begin_ns))
        return begin_ns

    def listen(self, seconds: float) -> Iterator[tuple[int, Chunk]]:
        """Yield the chunks that arrive within this time, with the numbers of their workers."""
        for number, message in self._messages(seconds):
            if isinstance(message, Chunk):
                yield number, message

    def end(self, wait_s: float) -> None:
        """Let all workers stop the load; their last chunks are `finished`."""
        self._send_all(StopLoad(wait_s))

    def close(self) -> None:
        """End the workers."""
        for connection in (*self._commands, *self._answers):
            connection.close()
        for process in self._processes:
            try:
                process.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, setup: WorkerSetup) -> None:
        # Two sockets, for the worker reads one and leaves messages on the other that may wait.
        commands, their_commands = socket.socketpair()
        answers, their_answers = socket.socketpair()
        descriptors = [their_commands.fileno(), their_answers.fileno()]
        command = python_module("charonia.tools.perf.worker", *map(str, descriptors))
        with their_commands, their_answers:
            self._processes.append(
                # In its own process group: Ctrl-C and signals of `timeout` reach the measuring process only.
                subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, process_group=0)
            )
        self._commands.append(Connection(commands.detach()))
        self._answers.append(Connection(answers.detach()))
        self._send(self._commands[-1], setup)

    def _send_all(self, message: PrepareLoad | StartLoad | StopLoad) -> None:
        for connection in self._commands:
            self._send(connection, message)

    def _send(self, connection: Connection, message: object) -> None:
        try:
            connection.send(message)
        except OSError:
            raise _ended() from None

    def _messages(self, seconds: float) -> Iterator[tuple[int, object]]:
        for ready in wait(self._answers, seconds):
            number = self._answers.index(ready)  # type: ignore[arg-type]  # `wait` got only these
            connection = self._answers[number]
            try:
                message = connection.recv()
            except (EOFError, OSError):
                raise _ended() from None
            if isinstance(message, WorkerFailed):
                raise ServingError(Code[message.code], message.message, hint=message.hint)
            yield number, message


@contextmanager
def pool(
    settings: RunSettings, source: InputSource, count: int, layout: SharedLayout | None = None
) -> Iterator[WorkerPool]:
    """Start the workers, and end them on exit."""
    processes = WorkerPool(settings, source, count, layout)
    try:
        yield processes
    finally:
        processes.close()


def process_count(most: int, level: float, is_rate: bool, cores: Sequence[int]) -> int:
    """Return the number of workers for a load.

    One worker sends some 10,000 requests per second. The workers use at most a quarter of the cores, because the server
    often runs on the same machine.

    Args:
        level: Highest number of requests per second, or in flight.
        is_rate: Whether `level` is a rate.
    """
    wanted = level / _RATE_PER_PROCESS if is_rate else level / _REQUESTS_PER_PROCESS
    return max(1, min(most, len(cores) // 4, int(min(wanted, 1e6))))


_RATE_PER_PROCESS = 4000
_REQUESTS_PER_PROCESS = 8


def _ended() -> ServingError:
    return internal("a worker process exited unexpectedly", hint="Its error is above.")
