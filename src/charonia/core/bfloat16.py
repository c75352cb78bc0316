"""Numbers as BF16 and back: arrays of BF16 hold the bit patterns as uint16."""

import numpy as np

from charonia.core.tensor import Array


def to_bfloat16(array: Array) -> Array:
    """Return the bit patterns, as uint16, of numbers rounded to BF16 (to the nearest, ties to even)."""
    bits = np.asarray(array, np.float32, order="C").view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    quiet_nan = (bits >> 16) | 0x40  # rounding could turn a NaN into infinity
    return np.where(np.isnan(array), quiet_nan, rounded).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    """Return the numbers, as float32, of BF16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
