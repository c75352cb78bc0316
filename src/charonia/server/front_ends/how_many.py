"""How many front ends `--front-ends auto` stands for. Pure.

Front ends pay where the limit is the core that reads and writes requests. A request takes two to five times as long in
a front end as in the engine, so one engine feeds up to six of them, and more would wait for it. But each takes a core
from the models, which matters the less the more cores there are: so one is added with each doubling, and fewer where a
model keeps the cores busy for milliseconds. Models that front ends run themselves need no engine: then each core can
have one. On few cores, a request that is passed on takes more of the machine than the second process adds.

`python -m bench.capacity` compares what the rule chooses with the best number; docs/front_ends.md has the results.
"""

from typing import NamedTuple

from charonia.server.options import FRONT_ENDS_MAX

FEW_CORES = 3
"""With this many cores or fewer, front ends pay only if they run the models themselves."""

FED_BY_ENGINE = 6
"""Front ends that one engine keeps busy: three over HTTP with small requests, six over gRPC with large ones."""


LARGE_BYTES = 20 * 2**20
"""Files of a model that computes for a millisecond or more: one core reads about so many bytes of weights in that."""

CORES_BESIDE_LARGE = 8
"""Cores for each front end beside such a model."""


class Chosen(NamedTuple):
    """A number of front ends, 0 for one process, and why it was chosen."""

    number: int
    reason: str


def how_many(cores: int, stays: str, largest_bytes: int = 0) -> Chosen:
    """Return the number of front ends for a machine and its models.

    Args:
        cores: Cores that the server may use.
        stays: Why a model runs in the engine only, "" if every model may run in front ends.
        largest_bytes: Files of the largest model that computes on these cores, 0 if that is not known.
    """
    have = f"{cores} core{'s' if cores > 1 else ''}"
    if cores == 1:
        return Chosen(0, have)
    if not stays:
        return Chosen(min(cores, FRONT_ENDS_MAX), f"{have}, and every model may run in front ends")
    if cores <= FEW_CORES:
        return Chosen(0, f"{have}, and {stays}")
    if largest_bytes >= LARGE_BYTES:
        number, stays = cores // CORES_BESIDE_LARGE, f"{stays}, and one of {largest_bytes >> 20} MiB needs the cores"
    else:
        number = cores.bit_length()
    return Chosen(min(number, FED_BY_ENGINE), f"{have}; {stays}")
