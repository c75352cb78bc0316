"""The content type of files: the three best classes of each, by name."""

import sys
from pathlib import Path

import tritonclient.http as http

from charonia.demo.content import detection_input

if __name__ == "__main__":
    client = http.InferenceServerClient("localhost:8000")
    best_three = [http.InferRequestedOutput("target_label", class_count=3)]
    for path in sys.argv[1:]:
        tensor = http.InferInput("bytes", [1, 2048], "INT32")
        tensor.set_data_from_numpy(detection_input(Path(path).read_bytes()))
        answer = client.infer("content_type", [tensor], outputs=best_three).as_numpy("target_label")
        print(path, *(entry.decode() for entry in answer[0]))
