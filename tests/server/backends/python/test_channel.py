"""The channel to a worker: whatever is placed in messages, however they are split, comes out equal."""

import os
import socket
from collections.abc import Iterator, Sequence
from itertools import pairwise

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from charonia.server.channel import channel, regions
from charonia.server.channel.channel import (
    BUFFERS_MAX,
    FDS_MAX,
    INLINE_BYTES_MAX,
    Incoming,
    Outgoing,
    Receiver,
    receive,
    remaining,
    send_all,
    send_some,
)
from charonia.server.channel.regions import ChannelError, Mappings, RegionPool

LARGE = INLINE_BYTES_MAX + 1
SMALLEST_REGION = 128 * 1024


class Ends:
    """A sender and a receiver, with nothing but bytes and descriptors between them."""

    def __init__(self) -> None:
        self.pool = RegionPool()
        self.mappings = Mappings()
        self.receiver = Receiver(self.mappings)

    def send(self, tensors: Sequence[bytes]) -> Incoming:
        """Send one message whose header says where the tensors are."""
        data, fds = self.packed(tensors)
        (message,) = self.receiver.feed(data, fds)
        return message

    def packed(self, tensors: Sequence[bytes]) -> tuple[bytes, list[int]]:
        outgoing = Outgoing(self.pool)
        places = [outgoing.place(tensor) for tensor in tensors]
        return b"".join(outgoing.frame(("tensors", places))), [os.dup(fd) for fd in outgoing.fds]

    def found(self, message: Incoming) -> list[memoryview]:
        return [message.find(place) for place in message.header[1]]

    def close(self) -> None:
        self.receiver.close()
        self.mappings.close()
        self.pool.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = Ends()
    yield both
    both.close()


def open_fds() -> int:
    return psutil.Process().num_fds()


sizes = st.one_of(st.integers(0, 40), st.sampled_from([INLINE_BYTES_MAX, LARGE, 3 * LARGE]))


@settings(max_examples=40, deadline=None)
@given(
    messages=st.lists(st.lists(sizes, max_size=4), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 500_000), max_size=6),
    released_early=st.booleans(),
)
def test_messages_come_out_equal_however_their_bytes_are_split(
    messages: list[list[int]], cuts: list[int], released_early: bool
) -> None:
    ends = Ends()
    before = open_fds()
    sent = [[bytes([index + 1]) * size for index, size in enumerate(message)] for message in messages]
    stream, fds = b"", []
    for tensors in sent:
        data, more = ends.packed(tensors)
        stream += data
        fds += more
    edges = sorted({0, *(cut % len(stream) for cut in cuts), len(stream)})

    received = []
    for start, end in pairwise(edges):
        for message in ends.receiver.feed(stream[start:end], fds if start == 0 else ()):
            views = ends.found(message)
            received.append([bytes(view) for view in views])
            del views
            if released_early:
                ends.pool.release(message.regions)

    assert received == sent
    ends.close()
    assert open_fds() == before


def test_a_region_is_announced_with_its_first_message_and_used_again_when_released(ends: Ends) -> None:
    first = ends.send([b"a" * LARGE])
    ((region, announced, *_),) = first.header[1]
    assert announced
    assert bytes(ends.found(first)[0]) == b"a" * LARGE
    assert first.regions == [region]

    assert ends.pool.release(first.regions) == []
    second = ends.send([b"b" * LARGE])

    assert second.header[1] == [(region, False, LARGE, 0)]
    assert bytes(ends.found(second)[0]) == b"b" * LARGE


def test_a_region_that_is_not_released_is_not_written_again(ends: Ends) -> None:
    first = ends.send([b"a" * LARGE])
    view = ends.found(first)[0]
    ends.found(ends.send([b"b" * LARGE]))
    assert bytes(view) == b"a" * LARGE


def test_a_withdrawn_message_leaves_its_regions_to_be_announced_by_the_next(ends: Ends) -> None:
    outgoing = Outgoing(ends.pool)
    outgoing.place(b"x" * LARGE)
    outgoing.withdraw()

    message = ends.send([b"y" * LARGE])

    assert message.header[1] == [(1, True, LARGE, 0)]
    assert bytes(ends.found(message)[0]) == b"y" * LARGE


def test_a_withdrawn_message_leaves_known_regions_known(ends: Ends) -> None:
    first = ends.send([b"x" * LARGE])
    ends.found(first)
    ends.pool.release(first.regions)
    outgoing = Outgoing(ends.pool)
    outgoing.place(b"y" * LARGE)
    outgoing.withdraw()
    message = ends.send([b"z" * LARGE])
    assert bytes(ends.found(message)[0]) == b"z" * LARGE


def test_releasing_a_region_that_nobody_has_does_nothing(ends: Ends) -> None:
    assert ends.pool.release([7, 7]) == []


def test_idle_regions_beyond_the_pools_limit_are_given_up(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "POOL_BYTES_MAX", 2 * SMALLEST_REGION)
    message = ends.send([b"x" * LARGE] * 3)
    ends.found(message)
    before = open_fds()

    dropped = ends.pool.release(message.regions)
    ends.mappings.drop(dropped)

    assert dropped == [3]
    assert open_fds() < before
    with pytest.raises(ChannelError, match="region 3"):
        ends.mappings.view(3, 1)


def test_a_tensor_beyond_the_descriptors_of_a_message_goes_inline(ends: Ends) -> None:
    message = ends.send([bytes([i]) * LARGE for i in range(FDS_MAX + 2)])
    regions = [place[0] for place in message.header[1]]
    assert all(regions[:FDS_MAX])
    assert regions[FDS_MAX:] == [0, 0]
    assert [view[0] for view in ends.found(message)] == list(range(FDS_MAX + 2))


