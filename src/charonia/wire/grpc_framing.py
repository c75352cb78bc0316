"""Length-prefixed messages of a call: a flag byte, four bytes of length, and the message, possibly compressed.

Invariants, which the fuzzer checks:

1. The result is the same messages or the same error, however the bytes of a call are split.
2. The reader never fills more memory than it received, and refuses a message over the limit as soon as its length is
   known.

Source: "gRPC over HTTP/2", Length-Prefixed-Message.
"""

import zlib
from collections.abc import Sequence
from typing import Final

from charonia.wire.grpc_status import RpcError, Status
from charonia.wire.tensors import Lend

Buffer = bytes | memoryview

PREFIX_BYTES: Final = 5

ENCODINGS: Final = (b"identity", b"deflate", b"gzip")
"""Supported message encodings."""

COMPRESS_ABOVE_BYTES: Final = 256
"""Smaller messages are sent uncompressed: compression would make them larger or cost more than it saves."""

VIEW_ABOVE_BYTES: Final = 32 * 1024
"""Larger messages are views of the received bytes; smaller ones are copied, which is cheaper to read."""

LENT_ABOVE_BYTES: Final = 64 * 1024
"""Larger uncompressed messages are put together in lent memory, where there is any."""

LENT_ALIGNMENT_BYTES: Final = 64
"""Alignment of their end: that of the last tensor, if its size is a multiple of it."""

_WINDOW_BITS: Final = {b"gzip": 31, b"deflate": 15}
"""zlib's container formats; gRPC's "deflate" is the zlib format."""


def sole_message(data: bytes, limit: int) -> Buffer | None:
    """Return the message if `data` is exactly one uncompressed message within `limit`, else None."""
    size = len(data) - PREFIX_BYTES
    if size < 0 or data[0] or size > limit or int.from_bytes(data[1:5], "big") != size:
        return None
    return data[5:] if size <= VIEW_ABOVE_BYTES else memoryview(data)[5:]


def prefix(size: int, compressed: bool = False) -> bytes:
    """Return the bytes before a message of `size` bytes."""
    return (b"\1" if compressed else b"\0") + size.to_bytes(4, "big")


def framed(parts: Sequence[Buffer], encoding: bytes = b"identity", level: int = 0) -> list[Buffer]:
    """Return the bytes of a message that consists of `parts`, in pieces; a single one if it is small.

    Args:
        parts: The message, in pieces.
        encoding: How to compress it, if that is worthwhile.
        level: zlib's level, 1 to 9.
    """
    size = sum(len(part) for part in parts)  # compiled as a loop
    if encoding != b"identity" and size > COMPRESS_ABOVE_BYTES:
        message = compress(b"".join(parts), encoding, level)
        return [prefix(len(message), compressed=True) + message]
    if size <= VIEW_ABOVE_BYTES:
        return [b"".join((prefix(size), *parts))]
    return [prefix(size) + parts[0], *parts[1:]]


