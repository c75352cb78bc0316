"""Steps and streams: what readers of files return."""

from collections.abc import Mapping
from dataclasses import dataclass

from charonia.core.tensor import Array

Item = dict[str, Array]
"""Arrays by tensor name, without the batch dimension."""

FILE_BYTES_MAX = 4 * 2**30
"""Largest file of input data."""


@dataclass(frozen=True, slots=True)
class Step:
    """One item to send.

    Attributes:
        inputs: Its inputs.
        expected: Outputs that the answer has to hold, None where there is nothing to compare.
        where: Where it is from, for messages, e.g. `data.json: step 3`.
    """

    inputs: Item
    expected: Mapping[str, Array] | None = None
    where: str = ""


Stream = list[Step]
"""Steps in the order they are sent."""
