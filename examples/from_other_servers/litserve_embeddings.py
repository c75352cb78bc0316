"""Embeddings for clients of OpenAI's API: LitServe's `OpenAIEmbeddingSpec`. The stand-in counts letters."""

from typing import Annotated

import numpy as np
from numpy.typing import NDArray

import charonia

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@charonia.model(max_batch_size=32)
def letters(text_input: list[str]) -> Annotated[NDArray[np.float32], charonia.Shape(-1, 26)]:
    return np.array([[text.lower().count(letter) for letter in LETTERS] for text in text_input], np.float32)
