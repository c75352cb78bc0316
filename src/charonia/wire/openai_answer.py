"""Answers in the form of OpenAI's API, of models that do not speak it themselves.

Source: OpenAI's API reference, "Chat", "Completions" and "Embeddings".

Errors in the form of OpenAI's API.

An error whose message begins with the name of a member of the request and a colon, such as `temperature: expected ...`,
names it as `param`. One that is about the model's maximum context length has the code that clients look for.

Source: OpenAI's API reference, "Error codes".

Requests to /v1/embeddings, and sentence encoders: from tokens to embeddings.

Source: OpenAI's API reference, "Embeddings"; sentence-transformers for pooling.
"""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from charonia.core.errors import Code, ServingError, TooLargeError, invalid, unsupported
from charonia.core.statistics import TokenUsage
from charonia.wire.http_status import STATUS
from charonia.wire.json_text import Object, dump, kind_of


class StopCutter:
    """Cuts text before the stop string that is complete first; of several that end together, before the longest.

    Attributes:
        is_cut: Whether a stop string was found; what follows is dropped.
    """

    __slots__ = ("_held", "_stops", "is_cut")

    def __init__(self, stops: Sequence[str]) -> None:
        """Create a cutter; `stops` has no empty string."""
        self._stops = tuple(stops)
        self._held = ""
        self.is_cut = False

    def take(self, piece: str) -> str:
        """Take a piece, and return the text that is certain by now."""
        if not self._stops:
            return piece
        if self.is_cut:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_cut = True
            self._held = ""
            return text[: min(found)[1]]
        end = len(text) - self._open(text)
        self._held = text[end:]
        return text[:end]

    def rest(self) -> str:
        """Return the held-back rest, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _open(self, text: str) -> int:
        """Return the length of the longest end of a text that may be the beginning of a stop string."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The common members of the chunks, or of the document, of an answer.

    Attributes:
        is_chat: Whether it answers /v1/chat/completions.
        created_s: When it was begun, in Unix time.
        model: The client's name for the model.
    """

    is_chat: bool
    id: str
    created_s: int
    model: str

    def _object(self, choices: list[object], *, is_chunk: bool) -> dict[str, object]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model, "choices": choices}

    def first(self, index: int) -> bytes:
        """Return the chunk that begins the answer `index` of a chat."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def piece(self, index: int, text: str) -> bytes:
        """Return a chunk with a piece of text of the answer `index`."""
        content: dict[str, object] = {"delta": {"content": text}} if self.is_chat else {"text": text}
        return self._chunk({"index": index, **content, "logprobs": None, "finish_reason": None})

    def calls(self, index: int, calls: Sequence[Object]) -> bytes:
        """Return the chunk with the calls of the answer `index` of a chat."""
        delta = {"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]}
        return self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def last(self, index: int, reason: str) -> bytes:
        """Return the chunk that ends the answer `index`."""
        content: dict[str, object] = {"delta": {}} if self.is_chat else {"text": ""}
        return self._chunk({"index": index, **content, "logprobs": None, "finish_reason": reason})

    def usage(self, usage: Object) -> bytes:
        """Return the chunk with the usage, after the last one of each answer."""
        return dump({**self._object([], is_chunk=True), "usage": usage})

    def _chunk(self, choice: object) -> bytes:
        return dump(self._object([choice], is_chunk=True))

    def document(self, answers: Sequence[tuple[str, Sequence[Object], str]], usage: Object) -> bytes:
        """Return the document.

        Args:
            answers: Text and calls of each answer, and why it ended.
        """
        choices: list[object] = []
        for index, (text, calls, reason) in enumerate(answers):
            content: dict[str, object] = {"text": text}
            if self.is_chat:
                message = {"role": "assistant", "content": text, "refusal": None}
                content = {"message": message | ({"content": text or None, "tool_calls": calls} if calls else {})}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": reason})
        return dump({**self._object(choices, is_chunk=False), "usage": usage})


def usage_object(usage: TokenUsage, *, is_estimated: bool = False) -> Object:
    """Return the usage of text."""
    document: Object = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }
    if is_estimated:
        document["estimated"] = True
    if usage.cached:
        document["prompt_tokens_details"] = {"cached_tokens": usage.cached}
    return document


