"""Requests and responses of all methods other than inference, as gRPC messages.

A response has the members of the document with which the same question is answered over HTTP.

Source: KServe v2 protocol, gRPC, and Triton's extensions of it, such as system and CUDA shared memory.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from charonia.config.convert import to_message
from charonia.config.model import ModelConfig
from charonia.core.errors import invalid, unsupported
from charonia.schema.pool import message_class, pool
from charonia.wire.grpc_framing import Buffer
from charonia.wire.grpc_status import RpcError, Status
from charonia.wire.shared_memory import CudaRegion, SystemRegion

FILE_PREFIX = "file:"
"""Load parameters with this prefix hold a file; the path follows."""


def parsed(name: str, data: Buffer) -> Any:
    """Parse the message of this full name.

    Raises:
        RpcError: INTERNAL when the bytes are not such a message.
    """
    try:
        return message_class(name).FromString(data)  # type: ignore[arg-type]  # the parser takes any buffer
    except DecodeError as error:
        raise RpcError(Status.INTERNAL, f"the bytes received are not a {name}") from error


def encoded(name: str, document: Mapping[str, object]) -> bytes:
    """Return the bytes of the message of this full name with the members of a document, as far as it has them."""
    data: bytes = ParseDict(dict(document), message_class(name)(), ignore_unknown_fields=True).SerializeToString()
    return data


def message_names(service: str, method: str) -> tuple[str, str]:
    """Return the full names of the request and the response of a method."""
    described: Any = pool().FindServiceByName(service).methods_by_name[method]
    return described.input_type.full_name, described.output_type.full_name


def encode_model_config(config: ModelConfig) -> bytes:
    """Return a `ModelConfigResponse`."""
    message: Any = message_class("inference.ModelConfigResponse")()
    message.config.CopyFrom(to_message(config))
    data: bytes = message.SerializeToString()
    return data


def system_region(request: Any) -> SystemRegion:
    """Return the region in a `SystemSharedMemoryRegisterRequest`."""
    return SystemRegion(request.name, request.key, request.offset, request.byte_size)


def cuda_region(request: Any) -> CudaRegion:
    """Return the region in a `CudaSharedMemoryRegisterRequest`."""
    return CudaRegion(request.name, request.raw_handle, request.device_id, request.byte_size)


def load_parameters(request: Any) -> tuple[str | None, Mapping[str, bytes] | None]:
    """Return configuration as JSON text or None, and files by path or None, in a `RepositoryModelLoadRequest`.

    Raises:
        ServingError: INVALID_ARG for an unknown parameter or an invalid value, UNSUPPORTED if it names a repository.
    """
    check_repository(request)
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in request.parameters.items():
        choice = value.WhichOneof("parameter_choice")
        if key == "config":
            _expect(key, "string_param", choice)
            config = value.string_param
        elif key.startswith(FILE_PREFIX):
            _expect(key, "bytes_param", choice)
            files[key.removeprefix(FILE_PREFIX)] = value.bytes_param
        else:
            raise invalid(f"unrecognized load parameter '{key}'.", hint="'config' and 'file:<path>' are accepted")
    return config, files or None


def unloads_dependents(request: Any) -> bool:
    """Return whether a `RepositoryModelUnloadRequest` includes dependents. Raises as `load_parameters`."""
    check_repository(request)
    unload_dependents = False
    for key, value in request.parameters.items():
        if key != "unload_dependents":
            raise invalid(f"unrecognized unload parameter '{key}'.", hint="'unload_dependents' is accepted")
        _expect(key, "bool_param", value.WhichOneof("parameter_choice"))
        unload_dependents = value.bool_param
    return unload_dependents


def check_repository(request: Any) -> None:
    """Raises ServingError, UNSUPPORTED, for a request that names a repository."""
    if request.repository_name:
        raise unsupported("'repository_name' specification is not supported", hint="leave it empty")


def _expect(key: str, expected: str, choice: str | None) -> None:
    if choice != expected:
        raise invalid(f"parameter '{key}': expected {expected}, got {choice or 'no value'}")
