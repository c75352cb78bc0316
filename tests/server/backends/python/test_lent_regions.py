"""Memory that an end lends to receive tensors in: what is sent is named, and it is used again when both are done."""

import os
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from charonia.server.channel import regions
from charonia.server.channel.channel import INLINE_BYTES_MAX, Incoming, Outgoing, Receiver
from charonia.server.channel.regions import Mappings, RegionPool

SIZE = INLINE_BYTES_MAX + 4096


class End:
    def __init__(self) -> None:
        self.mappings = Mappings(forwards=True)
        self.pool = RegionPool(self.mappings, forwards=True, names_own=True)
        self._receiver = Receiver(self.mappings, self.pool)

    def send(self, other: "End", *tensors: memoryview) -> tuple[Incoming, list[memoryview]]:
        """Send tensors in one message; return it and what arrives."""
        outgoing = Outgoing(self.pool)
        places = [outgoing.place(tensor) for tensor in tensors]
        frame = b"".join(outgoing.frame(("tensors", places)))
        (message,) = other._receiver.feed(frame, [os.dup(fd) for fd in outgoing.fds])
        return message, [message.find(place) for place in places]

    def close(self) -> None:
        self.pool.close()
        self.mappings.close()


@pytest.fixture
def front_end() -> Iterator[End]:
    end = End()
    yield end
    end.close()


@pytest.fixture
def engine() -> Iterator[End]:
    end = End()
    yield end
    end.close()


def lent(end: End, size: int) -> memoryview:
    memory = end.pool.lend(size)
    assert memory is not None
    assert len(memory) == size
    return memory


def address_of(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def test_what_was_received_in_lent_memory_is_read_there_by_the_other_end(front_end: End, engine: End) -> None:
    body = lent(front_end, 100 + 2 * SIZE)
    body[100] = 1

    message, (first, second) = front_end.send(engine, body[100 : 100 + SIZE], body[100 + SIZE :])

    body[99 + SIZE], body[100 + SIZE] = 2, 3
    assert (first[0], first[SIZE - 1], second[0]) == (1, 2, 3)
    assert message.regions == [1, 1]


def test_lent_memory_is_lent_again_when_both_ends_are_done_with_all_of_it(front_end: End, engine: End) -> None:
    body = lent(front_end, 2 * SIZE)
    address = address_of(body)
    message, arrived = front_end.send(engine, body[:SIZE], body[SIZE:])
    first, second = message.regions
    del body, arrived

    front_end.pool.release([first])
    meanwhile = lent(front_end, 2 * SIZE)
    front_end.pool.release([second])

    assert address_of(meanwhile) != address
    assert address_of(lent(front_end, 2 * SIZE)) == address


def test_lent_memory_that_is_not_sent_goes_back_when_it_is_dropped(front_end: End) -> None:
    before = psutil.Process().num_fds()

    for _ in range(20):
        lent(front_end, SIZE)

    assert psutil.Process().num_fds() == before + 2  # of one region, and of its mapping


def test_a_tensor_that_comes_back_is_this_ends_own_memory(front_end: End, engine: End) -> None:
    body = lent(front_end, 2 * SIZE)
    message, (there,) = front_end.send(engine, body[SIZE:])

    _, (back,) = engine.send(front_end, there[:-9])
    front_end.pool.release(message.regions)
    body[SIZE + 1] = 7
    del body

    assert (len(back), back[1]) == (SIZE - 9, 7)
    lent(front_end, 2 * SIZE)[SIZE + 1] = 8
    assert back[1] == 7


def test_a_message_that_is_withdrawn_leaves_lent_memory_to_its_holder(front_end: End) -> None:
    body = lent(front_end, SIZE)
    outgoing = Outgoing(front_end.pool)
    outgoing.place(body)

    outgoing.withdraw()

    body[0] = 7
    lent(front_end, SIZE)[0] = 8
    assert body[0] == 7


def test_no_more_is_lent_than_the_limit(front_end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "LENT_BYTES_MAX", 4 * SIZE)
    held = [lent(front_end, SIZE), lent(front_end, SIZE)]

    assert front_end.pool.lend(SIZE) is None
    held.pop()
    assert front_end.pool.lend(SIZE) is not None


def test_nothing_is_lent_when_the_other_end_is_gone(front_end: End) -> None:
    body = lent(front_end, SIZE)
    front_end.pool.close()

    body[0] = 1  # of a request that is still received
    assert front_end.pool.lend(SIZE) is None


def test_nothing_is_lent_where_no_memory_can_be_had(front_end: End, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> int:
        raise OSError("too many open files")

    monkeypatch.setattr(regions, "make_memory", refuse)

    assert front_end.pool.lend(SIZE) is None


def test_what_another_connection_has_lent_is_forwarded(front_end: End, engine: End) -> None:
    body = lent(front_end, 2 * SIZE)
    body[SIZE] = 5
    former = End()

    _, (there,) = former.send(engine, body[SIZE:])

    assert there[0] == 5
    former.close()
