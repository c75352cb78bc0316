"""Answers in the form of OpenAI's API, of models that do not speak it themselves.

Source: OpenAI's API reference, "Chat", "Completions" and "Embeddings".
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from charonia.core.usage import TokenUsage
from charonia.wire.json_text import dump


class StopCutter:
    """Cuts text before the stop string that is complete first; of several that end together, before the longest.

    Attributes:
        is_cut: Whether a stop string was found; what follows is dropped.
    """

    __slots__ = ("_held", "_stops", "is_cut")

    def __init__(self, stops: Sequence[str]) -> None:
        """Make a cutter; `stops` has no empty string."""
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
        """Return what was held back, at the end of the text."""
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
    """What the chunks, or the document, of an answer have in common.

    Attributes:
        is_chat: Whether it answers /v1/chat/completions.
        id: Its id.
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

    def last(self, index: int, reason: str) -> bytes:
        """Return the chunk that ends the answer `index`."""
        content: dict[str, object] = {"delta": {}} if self.is_chat else {"text": ""}
        return self._chunk({"index": index, **content, "logprobs": None, "finish_reason": reason})

    def usage(self, usage: TokenUsage) -> bytes:
        """Return the chunk with the usage, after the last one of each answer."""
        return dump({**self._object([], is_chunk=True), "usage": usage_object(usage)})

    def _chunk(self, choice: object) -> bytes:
        return dump(self._object([choice], is_chunk=True))

    def document(self, answers: Sequence[tuple[str, str]], usage: TokenUsage | None) -> bytes:
        """Return the document.

        Args:
            answers: Text of each answer, and why it ended.
            usage: The tokens, None where they are not known.
        """
        choices: list[object] = []
        for index, (text, reason) in enumerate(answers):
            content: dict[str, object] = {"text": text}
            if self.is_chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": reason})
        known = {"usage": usage_object(usage)} if usage is not None else {}
        return dump({**self._object(choices, is_chunk=False), **known})


def usage_object(usage: TokenUsage) -> dict[str, object]:
    """Return the usage of text."""
    document: dict[str, object] = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }
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
