"""How many front ends `--front-ends auto` stands for. Pure.

Front ends pay where the limit is the core that reads and writes requests. A request of a few hundred bytes takes about
70 us in a front end and 20 us in the engine, so one engine feeds up to four front ends, and more of them would wait for
it. Models that front ends run themselves need no engine: then each core can have one. On few cores, a request that is
passed on to the engine takes more of the machine than the second process adds.

`python -m bench.capacity` compares what the rule chooses with the best number; docs/front_ends.md has the results.
"""

from typing import NamedTuple

from charonia.server.options import FRONT_ENDS_MAX

FEW_CORES = 3
"""With this many cores or fewer, front ends pay only if they run the models themselves."""

CORES_EACH = 2
"""Cores for each front end that passes requests on: one for itself, one for the engine and the models."""

FED_BY_ENGINE = 4
"""Front ends that one engine keeps busy."""


class Chosen(NamedTuple):
    """A number of front ends, 0 for one process, and why it was chosen."""

    number: int
    reason: str


def how_many(cores: int, stays: str) -> Chosen:
    """Return the number of front ends for a machine and its models.

    Args:
        cores: Cores that the server may use.
        stays: Why a model runs in the engine only, "" if every model may run in front ends.
    """
    have = f"{cores} core{'s' if cores > 1 else ''}"
    if cores == 1:
        return Chosen(0, have)
    if not stays:
        return Chosen(min(cores, FRONT_ENDS_MAX), f"{have}, and every model may run in front ends")
    if cores <= FEW_CORES:
        return Chosen(0, f"{have}, and {stays}")
    return Chosen(min(cores // CORES_EACH, FED_BY_ENGINE), f"{have}; {stays}")