class MessageReader:
    """Parses the bytes of one direction of a call into messages.

    Attributes:
        pending_bytes: Bytes received and not yet returned.
    """

    __slots__ = ("_buffer", "_encoding", "_lend", "_lent", "_lent_size", "_limit", "_position")

    def __init__(self, encoding: bytes, limit: int, lend: Lend | None = None) -> None:
        """Create a reader.

        Args:
            encoding: Encoding of compressed messages, one of `ENCODINGS`.
            limit: Largest message in bytes, as received and decompressed.
            lend: Lends memory for large messages.
        """
        self._encoding = encoding
        self._limit = limit
        self._lend = lend
        self._lent: memoryview | None = None  # memory of the first message
        self._lent_size = 0  # bytes of the message in it
        self._buffer = bytearray()
        self._position = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes received and not yet returned."""
        in_lent = PREFIX_BYTES + self._lent_size if self._lent is not None else 0
        return len(self._buffer) - self._position + in_lent

    def feed(self, data: bytes) -> None:
        """Add received bytes.

        Raises:
            RpcError: RESOURCE_EXHAUSTED if the next message is over the limit.
        """
        lent = self._lent
        if lent is not None:
            end = self._lent_size + len(data)
            if end > len(lent):
                size = len(lent) - self._lent_size
                self._buffer += memoryview(data)[size:]
                data, end = data[:size], len(lent)
            lent[self._lent_size : end] = data
            self._lent_size = end
            return
        self._buffer += data
        size = self._next_size()
        if size > LENT_ABOVE_BYTES and self._lend is not None:
            self._move_to_lent(size, self._lend)

    def next_message(self) -> Buffer | None:
        """Return the next message, or None until more bytes arrive.

        Raises:
            RpcError: The message is over the limit, or cannot be decompressed.
        """
        if self._lent is not None:
            return self._take_lent(self._lent)
        size = self._next_size()
        start = self._position + PREFIX_BYTES
        if size < 0 or len(self._buffer) < start + size:
            return None
        flag = self._buffer[self._position]
        self._position = start + size
        if self._position == len(self._buffer) and size > VIEW_ABOVE_BYTES:
            # The reader releases the buffer, so a view of it needs no copy.
            message: Buffer = memoryview(self._buffer)[start : self._position]
            self._buffer, self._position = bytearray(), 0
        else:
            message = bytes(memoryview(self._buffer)[start : self._position])
            self._compact()
        if flag == 0:
            return message
        if flag != 1 or self._encoding == b"identity":
            raise RpcError(Status.INTERNAL, f"message has compression flag {flag}, but the call has no grpc-encoding")
        return decompress(message, self._encoding, self._limit)

    def _move_to_lent(self, size: int, lend: Lend) -> None:
        """Continue to receive the first message in lent memory if it has just begun, uncompressed, and there is any."""
        start = self._position + PREFIX_BYTES
        if self._buffer[self._position] or len(self._buffer) - start >= size:
            return
        lent = lend(size + LENT_ALIGNMENT_BYTES)
        if lent is not None:
            first = -size % LENT_ALIGNMENT_BYTES
            self._lent = lent[first : first + size]
            self._lent_size = len(self._buffer) - start
            self._lent[: self._lent_size] = memoryview(self._buffer)[start:]
            self._buffer, self._position = bytearray(), 0

    def _take_lent(self, lent: memoryview) -> memoryview | None:
        if self._lent_size < len(lent):
            return None
        self._lent, self._lent_size = None, 0
        return lent

    def _next_size(self) -> int:
        """Return the size of the next message, -1 if it is not known yet."""
        start = self._position
        if len(self._buffer) - start < PREFIX_BYTES:
            return -1
        size = int.from_bytes(self._buffer[start + 1 : start + PREFIX_BYTES], "big")
        if size > self._limit:
            raise too_large(f"{size} bytes", self._limit)
        return size

    def _compact(self) -> None:
        # Removing the front moves the rest, so this waits until the rest is the smaller part.
        if self._position * 2 >= len(self._buffer):
            del self._buffer[: self._position]
            self._position = 0


def too_large(size: str, limit: int) -> RpcError:
    return RpcError(Status.RESOURCE_EXHAUSTED, f"message too large: at most {limit} bytes are accepted, got {size}")


def compress(message: bytes, encoding: bytes, level: int) -> bytes:
    """Return the message in an encoding other than identity."""
    compressor = zlib.compressobj(level, wbits=_WINDOW_BITS[encoding])
    return compressor.compress(message) + compressor.flush()


def decompress(data: Buffer, encoding: bytes, limit: int) -> bytes:
    """Return the content of a compressed message.

    Raises:
        RpcError: RESOURCE_EXHAUSTED for more than `limit` bytes, INTERNAL for data that is not in the encoding.
    """
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        message = decompressor.decompress(data, limit + 1)
    except zlib.error as error:
        raise RpcError(Status.INTERNAL, f"message cannot be decompressed as {encoding.decode()}: {error}") from error
    if len(message) > limit:
        raise too_large("more after decompression", limit)
    if not decompressor.eof or decompressor.unused_data:
        raise RpcError(Status.INTERNAL, f"message is not exactly one {encoding.decode()} stream")
    return message