def test_a_tensor_for_which_no_memory_can_be_had_goes_inline(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> int:
        raise OSError("too many open files")

    monkeypatch.setattr(regions, "make_memory", refuse)
    message = ends.send([b"x" * LARGE])
    assert message.header[1] == [(0, False, LARGE, 0)]
    assert bytes(ends.found(message)[0]) == b"x" * LARGE


def test_dropping_a_region_leaves_the_views_that_are_held(ends: Ends) -> None:
    message = ends.send([b"kept" * LARGE])
    view = ends.found(message)[0]
    ends.mappings.drop(message.regions)
    ends.pool.close()
    assert bytes(view[:4]) == b"kept"


def test_closing_the_pool_leaves_views_of_its_memory_alone(ends: Ends) -> None:
    region = ends.pool.take(1)
    view = memoryview(region.memory)
    ends.pool.close()
    assert view[0] == 0


def test_a_closed_receiver_closes_descriptors_that_no_message_has_taken() -> None:
    ends = Ends()
    before = open_fds()
    data, fds = ends.packed([b"x" * LARGE])
    ends.receiver.feed(data[:5], fds)
    ends.close()
    assert open_fds() == before


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xff\xff\xff\x7f" + bytes(4), "a header of 2147483647 bytes is too large"),
        (b"\x01\0\0\0" + bytes(4) + b"?", "a header cannot be read"),
        (bytes(8), "a header cannot be read"),
        (b"\x01\0\0\0" + bytes(4) + b"N", "does not begin with the kind"),
        (b"\x05\0\0\0" + bytes(4) + b"(\0\0\0\0", "does not begin with the kind"),
    ],
)
@pytest.mark.parametrize("more", [b"", b"\x01"])
def test_bytes_that_are_no_message_are_an_error(ends: Ends, data: bytes, expected: str, more: bytes) -> None:
    with pytest.raises(ChannelError, match=expected):
        ends.receiver.feed(data + more)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ((0, False, 5, 0), "ends within a tensor"),
        ((9, False, 5, 2), "region 9 of 7 bytes is not mapped"),
        ((9, True, 5, 0), "descriptor of region 9 is missing"),
        ((0, False, -1, 0), "malformed"),
        ((1, False, 1, -1), "malformed"),
        ((0, False, 1), "malformed"),
        ([0, False, 1, 0], "malformed"),
        (("a", False, 1, 0), "malformed"),
        ((1, False, 2.5, 0), "malformed"),
        ((1, False, 2, "0"), "malformed"),
    ],
)
def test_a_place_that_leads_nowhere_is_an_error(ends: Ends, place: "channel.Place", expected: str) -> None:
    message = ends.send([b"1234"])
    with pytest.raises(ChannelError, match=expected):
        message.find(place)


def test_a_tensor_that_is_larger_than_its_region_is_an_error(ends: Ends) -> None:
    message = ends.send([b"x" * LARGE])
    ((region, announced, *_),) = message.header[1]
    with pytest.raises(ChannelError, match="is not mapped"):
        message.find((region, announced, SMALLEST_REGION + 1, 0))
    with pytest.raises(ChannelError, match="is not mapped"):
        message.find((region, False, LARGE, SMALLEST_REGION - LARGE + 1))


def test_a_descriptor_that_is_no_memory_is_an_error_and_is_closed(ends: Ends) -> None:
    reading, writing = os.pipe()
    before = open_fds()
    with pytest.raises(ChannelError, match="cannot be mapped"):
        ends.mappings.add(1, reading)
    assert open_fds() == before - 1
    os.close(writing)


def test_a_header_that_cannot_be_written_or_is_too_long_is_an_error(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ChannelError, match="cannot be sent"):
        Outgoing(ends.pool).frame(("x", object()))
    monkeypatch.setattr(channel, "HEADER_BYTES_MAX", 10)
    with pytest.raises(ChannelError, match="too large"):
        Outgoing(ends.pool).frame(("x" * 11,))


@given(st.lists(st.binary(max_size=5), max_size=6), st.integers(0, 30))
def test_what_remains_is_what_was_not_sent(buffers: list[bytes], sent: int) -> None:
    whole = b"".join(buffers)
    assert b"".join(remaining(buffers, min(sent, len(whole)))) == whole[sent:]


def test_a_socket_carries_more_buffers_than_one_call_takes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        buffers: list[channel.Data] = [b"ab"] * (BUFFERS_MAX * 2 + 3)
        send_all(ours, buffers, [])
        ours.close()
        got = b""
        while data := receive(theirs)[0]:
            got += data
    assert got == b"ab" * len(buffers)


def test_a_socket_carries_more_descriptors_than_one_call_takes() -> None:
    ours, theirs = socket.socketpair()
    ends = Ends()
    with ours, theirs:
        stream: list[channel.Data] = []
        fds: list[int] = []
        for number in range(3):
            outgoing = Outgoing(ends.pool)
            places = [outgoing.place(bytes([number]) * LARGE) for _ in range(FDS_MAX)]
            stream += outgoing.frame(("tensors", places))
            fds += outgoing.fds
        assert send_some(ours, stream, fds) == 1
        send_all(ours, remaining(stream, 1), fds[FDS_MAX:])
        ours.close()
        got = []
        while True:
            data, received = receive(theirs)
            if not data:
                break
            for message in ends.receiver.feed(data, received):
                first_bytes = {view[0] for view in ends.found(message)}
                got.append(first_bytes)
    ends.close()
    assert got == [{0}, {1}, {2}]
