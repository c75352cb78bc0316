"""Reads text from the probabilities of characters."""

import numpy as np


def decode(probability, characters):
    """Return the text of each line, and its score: the mean probability of its characters, 0 without any.

    Args:
        probability: FP32 [lines, steps, characters]; the first character is the blank.
        characters: The text of each character.

    Source: greedy decoding of connectionist temporal classification, Graves et al. (2006).
    """
    best = probability.argmax(axis=2)
    # A character that stays for several steps is one; a blank between two makes them two.
    begins = best != 0
    begins[:, 1:] &= best[:, 1:] != best[:, :-1]
    certainty = np.take_along_axis(probability, best[:, :, np.newaxis], axis=2)[:, :, 0]
    scores = (certainty * begins).sum(axis=1) / np.maximum(begins.sum(axis=1), 1)
    texts = ["".join(characters[index] for index in line[begin]) for line, begin in zip(best, begins, strict=True)]
    return texts, scores.astype(np.float32)
