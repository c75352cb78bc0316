"""The content type of files: the three best classes of each, by name."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from charonia.client import Client

# The model reads this many bytes from either end, without white space, of blocks of this size; 256 stands for no byte.
END_BYTES = 1024
BLOCK_BYTES = 4096
PADDING = 256


def detection_input(content: bytes) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return a file's content as the model's input: INT32 [1, 2048], the first 1024 bytes and the last."""
    head = content[:BLOCK_BYTES].lstrip()[:END_BYTES]
    tail = content[-BLOCK_BYTES:].rstrip()[-END_BYTES:]
    tensor = np.full((1, 2 * END_BYTES), PADDING, np.int32)
    tensor[0, : len(head)] = np.frombuffer(head, np.uint8)
    tensor[0, 2 * END_BYTES - len(tail) :] = np.frombuffer(tail, np.uint8)
    return tensor


if __name__ == "__main__":
    with Client("localhost:8000") as client:
        for path in sys.argv[1:]:
            content = detection_input(Path(path).read_bytes())
            answer = client.infer("content_type", {"bytes": content}, {"target_label": 3})
            print(path, *(entry.decode() for entry in answer["target_label"][0]))
