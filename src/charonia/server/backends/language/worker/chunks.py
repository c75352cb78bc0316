"""The chunks of a streamed answer of OpenAI's API, written without a serialiser: only the text in them changes. Pure.

Source: OpenAI's API reference, "Chat completion chunk object" and "Completion object".
"""

import json
from collections.abc import Mapping
from json.encoder import encode_basestring

CHAT = "chat/completions"
COMPLETIONS = "completions"

_OBJECTS = {CHAT: "chat.completion.chunk", COMPLETIONS: "text_completion"}


class ChunkWriter:
    """Writes the chunks of one answer with one choice.

    Args:
        route: `CHAT` or `COMPLETIONS`.
        request_id: Id of the answer.
        created: When it began, in s since 1970.
        model: The client's name for the model.
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
