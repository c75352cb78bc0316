"""The gRPC methods by path."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

from charonia.core.errors import ServingError, unsupported
from charonia.server.facade import NO_LOG_CONTROL, TrafficControl, known_model
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

Answer = Callable[[Service, Buffer], Any]
"""Returns the response to a message, or is a coroutine function."""

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
    unary: dict[str, dict[str, Answer]] = {
        _SERVICE: {
            "ServerLive": _server_live,
            "ServerReady": _server_ready,
            "ServerMetadata": _server_metadata,
            "ModelReady": _model_ready,
            "ModelStatistics": _model_statistics,
            "RepositoryIndex": _repository_index,
            "RepositoryModelLoad": _load,
            "RepositoryModelUnload": _unload,
            "SystemSharedMemoryStatus": _system_status,
            "CudaSharedMemoryStatus": _cuda_status,
            "SystemSharedMemoryRegister": _system_register,
            "CudaSharedMemoryRegister": _cuda_register,
            "SystemSharedMemoryUnregister": _system_unregister,
            "CudaSharedMemoryUnregister": _cuda_unregister,
            "LogSettings": _log_setting,
            "TraceSetting": _trace_setting,
        },
        "charonia.Traffic": {
            "ModelTraffic": _traffic,
            "ModelTrafficChange": _change_traffic,
            "ModelTrafficReset": _reset_traffic,
        },
        "grpc.health.v1.Health": {"Check": _health, "Watch": _watch},
    }
    methods = [
        (_SERVICE, Method("ModelMetadata", run=_when_loaded("ModelMetadataRequest", _model_metadata))),
        (_SERVICE, Method("ModelConfig", run=_when_loaded("ModelConfigRequest", _model_config))),
        (_SERVICE, Method("ModelInfer", run=UnaryCall.infer)),
        (_SERVICE, Method("ModelStreamInfer", converse=InferStream)),
        ("xds.service.orca.v3.OpenRcaService", Method("StreamCoreMetrics", converse=LoadStream)),
        *((service, Method("ServerReflectionInfo", converse=ReflectionStream)) for service in _REFLECTION),
        *((service, Method(name, run=_run(answer))) for service, own in unary.items() for name, answer in own.items()),
    ]
    return {f"/{service}/{method.name}".encode(): method for service, method in methods}


def _run(answer: Answer) -> Run:
    """Return a runner of calls. Coroutines are tasks, which continue when the caller leaves."""
    return _working(answer) if iscoroutinefunction(answer) else _answering(answer)


def _answering(answer: Callable[[Service, Buffer], bytes]) -> Run:
    def run(call: UnaryCall, message: Buffer) -> None:
        call.answer(answer(call.table.service, message))

    return run


def _working(work: Callable[[Service, Buffer], Awaitable[bytes]]) -> Run:
    # The event loop itself has only weak references to tasks.
    tasks: set[asyncio.Task[None]] = set()

    async def perform(call: UnaryCall, message: Buffer) -> None:
        try:
            call.answer(await work(call.table.service, message))
        except ServingError as error:
            call.refuse(error)
        except RpcError as refusal:
            call.fail(refusal)
        except Exception:
            call.table.fault(call)

    def run(call: UnaryCall, message: Buffer) -> None:
        task = call.table.service.loop.create_task(perform(call, message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return run


def _when_loaded(request: str, answer: Callable[[Service, Buffer], bytes]) -> Run:
    """Return a runner of calls about a model; where models are loaded on demand, it waits for the model."""

    async def wait(service: Service, message: Buffer) -> bytes:
        demand = service.services.demand
        loaded = demand(*grpc_messages.decode_model_reference(request, message)) if demand is not None else None
        if loaded is not None:
            await loaded
        return answer(service, message)

    at_once, later = _answering(answer), _working(wait)

    def run(call: UnaryCall, message: Buffer) -> None:
        (at_once if call.table.service.services.demand is None else later)(call, message)

    return run


def _server_live(service: Service, message: Buffer) -> bytes:
    grpc_messages.decode_empty("ServerLiveRequest", message)
    return grpc_messages.encode_live(service.engine.is_live())


def _server_ready(service: Service, message: Buffer) -> bytes:
    grpc_messages.decode_empty("ServerReadyRequest", message)
    return grpc_messages.encode_server_ready(service.engine.is_ready())


async def _model_ready(service: Service, message: Buffer) -> bytes:
    name, version = grpc_messages.decode_model_reference("ModelReadyRequest", message)
    return grpc_messages.encode_model_ready(await service.engine.model_ready(name, version))


def _server_metadata(service: Service, message: Buffer) -> bytes:
    grpc_messages.decode_empty("ServerMetadataRequest", message)
    return grpc_messages.encode_server_metadata(service.engine.server_metadata())


def _model_metadata(service: Service, message: Buffer) -> bytes:
    name, version = grpc_messages.decode_model_reference("ModelMetadataRequest", message)
    return grpc_messages.encode_model_metadata(service.engine.model_metadata(name, version))


def _model_config(service: Service, message: Buffer) -> bytes:
    name, version = grpc_messages.decode_model_reference("ModelConfigRequest", message)
    return grpc_messages.encode_model_config(service.engine.model_config(name, version))


async def _model_statistics(service: Service, message: Buffer) -> bytes:
    name, version = grpc_messages.decode_model_reference("ModelStatisticsRequest", message)
    return grpc_messages.encode_statistics(await service.engine.model_statistics(name, version))


async def _repository_index(service: Service, message: Buffer) -> bytes:
    return grpc_messages.encode_index(
        await service.engine.repository_index(grpc_messages.decode_index_request(message))
    )


def _health(service: Service, message: Buffer) -> bytes:
    grpc_messages.decode_health_check(message)
    return grpc_messages.encode_health(service.engine.is_ready())


def _watch(service: Service, message: Buffer) -> bytes:
    raise unsupported("Watch is not offered by this server: use Check")


async def _load(service: Service, message: Buffer) -> bytes:
    name, config, files = grpc_messages.decode_load_request(message)
    await service.engine.load_model(name, config, files)
    return b""


async def _unload(service: Service, message: Buffer) -> bytes:
    name, unload_dependents = grpc_messages.decode_unload_request(message)
    await service.engine.unload_model(name, unload_dependents)
    return b""


def _system_status(service: Service, message: Buffer) -> bytes:
    name = grpc_messages.decode_region_name("SystemSharedMemoryStatusRequest", message)
    return (
        grpc_messages.encode_system_status(_regions(service).system(name)) if name or service.services.regions else b""
    )


def _cuda_status(service: Service, message: Buffer) -> bytes:
    name = grpc_messages.decode_region_name("CudaSharedMemoryStatusRequest", message)
    return grpc_messages.encode_cuda_status(_regions(service).cuda(name)) if name or service.services.regions else b""


async def _system_unregister(service: Service, message: Buffer) -> bytes:
    name = grpc_messages.decode_region_name("SystemSharedMemoryUnregisterRequest", message)
    await _regions(service).unregister_system(name)
    return b""


async def _cuda_unregister(service: Service, message: Buffer) -> bytes:
    name = grpc_messages.decode_region_name("CudaSharedMemoryUnregisterRequest", message)
    await _regions(service).unregister_cuda(name)
    return b""


async def _system_register(service: Service, message: Buffer) -> bytes:
    await _regions(service).register_system(grpc_messages.decode_system_register(message))
    return b""


async def _cuda_register(service: Service, message: Buffer) -> bytes:
    await _regions(service).register_cuda(grpc_messages.decode_cuda_register(message))
    return b""


def _regions(service: Service) -> RegionRegistry:
    if service.services.regions is None:
        raise disabled()
    return service.services.regions


async def _traffic(service: Service, message: Buffer) -> bytes:
    return encode_traffic(await _traffic_of(service).show(decode_traffic_request(message)))


async def _change_traffic(service: Service, message: Buffer) -> bytes:
    return encode_traffic(await _traffic_of(service).change(*decode_traffic_change(message)))


async def _reset_traffic(service: Service, message: Buffer) -> bytes:
    return encode_traffic(await _traffic_of(service).reset(decode_traffic_request(message)))


def _traffic_of(service: Service) -> TrafficControl:
    if service.services.traffic is None:
        raise unsupported("traffic between versions is not offered here")
    return service.services.traffic


async def _trace_setting(service: Service, message: Buffer) -> bytes:
    tracing = service.services.tracing
    if tracing is None:
        raise unsupported(NO_TRACING)
    model, change = trace_settings.decode_message(message, partial(known_model, service.engine))
    await tracing.change(model, change)
    return trace_settings.encode_message(await tracing.settings(model))


async def _log_setting(service: Service, message: Buffer) -> bytes:
    control = service.services.log
    if control is None:
        raise unsupported(NO_LOG_CONTROL, hint="change the settings of `logging` there")
    await control.change(log_settings.decode_message(message, control.options))
    return log_settings.encode_message(control.options)
