"""A server inside another Python program: for scripts, notebooks and tests."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from charonia.config.server import ControlMode, ServerOptions
from charonia.core.request import ParameterValue
from charonia.core.tensor import Array
from charonia.frontends.inproc import InProcessFrontend, make_request
from charonia.server import Server as ServerParts
from charonia.server import new_event_loop

_T = TypeVar("_T")

LOOPBACK = "127.0.0.1"

START_SECONDS_MAX = 600.0
"""Longest time that entering the context waits for the models to load."""


class Server:
    """Serves model repositories from a thread of this process.

    Use it as a context manager::

        with charonia.Server("models") as server:
            outputs = server.infer("add_sub", {"INPUT0": a, "INPUT1": b})

    Args:
        repositories: Folder or folders that hold model folders.
        http: Also answer over HTTP, on a free port of the loopback interface (`http_port`).
        grpc: Also answer over gRPC, on a free port of the loopback interface (`grpc_port`).
        control_mode: "none" loads everything, "explicit" loads what `load_models` names and what `load` is asked for.
        load_models: Models to load at start in explicit mode.
        options: Every other setting; the arguments above replace its fields.
    """

    def __init__(
        self,
        repositories: str | Path | Sequence[str | Path],
        *,
        http: bool = False,
        grpc: bool = False,
        control_mode: str = "none",
        load_models: Sequence[str] = (),
        options: ServerOptions | None = None,
    ) -> None:
        folders = [repositories] if isinstance(repositories, str | Path) else list(repositories)
        base = options or ServerOptions()
        self._options = replace(
            base,
            models=replace(
                base.models,
                repositories=tuple(str(f) for f in folders),
                control_mode=ControlMode(control_mode),
                load=tuple(load_models),
            ),
            http=replace(base.http, enabled=http, address=LOOPBACK, port=0),
            grpc=replace(base.grpc, enabled=grpc, address=LOOPBACK, port=0),
            metrics=replace(base.metrics, enabled=False),
        )
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="charonia", daemon=True)
        self._parts: ServerParts | None = None

    def __enter__(self) -> Self:
        """Load the models and start to answer.

        Raises:
            ServingError: A model failed to load (unless `exit_on_error` is off).
        """
        self._thread.start()
        try:
            self._parts = self._call(self._start())
        except BaseException:
            self._stop_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish what is in flight and unload everything."""
        self._call(self._running().shutdown())
        self._stop_loop()

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

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, ParameterValue] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Array]:
        """Run a model on numpy arrays and return its outputs by name. Callable from any number of threads.

        Args:
            model: Model name.
            inputs: Arrays by input name, with the batch dimension where the model has one.
            version: Model version, "" for the newest that is ready.
            outputs: Names of the outputs to return; all when empty.
            parameters: Request parameters.
            timeout_s: Longest time to wait, in seconds; None for no limit.

        Raises:
            ServingError: The request failed.
            TimeoutError: It took longer than `timeout_s`; it is cancelled.
        """
        frontend = InProcessFrontend(self._running().engine)
        request = make_request(model, inputs, version=version, outputs=outputs, parameters=parameters)
        response = self._call(frontend.infer(request), timeout_s)
        return {tensor.name: tensor.array for tensor in response.outputs}

    def is_ready(self, model: str = "") -> bool:
        """Whether the server, or one model, is ready."""
        engine = self._running().engine

        async def ask() -> bool:
            return engine.model_ready(model) if model else engine.is_ready()

        return self._call(ask())

    def load(self, model: str, config: str | None = None) -> None:
        """Load or reload a model, with `config` (JSON) in place of its own configuration where given.

        Raises:
            ServingError: The control mode is not explicit, or the model fails to load.
        """
        self._call(self._running().engine.load_model(model, config))

    def unload(self, model: str) -> None:
        """Begin to unload a model.

        Raises:
            ServingError: The control mode is not explicit.
        """
        self._call(self._running().engine.unload_model(model))

    async def _start(self) -> ServerParts:
        parts = ServerParts(self._options)
        try:
            await parts.start()
        except BaseException:
            await parts.shutdown()
            raise
        return parts

    def _running(self) -> ServerParts:
        if self._parts is None:
            raise RuntimeError("the server is not running: use it as a context manager")
        return self._parts

    def _call(self, work: Coroutine[object, object, _T], timeout_s: float | None = START_SECONDS_MAX) -> _T:
        future: Future[_T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._parts = None
