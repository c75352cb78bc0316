"""Regions of memory that clients share with the server, as those who read and write requests see them."""

from typing import NamedTuple, Protocol


class Span(NamedTuple):
    """A part of a region, as a request names it.

    Attributes:
        region: Name of the region.
        offset: Where the part begins in the region, in bytes.
        byte_size: Its size in bytes.
    """

    region: str
    offset: int
    byte_size: int


class Place(Protocol):
    """Where an output of a request goes.

    The region stays mapped as long as something holds one of its places, though its name may be gone.

    Attributes:
        span: What the request asked for.
    """

    span: Span

    def write(self, data: bytes | memoryview) -> None:
        """Copy an output's bytes to the start of the place.

        Args:
            data: At most as many bytes as the place has.

        Raises:
            ServingError: The region is not what was registered any more.
        """
        ...


class Regions(Protocol):
    """What is registered."""

    def view(self, span: Span) -> memoryview:
        """Return the bytes of a part, read-only; the region stays mapped as long as the view lives.

        Raises:
            ServingError: NOT_FOUND for an unknown region, INVALID_ARG for a part that is not within it.
        """
        ...

    def place(self, span: Span) -> Place:
        """Return a part to write an output to. Raises as `view`."""
        ...
