"""Answers of llama.cpp in the form of OpenAI's API: names, ids, log probabilities, usage. Pure.

Source: OpenAI's API reference, "Completions".
"""

import json
from collections.abc import Mapping
from typing import Any

from .openai_members import COMPLETIONS


class AnswerForm:
    """The form of the answer to one request.

    Args:
        route: The route of the request.
        served: llama.cpp's name of the model.
        body: The client's document.
    """

    def __init__(self, route: str, served: str, body: Mapping[str, Any]) -> None:
        self._is_completion = route == COMPLETIONS
        self._counts_each = bool((body.get("stream_options") or {}).get("continuous_usage_stats"))
        self._has_logprobs = self._is_completion and body.get("logprobs") is not None
        self._lengths: dict[int, int] = {}  # of the text of each choice
        self._replaced: list[tuple[bytes, bytes]] = []  # texts between quotes, which no text of an answer can hold
        asked = body.get("model")
        if isinstance(asked, str) and asked != served:
            self._replaced.append((b'"model":' + json.dumps(served).encode(), b'"model":' + json.dumps(asked).encode()))
        if self._is_completion:
            self._replaced.append((b'"id":"chatcmpl-', b'"id":"cmpl-'))

    def of(self, document: bytes) -> bytes:
        """Return a chunk, or a document, for the client."""
        if self._counts_each or self._has_logprobs:
            document = json.dumps(self.completed(json.loads(document)), separators=(",", ":")).encode()
        for old, new in self._replaced:
            document = document.replace(old, new)
        return document

    def completed(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return a chunk, or a document, with what llama.cpp leaves out."""
        timings = document.get("timings")
        if self._counts_each and timings and "usage" not in document:
            prompt, made = timings["prompt_n"] + timings["cache_n"], timings["predicted_n"]
            document["usage"] = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        if self._is_completion:
            document["id"] = document["id"].replace("chatcmpl-", "cmpl-", 1)
            for choice in document["choices"]:
                if choice.get("logprobs"):
                    choice["logprobs"] = self._logprobs(choice)
        return document

    def _logprobs(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        tokens = choice["logprobs"]["content"]
        offsets = []
        at = self._lengths.get(choice["index"], 0)
        for token in tokens:
            offsets.append(at)
            at += len(token["token"])
        self._lengths[choice["index"]] = at
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [{each["token"]: each["logprob"] for each in token["top_logprobs"]} for token in tokens],
            "text_offset": offsets,
        }
