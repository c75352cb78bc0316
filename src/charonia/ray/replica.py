"""A replica: a server, the methods that Ray's proxies call, addresses for clients that bypass them, health checks.

Requests of Ray's proxies are answered by the server's front ends in the same process. Bytes pass through unchanged: the
front ends decode and encode them, as on connections of clients. All of it runs on the event loop on which Ray runs the
deployment's code, where the server runs, too. Python models may call models in other applications of the Ray cluster.
"""

import asyncio
import copyreg
import os
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from tempfile import NamedTemporaryFile
from typing import Any, TypedDict

import grpc
import ray.util
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from charonia.config.model import ModelConfig
from charonia.core.errors import Code, ServingError, internal, unavailable, unsupported
from charonia.core.request import FIELDS, InferRequest, RequestedOutput
from charonia.core.response import ExecutionRecord, InferResponse, Reply, Ticket
from charonia.core.tensor import Tensor
from charonia.ray.options import AppOptions
from charonia.server.app import InferenceServer
from charonia.server.backends.api import Models
from charonia.server.embedding import InProcessFrontend
from charonia.server.grpc.detached import DetachedCall
from charonia.server.grpc.frontend import GrpcFrontend
from charonia.server.grpc.methods import Method, method_table
from charonia.server.http.asgi import Message, begin
from charonia.server.http.frontend import HttpFrontend
from charonia.server.machine.memory import collect_less_often, trim_idle_memory
from charonia.server.options import WILDCARD_ADDRESSES
from charonia.wire.grpc_framing import PREFIX_BYTES
from charonia.wire.grpc_headers import Header
from charonia.wire.grpc_status import MESSAGE_BYTES_MAX, RpcError, rpc_error
from charonia.wire.http_status import STATUS, UNEXECUTED
from charonia.wire.json_text import encode_error

Failure = tuple[str, str, str]
"""Code, message and hint of an error on its way between replicas."""


_RECORDS: dict[type[Any], tuple[str, ...]] = {
    ExecutionRecord: ("instance", "batch_size", "queue_ns", "compute_ns"),
    InferRequest: FIELDS,
    InferResponse: ("model_name", "model_version", "id", "outputs", "parameters", "execution"),
    RequestedOutput: ("name", "classification"),
    Tensor: ("name", "datatype", "array"),
}
"""Classes of messages between replicas, with the arguments of their constructors. Compiled ones cannot be pickled."""


def _made(kind: type[Any], arguments: Mapping[str, object]) -> object:
    return kind(**arguments)


def _reduced(record: object) -> tuple[Any, ...]:
    kind = type(record)
    return _made, (kind, {name: getattr(record, name) for name in _RECORDS[kind]})


for _kind in _RECORDS:
    copyreg.pickle(_kind, _reduced)


def sent(request: InferRequest) -> tuple[InferRequest, int]:
    """Return a request as it goes to another replica, and how long its caller waits, in ns; 0 for no limit."""
    left_ns = max(request.deadline_ns - time.monotonic_ns(), 1) if request.deadline_ns else 0
    here = {"deadline_ns", "caller", "trace", "affinity"}  # what means nothing there
    return InferRequest(**{name: getattr(request, name) for name in {*FIELDS} - here}), left_ns


def received(request: InferRequest, left_ns: int) -> InferRequest:
    """Return a request that came from another replica, with its deadline by this machine's clock."""
    request.deadline_ns = time.monotonic_ns() + left_ns if left_ns else 0
    return request


