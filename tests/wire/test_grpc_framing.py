import gzip
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.wire.grpc_framing import (
    COMPRESS_ABOVE_BYTES,
    LENT_ABOVE_BYTES,
    VIEW_ABOVE_BYTES,
    Buffer,
    MessageReader,
    compress,
    decompress,
    framed,
    prefix,
    sole_message,
)
from charonia.wire.grpc_status import RpcError, Status
from charonia.wire.tensors import Lend

LIMIT = 1_000_000


def read(
    data: bytes, sizes: list[int], encoding: bytes = b"identity", limit: int = LIMIT, lend: Lend | None = None
) -> list[bytes] | Status:
    """Feed `data` in pieces of these sizes, then the rest; return the messages, or the error's status."""
    reader = MessageReader(encoding, limit, lend)
    messages: list[bytes] = []
    position = 0
    try:
        for size in (*sizes, len(data)):
            reader.feed(data[position : position + size])
            position += size
            while (message := reader.next_message()) is not None:
                messages.append(bytes(message))
    except RpcError as error:
        return error.status
    return messages


def test_the_prefix_is_a_flag_and_the_length() -> None:
    assert prefix(0x01020304) == b"\x00\x01\x02\x03\x04"
    assert prefix(5, compressed=True) == b"\x01\x00\x00\x00\x05"


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(0, 30), max_size=12))
def test_the_messages_do_not_depend_on_how_the_bytes_are_split(messages: list[bytes], sizes: list[int]) -> None:
    data = b"".join(prefix(len(message)) + message for message in messages)

    assert read(data, sizes) == messages


@given(st.binary(max_size=60), st.lists(st.integers(0, 30), max_size=12))
@settings(max_examples=200)
def test_the_outcome_does_not_depend_on_the_split(data: bytes, sizes: list[int]) -> None:
    assert read(data, sizes, b"gzip", 40) == read(data, [], b"gzip", 40)


LENT_SIZES = st.sampled_from([0, 5, LENT_ABOVE_BYTES, LENT_ABOVE_BYTES + 1, 2 * LENT_ABOVE_BYTES])


@given(
    st.lists(LENT_SIZES, max_size=4),
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 3 * LENT_ABOVE_BYTES)), max_size=9),
)
@settings(deadline=None)
def test_messages_in_lent_memory_are_the_same_however_they_are_split(lengths: list[int], sizes: list[int]) -> None:
    messages = [bytes([number + 1]) * length for number, length in enumerate(lengths)]
    data = b"".join(prefix(len(message)) + message for message in messages)

    assert read(data, sizes, lend=lambda size: memoryview(bytearray(size))) == messages


@given(st.lists(st.integers(0, 2 * LENT_ABOVE_BYTES), max_size=6))
def test_a_message_that_is_too_large_is_refused_behind_one_in_lent_memory(sizes: list[int]) -> None:
    size = 2 * LENT_ABOVE_BYTES
    data = prefix(size) + bytes(size) + prefix(LIMIT + 1) + b"x"

    assert read(data, sizes, lend=lambda size: memoryview(bytearray(size))) is Status.RESOURCE_EXHAUSTED


def test_a_large_message_is_put_together_in_lent_memory_whose_end_is_aligned() -> None:
    lent: list[memoryview] = []

    def lend(size: int) -> memoryview:
        lent.append(memoryview(bytearray(size)))
        return lent[-1]

    size = LENT_ABOVE_BYTES + 100
    reader = MessageReader(b"identity", LIMIT, lend)
    reader.feed(prefix(size) + b"abc")
    assert reader.pending_bytes == 5 + 3
    reader.feed(bytes(size - 3) + prefix(1) + b"z")
    assert reader.pending_bytes == 5 + size + 6

    message = reader.next_message()

    assert isinstance(message, memoryview)
    assert message.obj is lent[0].obj
    first = bytes(lent[0]).index(b"abc")
    assert (first + size) % 64 == 0
    assert reader.next_message() == b"z"
    assert (len(lent), reader.pending_bytes) == (1, 0)


@pytest.mark.parametrize("flag", [1, 2])
def test_a_compressed_message_takes_no_lent_memory(flag: int) -> None:
    reader = MessageReader(b"gzip", LIMIT, lambda size: pytest.fail("it was lent"))

    reader.feed(bytes((flag,)) + prefix(LENT_ABOVE_BYTES * 2)[1:] + b"abc")

    assert reader.pending_bytes == 8


def test_a_message_for_which_nothing_is_lent_is_put_together_elsewhere() -> None:
    large = b"x" * (2 * LENT_ABOVE_BYTES)

    assert read(prefix(len(large)) + large, [10, 70_000], lend=lambda size: None) == [large]


