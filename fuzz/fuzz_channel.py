"""Whatever a worker sends, the channel gives messages and tensors or a ChannelError, and keeps no descriptor.

A seeded mutation fuzzer. A case writes a few messages, changes their frames, the values of their headers or their
bytes, takes descriptors away or adds foreign ones, and feeds the stream whole or split. What is read must be messages
whose tensors have the size that the header says. Nothing but `ChannelError` may be raised, and when both ends are
closed, as many descriptors are open as before.

Bytes within a header are cut off or appended, not changed, and frames stay in step: `marshal` may take any amount of
memory for a length that was made up, and the worker that writes it is no stranger.
"""

import marshal
import os
import random
import struct

from charonia.server.channel.channel import INLINE_BYTES_MAX, Outgoing, Receiver
from charonia.server.channel.regions import ChannelError, Mappings, RegionPool

MESSAGES_MAX = 4
TENSORS_MAX = 4
ODD_VALUES = (None, True, -1, 0, 1, 3, 2**31, 2**70, 1.5, "", "x", b"y", (), (1,), [2], {"k": 1})
FRAME = struct.Struct("<II")


def message(rng: random.Random, pool: RegionPool) -> tuple[bytes, list[int]]:
    """Return the bytes and descriptors of a message, perhaps a wrong one."""
    outgoing = Outgoing(pool)
    sizes = [rng.choice([0, 1, 9, 300, INLINE_BYTES_MAX + 1]) for _ in range(rng.randrange(TENSORS_MAX))]
    places: list[object] = [outgoing.place(rng.randbytes(1) * size) for size in sizes]
    fds = [os.dup(fd) for fd in outgoing.fds]
    header: object = ("done", rng.randrange(9), places)
    rest = b"".join(bytes(part) for part in outgoing.parts)
    match rng.randrange(8):
        case 0 if places:
            places[rng.randrange(len(places))] = changed_place(rng)
        case 1:
            header = rng.choice(ODD_VALUES)
        case 2:
            rest = rest[: rng.randrange(len(rest) + 1)]
        case 3 if fds:
            os.close(fds.pop(rng.randrange(len(fds))))
        case 4:
            fds.insert(rng.randrange(len(fds) + 1), os.open(os.devnull, os.O_RDONLY))
        case _:
            pass
    return framed(rng, marshal.dumps(header, 2), rest), fds  # type: ignore[arg-type]  # plain values


def changed_place(rng: random.Random) -> object:
    """Return something where the place of a tensor should be."""
    if rng.random() < 0.2:
        return rng.choice(ODD_VALUES)
    return tuple(rng.choice(ODD_VALUES) for _ in range(rng.choice([2, 3, 4, 4, 4, 4, 5])))


def framed(rng: random.Random, header: bytes, rest: bytes) -> bytes:
    """Return a frame, perhaps one with a length that is too large, or with too much or too little in it."""
    cut = rng.randrange(len(header))
    match rng.randrange(12):
        case 0:
            header = header[:cut]
        case 1:
            header += rng.randbytes(rng.randrange(1, 9))
        case 2:
            header, rest = header[:cut], header[cut:] + rest
        case 3:
            rest += rng.randbytes(rng.randrange(1, 40))
        case 4:
            return FRAME.pack(rng.choice([2**26 + 1, 2**31 - 1, 2**32 - 1]), len(rest)) + header + rest
        case _:
            pass
    return FRAME.pack(len(header), len(rest)) + header + rest


def check(rng: random.Random) -> None:
    """Write, change, feed and read a few messages."""
    before = len(os.listdir("/proc/self/fd"))
    pool, mappings = RegionPool(), Mappings()
    receiver = Receiver(mappings)
    stream = b""
    fds: list[int] = []
    for _ in range(rng.randrange(1, MESSAGES_MAX + 1)):
        data, more = message(rng, pool)
        stream += data
        fds += more
    if rng.random() < 0.1:
        stream = stream[: rng.randint(1, len(stream))]
    size_max = rng.choice([7, 1000, len(stream)])
    position = 0
    try:
        while position < len(stream):
            size = min(rng.randint(1, size_max) if size_max < len(stream) else size_max, 70_000)
            for received in receiver.feed(stream[position : position + size], fds if position == 0 else ()):
                if len(received.header) == 3 and isinstance(received.header[2], list):
                    for place in received.header[2]:
                        assert len(received.find(place)) == place[2]
            position += size
    except ChannelError:
        pass  # a clean refusal
    finally:
        receiver.close()
        mappings.close()
        pool.close()
    assert len(os.listdir("/proc/self/fd")) == before
