"""Content codings of HTTP bodies: gzip and deflate (zlib), with a limit on the decompressed size."""

import re
import zlib

from charonia.core.errors import invalid, unsupported

ACCEPTED = "gzip, deflate"
"""Codings of request bodies, as a header field's value."""

COMPRESS_FROM_BYTES = 1024
"""Smaller responses are sent uncompressed. Most clients accept compression by default without needing it."""

RAISE_THE_LIMIT = "Use --http-max-input-size to increase the limit."
"""Hint about a body that is too large."""

_LEVEL = 1
"""Fast rather than small: tensors compress badly, and the server's CPU time is the scarcer resource."""

_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_ELEMENT = re.compile(rb"\s*([\w-]+)\s*(?:;\s*q\s*=\s*([01](?:\.\d{0,3})?)\s*)?")


def decompress(body: bytes | memoryview, coding: str, bytes_max: int) -> bytes | memoryview:
    """Return the body without its content coding.

    Raises:
        ServingError: UNSUPPORTED for codings other than gzip, deflate and identity; INVALID_ARG for a body that is not
            in this coding, or that would be larger than `bytes_max` bytes.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return body
    wbits = _WBITS.get(coding)
    if wbits is None:
        raise unsupported(f"Unsupported compression type '{coding:.40}'", hint=f"accepted: {ACCEPTED}")
    decoder = zlib.decompressobj(wbits)
    try:
        plain = decoder.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise invalid(f"the request body is not valid {coding} data: {error}") from error
    if len(plain) > bytes_max:
        raise invalid(
            f"Decompressed data size exceeds the maximum allowed value of {bytes_max} bytes", hint=RAISE_THE_LIMIT
        )
    if not decoder.eof:
        raise invalid(f"the {coding} data of the request body ends too early")
    if decoder.unused_data:
        raise invalid(f"the request body continues after its {coding} data")
    return plain


def compress(parts: list[bytes | memoryview], coding: str) -> bytes:
    """Return the joined parts in a content coding, "gzip" or "deflate"."""
    encoder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WBITS[coding])
    return b"".join([*(encoder.compress(part) for part in parts), encoder.flush()])


def choose_coding(accept_encoding: bytes) -> str:
    """Return the coding for a response: the one of gzip, deflate and identity with the largest q-value.

    The first listed wins among equals; "" stands for identity, and is the result if nothing fits.
    """
    best, best_q = b"", 0.0
    for element in accept_encoding.lower().split(b","):
        match = _ELEMENT.fullmatch(element)
        if match is None or match[1] not in (b"gzip", b"deflate", b"identity"):
            continue
        q = float(match[2]) if match[2] else 1.0
        if q > best_q:
            best, best_q = match[1], q
    return "" if best == b"identity" else best.decode()
