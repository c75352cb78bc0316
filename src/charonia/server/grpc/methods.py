"""The gRPC methods by path."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from charonia.core.errors import ServingError, unsupported
from charonia.server.facade import NO_LOG_CONTROL, Engine, Services, TrafficControl, known_model
from charonia.server.grpc.calls import Run, Service, UnaryCall
from charonia.server.grpc.streams import Converse, InferStream, ReflectionStream, StreamCall
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.server.tracing.requests import NO_TRACING
from charonia.wire import grpc_messages, log_settings, trace_settings
from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_messages import decode_traffic_change, decode_traffic_request, encode_traffic
from charonia.wire.grpc_status import RpcError, Status, rpc_error
from charonia.wire.orca import decode_load_request, encode_load
from charonia.wire.shared_memory import disabled

Answer = Callable[[Engine, Buffer], bytes]
Work = Callable[[Engine, Buffer], Awaitable[bytes]]
T = TypeVar("T")

_SERVICE = "inference.GRPCInferenceService"
_REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

UNREAD_BYTES_MAX = 64 * 1024
"""Reports that a caller has not read; beyond it, none are sent until it reads."""


class LoadStream:
    """One call for load reports. It ends with the server, or when the caller cancels it."""

    __slots__ = ("_call", "_task")

    def __init__(self, call: StreamCall) -> None:
        self._call = call
        self._task: asyncio.Task[None] | None = None

    def in_flight(self) -> int:
        """Return 1, which keeps the call open; 0 before the request, and when the server shuts down."""
        return int(self._task is not None and not self._call.table.service.engine.is_exiting())

    def start(self, message: Buffer) -> None:
        """Begin to send reports. Raises as `Conversation.start`."""
        if self._task is not None:
            raise RpcError(Status.UNIMPLEMENTED, f"{self._call.name}: expected exactly one request message")
        interval_s = decode_load_request(message)
        self._task = self._call.table.service.loop.create_task(self._send(interval_s))

    def drop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _send(self, interval_s: float) -> None:
        call = self._call
        load = call.table.service.services.load
        try:
            if load is None:
                raise unsupported("the load of this server is not reported here")
            while not call.is_over:
                if call.table.unsent_bytes(call) <= UNREAD_BYTES_MAX:
                    call.send([encode_load(await load.report())])
                await asyncio.sleep(interval_s)
        except ServingError as error:
            call.fail(rpc_error(error))
        except Exception:
            call.table.fault(call)


@dataclass(frozen=True, slots=True)
class Method:
    """A method: one of `run` and `converse` is set.

    Attributes:
        name: Its name, without the service.
        run: Runs a unary call.
        converse: Makes the conversation of a streaming call.
    """

    name: str
    run: Run | None = None
    converse: Converse | None = None


def unknown_method(path: bytes) -> RpcError:
    return RpcError(
        Status.UNIMPLEMENTED,
        f"unknown method '{path.decode('ascii', 'replace')}': reflection lists what this server has",
    )


def method_table() -> dict[bytes, Method]:
    """Return all methods by path."""
    table: dict[bytes, Method] = {}
    answers: dict[str, Answer] = {
        "ServerLive": _server_live,
        "ServerReady": _server_ready,
        "ServerMetadata": _server_metadata,
    }
    for name, answer in answers.items():
        _add(table, _SERVICE, Method(name, run=_answering(answer, _engine)))
    for name, answer in (("ModelMetadata", _model_metadata), ("ModelConfig", _model_config)):
        _add(table, _SERVICE, Method(name, run=_when_loaded(f"{name}Request", answer)))
    works: dict[str, Work] = {
        "ModelReady": _model_ready,
        "ModelStatistics": _model_statistics,
        "RepositoryIndex": _repository_index,
        "RepositoryModelLoad": _load,
        "RepositoryModelUnload": _unload,
    }
    for name, work in works.items():
        _add(table, _SERVICE, Method(name, run=_working(work, _engine)))
    region_answers: dict[str, Callable[[Services, Buffer], bytes]] = {
        "SystemSharedMemoryStatus": _system_status,
        "CudaSharedMemoryStatus": _cuda_status,
    }
    for name, region_answer in region_answers.items():
        _add(table, _SERVICE, Method(name, run=_answering(region_answer, _services)))
    changes: dict[str, Callable[[Services, Buffer], Awaitable[bytes]]] = {
        "SystemSharedMemoryRegister": _system_register,
        "CudaSharedMemoryRegister": _cuda_register,
        "SystemSharedMemoryUnregister": _system_unregister,
        "CudaSharedMemoryUnregister": _cuda_unregister,
        "LogSettings": _log_setting,
    }
    for name, change in changes.items():
        _add(table, _SERVICE, Method(name, run=_working(change, _services)))
    for name, work_on_traffic in (
        ("ModelTraffic", _traffic),
        ("ModelTrafficChange", _change_traffic),
        ("ModelTrafficReset", _reset_traffic),
    ):
        _add(table, "charonia.Traffic", Method(name, run=_working(work_on_traffic, _services)))
    _add(table, _SERVICE, Method("TraceSetting", run=_working(_trace_setting, _service)))
    _add(table, _SERVICE, Method("ModelInfer", run=UnaryCall.infer))
    _add(table, _SERVICE, Method("ModelStreamInfer", converse=InferStream))
    _add(table, "grpc.health.v1.Health", Method("Check", run=_answering(_health, _engine)))
    _add(
        table, "grpc.health.v1.Health", Method("Watch", run=_refusing("Watch is not offered by this server: use Check"))
    )
    _add(table, "xds.service.orca.v3.OpenRcaService", Method("StreamCoreMetrics", converse=LoadStream))
    for service in _REFLECTION:
        _add(table, service, Method("ServerReflectionInfo", converse=ReflectionStream))
    return table


def _add(table: dict[bytes, Method], service: str, method: Method) -> None:
    table[f"/{service}/{method.name}".encode()] = method


def _engine(call: UnaryCall) -> Engine:
    return call.table.service.engine


def _service(call: UnaryCall) -> Service:
    return call.table.service


def _services(call: UnaryCall) -> Services:
    return call.table.service.services


def _answering(answer: Callable[[T, Buffer], bytes], server: Callable[[UnaryCall], T]) -> Run:
    """Return a runner of calls that are answered immediately, by the part of the server that `server` selects."""

    def run(call: UnaryCall, message: Buffer) -> None:
        call.answer(answer(server(call), message))

    return run


def _refusing(sentence: str) -> Run:
    def run(call: UnaryCall, message: Buffer) -> None:
        raise unsupported(sentence)

    return run


def _working(work: Callable[[T, Buffer], Awaitable[bytes]], server: Callable[[UnaryCall], T]) -> Run:
    """Return a runner of calls that take a while. The work continues when the caller leaves."""
    # The event loop itself has only weak references to tasks.
    tasks: set[asyncio.Task[None]] = set()

    async def perform(call: UnaryCall, message: Buffer) -> None:
        try:
            call.answer(await work(server(call), message))
        except ServingError as error:
            call.refuse(error)
        except RpcError as error:
            call.fail(error)
        except Exception:
            call.table.fault(call)

    def run(call: UnaryCall, message: Buffer) -> None:
        task = call.table.service.loop.create_task(perform(call, message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return run


def _when_loaded(request: str, answer: Callable[[Engine, Buffer], bytes]) -> Run:
    """Return a runner of calls about a model; where models are loaded on demand, it waits for the model."""

    async def wait(service: Service, message: Buffer) -> bytes:
        demand = service.services.demand
        loaded = demand(*grpc_messages.decode_model_reference(request, message)) if demand is not None else None
        if loaded is not None:
            await loaded
        return answer(service.engine, message)

    at_once, later = _answering(answer, _engine), _working(wait, _service)

    def run(call: UnaryCall, message: Buffer) -> None:
        (at_once if call.table.service.services.demand is None else later)(call, message)

    return run


def _server_live(engine: Engine, message: Buffer) -> bytes:
    grpc_messages.decode_empty("ServerLiveRequest", message)
    return grpc_messages.encode_live(engine.is_live())


def _server_ready(engine: Engine, message: Buffer) -> bytes:
    grpc_messages.decode_empty("ServerReadyRequest", message)
    return grpc_messages.encode_server_ready(engine.is_ready())


async def _model_ready(engine: Engine, message: Buffer) -> bytes:
    name, version = grpc_messages.decode_model_reference("ModelReadyRequest", message)
    return grpc_messages.encode_model_ready(await engine.model_ready(name, version))


def _server_metadata(engine: Engine, message: Buffer) -> bytes:
    grpc_messages.decode_empty("ServerMetadataRequest", message)
    return grpc_messages.encode_server_metadata(engine.server_metadata())


def _model_metadata(engine: Engine, message: Buffer) -> bytes:
    name, version = grpc_messages.decode_model_reference("ModelMetadataRequest", message)
    return grpc_messages.encode_model_metadata(engine.model_metadata(name, version))


def _model_config(engine: Engine, message: Buffer) -> bytes:
    name, version = grpc_messages.decode_model_reference("ModelConfigRequest", message)
    return grpc_messages.encode_model_config(engine.model_config(name, version))


async def _model_statistics(engine: Engine, message: Buffer) -> bytes:
    name, version = grpc_messages.decode_model_reference("ModelStatisticsRequest", message)
    return grpc_messages.encode_statistics(await engine.model_statistics(name, version))


async def _repository_index(engine: Engine, message: Buffer) -> bytes:
    return grpc_messages.encode_index(await engine.repository_index(grpc_messages.decode_index_request(message)))


def _health(engine: Engine, message: Buffer) -> bytes:
    grpc_messages.decode_health_check(message)
    return grpc_messages.encode_health(engine.is_ready())


async def _load(engine: Engine, message: Buffer) -> bytes:
    name, config, files = grpc_messages.decode_load_request(message)
    await engine.load_model(name, config, files)
    return b""


async def _unload(engine: Engine, message: Buffer) -> bytes:
    name, unload_dependents = grpc_messages.decode_unload_request(message)
    await engine.unload_model(name, unload_dependents)
    return b""


def _system_status(services: Services, message: Buffer) -> bytes:
    name = grpc_messages.decode_region_name("SystemSharedMemoryStatusRequest", message)
    return grpc_messages.encode_system_status(_regions(services).system(name)) if name or services.regions else b""


def _cuda_status(services: Services, message: Buffer) -> bytes:
    name = grpc_messages.decode_region_name("CudaSharedMemoryStatusRequest", message)
    return grpc_messages.encode_cuda_status(_regions(services).cuda(name)) if name or services.regions else b""


async def _system_unregister(services: Services, message: Buffer) -> bytes:
    name = grpc_messages.decode_region_name("SystemSharedMemoryUnregisterRequest", message)
    await _regions(services).unregister_system(name)
    return b""


async def _cuda_unregister(services: Services, message: Buffer) -> bytes:
    name = grpc_messages.decode_region_name("CudaSharedMemoryUnregisterRequest", message)
    await _regions(services).unregister_cuda(name)
    return b""


async def _system_register(services: Services, message: Buffer) -> bytes:
    await _regions(services).register_system(grpc_messages.decode_system_register(message))
    return b""


async def _cuda_register(services: Services, message: Buffer) -> bytes:
    await _regions(services).register_cuda(grpc_messages.decode_cuda_register(message))
    return b""


def _regions(services: Services) -> RegionRegistry:
    if services.regions is None:
        raise disabled()
    return services.regions


async def _traffic(services: Services, message: Buffer) -> bytes:
    return encode_traffic(await _traffic_of(services).show(decode_traffic_request(message)))


async def _change_traffic(services: Services, message: Buffer) -> bytes:
    return encode_traffic(await _traffic_of(services).change(*decode_traffic_change(message)))


async def _reset_traffic(services: Services, message: Buffer) -> bytes:
    return encode_traffic(await _traffic_of(services).reset(decode_traffic_request(message)))


def _traffic_of(services: Services) -> TrafficControl:
    if services.traffic is None:
        raise unsupported("traffic between versions is not offered here")
    return services.traffic


async def _trace_setting(service: Service, message: Buffer) -> bytes:
    tracing = service.services.tracing
    if tracing is None:
        raise unsupported(NO_TRACING)
    model, change = trace_settings.decode_message(message)
    known_model(service.engine, model)
    await tracing.change(model, change)
    return trace_settings.encode_message(await tracing.settings(model))


async def _log_setting(services: Services, message: Buffer) -> bytes:
    control = services.log
    if control is None:
        raise unsupported(NO_LOG_CONTROL, hint="change the settings of `logging` there")
    await control.change(log_settings.decode_message(message, control.options))
    return log_settings.encode_message(control.options)
