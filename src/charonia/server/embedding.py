"""A server inside another Python program, such as a script, a notebook or a test.

`Server` runs it in a thread. `InProcessFrontend` takes and returns numpy arrays, without a socket.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from charonia.core.errors import ServingError, unavailable, unsupported
from charonia.core.request import InferRequest, ParameterValue
from charonia.core.response import InferResponse, Outcome, Ticket
from charonia.core.tensor import Array
from charonia.server.app import InferenceServer, new_event_loop
from charonia.server.facade import Engine, SingleResponse
from charonia.server.files.repository import file_repository
from charonia.server.files.served_files import classify
from charonia.server.machine.private_folder import PrivateFolder
from charonia.server.model_options import ControlMode
from charonia.server.options import ServerOptions
from charonia.wire.python_values import Inputs, make_outputs, make_tensors, needs_metadata, readable
from charonia.wire.v2_request import apply_parameters

UNREAD_RESPONSES_MAX = 1024
"""Responses of one request that wait to be taken; with more, the request fails: models know no back-pressure."""


class ResponseStream:
    """The responses of one request, taken one after the other, by one task.

    As an asynchronous iterator it ends after the last response; if the request fails, it raises the error after the
    responses before it. `close` cancels the request.
    """

    def __init__(self, engine: Engine, request: InferRequest) -> None:
        self._request = request
        self._responses: deque[InferResponse] = deque()
        self._arrived = asyncio.Event()
        self._error: ServingError | None = None
        self._is_over = False
        self._ticket: Ticket | None = None
        self._is_answered = False
        ticket = engine.infer(request, self._reply)
        if not self._is_over:
            self._ticket = ticket
        elif not self._is_answered:
            ticket.cancel()

    async def next(self) -> InferResponse | None:
        """Return the next response, None after the last.

        Raises:
            ServingError: The request failed.
        """
        while not self._responses and not self._is_over:
            self._arrived.clear()
            await self._arrived.wait()
        if self._responses:
            return self._responses.popleft()
        if self._error is not None:
            raise self._error
        return None

    def close(self) -> None:
        """Cancel the request if it is not over, and drop the responses that were not taken."""
        self._end(None)
        self._responses.clear()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferResponse:
        response = await self.next()
        if response is None:
            raise StopAsyncIteration
        return response

    def _reply(self, outcome: Outcome, final: bool) -> None:
        if self._is_over:
            return
        if isinstance(outcome, ServingError):
            self._error = outcome
        elif outcome is not None:
            if len(self._responses) >= UNREAD_RESPONSES_MAX:
                name = self._request.model_name
                self._end(unavailable(f"{UNREAD_RESPONSES_MAX} responses of model '{name}' were not taken"))
                return
            self._responses.append(outcome)
        if final:
            self._is_over = self._is_answered = True
            self._ticket = None
        self._arrived.set()

    def _end(self, error: ServingError | None) -> None:
        ticket, self._ticket = self._ticket, None
        self._is_over = True
        self._error = error
        self._arrived.set()
        if ticket is not None:
            ticket.cancel()


class InProcessFrontend:
    """Calls the engine from code that runs on the same event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a request that gets one response. Cancellation of the awaiting task cancels the request.

        Raises:
            ServingError: The request failed; UNSUPPORTED for no response, or several.
        """
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()
        single = SingleResponse(
            unsupported(f"model '{request.model_name}' did not answer exactly once", hint="use stream_infer")
        )
        ticket = self._engine.infer(request, partial(single.settle, future))
        try:
            return await future
        except (asyncio.CancelledError, ServingError):
            if not single.is_over:
                ticket.cancel()
            raise

    def stream(self, request: InferRequest) -> ResponseStream:
        """Run a request that gets any number of responses. Close the stream unless you read it to its end."""
        return ResponseStream(self._engine, request)


def make_request(
    engine: Engine,
    model: str,
    inputs: Inputs,
    *,
    version: str = "",
    outputs: Sequence[str] = (),
    parameters: Mapping[str, ParameterValue] | None = None,
) -> InferRequest:
    """Return a request with these values as inputs.

    Parameters have the same meaning as over HTTP: "priority" and "timeout" (microseconds in the queue) are for the
    scheduler, others for the model.

    Raises:
        ServingError: INVALID_ARG for a value that cannot become a tensor, or an invalid parameter; NOT_FOUND for a
            model or input that does not exist.
    """
    metadata = engine.model_metadata(model, str(version)) if needs_metadata(inputs) else None
    tensors = make_tensors(model, inputs, metadata)
    request = InferRequest(model, tensors, model_version=str(version), outputs=make_outputs(outputs))
    if parameters:
        apply_parameters(request, dict(parameters))
    return request


_T = TypeVar("_T")

LOOPBACK = "127.0.0.1"


class Server:
    """Serves models from a thread of this process.

    Use it as a context manager::

        with charonia.Server("models") as server:
            outputs = server.infer("add_sub", {"INPUT0": a, "INPUT1": b})

    Args:
        models: What `charonia serve` serves: repositories, folders of models, files, `NAME=PATH`.
        http: Also serve HTTP, on a free port of the loopback interface (`http_url`).
        grpc: Also serve gRPC, on a free port of the loopback interface (`grpc_url`).
        control_mode: "none" loads everything, "explicit" loads the models of `load_models` and of calls to `load`.
        load_models: Models to load at startup in explicit mode.
        options: Every other setting; the arguments above replace its fields.
    """

    def __init__(
        self,
        models: str | Path | Sequence[str | Path],
        *,
        http: bool = False,
        grpc: bool = False,
        control_mode: str = "none",
        load_models: Sequence[str] = (),
        options: ServerOptions | None = None,
    ) -> None:
        paths = [models] if isinstance(models, str | Path) else list(models)
        base = options or ServerOptions()
        self._options = replace(
            base,
            models=replace(
                base.models,
                repositories=tuple(map(str, paths)),
                control_mode=ControlMode(control_mode),
                load=tuple(load_models),
            ),
            http=replace(base.http, enabled=http, address=LOOPBACK, port=0),
            grpc=replace(base.grpc, enabled=grpc, address=LOOPBACK, port=0),
            metrics=replace(base.metrics, enabled=False),
        )
        self._lock = threading.Lock()  # around `_parts`, and handing work to the loop while they are there
        self._parts: InferenceServer | None = None
        self._loop: asyncio.AbstractEventLoop
        self._serving: asyncio.Task[None]
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Load the models and start to serve.

        Raises:
            ServingError: A repository does not exist, or a model failed to load (unless `exit_on_error` is off).
        """
        if self._thread is not None:
            raise RuntimeError("this server is running already: make another charonia.Server")
        started: Future[InferenceServer] = Future()
        self._loop = new_event_loop()
        self._serving = self._loop.create_task(self._serve(started))
        self._thread = threading.Thread(target=_run, args=(self._loop, self._serving), name="charonia", daemon=True)
        self._thread.start()
        try:
            self._parts = started.result()
        except BaseException:
            self._stop(self._thread)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish the requests in flight and unload everything."""
        if self._thread is not None:
            self._stop(self._thread)

    @property
    def http_port(self) -> int:
        """Port of the HTTP front end; 0 where it is off."""
        http = self._running().http
        return http.port if http is not None else 0

    @property
    def grpc_port(self) -> int:
        """Port of the gRPC front end; 0 where it is off."""
        grpc = self._running().grpc
        return grpc.port if grpc is not None else 0

    @property
    def http_url(self) -> str:
        """Address of the HTTP front end as clients take it, `127.0.0.1:port`; "" where it is off."""
        return f"{LOOPBACK}:{port}" if (port := self.http_port) else ""

    @property
    def grpc_url(self) -> str:
        """Address of the gRPC front end as clients take it, `127.0.0.1:port`; "" where it is off."""
        return f"{LOOPBACK}:{port}" if (port := self.grpc_port) else ""

    def infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, ParameterValue] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Array]:
        """Run a model and return its outputs by name. Callable from any number of threads.

        Args:
            model: Model name.
            inputs: Values by input name, with the batch dimension where the model has one: arrays, whose dtype
                determines the datatype; lists and single elements, which use the model's datatype.
            version: Model version, "" for the latest that is ready.
            outputs: Names of the outputs to return; all when empty.
            parameters: Request parameters.
            timeout_s: Longest time to wait, in seconds; None for no limit.

        Raises:
            ServingError: The request failed.
            TimeoutError: The request took longer than `timeout_s`; it is cancelled.
        """

        async def run(parts: InferenceServer) -> InferResponse:
            request = make_request(parts.engine, model, inputs, version=version, outputs=outputs, parameters=parameters)
            return await InProcessFrontend(parts.engine).infer(request)

        try:
            response = self._call(run, timeout_s)
        except TimeoutError:
            raise TimeoutError(f"model '{model}' did not answer within {timeout_s} s") from None
        return {tensor.name: readable(tensor) for tensor in response.outputs}

    def stream_infer(
        self,
        model: str,
        inputs: Inputs,
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, ParameterValue] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[dict[str, Array]]:
        """Run a model and return an iterator over its responses, each as by `infer`.

        A decoupled model sends any number of responses. The request begins with the first step of the iterator, and is
        cancelled when the iterator is left or closed.

        Args: as for `infer`; `timeout_s` is the longest time to wait for each response, in seconds.

        Raises:
            ServingError: The request failed; raised after the responses that came before.
            TimeoutError: A response took longer than `timeout_s`; the request is cancelled.
        """

        async def begin(parts: InferenceServer) -> ResponseStream:
            request = make_request(parts.engine, model, inputs, version=version, outputs=outputs, parameters=parameters)
            return InProcessFrontend(parts.engine).stream(request)

        stream = self._call(begin)
        try:
            while True:
                try:
                    response = self._call(lambda _: stream.next(), timeout_s)
                except TimeoutError:
                    raise TimeoutError(f"model '{model}' sent no response within {timeout_s} s") from None
                if response is None:
                    return
                yield {tensor.name: readable(tensor) for tensor in response.outputs}
        finally:
            with self._lock:
                if self._parts is not None:
                    self._loop.call_soon_threadsafe(stream.close)

    def is_ready(self, model: str = "") -> bool:
        """Whether the server, or one model, is ready."""

        async def ask(parts: InferenceServer) -> bool:
            return await parts.engine.model_ready(model) if model else parts.engine.is_ready()

        return self._call(ask)

    def load(self, model: str, config: str | None = None) -> None:
        """Load or reload a model, with `config` (JSON), if given, in place of its configuration.

        Raises:
            ServingError: The control mode is not explicit, or the model fails to load.
        """
        self._call(lambda parts: parts.engine.load_model(model, config))

    def unload(self, model: str) -> None:
        """Start to unload a model.

        Raises:
            ServingError: The control mode is not explicit.
        """
        self._call(lambda parts: parts.engine.unload_model(model))

    async def _serve(self, started: "Future[InferenceServer]") -> None:
        """Serve until this task is cancelled."""
        async with AsyncExitStack() as cleanup:
            try:
                files = classify(self._options.models)
                options = self._options
                if files.needs_repository or options.models.files.mounts:
                    folder = cleanup.enter_context(PrivateFolder()).path
                    repository = file_repository(files, options.models.files, folder, options.backends)
                    await repository.make()
                    made = replace(options.models, repositories=(*files.repositories, str(folder)))
                    options = replace(options, models=made)
                    if (interval_s := options.models.poll_interval_secs) and repository.has_services:
                        cleanup.callback(asyncio.create_task(repository.follow(interval_s)).cancel)
                parts = InferenceServer(options)
                cleanup.push_async_callback(parts.shutdown)
                await parts.start()
            except Exception as error:
                started.set_exception(error)
            else:
                started.set_result(parts)
            await self._loop.create_future()

    def _running(self) -> InferenceServer:
        if self._parts is None:
            raise unavailable(
                "the server is not running", hint="use it as a context manager: with charonia.Server(...) as server:"
            )
        return self._parts

    def _call(
        self, work: Callable[[InferenceServer], Coroutine[object, object, _T]], timeout_s: float | None = None
    ) -> _T:
        with self._lock:
            future = asyncio.run_coroutine_threadsafe(work(self._running()), self._loop)
        try:
            return future.result(timeout_s)
        except CancelledError:
            raise unavailable("the server was stopped before this was done") from None
        except BaseException:
            future.cancel()
            raise

    def _stop(self, thread: threading.Thread) -> None:
        with self._lock:
            self._parts = None
        self._loop.call_soon_threadsafe(self._serving.cancel)
        thread.join()
        self._thread = None


def _run(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> None:
    """Run a loop until the task was cancelled and has cleaned up; the loop's other tasks have ended then, too."""

    async def until_cancelled() -> None:
        with suppress(asyncio.CancelledError):
            await task

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(until_cancelled())
