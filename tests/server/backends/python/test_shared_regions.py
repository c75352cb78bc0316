"""Tensors that lie in shared memory already are named or forwarded, not copied."""

import os
import weakref
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from charonia.server.channel import channel
from charonia.server.channel.channel import INLINE_BYTES_MAX, Incoming, Outgoing, Receiver
from charonia.server.channel.regions import ChannelError, Mappings, RegionPool

SIZE = INLINE_BYTES_MAX + 4096
ONES = b"\x01" * SIZE


class Worker:
    """A server's end and a worker's end, without a socket between them."""

    def __init__(self) -> None:
        self.server_pool = RegionPool(forwards=True)
        self.server_mappings = Mappings(forwards=True)
        self.worker_mappings = Mappings()
        self.worker_pool = RegionPool(self.worker_mappings)
        self._to_worker = Receiver(self.worker_mappings)
        self._to_server = Receiver(self.server_mappings, self.server_pool)

    def receive(self, data: bytes | memoryview) -> tuple[memoryview, list[int]]:
        """Send from the server to the worker; return what arrives and the regions to give back."""
        return _passed(data, self.server_pool, self._to_worker)

    def send(self, data: bytes | memoryview) -> tuple[memoryview, list[int]]:
        return _passed(data, self.worker_pool, self._to_server)

    def close(self) -> None:
        for part in (self.server_pool, self.server_mappings, self.worker_pool, self.worker_mappings):
            part.close()


def _passed(data: bytes | memoryview, pool: RegionPool, receiver: Receiver) -> tuple[memoryview, list[int]]:
    outgoing = Outgoing(pool)
    place = outgoing.place(data)
    frame = b"".join(outgoing.frame(("tensor", place)))
    (message,) = receiver.feed(frame, [os.dup(fd) for fd in outgoing.fds])
    return message.find(place), message.regions


@pytest.fixture
def first() -> Iterator[Worker]:
    yield from _worker()


@pytest.fixture
def second() -> Iterator[Worker]:
    yield from _worker()


def _worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def test_what_a_worker_sends_back_unchanged_is_the_servers_own_memory(first: Worker) -> None:
    there, regions = first.receive(ONES)

    back, to_give_back = first.send(there)

    there[0] = 7  # the model computes in place before it answers
    assert back[0] == 7
    assert to_give_back == []
    assert regions == [1]


def test_a_region_that_came_back_is_not_written_to_while_it_is_looked_at(first: Worker) -> None:
    there, regions = first.receive(ONES)
    back, _ = first.send(there)
    kept = np.asarray(back)

    first.server_pool.release(regions)
    _, others = first.receive(b"\x02" * SIZE)

    assert others != regions
    assert kept[0] == 1
    del back, kept
    first.server_pool.release(others)
    assert first.receive(ONES)[1] in (regions, others)
    assert first.server_pool.take(SIZE).id in (*regions, *others)


def test_what_one_worker_has_sent_reaches_another_without_a_copy(first: Worker, second: Worker) -> None:
    array = np.full(SIZE, 3, np.uint8)
    from_first, _ = first.send(array.data)

    at_second, _ = second.receive(from_first)

    from_first[0] = 9
    assert at_second[0] == 9  # it is the same memory


def test_what_the_other_worker_writes_there_stays_its_own(first: Worker, second: Worker) -> None:
    from_first, _ = first.send(ONES)
    at_second, _ = second.receive(from_first)

    at_second[0] = 9

    assert from_first[0] == 1


def test_a_forwarded_region_keeps_its_content_until_it_is_released(first: Worker, second: Worker) -> None:
    from_first, _ = first.send(ONES)
    array = np.asarray(from_first)
    forwarded, regions = second.receive(array.data)
    gone: list[bool] = []
    weakref.finalize(array, gone.append, True)
    del array, from_first
    assert not gone

    dropped = second.server_pool.release(regions)

    assert dropped == regions
    assert gone
    del forwarded


def test_forwarding_leaves_no_descriptor_behind(first: Worker, second: Worker) -> None:
    process = psutil.Process()
    from_first, _ = first.send(ONES)
    before = process.num_fds()

    for _ in range(20):
        forwarded, regions = second.receive(from_first)
        second.worker_mappings.drop(second.server_pool.release(regions))
        del forwarded

    assert process.num_fds() == before


def test_the_descriptor_of_a_region_goes_when_the_region_is_unmapped(first: Worker) -> None:
    process = psutil.Process()
    before = process.num_fds()
    first.send(ONES)

    first.server_mappings.drop([1])

    assert process.num_fds() == before + 2  # those of the sender
    outgoing = Outgoing(first.server_pool)
    assert outgoing.place(ONES)[0] > 0


def test_a_part_of_a_region_is_named_by_its_offset(first: Worker) -> None:
    there, _ = first.receive(ONES + ONES)

    back, to_give_back = first.send(there[4096:])

    there[4096] = 7
    assert (back[0], len(back), to_give_back) == (7, 2 * SIZE - 4096, [])


@pytest.mark.parametrize("place", [(-1, 0, 10, 0), (-3, 0, SIZE, 0)])
def test_a_region_that_is_not_out_cannot_be_named(first: Worker, place: "channel.Place") -> None:
    incoming = Incoming(("tensor",), memoryview(b""), [], first.server_mappings, first.server_pool)

    with pytest.raises(ChannelError, match="in use"):
        incoming.find(place)


def test_an_end_whose_regions_are_not_to_be_named_refuses_it() -> None:
    with pytest.raises(ChannelError, match="none to name"):
        Incoming(("tensor",), memoryview(b""), [], Mappings()).find((-1, 0, 10, 0))
