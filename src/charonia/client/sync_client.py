"""The blocking client: the asynchronous one, on an event loop in its own thread."""

import asyncio
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from charonia.client.async_client import LOAD_TIMEOUT_S, TIMEOUT_S, AsyncClient
from charonia.client.balancing.options import DEFAULT, Balancing
from charonia.client.balancing.transport import EndpointStatus
from charonia.client.errors import ClientError
from charonia.client.requests import InferResult, SequencePart
from charonia.client.traffic import SyncTraffic
from charonia.core.errors import Code
from charonia.core.metadata import ModelIndexEntry, ModelMetadata, ServerMetadata
from charonia.core.request import ParameterValue
from charonia.wire.answer import Failure
from charonia.wire.python_values import Inputs, Outputs
from charonia.wire.query import Json, SharedMemoryRegion, TraceChange
from charonia.wire.transport import WireOptions

_DEFAULT_OPTIONS = WireOptions()
_T = TypeVar("_T")


class Client:
    """A client of one server, or of several alike, for any number of threads.

    Use it as a context manager::

        with Client("localhost:8000") as client:
            result = client.infer("add_sub", {"INPUT0": a, "INPUT1": b})

    It has the methods, arguments and errors of `AsyncClient`.

    Args:
        url: `HOST:PORT` or `http://HOST:PORT` for HTTP, `grpc://HOST:PORT` for gRPC; `https://`, `grpcs://` with TLS;
            several servers as for `AsyncClient`.
        timeout_s: Default timeout of a request, in seconds.
        options: Headers, TLS, compression, limits.
        balancing: How requests are balanced among several servers.

    Attributes:
        traffic: How requests without a version are split among the versions of models.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        timeout_s: float = TIMEOUT_S,
        options: WireOptions = _DEFAULT_OPTIONS,
        balancing: Balancing = DEFAULT,
    ) -> None:
        async def make() -> AsyncClient:
            return AsyncClient(url, timeout_s=timeout_s, options=options, balancing=balancing)

        # Guards `_is_closed` and the hand-over of work to the running loop; the garbage collector may close iterators.
        self._lock = threading.RLock()
        self._is_closed = False
        self._loop = _new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="charonia-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(make())
            self.traffic = SyncTraffic(self._client.traffic, self._run)
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        """Do nothing: connections are opened on demand."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and end the thread; requests in flight fail. A second call does nothing."""
        with suppress(ClientError):  # it is closed, or another thread is closing it
            self._run(self._client.close())
        self._stop()

    def server_live(self) -> bool:
        """Whether the server responds."""
        return self._run(self._client.server_live())

    def server_ready(self) -> bool:
        """Whether the server accepts inference requests."""
        return self._run(self._client.server_ready())

    def model_ready(self, model: str, version: str = "") -> bool:
        """Whether a model accepts inference requests; also False if the model does not exist."""
        return self._run(self._client.model_ready(model, version))

    def server_metadata(self) -> ServerMetadata:
        """Return the server's name, version and extensions."""
        return self._run(self._client.server_metadata())

    def model_metadata(self, model: str, version: str = "") -> ModelMetadata:
        """Return a model's versions and tensors."""
        return self._run(self._client.model_metadata(model, version))

    def model_config(self, model: str, version: str = "") -> Json:
        """Return a model's configuration as a JSON object."""
        return self._run(self._client.model_config(model, version))

    def statistics(self, model: str = "", version: str = "") -> list[Json]:
        """Return the server's statistics, a JSON object for each model and version."""
        return self._run(self._client.statistics(model, version))

    def repository_index(self, *, ready: bool = False) -> list[ModelIndexEntry]:
        """Return the models of the repositories, or only the ready ones."""
        return self._run(self._client.repository_index(ready=ready))

    def load_model(
        self,
        model: str,
        *,
        config: str | Mapping[str, object] = "",
        files: Mapping[str, bytes] | None = None,
        timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        """Load or reload a model; see `AsyncClient.load_model`."""
        self._run(self._client.load_model(model, config=config, files=files, timeout_s=timeout_s))

    def unload_model(self, model: str, *, unload_dependents: bool = False, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Unload a model, and optionally the models of an ensemble."""
        self._run(self._client.unload_model(model, unload_dependents=unload_dependents, timeout_s=timeout_s))

    def register_shared_memory(self, region: SharedMemoryRegion) -> None:
        """Register a region of system shared memory."""
        self._run(self._client.register_shared_memory(region))

    def unregister_shared_memory(self, name: str = "") -> None:
        """Unregister a region of system shared memory, or all regions of all clients if no name is given."""
        self._run(self._client.unregister_shared_memory(name))

    def shared_memory_regions(self, name: str = "") -> list[SharedMemoryRegion]:
        """Return the registered regions of system shared memory, or the one of this name."""
        return self._run(self._client.shared_memory_regions(name))

    def trace_settings(self, model: str = "") -> Json:
        """Return the trace settings; see `AsyncClient.trace_settings`."""
        return self._run(self._client.trace_settings(model))

    def update_trace_settings(self, change: TraceChange, model: str = "") -> Json:
        """Change trace settings; see `AsyncClient.update_trace_settings`."""
        return self._run(self._client.update_trace_settings(change, model))

    def infer(
        self,
        model: str,
        inputs: Inputs,
        outputs: Outputs | None = None,
        *,
        version: str = "",
        request_id: str = "",
        parameters: Mapping[str, ParameterValue] | None = None,
        sequence: SequencePart | None = None,
        timeout_s: float | None = None,
    ) -> InferResult:
        """Run a model; see `AsyncClient.infer`."""
        return self._run(
            self._client.infer(
                model,
                inputs,
                outputs,
                version=version,
                request_id=request_id,
                parameters=parameters,
                sequence=sequence,
                timeout_s=timeout_s,
            )
        )

    def endpoints(self) -> list[EndpointStatus]:
        """Return the status of each server; see `AsyncClient.endpoints`."""

        async def look() -> list[EndpointStatus]:
            return self._client.endpoints()

        return self._run(look())

    def stream_infer(
        self,
        model: str,
        inputs: Inputs,
        outputs: Outputs | None = None,
        *,
        version: str = "",
        request_id: str = "",
        parameters: Mapping[str, ParameterValue] | None = None,
        sequence: SequencePart | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[InferResult]:
        """Run a model that sends any number of responses, over gRPC only; see `AsyncClient.stream_infer`.

        The first step of the iterator sends the request. Closing the iterator cancels the request.
        """
        responses = self._client.stream_infer(
            model,
            inputs,
            outputs,
            version=version,
            request_id=request_id,
            parameters=parameters,
            sequence=sequence,
            timeout_s=timeout_s,
        )

        async def take() -> InferResult | None:
            return await anext(responses, None)

        try:
            while (result := self._run(take())) is not None:
                yield result
        finally:
            # Without waiting: the garbage collector may close an abandoned iterator in the loop's own thread.
            with self._lock:
                if not self._is_closed:
                    asyncio.run_coroutine_threadsafe(responses.aclose(), self._loop)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        with self._lock:
            if self._is_closed:
                work.close()
                raise _closed()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise _closed() from None
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(_cancel_rest(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_rest() -> None:
    """Cancel the requests that other threads still wait for, and let them end."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _closed() -> ClientError:
    return ClientError(Code.UNAVAILABLE, "the client was closed", Failure.CLOSED)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # it does not exist there

    return uvloop.new_event_loop()
