"""The interface between a Python model and its host, which is a worker process or a thread of the server.

The module `triton_python_backend_utils` does not depend on sockets or processes: it uses a `Host`. A process may have
several hosts, so models share no global state: each model gets its own copy of that module, whose classes have the
`Binding` of their model (see `bound_to` there). Threads that a model starts therefore reach the right host, too.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Generic, TypeVar

from ....channel.datatypes import TritonModelException

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence
    from typing import Any, Protocol

    from .errors import Parameter
    from .tensor import Tensor

    Outputs = tuple[int, list[Tensor], dict[str, Parameter]]
    Failure = tuple[int, str]
    Result = Outputs | Failure
    """A response, `(-1, tensors, parameters)`, or an error, `(number of its TritonError code, text)`."""

    Answer = tuple["ModelBatch", int, "Result | None", bool]
    """A response as `Host.respond` takes it: the batch, the index of the request in it, the result, whether it is the
    last."""

    Fields = tuple[str, int | str, int, int, int, str, tuple[str, ...], str]
    """Id, correlation id, flags, timeout in us, priority, parameters as JSON text, names of the wanted outputs, and
    trace context as JSON text or ""."""

    class Host(Protocol):
        """What runs a model. Every method may be called from any thread."""

        name: str
        """Name of the instance, for messages."""

        def log(self, level: int, message: str, file: str, line: int) -> None:
            """Write to the server's log; levels are those of `Logger`."""

        def raised(self, request_ids: list[str], traceback: str) -> None:
            """Report an exception of `execute`, with the ids of its requests, for the server's log."""

        def respond(self, batch: ModelBatch, index: int, result: Result | None, final: bool) -> None:
            """Answer a request through its sender, before or after its `execute` returns. None only with `final`."""

        def respond_together(self, answers: Sequence[Answer]) -> None:
            """Answer requests as `respond` does, in one message where the host has messages."""

        def poll(self) -> None:
            """Handle messages that have arrived, such as cancellations, without waiting."""

        def begin(self, call: ModelCall) -> None:
            """Start a request of another model; its outcomes go to `call.inbox`.

            Raises:
                TritonModelException: It cannot be sent.
            """

        def end(self, call: ModelCall, *, softly: bool = False) -> None:
            """Cancel a call that has no last outcome yet; softly, only tell the called model. Idempotent."""

        def wait(self, inbox: Inbox[Any]) -> None:
            """Return when the inbox holds something."""

        def attach(self, loop: asyncio.AbstractEventLoop) -> None:
            """Handle messages also while this event loop runs in the model's thread."""

        def control(self, action: str, model_name: str, options: dict[str, object]) -> Any:
            """Do "load", "unload" or "ready" with a model and return the answer.

            Args:
                options: "config" text or None, "files" bytes by path, "unload_dependents" bool, "version" text.

            Raises:
                TritonModelException: The server refuses; its words.
            """

        def make_number(self) -> int:
            """Return a number that is unique in this host, for metrics and their families."""

        def ask_metrics(self, update: tuple[Any, ...]) -> Any:
            """Make a family of metrics known, or return the value of a metric.

            Args:
                update: ("family", number, name, description, kind) or ("value", number of the question, metric).

            Raises:
                TritonModelException: The family contradicts another of that name, or there is no such metric.
            """

        def metrics(self, updates: list[tuple[object, ...]]) -> None:
            """Report on metrics.

            Args:
                updates: Of these, in their order: ("metric", number, family, labels, buckets or None),
                    ("add" | "set" | "observe", metric, value), ("merge", metric, counts of the buckets, sum),
                    ("drop_family", number).
            """

        def later(self, action: Callable[[], None]) -> None:
            """Run an action soon. For finalizers, which may interrupt a thread that holds any lock: never waits."""


