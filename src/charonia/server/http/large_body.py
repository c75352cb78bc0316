"""The memory that a large body is received in, so that the kernel makes the only copy of a tensor. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from charonia.wire.tensors import Lend

DIRECT_BODY_BYTES = 64 * 1024
"""A body of which at least this many bytes are outstanding is received directly into its own buffer."""

ALIGNMENT_BYTES = 64
"""Alignment of the first tensor in such a buffer."""

JSON_SIZE = b"inference-header-content-length"
"""Header field with the length of the JSON part of a body."""

DIGITS_MAX = 18
"""Longest number in a header field."""


def body_buffer(
    headers: Mapping[bytes, bytes], length: int, parts: Sequence[bytes], lend: Lend | None = None
) -> memoryview:
    """Return the buffer of a body in progress, with the part that has been received.

    Args:
        headers: Header fields by lower-case name.
        length: Size of the whole body in bytes.
        parts: What has been received.
        lend: Lends the memory of bodies that hold tensors as they are: behind JSON, and not compressed.
    """
    json_size = headers.get(JSON_SIZE, b"")
    size = length + ALIGNMENT_BYTES
    has_tensors = bool(json_size) and b"content-encoding" not in headers
    lent = lend(size) if lend is not None and has_tensors else None
    # A bytearray would be zeroed first.
    memory = np.empty(size, np.uint8) if lent is None else np.frombuffer(lent, np.uint8)
    first_tensor = memory.ctypes.data + (int(json_size) if json_size.isdigit() and len(json_size) < DIGITS_MAX else 0)
    start = -first_tensor % ALIGNMENT_BYTES
    body = memory.data[start : start + length]
    received = b"".join(parts)
    body[: len(received)] = received
    return body
