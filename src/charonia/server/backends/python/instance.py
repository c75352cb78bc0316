"""One instance of a Python model: a worker process that is restarted when it ends, and the batches that it runs.

`WorkerSupervisor` keeps the worker running, `Batches` sends batches and handles their results. The instance dispatches
the worker's messages.
"""

from collections.abc import Callable, Sequence

from charonia.core.errors import ServingError
from charonia.core.request import CallFrame, InferRequest
from charonia.server.backends.api import BatchSink
from charonia.server.backends.python.batches import Batches
from charonia.server.backends.python.services import Readiness, ServerServices, WorkerServices
from charonia.server.backends.python.supervisor import MakeProcess, WorkerHealth, WorkerPhase, WorkerSupervisor
from charonia.server.channel.channel import Incoming
from charonia.server.channel.regions import ChannelError


class PythonInstance:
    """An `AsyncInstance` in a worker process.

    Args:
        name: Instance name.
        make_process: Starts a worker process.
        start_message: The message that loads the model.
        output_names: All outputs of the model.
        start_s_max: Time that the model has to initialize, 0 for no limit.
        execute_s_max: Time that a batch has, 0 for no limit.
        server: Services of the server for the model.
        is_decoupled: Whether a request may have any number of responses.
    """

    def __init__(
        self,
        name: str,
        make_process: MakeProcess,
        start_message: tuple[object, ...],
        *,
        output_names: tuple[str, ...],
        start_s_max: float,
        execute_s_max: float,
        server: ServerServices | None = None,
        is_decoupled: bool = False,
    ) -> None:
        self.name = name
        server = server or ServerServices(CallFrame(name, ""))
        self._batches = Batches(
            name,
            output_names=output_names,
            execute_s_max=execute_s_max,
            is_decoupled=is_decoupled,
            busy_poll=server.busy_poll,
        )
        self._services = WorkerServices(server, self._batches.running)
        self._readiness = Readiness(name, self._ask_whether_ready)
        self._supervisor = WorkerSupervisor(
            name,
            make_process,
            start_message,
            start_s_max=start_s_max,
            batches=self._batches,
            on_message=self._message,
            on_unlink=self._unlinked,
        )

    def __repr__(self) -> str:
        """Return e.g. `<PythonInstance 'm_0_0' pid=4711 ready restarts=0 batches=2>`."""
        return f"<PythonInstance '{self.name}' {self._supervisor!r} batches={len(self._batches)}>"

    @property
    def pid(self) -> int:
        """Process id of the worker, 0 while there is none."""
        link = self._supervisor.link
        return link.process.pid if link is not None else 0

    @property
    def health(self) -> WorkerHealth:
        """Restarts of the worker, and why it is down."""
        return self._supervisor.health

    @property
    def problem(self) -> str:
        """Why the worker is down, "" while it runs."""
        return self._supervisor.health.problem

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or never started."""
        return self._supervisor.state is WorkerPhase.CLOSED

    async def open(self) -> None:
        """Start the worker and wait until the model is initialized.

        Raises:
            ServingError: It failed, with the reason.
        """
        try:
            await self._supervisor.start()
        except BaseException:
            await self.aclose()
            raise

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        self._batches.add(sink, requests)

    def cancel(self, sink: BatchSink, index: int) -> None:
        """Notify the model that a request's caller has gone; its calls end when all callers of the batch have gone."""
        if self._batches.cancel(sink, index):
            self._services.calls.cancel_batch(sink)

    def keep_warm(self, batches: Sequence[Sequence[InferRequest]]) -> None:
        self._supervisor.warm_up = batches

    def when_lost(self, lost: Callable[[], None]) -> None:
        """Call `lost` whenever a worker has ended, with what its model remembered; then its batches fail."""
        self._supervisor.on_lost = lost

    async def is_ready(self) -> bool:
        """Return whether the worker runs, and its model, if it has `is_ready`, reports that it is ready."""
        if self._supervisor.state is not WorkerPhase.READY:
            return False
        return not self._supervisor.capabilities.get("has_is_ready") or await self._readiness.ask()

    def resident_bytes(self) -> int:
        """Return the resident memory of the worker process."""
        link = self._supervisor.link
        return link.process.resident_bytes() if link is not None else 0

    def cpu_seconds(self) -> float:
        """Return the CPU time of the worker process so far."""
        link = self._supervisor.link
        return link.process.cpu_seconds() if link is not None else 0.0

    async def aclose(self) -> None:
        """Let the model finalize, if it is initialized, and end the worker."""
        await self._supervisor.close()

    def _message(self, message: Incoming) -> None:
        supervisor = self._supervisor
        link = supervisor.link
        if link is None:
            return
        kind = message.header[0]
        try:
            if kind == "done":
                self._batches.done(message, link)
            elif kind == "responses":
                self._batches.responses(message, link)
            elif kind == "ready":
                supervisor.initialized(message.header[1] if len(message.header) > 1 else {})
            elif kind == "failed":
                supervisor.failed(str(message.header[1]))
            elif kind == "raised":
                self._services.raised(self.name, *message.header[1:])
            elif kind == "answer_ready":
                self._readiness.answered(*message.header[1:])
            else:
                self._services.take(
                    message, link, is_ready=supervisor.state in (WorkerPhase.READY, WorkerPhase.WARMING)
                )
        except (ChannelError, ServingError, LookupError, TypeError, ValueError) as error:
            link.process.kill(f"it sent a message that cannot be read: {error}")

    def _ask_whether_ready(self, number: int) -> None:
        link = self._supervisor.link
        if link is not None:
            link.process.send(("is_ready", number))

    def _unlinked(self) -> None:
        self._services.ended()
        self._readiness.gone()
