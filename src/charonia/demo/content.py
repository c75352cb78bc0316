"""Files as input for content type detection."""

import numpy as np
from numpy.typing import NDArray

# The model reads this many bytes from either end, without white space, of blocks of this size; 256 stands for no byte.
_END_BYTES = 1024
_BLOCK_BYTES = 4096
_PADDING = 256


def detection_input(content: bytes) -> NDArray[np.int32]:
    """Return a file's content as the model takes it: INT32 [1, 2048], the first 1024 bytes and the last."""
    head = content[:_BLOCK_BYTES].lstrip()[:_END_BYTES]
    tail = content[-_BLOCK_BYTES:].rstrip()[-_END_BYTES:]
    tensor = np.full((1, 2 * _END_BYTES), _PADDING, dtype=np.int32)
    tensor[0, : len(head)] = np.frombuffer(head, dtype=np.uint8)
    tensor[0, 2 * _END_BYTES - len(tail) :] = np.frombuffer(tail, dtype=np.uint8)
    return tensor
