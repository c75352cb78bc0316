"""What llama.cpp leaves out of OpenAI's responses: the format of the text, and places in events. Pure.

Source: OpenAI's API reference, "Responses" and "Streaming events".
"""

import json
from collections.abc import Mapping
from typing import Any

_DATA = b"\ndata: "
_IN_CONTENT = ("response.content_part.", "response.output_text.", "response.reasoning_text.", "response.refusal.")


def response_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request as llama.cpp reads it.

    It looks for `text.format` where chats have it, in `response_format`, and takes no null in tools.
    """
    body = dict(body)
    tools = body.get("tools")
    if isinstance(tools, list):
        body["tools"] = [{name: value for name, value in tool.items() if value is not None} for tool in tools]
    text = body.get("text")
    given = text.get("format") if isinstance(text, dict) else None
    if not isinstance(given, dict):
        return body
    kind = given.get("type")
    rest = {name: value for name, value in given.items() if name != "type"}
    return {**body, "response_format": {"type": kind, kind: rest} if kind == "json_schema" else {"type": kind}}


class ResponseEvents:
    """The events of one response: each gets its number, and the places of the item and the content that it is about."""

    def __init__(self) -> None:
        self._count = 0
        self._places: dict[str, int] = {}

    def complete(self, event: bytes) -> bytes:
        """Return an event with what it lacks."""
        head, _, data = event.partition(_DATA)
        document = json.loads(data)
        document.setdefault("sequence_number", self._count)
        self._count += 1
        kind = document.get("type", "")
        item = document.get("item_id") or document.get("item", {}).get("id")
        if item is not None:
            document.setdefault("output_index", self._places.setdefault(item, len(self._places)))
        if kind.startswith(_IN_CONTENT):
            document.setdefault("content_index", 0)
        if kind.startswith("response.output_text."):
            document.setdefault("logprobs", [])
        if "response" in document:
            document["response"].setdefault("output", [])
        return head + _DATA + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