class RemoteModels:
    """The models of this replica, and some of other applications.

    Args:
        models: The models of this replica.
        applications: Application of each of the others, by model.
    """

    def __init__(self, models: Models, applications: Mapping[str, str]) -> None:
        self._models = models
        self._applications = applications
        self._handles: dict[str, Any] = {}

    def infer(self, request: InferRequest, reply: Reply) -> Ticket:
        """Run a request, here or in the application that has the model."""
        if request.model_name not in self._applications:
            return self._models.infer(request, reply)
        return asyncio.get_running_loop().create_task(self._ask(request, reply))  # type: ignore[return-value]

    async def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model is ready."""
        if name not in self._applications:
            return await self._models.model_ready(name, version)
        ready: bool = await (await self._handle(name)).model_ready.remote(name, version)
        return ready

    def is_loadable(self, name: str) -> bool:
        """Whether a request for this model waits for it: their application decides for other models."""
        return name in self._applications or self._models.is_loadable(name)

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        """Return the configuration of a model of this replica."""
        if name in self._applications:
            raise unavailable(f"model '{name}' is in the application '{self._applications[name]}'")
        return self._models.model_config(name, version)

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load a model of this replica."""
        self._check_here(name)
        await self._models.load_model(name, config, files)

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model of this replica."""
        self._check_here(name)
        await self._models.unload_model(name, unload_dependents)

    def _check_here(self, name: str) -> None:
        if name in self._applications:
            raise unsupported(f"model '{name}' cannot be controlled: it is in '{self._applications[name]}'")

    async def _ask(self, request: InferRequest, reply: Reply) -> None:
        name = request.model_name
        try:
            outcome = await self._answer(request)
        except asyncio.CancelledError:
            reply(ServingError(Code.CANCELLED, f"the request to model '{name}' was cancelled"), True)
            raise
        except ServingError as error:
            outcome = error
        except Exception as error:  # of Ray: a replica that was killed, an application that is gone
            outcome = internal(f"model '{name}' of the application '{self._applications[name]}': {error}")
        reply(outcome, True)

    async def _answer(self, request: InferRequest) -> InferResponse | ServingError:
        handle = await self._handle(request.model_name)
        response = handle.infer.remote(*sent(request))
        try:
            outcome: InferResponse | Failure = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        if isinstance(outcome, InferResponse):
            return outcome
        code, message, hint = outcome
        return ServingError(Code(code), message, hint=hint)

    async def _handle(self, name: str) -> Any:
        """Return the handle of the application that has a model."""
        application = self._applications[name]
        if application not in self._handles:
            # Asks Ray's controller, and waits for its answer.
            try:
                self._handles[application] = await asyncio.to_thread(serve.get_app_handle, application)
            except Exception as error:
                raise unavailable(
                    f"model '{name}': the application '{application}' cannot be reached: {error}",
                    hint="deploy it in the same Ray cluster, by this name",
                ) from error
        return self._handles[application]


METHODS: dict[str, Method] = {method.name: method for method in method_table().values()}
"""All methods by name. Ray's proxy calls the replica's method of that name."""

UNTAKEN_BYTES_MAX = 1024 * 1024
"""Bytes of a streaming call's messages that may wait in the server before no more are read from its caller."""

ANSWER_TURNS = 0 if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else 64
"""Turns of the event loop that an answer waits for others, so that Ray sends more of them to its proxy together:
most of the cost of a request is what proxy and replica do for each message. If the loop has nothing else to do, all
turns take 0.1 ms. Where HAProxy takes the place of that proxy, answers go straight to their connections."""


def add_grpc_services(servicer: object, server: Any) -> None:
    """Add the inference, health and reflection services to Ray's gRPC proxy (`grpc_servicer_functions`).

    Messages have no deserializer: the proxy passes them on as bytes.
    """
    by_service: dict[str, dict[str, Any]] = {}
    for path, method in method_table().items():
        _, service, name = path.decode().split("/")
        handler = grpc.unary_unary_rpc_method_handler if method.run else grpc.stream_stream_rpc_method_handler
        # Ray's proxy replaces this function by its own.
        by_service.setdefault(service, {})[name] = handler(servicer)
    for service, handlers in by_service.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


class _CallEnd:
    """The end of a gRPC call."""

    def __init__(self, error: RpcError | None) -> None:
        self.error = error


