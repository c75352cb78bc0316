"""Server reflection: queries about the schema.

Responses come from the private schema, so they describe this server's services and nothing else in the process. The
two packages of the protocol, v1 and v1alpha, have the same messages.

Source: the gRPC server reflection protocol.
"""

from functools import cache
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError

from charonia.schema.pool import file_set, message_class, pool
from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_status import RpcError, Status


def answer(data: Buffer) -> bytes:
    """Return the `ServerReflectionResponse` to a `ServerReflectionRequest`.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
    """
    try:
        request: Any = message_class("grpc.reflection.v1.ServerReflectionRequest").FromString(data)  # type: ignore[arg-type]  # any buffer
    except DecodeError as error:
        raise RpcError(Status.INTERNAL, "the bytes received are not a ServerReflectionRequest") from error
    response: Any = message_class("grpc.reflection.v1.ServerReflectionResponse")(valid_host=request.host)
    response.original_request.CopyFrom(request)
    try:
        _fill(request, response)
    except KeyError:
        response.error_response.error_code = Status.NOT_FOUND
        response.error_response.error_message = "not found in the schema of this server"
    encoded: bytes = response.SerializeToString()
    return encoded


def _fill(request: Any, response: Any) -> None:
    """Answer one query; KeyError if the schema has nothing of that name."""
    match request.WhichOneof("message_request"):
        case "list_services":
            for name in service_names():
                response.list_services_response.service.add(name=name)
        case "file_by_filename":
            file = pool().FindFileByName(request.file_by_filename)
            response.file_descriptor_response.file_descriptor_proto.extend(_with_dependencies(file))
        case "file_containing_symbol":
            file = _file_of(request.file_containing_symbol)
            response.file_descriptor_response.file_descriptor_proto.extend(_with_dependencies(file))
        case "all_extension_numbers_of_type":
            pool().FindMessageTypeByName(request.all_extension_numbers_of_type)
            response.all_extension_numbers_response.base_type_name = request.all_extension_numbers_of_type
        case "file_containing_extension":
            raise KeyError(request.file_containing_extension.containing_type)
        case _:
            response.error_response.error_code = Status.INVALID_ARGUMENT
            response.error_response.error_message = "the request contains no query"


def _file_of(symbol: str) -> FileDescriptor:
    """Return the file that declares a symbol; KeyError if there is none."""
    try:
        return pool().FindFileContainingSymbol(symbol)
    except KeyError:
        # The pool does not find methods by their full name.
        service_name, _, method = symbol.rpartition(".")
        service = pool().FindServiceByName(service_name)
        return service.methods_by_name[method].containing_service.file


@cache
def service_names() -> tuple[str, ...]:
    return tuple(f"{file.package}.{service.name}" for file in file_set().file for service in file.service)


def _with_dependencies(file: FileDescriptor) -> list[bytes]:
    """Return a file and those it imports, serialized."""
    found: dict[str, bytes] = {}
    waiting = [file]
    while waiting:
        current = waiting.pop()
        if current.name not in found:
            found[current.name] = current.serialized_pb
            waiting.extend(current.dependencies)
    return list(found.values())