def encode_embeddings(vectors: NDArray[np.float32], model: str, *, as_base64: bool, usage: TokenUsage | None) -> bytes:
    """Return the document with embeddings.

    Args:
        vectors: A row for each text.
        model: The client's name for the model.
        as_base64: Whether vectors are base64 of little-endian numbers.
        usage: The tokens, None where they are not known.
    """
    vectors = np.ascontiguousarray(vectors, "<f4")
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.tobytes()).decode() if as_base64 else vector,
        }
        for index, vector in enumerate(vectors)
    ]
    tokens = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt} if usage is not None else None
    return dump({"object": "list", "data": data, "model": model, **({"usage": tokens} if tokens else {})})


PATHS = b"/v1/"
"""Beginning of the paths whose errors have this form."""

_STATUS = STATUS | {Code.UNSUPPORTED: 400}  # clients of this API try again what fails with 500 and more

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 403: "insufficient_permissions", 429: "rate_limit_exceeded"}
_OVERFLOW = re.compile(r"maximum (?:context|model) length")
_PARAM = re.compile(r"([a-z][a-z0-9_]*(?:\[\d+\]|\.[a-z][a-z0-9_]*)*): ")


def openai_status(error: ServingError) -> int:
    """Return the HTTP status of an error. A body that is too large has its own."""
    return 413 if isinstance(error, TooLargeError) else 429 if error.retry_after_s else _STATUS[error.code]


def error_object(error: ServingError, status: int = 0) -> dict[str, object]:
    """Return an error as an object.

    Args:
        status: Its HTTP status, 0 for that of its code.
    """
    status = status or openai_status(error)
    match = _PARAM.match(error.message)
    param = match[1] if match is not None else None
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = "model_not_found" if status == 404 and param == "model" else _CODES.get(status)
    if status == 400 and _OVERFLOW.search(error.message):
        code = "context_length_exceeded"
    return {"message": str(error), "type": kind, "param": param, "code": code}


def encode_openai_error(error: ServingError, status: int = 0) -> bytes:
    """Return the body of an error response, or the data of an event. Arguments as in `error_object`."""
    return dump({"error": error_object(error, status)})


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
        is_base64: Whether the answer has vectors as base64 of little-endian numbers.
        dimensions: Requested numbers of each vector, 0 for all.
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
    return EmbeddingsRequest(decode_texts("input", document.get("input")), form == "base64", dimensions)


def decode_texts(member: str, value: object) -> tuple[Text, ...]:
    """Return the texts of a member of a request: a string, or tokens, or an array of either, none of them empty.

    Raises:
        ServingError: INVALID_ARG; the message begins with the member.
    """
    if type(value) is str:
        texts: tuple[Text, ...] = (value,)
    elif type(value) is list and value and all(type(each) is int for each in value):
        texts = (tuple(value),)
    elif type(value) is list and all(type(each) is str for each in value):
        texts = tuple(value)
    elif type(value) is list and all(type(each) is list and all(type(t) is int for t in each) for each in value):
        texts = tuple(tuple(each) for each in value)
    else:
        raise invalid(f"{member}: expected a string, tokens, or an array of either, got {kind_of(value)}")
    if not 0 < len(texts) <= TEXTS_MAX:
        raise invalid(f"{member}: expected 1 to {TEXTS_MAX} texts, got {len(texts)}")
    empty = next((number for number, text in enumerate(texts) if not text), None)
    if empty is not None:
        raise invalid(f"{member}: expected no empty text, got one at {empty}")
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
        output: Of shape [texts, numbers], returned unchanged, or [texts, tokens, numbers].
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
    """Return the first numbers of each vector, normalized to length 1; unchanged vectors for 0 dimensions.

    Raises:
        ServingError: INVALID_ARG when they have fewer.
    """
    if not dimensions:
        return vectors
    if dimensions > vectors.shape[1]:
        raise invalid(f"dimensions: expected at most {vectors.shape[1]}, the model's own, got {dimensions}")
    return vectors if dimensions == vectors.shape[1] else normalized(vectors[:, :dimensions])
