"""Answers of engines: outputs of Triton's contract, and streams of OpenAI's API with one choice of plain text.

Chunks of a stream are written without a serialiser: only the text changes.

Source: OpenAI's API reference, "Chat completion chunk object" and "Completion object".
"""

from __future__ import annotations

import json
import math
import time
from json.encoder import encode_basestring
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


CHAT = "chat/completions"
COMPLETIONS = "completions"

_OBJECTS = {CHAT: "chat.completion.chunk", COMPLETIONS: "text_completion"}


def usage_of(prompt: int, completion: int = 0, cached: int = 0) -> dict[str, int]:
    """Return the response parameters that count tokens; those of the prompt from a cache are counted twice."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached}


def returned(
    wanted: frozenset[str], choices: Sequence[Any], prompt_tokens: int, counts: Sequence[int]
) -> dict[str, list[Any]]:
    """Return the outputs that a request of Triton's contract wants besides the text.

    Args:
        choices: Choices of vLLM or TensorRT-LLM.
        counts: New tokens of each.
    """
    values: dict[str, Callable[[], list[Any]]] = {
        "finish_reason": lambda: [str(choice.finish_reason).encode() for choice in choices],
        "stop_reason": lambda: [str(choice.stop_reason).encode() for choice in choices],
        "cumulative_logprob": lambda: [
            math.nan if choice.cumulative_logprob is None else choice.cumulative_logprob for choice in choices
        ],
        "logprobs": lambda: [_logprobs(choice.logprobs) for choice in choices],
        "num_input_tokens": lambda: [prompt_tokens],
        "num_output_tokens": lambda: list(counts),
    }
    return {name: values[name]() for name in wanted if name in values}


def _logprobs(of_tokens: Any) -> bytes:
    """Return the alternatives at each place as JSON text, by the token's id."""
    if of_tokens is None:
        return b"null"
    return json.dumps([{token: _alternative(each) for token, each in of.items()} for of in of_tokens]).encode()


def _alternative(of_token: Any) -> dict[str, Any]:
    names = ("logprob", "rank", "decoded_token")  # the last one is vLLM's
    return {name: getattr(of_token, name) for name in names if hasattr(of_token, name)}


def shown_usage(usage: Mapping[str, int]) -> dict[str, Any]:
    """Return the usage of an answer in OpenAI's form; `usage` as of `usage_of`."""
    prompt, completion, cached = usage["prompt_tokens"], usage["completion_tokens"], usage["cached_tokens"]
    total = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**total, "prompt_tokens_details": {"cached_tokens": cached}}


def document(
    route: str, request_id: str, model: str, choices: Sequence[dict[str, Any]], usage: Mapping[str, int]
) -> bytes:
    """Return the answer to a request that is not streamed; `usage` as of `usage_of`."""
    head = {"id": request_id, "object": _OBJECTS[route].removesuffix(".chunk"), "created": int(time.time())}
    return json.dumps({**head, "model": model, "choices": choices, "usage": shown_usage(usage)}).encode()


class ChunkWriter:
    """Writes the chunks of one answer with one choice.

    Args:
        route: `CHAT` or `COMPLETIONS`.
        created: When it began, in s since 1970.
    """

    __slots__ = ("_after", "_before", "_head")

    def __init__(self, route: str, request_id: str, created: int, model: str) -> None:
        head = {"id": request_id, "object": _OBJECTS[route], "created": created, "model": model}
        self._head = json.dumps(head)[:-1]
        is_chat = route == CHAT
        self._before = f'{self._head}, "choices": [{{"index": 0, {_DELTA if is_chat else _TEXT}'
        self._after = f'{"}" if is_chat else ""}, "logprobs": null, "finish_reason": '

    def role(self) -> bytes:
        """Return the first chunk of a chat, which has no text yet."""
        delta = '"delta": {"role": "assistant", "content": ""}'
        return f'{self._head}, "choices": [{{"index": 0, {delta}, "logprobs": null, "finish_reason": null}}]}}'.encode()

    def text(self, text: str) -> bytes:
        return f"{self._before}{encode_basestring(text)}{self._after}null}}]}}".encode("utf-8", "replace")

    def last(self, text: str, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """Return the last chunk with text."""
        reasons = f'{encode_basestring(finish_reason)}, "stop_reason": {json.dumps(stop_reason)}'
        return f"{self._before}{encode_basestring(text)}{self._after}{reasons}}}]}}".encode("utf-8", "replace")

    def usage(self, usage: Mapping[str, object]) -> bytes:
        return f'{self._head}, "choices": [], "usage": {json.dumps(usage)}}}'.encode()


_DELTA = '"delta": {"content": '
_TEXT = '"text": '


class TextStream:
    """Sends the chunks of one answer.

    Args:
        body: The client's JSON document, whose `stream_options` say whether the usage is wanted.

    Attributes:
        count: Tokens so far.
    """

    def __init__(self, request: Any, request_id: str, model: str, body: dict[str, Any]) -> None:
        self._request = request
        self._writer = ChunkWriter(request.route, request_id, int(time.time()), model)
        self._has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.count = 0
        self._has_begun = request.route != CHAT

    def take(self, text: str, tokens: int) -> None:
        """Send more text.

        Args:
            text: The text, "" while a character has no end yet.
            tokens: How many tokens it came from.
        """
        self._begin()
        self.count += tokens
        if text or tokens:
            self._request.send({"text_output": self._writer.text(text)})

    def end(
        self, text: str, tokens: int, finish_reason: str, stop_reason: int | str | None, prompt: int, cached: int
    ) -> None:
        """Send the last text, why it is the last, and the usage.

        Args:
            tokens: How many tokens it came from.
            finish_reason: Why it ends.
            stop_reason: The text or token that ended it, None for none of the request's.
            prompt: Tokens of the prompt.
            cached: How many of them came from a cache.
        """
        self._begin()
        self.count += tokens
        usage = usage_of(prompt, self.count, cached)
        last = self._writer.last(text, finish_reason, stop_reason)
        if self._has_usage:
            self._request.send({"text_output": last})
            total = {"prompt_tokens": prompt, "total_tokens": prompt + self.count, "completion_tokens": self.count}
            last = self._writer.usage(total)
        self._request.send({"text_output": last}, usage, final=True)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._request.send({"text_output": self._writer.role()})
