"""Prints how similar texts are: `python client.py TEXT TEXT ... [--url localhost:8000]`, with the public client."""

import argparse

import numpy as np
import tritonclient.http as httpclient


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="+", metavar="TEXT")
    parser.add_argument("--url", default="localhost:8000")
    options = parser.parse_args()

    texts = httpclient.InferInput("TEXT", [len(options.texts), 1], "BYTES")
    texts.set_data_from_numpy(np.array([[text] for text in options.texts], object))
    with httpclient.InferenceServerClient(options.url) as client:
        vectors = client.infer("text_vector", [texts]).as_numpy("VECTOR")
    for text, row in zip(options.texts, vectors @ vectors.T, strict=True):
        print(" ".join(f"{similarity:5.2f}" for similarity in row), text, sep="  ")


if __name__ == "__main__":
    main()
