"""A replica: a server in a thread of its own, the methods that Ray's proxies call, and what Ray asks of it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import grpc
import ray.util
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from charonia.core.errors import ServingError
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.ray.bridge import answer_http, answer_stream, answer_unary
from charonia.ray.discovery import ReplicaAddress, addresses_async
from charonia.ray.elsewhere import Failure, ModelsElsewhere, received
from charonia.ray.grpc_services import METHODS
from charonia.ray.options import AppOptions
from charonia.server.app import InferenceServer
from charonia.server.embedding import InProcessFrontend, Server
from charonia.server.http.asgi import Message
from charonia.server.options import WILDCARD_ADDRESSES
from charonia.wire.grpc_headers import Header
from charonia.wire.grpc_status import MESSAGE_BYTES_MAX, RpcError, rpc_error
from charonia.wire.json_text import encode_error

ADDRESSES_PATH = "/addresses"
"""Route with the addresses of all replicas of the application; not there where the server asks for keys."""

HEALTH_TIMEOUT_S = 10.0
"""Time in which the server's event loop has to answer, or Ray replaces the replica."""


_T = TypeVar("_T")


class GrpcMessage:
    """A response message that is bytes already."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:  # noqa: N802  # the name that Ray calls
        """Return the bytes."""
        return self._data


class _Forwarded(Response):
    """A response that consists of the server's messages."""

    def __init__(self, messages: AsyncGenerator[list[Message], None]) -> None:
        self._messages = messages

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        async with aclosing(self._messages) as all_messages:
            async for messages in all_messages:
                for message in messages:
                    await send(message)


class _Held:
    """A model that is loaded for requests with its name in `serve_multiplexed_model_id`; Ray lets go of the oldest."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        self._let_go: Callable[[], None] | None = let_go

    def __del__(self) -> None:
        let_go, self._let_go = self._let_go, None  # Ray calls this, and the interpreter once more
        if let_go is not None:
            with suppress(ServingError):  # it is not loaded any more, or the server has stopped
                let_go()


class Replica:
    """What Ray runs. The gRPC methods are added below."""

    def __init__(self, options: AppOptions) -> None:
        """Load the models. Raises ServingError, which Ray shows as the reason why the deployment fails."""
        server_options = options.server_options()
        models = server_options.models
        self._options = options
        self._has_keys = bool(server_options.api_keys)
        self._server = Server(
            models.repositories,
            http=True,
            grpc=True,
            metrics=True,
            address=options.address,
            control_mode=models.control_mode.value,
            load_models=models.load,
            options=server_options,
            calls=(lambda own: ModelsElsewhere(own, options.elsewhere)) if options.elsewhere else None,
        )
        self._server.__enter__()
        self._hold: Callable[[str], Awaitable[_Held]] | None = None
        if options.models_per_replica:

            async def load(model: str) -> _Held:
                await self._ask(lambda parts: parts.engine.load_model(model))
                return _Held(lambda: self._server.unload(model))

            self._hold = serve.multiplexed(max_num_models_per_replica=options.models_per_replica)(load)

    async def __del__(self) -> None:
        """Finish the requests in flight on the replica's own ports; those of Ray's proxies are over."""
        await asyncio.to_thread(self._server.__exit__, None, None, None)

    async def check_health(self) -> None:
        """Fail if the server's event loop does not answer."""

        async def is_live(parts: InferenceServer) -> bool:
            return parts.engine.is_live()

        if not await asyncio.wait_for(self._ask(is_live), HEALTH_TIMEOUT_S):
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
            return Response(encode_error(error), 400, media_type="application/json")
        return _Forwarded(answer_http(self._server, scope, body))

    async def infer(self, request: InferRequest, left_ns: int) -> InferResponse | Failure:
        """Run a request of a model in another application."""

        async def run(parts: InferenceServer) -> InferResponse:
            return await InProcessFrontend(parts.engine).infer(received(request, left_ns))

        try:
            return await self._ask(run)
        except ServingError as error:
            return error.code.value, error.message, error.hint

    async def model_ready(self, name: str, version: str) -> bool:
        """Whether a model is ready, for one in another application."""
        try:
            return await self._ask(lambda parts: parts.engine.model_ready(name, version))
        except ServingError:
            return False

    def address(self) -> ReplicaAddress:
        """Return where this replica listens."""
        bound = self._options.address
        host = str(ray.util.get_node_ip_address()) if bound in WILDCARD_ADDRESSES else bound  # type: ignore[no-untyped-call]
        host = f"[{host}]" if ":" in host else host
        return ReplicaAddress(
            replica=serve.get_replica_context().replica_id.unique_id,
            http=f"{host}:{self._server.http_port}",
            grpc=f"{host}:{self._server.grpc_port}",
            metrics=f"{host}:{self._server.metrics_port}",
        )

    async def _ask(self, work: Callable[[InferenceServer], Coroutine[object, object, _T]]) -> _T:
        """Run a coroutine on the server's loop."""
        return await asyncio.wrap_future(self._server.submit(work))

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
    context.set_details(failure.message.encode()[:MESSAGE_BYTES_MAX].decode("utf-8", "ignore"))


def _unary(name: str) -> Callable[..., Awaitable[GrpcMessage]]:
    async def call(self: Replica, request: bytes, grpc_context: Any) -> GrpcMessage:
        try:
            await self._hold_model()
            return GrpcMessage(await answer_unary(self._server, METHODS[name], _metadata(grpc_context), request))
        except (RpcError, ServingError) as error:
            _set_status(grpc_context, error)
            return GrpcMessage(b"")

    return call


def _stream(name: str) -> Callable[..., AsyncGenerator[GrpcMessage, None]]:
    async def call(self: Replica, requests: Any, grpc_context: Any) -> AsyncGenerator[GrpcMessage, None]:
        try:
            await self._hold_model()
            async with aclosing(
                answer_stream(self._server, METHODS[name], _metadata(grpc_context), requests)
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
    setattr(Replica, _name, _call)
