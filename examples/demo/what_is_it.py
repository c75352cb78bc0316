"""The content type of files: the three best classes of each, by name."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http as http

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
    client = http.InferenceServerClient("localhost:8000")
    best_three = [http.InferRequestedOutput("target_label", class_count=3)]
    for path in sys.argv[1:]:
        tensor = http.InferInput("bytes", [1, 2 * END_BYTES], "INT32")
        tensor.set_data_from_numpy(detection_input(Path(path).read_bytes()))
        answer = client.infer("content_type", [tensor], outputs=best_three).as_numpy("target_label")
        print(path, *(entry.decode() for entry in answer[0]))
