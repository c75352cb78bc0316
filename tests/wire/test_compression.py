import gzip
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.core.errors import Code, ServingError
from charonia.wire.compression import choose_coding, compress, decompress


@settings(max_examples=50)
@given(parts=st.lists(st.binary(max_size=50), max_size=4), coding=st.sampled_from(["gzip", "deflate"]))
def test_what_is_compressed_can_be_read_again(parts: list[bytes], coding: str) -> None:
    assert decompress(compress([*parts], coding), coding, 1000) == b"".join(parts)


@pytest.mark.parametrize("coding", ["", "identity", " Identity "])
def test_identity_changes_nothing(coding: str) -> None:
    assert decompress(b"abc", coding, 3) == b"abc"


def test_a_body_may_grow_to_the_limit_and_not_beyond() -> None:
    assert len(decompress(gzip.compress(bytes(1000)), "GZIP", 1000)) == 1000
    with pytest.raises(ServingError, match="Decompressed data size exceeds the maximum allowed value of 1000 bytes"):
        decompress(zlib.compress(bytes(10_000_000)), "deflate", 1000)


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        (b"junk", "is not valid gzip data"),
        (gzip.compress(b"abc", mtime=0)[:-1], "ends too early"),
        (gzip.compress(b"abc", mtime=0) + b"x", "continues after its gzip data"),
    ],
)
def test_a_broken_body_is_refused(body: bytes, fragment: str) -> None:
    with pytest.raises(ServingError, match=fragment) as caught:
        decompress(body, "gzip", 1000)
    assert caught.value.code is Code.INVALID_ARG


def test_an_unknown_coding_is_refused() -> None:
    with pytest.raises(ServingError, match="Unsupported compression type 'br'") as caught:
        decompress(b"", "br", 1000)
    assert caught.value.code is Code.UNSUPPORTED


@pytest.mark.parametrize(
    ("header", "coding"),
    [
        (b"", ""),
        (b"gzip", "gzip"),
        (b"gzip, deflate", "gzip"),
        (b"Deflate, gzip", "deflate"),
        (b"gzip;q=0.5, deflate;q=0.8", "deflate"),
        (b"gzip ; q=0.5 , identity", ""),
        (b"gzip;q=0", ""),
        (b"br, *;q=0.1", ""),
        (b"gzip;q=x, deflate;q=0.1", "deflate"),
        (b"gzip;q=1..5", ""),
    ],
)
def test_the_coding_that_the_client_prefers_is_chosen(header: bytes, coding: str) -> None:
    assert choose_coding(header) == coding
