"""Read the text of pictures: one request each.

Usage: python examples/ocr/read.py [--model=ocr_bls] [--address=localhost:8000] PICTURE...
"""

import argparse
from pathlib import Path

import numpy as np
import tritonclient.http as httpclient


def main() -> None:
    parser = argparse.ArgumentParser(description="Read the text of pictures.")
    parser.add_argument("picture", nargs="+", type=Path, help="a JPEG or PNG file")
    parser.add_argument("--model", default="ocr", help="ocr, an ensemble, or ocr_bls")
    parser.add_argument("--address", default="localhost:8000")
    given = parser.parse_args()
    with httpclient.InferenceServerClient(given.address) as client:
        for picture in given.picture:
            image = httpclient.InferInput("IMAGE", [1], "BYTES")
            image.set_data_from_numpy(np.array([picture.read_bytes()], np.object_))
            answer = client.infer(given.model, [image])
            for text, score, box in zip(*map(answer.as_numpy, ("TEXT", "SCORE", "BOX")), strict=True):
                left, top = box.min(axis=0)
                print(f"{score:.2f}  {left:5.0f} {top:5.0f}  {text.decode()}")


if __name__ == "__main__":
    main()
