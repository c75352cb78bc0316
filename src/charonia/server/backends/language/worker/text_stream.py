"""A streamed answer of OpenAI's API with one choice of plain text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .chunks import CHAT, ChunkWriter

if TYPE_CHECKING:
    from typing import Any


class TextStream:
    """Sends the chunks of one answer.

    Args:
        request: The request.
        request_id: Id of the answer.
        model: The client's name for the model.
        body: The client's JSON document, whose `stream_options` say whether the usage is wanted.
    """

    def __init__(self, request: Any, request_id: str, model: str, body: dict[str, Any]) -> None:
        self._request = request
        self._writer = ChunkWriter(request.route, request_id, int(time.time()), model)
        self._has_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._count = 0
        self._has_begun = request.route != CHAT

    def take(self, text: str, tokens: int) -> None:
        """Send more text.

        Args:
            text: The text, "" while a character has no end yet.
            tokens: How many tokens it came from.
        """
        self._begin()
        self._count += tokens
        if text or tokens:
            self._request.send({"text_output": self._writer.text(text)})

    def end(
        self, text: str, tokens: int, finish_reason: str, stop_reason: int | str | None, prompt: int, cached: int
    ) -> None:
        """Send the last text, why it is the last, and the usage.

        Args:
            text: The text.
            tokens: How many tokens it came from.
            finish_reason: Why it ends.
            stop_reason: The text or token that ended it, None for none of the request's.
            prompt: Tokens of the prompt.
            cached: How many of them came from a cache.
        """
        self._begin()
        self._count += tokens
        usage = {"prompt_tokens": prompt, "completion_tokens": self._count, "cached_tokens": cached}
        last = self._writer.last(text, finish_reason, stop_reason)
        if self._has_usage:
            self._request.send({"text_output": last})
            total = {"prompt_tokens": prompt, "total_tokens": prompt + self._count, "completion_tokens": self._count}
            last = self._writer.usage(total)
        self._request.send({"text_output": last}, usage, final=True)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._request.send({"text_output": self._writer.role()})
