"""Shared memory of clients: the regions as codecs see them, references in requests, and HTTP registration documents.

Source: Triton's system and CUDA shared memory extensions.
"""

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from charonia.core.errors import ServingError, internal, invalid, unsupported
from charonia.wire.json_text import UINT64_MAX, Object, kind_of, parse_object
from charonia.wire.tensors import Buffer


class RegionSpan(NamedTuple):
    """A part of a region, as a request names it.

    Attributes:
        region: Name of the region.
        offset: Where the part begins in the region, in bytes.
    """

    region: str
    offset: int
    byte_size: int


class OutputLocation(Protocol):
    """The destination of an output.

    The region stays mapped as long as one of its places is referenced, even after it was unregistered.

    Attributes:
        span: The requested span.
    """

    span: RegionSpan

    def write(self, data: bytes | memoryview) -> None:
        """Copy an output's bytes to the start of the place.

        Args:
            data: At most as many bytes as the place has.

        Raises:
            ServingError: The region no longer matches its registration.
        """


class Regions(Protocol):
    """The registered regions."""

    def view(self, span: RegionSpan) -> memoryview:
        """Return the bytes of a part, read-only; the region stays mapped as long as the view lives.

        Raises:
            ServingError: NOT_FOUND for an unknown region, INVALID_ARG for a part that is not within it.
        """

    def place(self, span: RegionSpan) -> OutputLocation:
        """Return a part to write an output to. Raises as `view`."""


REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
BYTE_SIZE = "shared_memory_byte_size"

NO_PLACES: Mapping[str, OutputLocation] = {}
"""The places of a request whose outputs are all in the response."""


class SystemRegion(NamedTuple):
    """A registered part of a shared memory object of the operating system.

    Attributes:
        name: Name that requests use.
        key: Name of the object, as `shm_open` takes it.
        offset: Where the region begins in it, in bytes.
        byte_size: Size of the region in bytes.
    """

    name: str
    key: str
    offset: int
    byte_size: int


class CudaRegion(NamedTuple):
    """A registered part of a GPU's memory.

    Attributes:
        name: Name that requests use.
        raw_handle: Handle for other processes (`cudaIpcMemHandle_t`).
        device_id: The GPU.
        byte_size: Size of the region in bytes.
    """

    name: str
    raw_handle: bytes
    device_id: int
    byte_size: int


def disabled() -> ServingError:
    return unsupported(
        "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
        hint="or send the tensors in the messages",
    )


def span(owner: str, region: object, offset: object, byte_size: object) -> RegionSpan:
    """Return the part of a region that the parameters of a tensor name.

    Args:
        owner: The tensor, as "input 'x'".
        region: Value of the parameter `REGION`.
        offset: Value of `OFFSET`, None where it is absent.
        byte_size: Value of `BYTE_SIZE`, None where it is absent.

    Raises:
        ServingError: INVALID_ARG for values of the wrong type.
    """
    if type(region) is not str or not region:
        raise invalid(f"{owner}: parameter '{REGION}': expected the name of a region, got {kind_of(region)}")
    values = []
    for key, given in ((OFFSET, offset), (BYTE_SIZE, byte_size)):
        value = 0 if given is None else given
        if type(value) is not int or not 0 <= value <= UINT64_MAX:
            got = value if type(value) is int else kind_of(value)
            raise invalid(f"{owner}: parameter '{key}': expected a number of bytes, got {got}")
        values.append(value)
    return RegionSpan(region, *values)


def places(spans: Mapping[str, RegionSpan], regions: Regions | None) -> Mapping[str, OutputLocation]:
    """Return the destinations of outputs, by name.

    Raises:
        ServingError: Shared memory is disabled, or a region does not exist.
    """
    if regions is None:
        raise disabled()
    return {name: regions.place(part) for name, part in spans.items()}


def view(part: RegionSpan, regions: Regions | None) -> memoryview:
    """Return the bytes of an input. Raises as `places`."""
    if regions is None:
        raise disabled()
    return regions.view(part)


def write(place: OutputLocation, name: str, data: Buffer) -> None:
    """Write an output to its place.

    Raises:
        ServingError: INTERNAL when the place is too small.
    """
    if len(data) > place.span.byte_size:
        raise internal(
            f"shared memory size specified with the request for output '{name}' ({place.span.byte_size} bytes) should "
            f"be at least {len(data)} bytes to hold the results"
        )
    place.write(memoryview(data))


def decode_system_register(name: str, body: bytes | memoryview) -> SystemRegion:
    """Return the region in the body of a request to register system shared memory.

    Raises:
        ServingError: INVALID_ARG for a body that does not name one.
    """
    document = parse_object(body) if len(body) else {}
    key = document.get("key")
    if type(key) is not str:
        raise invalid("Shared memory register request has no 'key' field", hint="the name of the object, as a string")
    return SystemRegion(name, key, _number(document, "offset", 0), _number(document, "byte_size"))


def decode_cuda_register(name: str, body: bytes | memoryview) -> CudaRegion:
    """Return the region in the body of a request to register CUDA shared memory.

    Raises:
        ServingError: INVALID_ARG for a body that does not name one.
    """
    document = parse_object(body) if len(body) else {}
    handle = document.get("raw_handle")
    text = handle.get("b64") if type(handle) is dict else None
    if type(text) is not str:
        raise invalid("Shared memory register request has no 'raw_handle' field with the handle as base64 in 'b64'")
    try:
        raw = b64decode(text, validate=True)
    except (Base64Error, ValueError) as error:
        raise invalid(f"Shared memory register request: 'raw_handle' is not base64: {error}") from error
    return CudaRegion(name, raw, _number(document, "device_id"), _number(document, "byte_size"))


def describe_system(regions: Iterable[SystemRegion]) -> list[Object]:
    return [dict(region._asdict()) for region in regions]


def describe_cuda(regions: Iterable[CudaRegion]) -> list[Object]:
    """Return the status document of CUDA shared memory."""
    return [{"name": r.name, "device_id": r.device_id, "byte_size": r.byte_size} for r in regions]


def _number(document: Object, key: str, default: int | None = None) -> int:
    value = document.get(key, default)
    if value is None:
        raise invalid(f"Shared memory register request has no '{key}' field")
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        got = value if type(value) is int else kind_of(value)
        raise invalid(f"Shared memory register request: '{key}' must be a non-negative integer, got {got}")
    return value
