"""A replica: a server, the methods that Ray's proxies call, addresses for clients that bypass them, health checks."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from tempfile import NamedTemporaryFile
from typing import Any, TypedDict

import grpc
import ray.util
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.ray.bridge import METHODS, answer_http, answer_stream, answer_unary
from charonia.ray.elsewhere import Failure, ModelsElsewhere, received
from charonia.ray.options import AppOptions
from charonia.server.app import InferenceServer
from charonia.server.embedding import InProcessFrontend
from charonia.server.http.asgi import Message
from charonia.server.http.frontend import HttpFrontend
from charonia.server.machine.memory import collect_less_often, give_back_idle_memory
from charonia.server.options import WILDCARD_ADDRESSES
from charonia.wire.grpc_headers import Header
from charonia.wire.grpc_status import MESSAGE_BYTES_MAX, RpcError, rpc_error
from charonia.wire.http_status import STATUS, UNEXECUTED
from charonia.wire.json_text import encode_error

ADDRESSES_PATH = "/addresses"
"""Route with the addresses of all replicas of the application; absent if the server requires keys."""


class ReplicaAddress(TypedDict):
    """Where one replica listens: `host:port` for each protocol.

    Attributes:
        replica: Name of the replica.
        http: HTTP.
        grpc: gRPC.
        metrics: The metrics page.
    """

    replica: str
    http: str
    grpc: str
    metrics: str


def addresses(application: str = "default", *, timeout_s: float = 10.0) -> list[ReplicaAddress]:
    """Return the addresses of each running replica of an application, by name of the replica.

    A replica that does not answer, because it is being stopped, is left out.

    Args:
        application: Name of the application.
        timeout_s: Longest time to wait for the replicas, in seconds.

    Raises:
        RayServeException: The application does not exist.
        TimeoutError: Replicas did not answer in time.
    """
    handle = serve.get_app_handle(application)
    if not handle.is_initialized:
        # Its own would need an event loop here with RAY_SERVE_THROUGHPUT_OPTIMIZED. Ray has no public name for this.
        handle._init(_run_router_in_separate_loop=True)  # type: ignore[no-untyped-call]
    response = handle.broadcast("address")
    return _listening(response.results(timeout_s=timeout_s, return_exceptions=True))


async def addresses_async(handle: Any, *, timeout_s: float = 10.0) -> list[ReplicaAddress]:
    """The same for the application of a handle, from an event loop."""
    response = handle.broadcast("address")
    return _listening(await response.results_async(timeout_s=timeout_s, return_exceptions=True))


def _listening(found: list[Any]) -> list[ReplicaAddress]:
    listening: list[ReplicaAddress] = [each for each in found if not isinstance(each, Exception)]
    return sorted(listening, key=lambda each: each["replica"])


class GrpcMessage:
    """A response message that is bytes already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802  # the name that Ray calls
        return self._data


class _Forwarded(Response):
    """The server's response to a request."""

    def __init__(self, http: HttpFrontend, body: bytes) -> None:
        self._http = http
        self._request_body = body

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        await answer_http(self._http, scope, self._request_body, send)


class _Held:
    """A model that is loaded for requests with its name in `serve_multiplexed_model_id`; Ray releases the oldest."""

    def __init__(self, let_go: Callable[[], object]) -> None:
        self._let_go: Callable[[], object] | None = let_go

    def __del__(self) -> None:
        let_go, self._let_go = self._let_go, None  # Ray calls this, in a thread, and the interpreter once more
        if let_go is not None:
            let_go()


