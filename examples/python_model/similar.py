"""Ask the example's model which of some sentences is most like the first one.

Usage: python examples/python_model/similar.py [HOST:PORT]
"""

import sys

import numpy as np
import tritonclient.http as httpclient

SENTENCES = [
    "The harbour is closed because of the storm.",
    "Because of storms, the harbour was closed.",
    "Add two eggs and a cup of flour.",
    "Ships may not leave the harbour.",
]


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else "localhost:8000"
    with httpclient.InferenceServerClient(address) as client:
        text = httpclient.InferInput("TEXT", [len(SENTENCES), 1], "BYTES")
        text.set_data_from_numpy(np.array([[sentence] for sentence in SENTENCES], np.object_))
        vectors = client.infer("text_features", [text]).as_numpy("FEATURES")
    for sentence, similarity in sorted(zip(SENTENCES, vectors @ vectors[0], strict=True), key=lambda pair: -pair[1]):
        print(f"{similarity:.2f}  {sentence}")


if __name__ == "__main__":
    main()
