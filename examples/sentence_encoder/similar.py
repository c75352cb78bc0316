"""Ask a running server which of some sentences is nearest to another, by both encoders.

Usage: python examples/sentence_encoder/similar.py [QUESTION SENTENCE SENTENCE ...]
"""

import sys

import numpy as np
import tritonclient.http as http

QUESTION = "How do I get my money back?"
SENTENCES = ["Refunds take three days.", "The cat sleeps on the sofa.", "Our shop opens at nine."]


def vectors(client: http.InferenceServerClient, model: str, texts: list[str]) -> np.ndarray:
    """Return one vector of length 1 for each text."""
    text = http.InferInput("text", [len(texts), 1], "BYTES")
    text.set_data_from_numpy(np.array([[one.encode()] for one in texts], object))
    return client.infer(model, [text]).as_numpy("embedding")


if __name__ == "__main__":
    question, *sentences = sys.argv[1:] or [QUESTION, *SENTENCES]
    with http.InferenceServerClient("localhost:8000") as client:
        for model in ("sentences", "sentences_onnx"):
            asked, *known = vectors(client, model, [question, *sentences])
            print(model)
            scores = ((float(asked @ one), sentence) for one, sentence in zip(known, sentences, strict=True))
            for score, sentence in sorted(scores, reverse=True):
                print(f"  {score:6.3f}  {sentence}")
