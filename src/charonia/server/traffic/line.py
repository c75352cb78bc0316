"""Which version a request goes to. Pure.

The versions lie on the line from 0 to 1, each with a segment as long as its share, in the order of their numbers: the
newest has the upper end. A request has a point. A client that is kept on its version has always the same one, so when a
version grows at the cost of its neighbour, clients move to it and none moves back. Other requests have points that are
spread evenly.
"""

from collections.abc import Container, Sequence
from hashlib import blake2b

_GOLDEN = 0.6180339887498949
"""Multiples of this number, without their whole part, are spread more evenly than those of any other."""

_HASH_BYTES = 8


class EvenPoints:
    """Points that are spread evenly: among any n in a row, a share w is met by n * w of them, give or take a few."""

    __slots__ = ("_at",)

    def __init__(self) -> None:
        self._at = 0.0

    def next(self) -> float:
        """Return the next point."""
        self._at = at = (self._at + _GOLDEN) % 1.0
        return at


def point_of(model: str, client: str | int) -> float:
    """Return the point of a client. It is the same in every server, and independent between models."""
    digest = blake2b(f"{model}\0{client}".encode("utf-8", "surrogatepass"), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def choose(weights: Sequence[tuple[int, float]], ready: Container[int], point: float) -> int | None:
    """Return the version at a point. If it is not ready, only its own segment is divided among the others.

    Args:
        weights: Versions and weights, in the order of the versions.
        ready: The versions that are ready.
        point: From 0 to below 1.

    Returns:
        The version; None if none with a weight is ready.
    """
    left = weights
    while left:
        at = point * sum([weight for _, weight in left])
        chosen = left[-1]
        for each in left:
            if at < each[1]:
                chosen = each
                break
            at -= each[1]
        version, weight = chosen
        if weight > 0 and version in ready:
            return version
        left = [each for each in left if each[0] != version]
        point = min(at / weight, 1 - 2**-53) if weight > 0 else point
    return None


def shares(weights: Sequence[tuple[int, float]], ready: Container[int]) -> dict[int, float]:
    """Return the share of the requests that each ready version gets. Arguments as for `choose`."""
    found = {version: weight for version, weight in weights if weight > 0 and version in ready}
    total = sum(found.values())
    return {version: weight / total for version, weight in found.items()}
