"""The blocking client: the asynchronous one, on an event loop in its own thread."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import uvloop

from charonia.client.async_client import TIMEOUT_S, AsyncClient, AsyncTraffic
from charonia.client.balancing.options import DEFAULT, Balancing
from charonia.client.balancing.transport import EndpointStatus
from charonia.client.errors import ClientError
from charonia.core.errors import Code
from charonia.wire.answer import Failure
from charonia.wire.query import Json
from charonia.wire.transport import WireOptions

_DEFAULT_OPTIONS = WireOptions()
_A = TypeVar("_A")
_T = TypeVar("_T")
_P = ParamSpec("_P")


class _Blocking(Generic[_A]):
    """What `_blocking` needs: the asynchronous object, and how its coroutines are run."""

    _client: _A
    _run: Callable[[Coroutine[Any, Any, Any]], Any]


def _blocking(
    method: Callable[Concatenate[_A, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[_Blocking[_A], _P], _T]:
    """Return the blocking form of a method, with its parameters and documentation."""

    @wraps(method)
    def call(self: _Blocking[_A], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        result: _T = self._run(method(self._client, *args, **kwargs))
        return result

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, _P], AsyncGenerator[_T, None]],
) -> Callable[Concatenate["Client", _P], Iterator[_T]]:
    """Return the blocking form of a method that yields; closing the iterator cancels the request."""

    @wraps(method)
    def call(self: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        responses = method(self._client, *args, **kwargs)

        async def take() -> _T | None:
            return await anext(responses, None)

        try:
            while (result := self._run(take())) is not None:
                yield result
        finally:
            # Without waiting: the garbage collector may close an abandoned iterator in the loop's own thread.
            with self._lock:
                if not self._is_closed:
                    asyncio.run_coroutine_threadsafe(responses.aclose(), self._loop)

    return call


class SyncTraffic(_Blocking[AsyncTraffic]):
    """The traffic of models, for the blocking client. It has the methods, arguments and errors of `AsyncTraffic`.

    Args:
        traffic: That of the asynchronous client.
        run: Runs a coroutine on its event loop.
    """

    def __init__(self, traffic: AsyncTraffic, run: Callable[[Coroutine[Any, Any, Json]], Json]) -> None:
        self._client = traffic
        self._run = run

    get = _blocking(AsyncTraffic.get)
    update = _blocking(AsyncTraffic.update)
    reset = _blocking(AsyncTraffic.reset)


class Client(_Blocking[AsyncClient]):
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
        self._loop = uvloop.new_event_loop()
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

    def endpoints(self) -> list[EndpointStatus]:
        """Return the status of each server; see `AsyncClient.endpoints`."""

        async def look() -> list[EndpointStatus]:
            return self._client.endpoints()

        return self._run(look())

    server_live = _blocking(AsyncClient.server_live)
    server_ready = _blocking(AsyncClient.server_ready)
    model_ready = _blocking(AsyncClient.model_ready)
    server_metadata = _blocking(AsyncClient.server_metadata)
    model_metadata = _blocking(AsyncClient.model_metadata)
    model_config = _blocking(AsyncClient.model_config)
    statistics = _blocking(AsyncClient.statistics)
    repository_index = _blocking(AsyncClient.repository_index)
    load_model = _blocking(AsyncClient.load_model)
    unload_model = _blocking(AsyncClient.unload_model)
    register_shared_memory = _blocking(AsyncClient.register_shared_memory)
    unregister_shared_memory = _blocking(AsyncClient.unregister_shared_memory)
    shared_memory_regions = _blocking(AsyncClient.shared_memory_regions)
    trace_settings = _blocking(AsyncClient.trace_settings)
    update_trace_settings = _blocking(AsyncClient.update_trace_settings)
    infer = _blocking(AsyncClient.infer)
    stream_infer = _iterating(AsyncClient.stream_infer)

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
