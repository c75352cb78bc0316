"""The methods that are served, by path."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from charonia.core.errors import ServingError, unsupported
from charonia.server.facade import Engine, Services
from charonia.server.grpc.calls import Call, Run, Service, UnaryCall, Wire, internal_error
from charonia.server.grpc.infer_stream import InferStream
from charonia.server.grpc.reflection import ReflectionStream
from charonia.server.grpc.room import HeldCall, Room
from charonia.server.grpc.settings import log_setting, trace_setting
from charonia.server.grpc.shared_memory import ANSWERS, WORKS
from charonia.server.grpc.stream import Conversation, StreamCall
from charonia.wire import grpc_messages as messages
from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_headers import CallHead
from charonia.wire.grpc_status import RpcError, Status

Answer = Callable[[Engine, Buffer], bytes]
Work = Callable[[Engine, Buffer], Awaitable[bytes]]
T = TypeVar("T")

_SERVICE = "inference.GRPCInferenceService"
_REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


@dataclass(frozen=True, slots=True)
class Method:
    """A method: one of `run` and `converse` is set.

    Attributes:
        name: Its name, without the service.
        run: Runs a call with one request.
        converse: Makes what is said on a call with streams.
    """

    name: str
    run: Run | None = None
    converse: Callable[[StreamCall], Conversation] | None = None

    def open(self, wire: Wire, stream_id: int, head: CallHead, room: Room | None = None) -> Call:
        """Return a new call of this method; where it has one request it waits for `room`, if that is given."""
        if self.run is not None:
            if room is not None:
                return room.hold(HeldCall(wire, stream_id, self.name, head, self.run))
            return UnaryCall(wire, stream_id, self.name, head, self.run)
        assert self.converse is not None
        return StreamCall(wire, stream_id, self.name, head, self.converse)


def unknown_method(path: bytes) -> RpcError:
    """Return the error for a path that is not in the table."""
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
        "ModelStatistics": _model_statistics,
        "RepositoryIndex": _repository_index,
    }
    for name, answer in answers.items():
        _add(table, _SERVICE, Method(name, run=_answering(answer, _engine)))
    for name, answer in (("ModelMetadata", _model_metadata), ("ModelConfig", _model_config)):
        _add(table, _SERVICE, Method(name, run=_when_loaded(f"{name}Request", answer)))
    works: dict[str, Work] = {
        "ModelReady": _model_ready,
        "RepositoryModelLoad": _load,
        "RepositoryModelUnload": _unload,
    }
    for name, work in works.items():
        _add(table, _SERVICE, Method(name, run=_working(work, _engine)))
    for name, service_answer in ANSWERS.items():
        _add(table, _SERVICE, Method(name, run=_answering(service_answer, _services)))
    for name, service_work in WORKS.items():
        _add(table, _SERVICE, Method(name, run=_working(service_work, _services)))
    _add(table, _SERVICE, Method("TraceSetting", run=trace_setting))
    _add(table, _SERVICE, Method("LogSettings", run=log_setting))
    _add(table, _SERVICE, Method("ModelInfer", run=UnaryCall.infer))
    _add(table, _SERVICE, Method("ModelStreamInfer", converse=InferStream))
    _add(table, "grpc.health.v1.Health", Method("Check", run=_answering(_health, _engine)))
    _add(
        table, "grpc.health.v1.Health", Method("Watch", run=_refusing("Watch is not offered by this server: use Check"))
    )
    for service in _REFLECTION:
        _add(table, service, Method("ServerReflectionInfo", converse=ReflectionStream))
    return table


def _add(table: dict[bytes, Method], service: str, method: Method) -> None:
    table[f"/{service}/{method.name}".encode()] = method


def _engine(call: UnaryCall) -> Engine:
    return call.wire.service.engine


def _service(call: UnaryCall) -> Service:
    return call.wire.service


def _services(call: UnaryCall) -> Services:
    return call.wire.service.services


def _answering(answer: Callable[[T, Buffer], bytes], server: Callable[[UnaryCall], T]) -> Run:
    """Return what answers a call at once, given the part of the server that it is about."""

    def run(call: UnaryCall, message: Buffer) -> None:
        call.answer(answer(server(call), message))

    return run


def _refusing(sentence: str) -> Run:
    def run(call: UnaryCall, message: Buffer) -> None:
        raise unsupported(sentence)

    return run


def _working(work: Callable[[T, Buffer], Awaitable[bytes]], server: Callable[[UnaryCall], T]) -> Run:
    """Return what runs a call whose answer takes a while. A caller that leaves does not stop the work."""
    # The event loop itself holds tasks weakly only.
    tasks: set[asyncio.Task[None]] = set()

    async def perform(call: UnaryCall, message: Buffer) -> None:
        try:
            call.answer(await work(server(call), message))
        except ServingError as error:
            call.refuse(error)
        except RpcError as error:
            call.fail(error)
        except Exception:
            call.fail(internal_error(call.name))

    def run(call: UnaryCall, message: Buffer) -> None:
        task = call.wire.service.loop.create_task(perform(call, message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return run


def _when_loaded(request: str, answer: Callable[[Engine, Buffer], bytes]) -> Run:
    """Return what answers a call about a model: at once, or when it is loaded where models are loaded on demand."""

    async def wait(service: Service, message: Buffer) -> bytes:
        demand = service.services.demand
        loaded = demand(*messages.decode_model_reference(request, message)) if demand is not None else None
        if loaded is not None:
            await loaded
        return answer(service.engine, message)

    at_once, later = _answering(answer, _engine), _working(wait, _service)

    def run(call: UnaryCall, message: Buffer) -> None:
        (at_once if call.wire.service.services.demand is None else later)(call, message)

    return run


def _server_live(engine: Engine, message: Buffer) -> bytes:
    messages.decode_empty("ServerLiveRequest", message)
    return messages.encode_live(engine.is_live())


def _server_ready(engine: Engine, message: Buffer) -> bytes:
    messages.decode_empty("ServerReadyRequest", message)
    return messages.encode_server_ready(engine.is_ready())


async def _model_ready(engine: Engine, message: Buffer) -> bytes:
    name, version = messages.decode_model_reference("ModelReadyRequest", message)
    return messages.encode_model_ready(await engine.model_ready(name, version))


def _server_metadata(engine: Engine, message: Buffer) -> bytes:
    messages.decode_empty("ServerMetadataRequest", message)
    return messages.encode_server_metadata(engine.server_metadata())


def _model_metadata(engine: Engine, message: Buffer) -> bytes:
    name, version = messages.decode_model_reference("ModelMetadataRequest", message)
    return messages.encode_model_metadata(engine.model_metadata(name, version))


def _model_config(engine: Engine, message: Buffer) -> bytes:
    name, version = messages.decode_model_reference("ModelConfigRequest", message)
    return messages.encode_model_config(engine.model_config(name, version))


def _model_statistics(engine: Engine, message: Buffer) -> bytes:
    name, version = messages.decode_model_reference("ModelStatisticsRequest", message)
    return messages.encode_statistics(engine.model_statistics(name, version))


def _repository_index(engine: Engine, message: Buffer) -> bytes:
    return messages.encode_index(engine.repository_index(messages.decode_index_request(message)))


def _health(engine: Engine, message: Buffer) -> bytes:
    messages.decode_health_check(message)
    return messages.encode_health(engine.is_ready())


async def _load(engine: Engine, message: Buffer) -> bytes:
    name, config, files = messages.decode_load_request(message)
    await engine.load_model(name, config, files)
    return b""


async def _unload(engine: Engine, message: Buffer) -> bytes:
    name, unload_dependents = messages.decode_unload_request(message)
    await engine.unload_model(name, unload_dependents)
    return b""
