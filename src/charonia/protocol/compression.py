"""Content codings of HTTP bodies: gzip and deflate (zlib), with a limit on what a body may grow to."""

import re
import zlib

from charonia.core.errors import invalid, unsupported

GZIP_WBITS = 16 + zlib.MAX_WBITS
ACCEPTED = "gzip, deflate"
_RESPONSE_LEVEL = 1
"""Fast rather than small: tensors compress badly, and a server's time is the scarcer good."""

_WBITS = {"gzip": GZIP_WBITS, "deflate": zlib.MAX_WBITS}
_ELEMENT = re.compile(r"\s*([\w*-]+)\s*(?:;\s*q\s*=\s*([0-9.]+)\s*)?(?:;[^,]*)?")


def decompress(body: bytes | memoryview, coding: str, size_max: int) -> bytes:
    """Return the body without its content coding.

    Raises:
        ServingError: UNSUPPORTED for another coding than gzip, deflate and identity; INVALID_ARG for a body that is not
            in this coding, or that would be larger than `size_max` bytes.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return bytes(body)
    wbits = _WBITS.get(coding)
    if wbits is None:
        raise unsupported(f"Unsupported compression type '{coding}'", hint=f"accepted: {ACCEPTED}")
    decoder = zlib.decompressobj(wbits)
    try:
        plain = decoder.decompress(body, size_max + 1)
    except zlib.error as error:
        raise invalid(f"the request body is not valid {coding} data: {error}") from error
    if len(plain) > size_max:
        raise invalid(
            f"the decompressed request body is larger than the maximum of {size_max} bytes (--http-max-input-size)"
        )
    if not decoder.eof:
        raise invalid(f"the {coding} data of the request body ends too early")
    if decoder.unused_data:
        raise invalid(f"the request body goes on after its {coding} data")
    return plain


def compress(parts: list[bytes | memoryview], coding: str) -> bytes:
    """Return the joined parts in a content coding, "gzip" or "deflate"."""
    encoder = zlib.compressobj(_RESPONSE_LEVEL, zlib.DEFLATED, _WBITS[coding])
    return b"".join([*(encoder.compress(part) for part in parts), encoder.flush()])


def choose_coding(accept_encoding: str) -> str:
    """Return the coding for a response: the one of gzip, deflate and identity with the largest q-value.

    The first listed wins among equals; "" stands for identity, also where nothing fits.
    """
    best, best_q = "", 0.0
    for element in accept_encoding.lower().split(","):
        match = _ELEMENT.fullmatch(element)
        if match is None or match[1] not in ("gzip", "deflate", "identity"):
            continue
        try:
            q = float(match[2]) if match[2] else 1.0
        except ValueError:
            continue
        if q > best_q:
            best, best_q = match[1], q
    return "" if best == "identity" else best
