"""The gRPC methods by path."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from charonia.core.errors import ServingError, unsupported
from charonia.server.facade import NO_LOG_CONTROL, TrafficControl, known_model
from charonia.server.grpc.calls import Run, Service, UnaryCall
from charonia.server.grpc.streams import InferStream, MakeHandler, ReflectionStream, StreamCall
from charonia.server.shared_memory.registry import RegionRegistry
from charonia.server.tracing.requests import NO_TRACING
from charonia.wire import log_settings, trace_settings, v2_control
from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_messages import (
    check_repository,
    cuda_region,
    encode_model_config,
    encoded,
    load_parameters,
    message_names,
    parsed,
    system_region,
    unloads_dependents,
)
from charonia.wire.grpc_status import RpcError, Status, rpc_error
from charonia.wire.json_text import Object, dump, parse_object
from charonia.wire.orca import decode_load_request, encode_load
from charonia.wire.shared_memory import describe_cuda, describe_system, disabled

Document = Mapping[str, object] | None
"""A response as a document; None for an empty one."""

Answer = Callable[[Service, Any], Document]
"""Returns the response to a request."""

Work = Callable[[Service, Any], Awaitable[Document]]
"""Does the same later."""

_SERVICE: Final = "inference.GRPCInferenceService"
_REFLECTION: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

UNREAD_BYTES_MAX: Final = 64 * 1024
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
        """Begin to send reports. Raises as `StreamHandler.start`."""
        if self._task is not None:
            raise RpcError(Status.UNIMPLEMENTED, f"{self._call.name}: expected exactly one request message")
        interval_s = decode_load_request(message)
        self._task = self._call.table.service.loop.create_task(self._send(interval_s))

    def drop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _send(self, interval_s: float) -> None:
        call = self._call
        load = call.table.service.load
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
    """A method: one of `run` and `make_handler` is set.

    Attributes:
        name: Its name, without the service.
        run: Runs a unary call.
        make_handler: Makes the handler of a streaming call.
    """

    name: str
    run: Run | None = None
    make_handler: MakeHandler | None = None


def unknown_method(path: bytes) -> RpcError:
    return RpcError(
        Status.UNIMPLEMENTED,
        f"unknown method '{path.decode('ascii', 'replace')}': reflection lists what this server has",
    )


def method_table() -> dict[bytes, Method]:
    """Return all methods by path."""
    at_once: dict[str, dict[str, Answer]] = {
        _SERVICE: {
            "ServerLive": lambda service, _: {"live": service.engine.is_live()},
            "ServerReady": lambda service, _: {"ready": service.engine.is_ready()},
            "ServerMetadata": lambda service, _: v2_control.server_metadata(service.engine.server_metadata()),
            "SystemSharedMemoryStatus": _system_status,
            "CudaSharedMemoryStatus": _cuda_status,
        },
        "grpc.health.v1.Health": {"Check": _health, "Watch": _watch},
    }
    later: dict[str, dict[str, Work]] = {
        _SERVICE: {
            "ModelReady": _model_ready,
            "ModelStatistics": _model_statistics,
            "RepositoryIndex": _repository_index,
            "RepositoryModelLoad": _load,
            "RepositoryModelUnload": _unload,
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
    }
    methods = [
        (_SERVICE, Method("ModelMetadata", run=_when_loaded("ModelMetadata", _model_metadata))),
        (_SERVICE, Method("ModelConfig", run=_when_loaded("ModelConfig", _model_config))),
        (_SERVICE, Method("ModelInfer", run=UnaryCall.infer)),
        (_SERVICE, Method("ModelStreamInfer", make_handler=InferStream)),
        ("xds.service.orca.v3.OpenRcaService", Method("StreamCoreMetrics", make_handler=LoadStream)),
        *((service, Method("ServerReflectionInfo", make_handler=ReflectionStream)) for service in _REFLECTION),
        *(
            (own, Method(name, run=_answering(own, name, a)))
            for own, some in at_once.items()
            for name, a in some.items()
        ),
        *((own, Method(name, run=_working(own, name, w))) for own, some in later.items() for name, w in some.items()),
    ]
    return {f"/{service}/{method.name}".encode(): method for service, method in methods}


def _answering(of: str, method: str, answer: Answer) -> Run:
    asked, answered = message_names(of, method)

    def run(call: UnaryCall, message: Buffer) -> None:
        call.answer(encoded(answered, answer(call.table.service, parsed(asked, message)) or {}))

    return run


def _working(of: str, method: str, work: Work) -> Run:
    """Return a runner of calls as tasks, which continue when the caller leaves."""
    asked, answered = message_names(of, method)

    async def answer(service: Service, message: Buffer) -> bytes:
        return encoded(answered, await work(service, parsed(asked, message)) or {})

    return _in_task(answer)


def _in_task(work: Callable[[Service, Buffer], Awaitable[bytes]]) -> Run:
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


def _when_loaded(method: str, answer: Callable[[Service, str, str], bytes]) -> Run:
    """Return a runner of calls about a model; where models are loaded on demand, it waits for the model."""
    asked, _ = message_names(_SERVICE, method)

    async def wait(service: Service, message: Buffer) -> bytes:
        request, demand = parsed(asked, message), service.services.demand
        loaded = demand(request.name, request.version) if demand is not None else None
        if loaded is not None:
            await loaded
        return answer(service, request.name, request.version)

    later = _in_task(wait)

    def run(call: UnaryCall, message: Buffer) -> None:
        service = call.table.service
        if service.services.demand is not None:
            later(call, message)
        else:
            request = parsed(asked, message)
            call.answer(answer(service, request.name, request.version))

    return run


def _model_metadata(service: Service, name: str, version: str) -> bytes:
    document = v2_control.model_metadata(service.engine.model_metadata(name, version))
    return encoded("inference.ModelMetadataResponse", document)


def _model_config(service: Service, name: str, version: str) -> bytes:
    return encode_model_config(service.engine.model_config(name, version))


async def _model_ready(service: Service, request: Any) -> Document:
    return {"ready": await service.engine.model_ready(request.name, request.version)}


async def _model_statistics(service: Service, request: Any) -> Document:
    return v2_control.statistics(await service.engine.model_statistics(request.name, request.version))


async def _repository_index(service: Service, request: Any) -> Document:
    check_repository(request)
    return {"models": v2_control.index(await service.engine.repository_index(request.ready))}


def _health(service: Service, request: Any) -> Document:
    return {"status": "SERVING" if service.engine.is_ready() else "NOT_SERVING"}


def _watch(service: Service, request: Any) -> Document:
    raise unsupported("Watch is not offered by this server: use Check")


async def _load(service: Service, request: Any) -> Document:
    config, files = load_parameters(request)
    await service.engine.load_model(request.model_name, config, files)
    return None


async def _unload(service: Service, request: Any) -> Document:
    await service.engine.unload_model(request.model_name, unloads_dependents(request))
    return None


def _system_status(service: Service, request: Any) -> Document:
    is_known = request.name or service.regions is not None
    return _status(describe_system(_regions(service).system(request.name)) if is_known else [])


def _cuda_status(service: Service, request: Any) -> Document:
    is_known = request.name or service.regions is not None
    return _status(describe_cuda(_regions(service).cuda(request.name)) if is_known else [])


def _status(regions: list[Object]) -> Document:
    return {"regions": {str(region["name"]): region for region in regions}}


async def _system_register(service: Service, request: Any) -> Document:
    await _regions(service).register_system(system_region(request))
    return None


async def _cuda_register(service: Service, request: Any) -> Document:
    await _regions(service).register_cuda(cuda_region(request))
    return None


async def _system_unregister(service: Service, request: Any) -> Document:
    await _regions(service).unregister_system(request.name)
    return None


async def _cuda_unregister(service: Service, request: Any) -> Document:
    await _regions(service).unregister_cuda(request.name)
    return None


def _regions(service: Service) -> RegionRegistry:
    if service.regions is None:
        raise disabled()
    return service.regions


async def _traffic(service: Service, request: Any) -> Document:
    return _as_text(await _traffic_of(service).show(request.model_name))


async def _change_traffic(service: Service, request: Any) -> Document:
    return _as_text(await _traffic_of(service).change(request.model_name, parse_object(request.change.encode())))


async def _reset_traffic(service: Service, request: Any) -> Document:
    return _as_text(await _traffic_of(service).reset(request.model_name))


def _as_text(traffic: Mapping[str, object]) -> Document:
    return {"traffic": dump(traffic).decode()}


def _traffic_of(service: Service) -> TrafficControl:
    if service.traffic is None:
        raise unsupported("traffic between versions is not offered here")
    return service.traffic


async def _trace_setting(service: Service, request: Any) -> Document:
    tracing = service.services.tracing
    if tracing is None:
        raise unsupported(NO_TRACING)
    known_model(service.engine, request.model_name)
    await tracing.change(request.model_name, trace_settings.decode_message(request))
    return trace_settings.describe_message(await tracing.settings(request.model_name))


async def _log_setting(service: Service, request: Any) -> Document:
    control = service.services.log
    if control is None:
        raise unsupported(NO_LOG_CONTROL, hint="change the settings of `logging` there")
    await control.change(log_settings.decode_message(request, control.options))
    return log_settings.describe_message(control.options)