def test_large_messages_come_as_views_and_small_ones_as_bytes() -> None:
    large, small = b"x" * (VIEW_ABOVE_BYTES + 1), b"y" * VIEW_ABOVE_BYTES
    reader = MessageReader(b"identity", LIMIT)

    reader.feed(prefix(len(large)) + large[:7])
    assert reader.next_message() is None
    reader.feed(large[7:])
    message = reader.next_message()
    reader.feed(prefix(len(small)) + small)

    assert isinstance(message, memoryview)
    assert message == large
    assert reader.next_message() == small
    assert reader.pending_bytes == 0


def test_a_large_message_with_another_behind_it_is_not_disturbed_by_what_follows() -> None:
    large = b"x" * (VIEW_ABOVE_BYTES + 1)
    reader = MessageReader(b"identity", LIMIT)
    reader.feed((prefix(len(large)) + large) * 2)

    first, second = reader.next_message(), reader.next_message()
    reader.feed(prefix(1) + b"z")

    assert (first, second, reader.next_message()) == (large, large, b"z")


@pytest.mark.parametrize("data", [prefix(11), prefix(11) + b"x" * 11, prefix(2**32 - 1)])
def test_a_message_over_the_limit_is_refused_by_its_length(data: bytes) -> None:
    with pytest.raises(RpcError, match="at most 10 bytes") as caught:
        MessageReader(b"identity", 10).feed(data)

    assert caught.value.status is Status.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("encoding", "flag"), [(b"identity", 1), (b"gzip", 2), (b"identity", 255)])
def test_a_flag_without_meaning_is_refused(encoding: bytes, flag: int) -> None:
    assert read(bytes((flag,)) + b"\0\0\0\1x", [], encoding) is Status.INTERNAL


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_a_compressed_message_is_decompressed(encoding: bytes) -> None:
    packed = compress(b"abc" * 100, encoding, 6)
    data = prefix(len(packed), compressed=True) + packed

    assert read(data, [3], encoding) == [b"abc" * 100]
    assert len(packed) < 100


def test_gzip_and_deflate_are_the_formats_of_those_names() -> None:
    assert gzip.decompress(compress(b"abc", b"gzip", 1)) == b"abc"
    assert zlib.decompress(compress(b"abc", b"deflate", 1)) == b"abc"
    assert decompress(gzip.compress(b"abc"), b"gzip", 3) == b"abc"


def test_a_decompression_bomb_stops_at_the_limit() -> None:
    with pytest.raises(RpcError, match="after decompression") as caught:
        decompress(compress(b"\0" * 100_000, b"gzip", 9), b"gzip", 99_999)

    assert caught.value.status is Status.RESOURCE_EXHAUSTED
    assert len(decompress(compress(b"\0" * 100_000, b"gzip", 9), b"gzip", 100_000)) == 100_000


@pytest.mark.parametrize(
    "data",
    [b"", b"no gzip", gzip.compress(b"abc", mtime=0)[:-1], gzip.compress(b"abc", mtime=0) + b"x"],
    ids=["empty", "other", "cut", "more"],
)
def test_broken_compressed_data_is_refused(data: bytes) -> None:
    with pytest.raises(RpcError) as caught:
        decompress(data, b"gzip", LIMIT)

    assert caught.value.status is Status.INTERNAL


def test_a_message_alone_in_its_bytes_is_found_at_once() -> None:
    large = b"x" * (VIEW_ABOVE_BYTES + 1)

    assert sole_message(prefix(3) + b"abc", 3) == b"abc"
    assert sole_message(prefix(len(large)) + large, LIMIT) == large


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0\0",
        prefix(3) + b"ab",
        prefix(3) + b"abcd",
        prefix(3, compressed=True) + b"abc",
        prefix(4) + b"abcd",
    ],
    ids=["nothing", "no prefix", "short", "long", "compressed", "over the limit"],
)
def test_other_bytes_are_left_to_the_reader(data: bytes) -> None:
    assert sole_message(data, 3) is None


def joined(parts: list[Buffer]) -> bytes:
    return b"".join(parts)


def test_small_messages_are_one_piece_and_large_ones_keep_theirs() -> None:
    large = memoryview(b"x" * (VIEW_ABOVE_BYTES + 1))

    assert framed([b"ab", b"cd"]) == [prefix(4) + b"abcd"]
    pieces = framed([b"head", large])
    assert pieces == [prefix(4 + len(large)) + b"head", large]
    assert pieces[1] is large


def test_compression_leaves_small_messages_alone() -> None:
    small, large = b"x" * COMPRESS_ABOVE_BYTES, b"x" * (COMPRESS_ABOVE_BYTES + 1)

    assert framed([small], b"gzip", 6) == [prefix(len(small)) + small]
    assert read(joined(framed([large], b"gzip", 6)), [], b"gzip") == [large]
    assert len(joined(framed([large], b"gzip", 6))) < 60