class RayReplica:
    """What Ray runs. The gRPC methods are added below."""

    async def __init__(self, options: AppOptions) -> None:  # type: ignore[misc]  # Ray awaits it
        """Load the models. Raises ServingError, which Ray shows as the reason why the deployment fails."""
        server_options = options.server_options()
        self._options = options
        self._has_keys = bool(server_options.api_keys)
        if options.keys:
            self._keys = NamedTemporaryFile("w", prefix="charonia-keys-")  # noqa: SIM115  # as long as the replica
            self._keys.write("\n".join(options.keys) + "\n")
            self._keys.flush()
            server_options = replace(server_options, api_keys=self._keys.name)
        self._hold: Callable[[str], Awaitable[_Held]] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        elsewhere = (lambda own: ModelsElsewhere(own, options.elsewhere)) if options.elsewhere else None
        self._server = InferenceServer(server_options, callable_models=elsewhere)
        try:
            await self._server.start()
        except BaseException:
            await self._server.shutdown()
            raise
        assert self._server.http is not None
        assert self._server.grpc is not None
        self._http, self._grpc = self._server.http, self._server.grpc
        collect_less_often()
        self._giving_back = asyncio.create_task(give_back_idle_memory())
        if options.models_per_replica:
            self._hold = serve.multiplexed(max_num_models_per_replica=options.models_per_replica)(self._loader())

    async def __del__(self) -> None:
        """Complete the requests in flight on the replica's own ports; requests of Ray's proxies are over."""
        self._giving_back.cancel()
        await self._server.shutdown()

    async def check_health(self) -> None:
        """Fail if the server is not live; Ray's own time limit detects an event loop that hangs."""
        if not self._server.engine.is_live():
            raise RuntimeError("the server is not live")

    async def __call__(self, request: Request) -> Response:
        """Answer an HTTP request of Ray's proxy."""
        scope = request.scope
        if not self._has_keys and scope["path"].removeprefix(scope.get("root_path", "")) == ADDRESSES_PATH:
            context = serve.get_replica_context()
            handle = serve.get_deployment_handle(context.deployment, context.app_name)
            return JSONResponse(await addresses_async(handle))
        body = await request.body()
        try:
            await self._hold_model()
        except ServingError as error:
            return Response(encode_error(error), STATUS[error.code], media_type="application/json")
        return _Forwarded(self._http, body)

    async def infer(self, request: InferRequest, left_ns: int) -> InferResponse | Failure:
        """Run a request of a model in another application."""
        try:
            return await InProcessFrontend(self._server.engine).infer(received(request, left_ns))
        except ServingError as error:
            return error.code.value, error.message, error.hint

    async def model_ready(self, name: str, version: str) -> bool:
        """Whether a model is ready, for one in another application."""
        try:
            return await self._server.engine.model_ready(name, version)
        except ServingError:
            return False

    def address(self) -> ReplicaAddress:
        """Return where this replica listens."""
        bound = self._options.address
        host = str(ray.util.get_node_ip_address()) if bound in WILDCARD_ADDRESSES else bound  # type: ignore[no-untyped-call]
        host = f"[{host}]" if ":" in host else host
        assert self._server.metrics is not None
        return ReplicaAddress(
            replica=serve.get_replica_context().replica_id.unique_id,
            http=f"{host}:{self._http.port}",
            grpc=f"{host}:{self._grpc.port}",
            metrics=f"{host}:{self._server.metrics.port}",
        )

    def _loader(self) -> Callable[[str], Awaitable[_Held]]:
        """Return the function with which Ray loads a model by its name."""
        loop, engine = asyncio.get_running_loop(), self._server.engine

        async def unload(model: str) -> None:
            with suppress(ServingError):  # it is not loaded any more, or the server is shutting down
                await engine.unload_model(model)

        def begin_to_unload(model: str) -> None:
            task = loop.create_task(unload(model))
            self._leaving.add(task)  # the loop itself holds tasks weakly
            task.add_done_callback(self._leaving.discard)

        async def load(model: str) -> _Held:
            await engine.load_model(model)
            return _Held(lambda: loop.call_soon_threadsafe(begin_to_unload, model))

        return load

    async def _hold_model(self) -> None:
        """Load the model that the request names for multiplexing, if it names one."""
        if self._hold is not None and (model := serve.get_multiplexed_model_id()):
            await self._hold(model)


def _metadata(context: Any) -> list[Header]:
    return [
        (name.encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in context.invocation_metadata()
    ]


def _set_status(context: Any, error: RpcError | ServingError) -> None:
    failure = rpc_error(error) if isinstance(error, ServingError) else error
    context.set_code(grpc.StatusCode[failure.status.name])
    if failure.is_unexecuted:
        name, value = UNEXECUTED
        context.set_trailing_metadata([(name.decode(), value.decode())])
    context.set_details(failure.message.encode()[:MESSAGE_BYTES_MAX].decode("utf-8", "ignore"))


def _unary(name: str) -> Callable[..., Awaitable[GrpcMessage]]:
    async def call(self: RayReplica, request: bytes, grpc_context: Any) -> GrpcMessage:
        try:
            await self._hold_model()
            return GrpcMessage(await answer_unary(self._grpc, METHODS[name], _metadata(grpc_context), request))
        except (RpcError, ServingError) as error:
            _set_status(grpc_context, error)
            return GrpcMessage(b"")

    return call


def _stream(name: str) -> Callable[..., AsyncGenerator[GrpcMessage, None]]:
    async def call(self: RayReplica, requests: Any, grpc_context: Any) -> AsyncGenerator[GrpcMessage, None]:
        try:
            await self._hold_model()
            async with aclosing(
                answer_stream(self._grpc, METHODS[name], _metadata(grpc_context), requests)
            ) as messages:
                async for message in messages:
                    yield GrpcMessage(message)
        except (RpcError, ServingError) as error:
            _set_status(grpc_context, error)
            raise

    return call


for _name, _method in METHODS.items():
    _call = _unary(_name) if _method.run is not None else _stream(_name)
    _call.__name__ = _name
    setattr(RayReplica, _name, _call)