RESPONSES_UNREAD_MAX = 16_384
"""Unread responses to one call; with more, the call is cancelled."""

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """A queue of outcomes for a thread or a task that waits. Any thread may fill it."""

    __slots__ = ("_listeners", "items")

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self._listeners: list[Callable[[], None]] = []

    def put(self, item: Item) -> None:
        """Add an item and wake the listeners."""
        self.items.append(item)
        if self._listeners:
            listeners, self._listeners = self._listeners, []
            for wake in listeners:
                wake()

    def listen(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once when an item is put. Check `items` afterwards, for items that came before."""
        self._listeners.append(wake)

    def wait(self) -> None:
        """Return when there is an item; for hosts where another thread fills it."""
        while not self.items:
            lock = threading.Lock()  # a fraction of the cost of an event
            lock.acquire()
            self.listen(lock.release)
            if not self.items:
                lock.acquire()


def value_of(outcome: tuple[Any, ...]) -> Any:
    """Return the value of `("ok", value)`. Raises TritonModelException for `("error", number of the code, text)`."""
    if outcome[0] == "error":
        raise TritonModelException(str(outcome[2]))
    return outcome[1]


class ModelCall:
    """A request that the model makes.

    Attributes:
        batch: Number of the batch whose `execute` makes it, 0 for none.
        model_version: Its version, "" for the latest.
        decoupled: Whether any number of responses is fine.
        on_gpu: Whether outputs may stay in the memory of a GPU.
        inbox: Gets `(result or None, whether it is the last)`. None only as the last: no (more) responses.
    """

    __slots__ = ("batch", "decoupled", "fields", "inbox", "inputs", "model_name", "model_version", "number", "on_gpu")

    def __init__(
        self, batch: int, model_name: str, model_version: str, decoupled: bool, fields: Fields, inputs: list[Tensor]
    ) -> None:
        self.number = 0
        self.batch = batch
        self.model_name = model_name
        self.model_version = model_version
        self.decoupled = decoupled
        self.fields = fields
        self.inputs = inputs
        self.on_gpu = False
        self.inbox: Inbox[tuple[Result | None, bool]] = Inbox()

    def overrun(self) -> str:
        """Return an error text if too many responses are unread, else ""."""
        if len(self.inbox.items) < RESPONSES_UNREAD_MAX:
            return ""
        return f"the responses of model '{self.model_name}' were not read fast enough"


class ModelBatch:
    """Requests that `execute` gets together, until the last of them is answered.

    Attributes:
        number: Number, unique among the batches of a host that are not answered.
        cancelled: Indices of the requests whose callers have gone.
        listeners: By index what is called when the caller of that request goes; None for nothing.
        rescheduled: Indices of the requests that the model has rescheduled.
        unanswered: Requests without a final answer; kept by the host.
        refused: Failures by index of requests withheld from the model, because an input is lost; None for none.
        regions: Shared memory of the inputs; used only by the host.
    """

    __slots__ = ("cancelled", "listeners", "number", "refused", "regions", "rescheduled", "unanswered")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.cancelled: set[int] = set()
        self.listeners: dict[int, Callable[[], None]] | None = None
        self.rescheduled: set[int] = set()
        self.unanswered = size
        self.refused: dict[int, Failure] | None = None
        self.regions: list[int] = []

    def cancel(self, index: int) -> None:
        """Note that the caller of a request has gone; called by the host."""
        self.cancelled.add(index)
        self._tell(index)

    def listen(self, index: int, listener: Callable[[], None]) -> None:
        """Call `listener` once when the caller of a request goes, immediately if it has gone. Any thread."""
        self.listeners = self.listeners or {}
        self.listeners[index] = listener
        if index in self.cancelled:
            self._tell(index)

    def _tell(self, index: int) -> None:
        listener = self.listeners.pop(index, None) if self.listeners else None
        if listener is not None:
            listener()


NAMES_NOTED_MAX = 64
"""Outputs that a configuration lacks and that are logged; after that many, further ones are not."""

WARNING = 1
"""Level of the log."""


class Binding:
    """State that all objects of one model share.

    Attributes:
        model_dir: Folder of the model version.
        is_decoupled: Whether a request may have any number of responses.
        is_serving: Whether the model is between `initialize` and `finalize`, where it may call other models.
        running: Number of the batch that `execute` works on, 0 for none.
        task_batch: In a task of an ordinary model, the number of the batch whose `execute` created it.
        thread: Thread in which `execute` runs.
        outputs: Names of the outputs in the configuration.
    """

    def __init__(self, host: Host | None, model_dir: str = "") -> None:
        self.host = host
        self.model_dir = model_dir
        self.is_decoupled = False
        self.is_serving = False
        self.running = 0
        self.task_batch: ContextVar[int] = ContextVar("task_batch")
        self.thread = 0
        self.outputs: frozenset[str] = frozenset()
        self._noted: set[str] = set()

    def configure(self, config_json: str) -> dict[str, Any]:
        """Take note of the outputs in a configuration, which include the states that the server keeps; return it."""
        config: dict[str, Any] = json.loads(config_json)
        states = (config.get("sequence_batching") or {}).get("state") or ()
        names = [output["name"] for output in config.get("output") or ()]
        self.outputs = frozenset([*names, *(state["output_name"] for state in states)])
        return config

    def note_outputs(self, names: list[str]) -> None:
        """Log the names of a response's outputs if the configuration lacks one: once for each that it lacks."""
        new = [name for name in names if name not in self.outputs and name not in self._noted]
        if new and len(self._noted) < NAMES_NOTED_MAX:
            self._noted.update(new)
            self.reach().log(
                WARNING,
                f"the model returned {', '.join(names)}; {', '.join(new)} is dropped, as the configuration has only "
                f"{', '.join(sorted(self.outputs)) or 'no outputs'}",
                __file__,
                0,
            )

    def reach(self) -> Host:
        """Return the host.

        Raises:
            TritonModelException: There is none, because the module was not imported by a model that is being served.
        """
        if self.host is None:
            raise TritonModelException("this works only in a model that a server runs")
        return self.host

    def calling(self) -> Host:
        """Return the host, to call other models. Raises TritonModelException: Not now."""
        if not self.is_serving:
            raise TritonModelException(
                "BLS is only supported during the 'execute' function; other models cannot be called or controlled in "
                "'auto_complete_config', 'initialize' and 'finalize'."
            )
        return self.reach()

    def batch_of_caller(self) -> int:
        """Return the number of the batch that the current task or thread works for, 0 for none.

        A thread that a decoupled model has started may belong to any batch. One of another model is there to help the
        `execute` that runs.
        """
        if self.is_decoupled and threading.get_ident() != self.thread:
            return 0
        return self.task_batch.get(self.running)