async def answer_http(
    http: HttpFrontend, scope: Mapping[str, Any], body: bytes, send: Callable[[Message], Awaitable[None]]
) -> None:
    """Answer an HTTP request with ASGI messages; to be cancelled if the client leaves."""
    messages: list[Message] = []
    arrived = asyncio.Event()

    def take(more: list[Message]) -> None:
        messages.extend(more)
        arrived.set()

    exchange = begin(http, scope, body, take)
    is_open = True
    try:
        while is_open:
            await arrived.wait()
            arrived.clear()
            for _ in range(ANSWER_TURNS):
                await asyncio.sleep(0)
            sending, messages[:] = messages[:], ()
            for message in sending:
                await send(message)
            is_open = sending[-1].get("more_body", True)
    finally:
        if is_open:
            exchange.abandon()


async def answer_unary(front_end: GrpcFrontend, method: Method, metadata: Iterable[Header], message: bytes) -> bytes:
    """Return the response to a unary gRPC call.

    Raises:
        RpcError: The call failed.
    """
    responses: list[bytes] = []
    ended: asyncio.Future[RpcError | None] = asyncio.get_running_loop().create_future()

    def end(error: RpcError | None) -> None:
        if not ended.done():
            ended.set_result(error)

    call = DetachedCall(front_end.service, method, metadata, send=responses.append, end=end)
    try:
        call.receive(message)
        error = await ended
    finally:
        call.abandon()  # nothing, once it is over
    if error is not None:
        raise error
    return responses[0]


async def answer_stream(
    front_end: GrpcFrontend, method: Method, metadata: Iterable[Header], messages: AsyncIterable[bytes]
) -> AsyncGenerator[bytes, None]:
    """Yield the responses of a streaming gRPC call; to be closed if the caller leaves. Raises as `answer_unary`."""
    arrived: asyncio.Queue[bytes | _CallEnd] = asyncio.Queue()
    untaken_bytes = 0
    has_room = asyncio.Event()

    def consumed(size: int) -> None:
        nonlocal untaken_bytes
        untaken_bytes -= size
        has_room.set()

    def end(error: RpcError | None) -> None:
        arrived.put_nowait(_CallEnd(error))

    async def feed() -> None:
        nonlocal untaken_bytes
        try:
            async for message in messages:
                untaken_bytes += PREFIX_BYTES + len(message)
                call.receive(message, end=False)
                while untaken_bytes > UNTAKEN_BYTES_MAX:
                    has_room.clear()
                    await has_room.wait()
        finally:
            call.end()

    call = DetachedCall(front_end.service, method, metadata, send=arrived.put_nowait, end=end, consumed=consumed)
    feeding = asyncio.create_task(feed())
    try:
        while not isinstance(item := await arrived.get(), _CallEnd):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        feeding.cancel()
        call.abandon()


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


class _ForwardedResponse(Response):
    """The server's response to a request."""

    def __init__(self, http: HttpFrontend, body: bytes) -> None:
        self._http = http
        self._request_body = body

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        await answer_http(self._http, scope, self._request_body, send)


class _ModelLease:
    """A model that is loaded for requests with its name in `serve_multiplexed_model_id`; Ray releases the oldest."""

    def __init__(self, release: Callable[[], object]) -> None:
        self._release: Callable[[], object] | None = release

    def __del__(self) -> None:
        release, self._release = self._release, None  # Ray calls this, in a thread, and the interpreter once more
        if release is not None:
            release()


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
        self._hold: Callable[[str], Awaitable[_ModelLease]] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        elsewhere = (lambda own: RemoteModels(own, options.elsewhere)) if options.elsewhere else None
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
        self._giving_back = asyncio.create_task(trim_idle_memory())
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
        return _ForwardedResponse(self._http, body)

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

    def _loader(self) -> Callable[[str], Awaitable[_ModelLease]]:
        """Return the function with which Ray loads a model by its name."""
        loop, engine = asyncio.get_running_loop(), self._server.engine

        async def unload(model: str) -> None:
            with suppress(ServingError):  # it is not loaded any more, or the server is shutting down
                await engine.unload_model(model)

        def begin_to_unload(model: str) -> None:
            task = loop.create_task(unload(model))
            self._leaving.add(task)  # the loop itself holds tasks weakly
            task.add_done_callback(self._leaving.discard)

        async def load(model: str) -> _ModelLease:
            await engine.load_model(model)
            return _ModelLease(lambda: loop.call_soon_threadsafe(begin_to_unload, model))

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
