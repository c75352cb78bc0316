"""Requests to /v1/embeddings, and sentence encoders: from tokens to embeddings.

Source: OpenAI's API reference, "Embeddings"; sentence-transformers for pooling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from charonia.core.errors import invalid, unsupported
from charonia.wire.json_text import Object, kind_of

TEXTS_MAX = 2048
"""Most texts of a request."""

Floats = NDArray[np.float32]
Text = str | tuple[int, ...]
"""Text, or its tokens."""

_KNOWN = ("model", "input", "encoding_format", "dimensions", "user")


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """A request for embeddings.

    Attributes:
        texts: The texts.
        is_base64: Whether vectors are to be base64 of little-endian numbers.
        dimensions: Numbers of each vector that are asked for, 0 for all.
    """

    texts: tuple[Text, ...]
    is_base64: bool
    dimensions: int


def decode_embeddings_request(document: Object) -> EmbeddingsRequest:
    """Return the request in a document.

    Raises:
        ServingError: INVALID_ARG or UNSUPPORTED; the message begins with the member.
    """
    unknown = next((key for key, value in document.items() if key not in _KNOWN and value is not None), None)
    if unknown is not None:
        raise unsupported(f"{unknown}: is not known here", hint=f"known are {', '.join(_KNOWN)}")
    form = document.get("encoding_format") or "float"
    if form not in ("float", "base64"):
        raise invalid(f"encoding_format: expected float or base64, got {form!r:.40}")
    dimensions = document.get("dimensions") or 0
    if type(dimensions) is not int or dimensions < 0:
        raise invalid(f"dimensions: expected a positive integer, got {dimensions!r:.40}")
    return EmbeddingsRequest(_texts(document.get("input")), form == "base64", dimensions)


def _texts(value: object) -> tuple[Text, ...]:
    if type(value) is str:
        texts: tuple[Text, ...] = (value,)
    elif type(value) is list and value and all(type(each) is int for each in value):
        texts = (tuple(value),)
    elif type(value) is list and all(type(each) is str for each in value):
        texts = tuple(value)
    elif type(value) is list and all(type(each) is list and all(type(t) is int for t in each) for each in value):
        texts = tuple(tuple(each) for each in value)
    else:
        raise invalid(f"input: expected a string, tokens, or an array of either, got {kind_of(value)}")
    if not 0 < len(texts) <= TEXTS_MAX:
        raise invalid(f"input: expected 1 to {TEXTS_MAX} texts, got {len(texts)}")
    empty = next((number for number, text in enumerate(texts) if not text), None)
    if empty is not None:
        raise invalid(f"input: expected no empty text, got one at {empty}")
    return texts


def padded_tokens(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens of texts, padded with 0 to the longest, and their mask: 1 for tokens, 0 for padding."""
    longest = max(map(len, rows))
    tokens = np.zeros((len(rows), longest), np.int64)
    mask = np.zeros_like(tokens)
    for row, (ids, used) in zip(rows, zip(tokens, mask, strict=True), strict=True):
        ids[: len(row)] = row
        used[: len(row)] = 1
    return tokens, mask


def pooled(output: Floats, mask: NDArray[np.int64], pooling: str) -> Floats:
    """Return an embedding a text.

    Args:
        output: Of shape [texts, numbers], returned as it is, or [texts, tokens, numbers].
        mask: Of shape [texts, tokens]: 1 for tokens, 0 for padding.
        pooling: "mean" of the tokens, or "cls", the first token.
    """
    if output.ndim == 2:
        return output
    if pooling == "cls":
        return output[:, 0]
    weights = mask[:, :, None].astype(np.float32)
    total: Floats = (output * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1)
    return total


def normalized(vectors: Floats) -> Floats:
    """Return vectors of length 1; one of length 0 stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1), np.float32)


def shortened(vectors: Floats, dimensions: int) -> Floats:
    """Return the first numbers of each vector, as one of length 1; 0 dimensions means the vectors as they are.

    Raises:
        ServingError: INVALID_ARG when they have fewer.
    """
    if not dimensions:
        return vectors
    if dimensions > vectors.shape[1]:
        raise invalid(f"dimensions: expected at most {vectors.shape[1]}, the model's own, got {dimensions}")
    return vectors if dimensions == vectors.shape[1] else normalized(vectors[:, :dimensions])
