"""OpenAI's responses in terms of chat completions: the request of one, and its answer from that of the other. Pure.

Source: OpenAI's API reference, "Responses" and "Streaming events".
"""

from collections.abc import Iterator, Mapping
from typing import Any

from charonia.core.errors import invalid, unsupported
from charonia.wire.json_text import dump, kind_of

Object = dict[str, Any]

_RENAMED = {"max_output_tokens": "max_tokens"}

_ONLY: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "reasoning": ({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
}
"""Members that have only values without effect."""

_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")

_ECHOED: Mapping[str, object] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
    "previous_response_id": None, "store": False, "temperature": 1.0, "text": {"format": {"type": "text"}},
    "tool_choice": "auto", "tools": [], "top_p": 1.0, "truncation": "disabled", "user": None,
}  # fmt: skip
"""Members of a response that repeat members of its request, with their defaults."""


def chat_request(document: Object, earlier: list[Object]) -> Object:
    """Return the request of a chat that answers a request for a response.

    Args:
        document: The request.
        earlier: The messages of the response that it continues.

    Raises:
        ServingError: INVALID_ARG or UNSUPPORTED; the message begins with the member.
    """
    chat: Object = {}
    instructions = document.get("instructions")
    if instructions is not None and type(instructions) is not str:
        raise invalid(f"instructions: expected a string, got {kind_of(instructions)}")
    messages: list[Object] = [{"role": "system", "content": instructions}] if instructions else []
    messages += [*earlier, *input_messages(document.get("input"))]
    for name, value in document.items():
        if value is None or name in ("input", "instructions", "previous_response_id"):
            continue
        if name in _ONLY:
            if value not in _ONLY[name]:
                raise unsupported(f"{name}: expected {dump(_ONLY[name][0]).decode()}, got {dump(value).decode():.80}")
        elif name in _MEMBERS:
            chat.update(_MEMBERS[name](name, value))
        else:
            chat[_RENAMED.get(name, name)] = value
    if "top_logprobs" in chat:
        chat["logprobs"] = True
    if document.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return {**chat, "messages": messages}


def input_messages(value: object) -> list[Object]:
    """Return the messages of the input of a request, or of the output of a response.

    Raises:
        ServingError: INVALID_ARG or UNSUPPORTED; the message begins with the member.
    """
    if type(value) is str and value:
        return [{"role": "user", "content": value}]
    if type(value) is not list or not value:
        got = kind_of(value) if value not in ("", []) else "an empty one"
        raise invalid(f"input: expected a string or an array of items, got {got}")
    messages: list[Object] = []
    for number, item in enumerate(value):
        where = f"input[{number}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            if type(item.get("role")) is not str:
                raise invalid(f"{where}.role: expected a string, got {kind_of(item.get('role'))}")
            messages.append({"role": item["role"], "content": _content(f"{where}.content", item.get("content"))})
        elif kind == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            _append_call(messages, {"id": item.get("call_id"), "type": "function", "function": call})
        elif kind == "function_call_output":
            content = _content(f"{where}.output", item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind != "reasoning":  # which the model does not read again
            raise unsupported(f"{where}: expected an item of type message, function_call or function_call_output")
    return messages


def _append_call(messages: list[Object], call: Object) -> None:
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _content(where: str, value: object) -> object:
    """Return the content of a message: a string if all of its parts are text."""
    if type(value) is not list:
        if type(value) is not str:
            raise invalid(f"{where}: expected a string or an array of parts, got {kind_of(value)}")
        return value
    parts = [_part(f"{where}[{number}]", part) for number, part in enumerate(value)]
    return "".join(str(part["text"]) for part in parts) if all(part["type"] == "text" for part in parts) else parts


def _part(where: str, part: object) -> Object:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict):
        if kind in ("input_text", "output_text", "text") and type(part.get("text")) is str:
            return {"type": "text", "text": part["text"]}
        if kind == "refusal" and type(part.get("refusal")) is str:
            return {"type": "text", "text": part["refusal"]}
        if kind == "input_image" and type(part.get("image_url")) is str:
            return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise unsupported(
        f"{where}: expected a part of type input_text, output_text or input_image, got {kind or part!r:.80}"
    )


def _text(name: str, value: object) -> Object:
    if type(value) is not dict:
        raise invalid(f"{name}: expected an object, got {kind_of(value)}")
    if value.get("verbosity") not in (None, "medium"):
        raise unsupported(f"{name}.verbosity: expected medium, got {value['verbosity']!r:.80}")
    form = value.get("format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return {"response_format": form} if form is not None else {}
    rest = {key: each for key, each in form.items() if key != "type" and each is not None}
    return {"response_format": {"type": "json_schema", "json_schema": rest}}


def _tools(name: str, value: object) -> Object:
    if type(value) is not list:
        raise invalid(f"{name}: expected an array of tools, got {kind_of(value)}")
    tools = []
    for number, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise unsupported(f"{name}: expected tools of type function, got {kind!r:.80} at {number}")
        tools.append(_function(tool))
    return {"tools": tools}


def _function(tool: Object) -> Object:
    members = {key: each for key, each in tool.items() if key != "type" and each is not None}
    return {"type": "function", "function": members}


def _tool_choice(name: str, value: object) -> Object:
    if isinstance(value, dict) and value.get("type") == "function":
        return {name: _function(value)}
    if isinstance(value, dict) and value.get("type") == "allowed_tools" and isinstance(value.get("tools"), list):
        tools = [_function(tool) for tool in value["tools"] if isinstance(tool, dict)]
        return {name: {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": tools}}}
    return {name: value}


def _include(name: str, value: object) -> Object:
    if type(value) is not list or any(each not in _INCLUDED for each in value):
        raise unsupported(f"{name}: expected some of {', '.join(_INCLUDED)}, got {value!r:.80}")
    return {"logprobs": True} if _INCLUDED[0] in value else {}


_MEMBERS = {"text": _text, "tools": _tools, "tool_choice": _tool_choice, "include": _include}


class ResponseForm:
    """The answer to one request: its events, or its document.

    Args:
        asked: The client's request.
        id: Id of the response, without its prefix; ids of its items begin with it.
        created_s: When it was begun, in Unix time.
    """

    def __init__(self, asked: Object, id: str, created_s: int) -> None:
        echoed = {name: default if asked.get(name) is None else asked[name] for name, default in _ECHOED.items()}
        self.id = f"resp_{id}"
        self._id = id
        self._head: Object = {
            "id": self.id, "object": "response", "created_at": created_s, "model": asked["model"], **echoed
        }  # fmt: skip
        self._number = 0
        self._items: list[Object] = []
        self._calls: dict[int, Object] = {}
        self._open: Object | None = None  # the last item, while it grows
        self._reason: str | None = None
        self._usage: Object | None = None

    @property
    def output(self) -> list[Object]:
        """The items so far."""
        return self._items

    def document(self, completion: Object) -> bytes:
        """Return the response for the document of a chat."""
        for _ in self._take(completion, "message"):
            pass
        for _ in self._close():
            pass
        return dump(self._response())

    def begin(self) -> Iterator[bytes]:
        """Yield the first events."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def take(self, chunk: Object) -> Iterator[bytes]:
        """Yield the events for a chunk of a chat."""
        return self._take(chunk, "delta")

    def end(self) -> Iterator[bytes]:
        """Yield the last events."""
        yield from self._close()
        response = self._response()
        yield self._event(f"response.{response['status']}", response=response)

    def _take(self, chunk: Object, member: str) -> Iterator[bytes]:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._usage = _usage(usage)
        for choice in chunk.get("choices") or ():
            delta = choice.get(member) or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            if reasoning:
                yield from self._grow("reasoning", reasoning, None)
            if delta.get("content"):
                yield from self._grow("message", delta["content"], choice.get("logprobs"))
            for place, call in enumerate(delta.get("tool_calls") or ()):
                yield from self._call(call.get("index", place), call)
            self._reason = choice.get("finish_reason") or self._reason

    def _grow(self, kind: str, text: str, logprobs: Any) -> Iterator[bytes]:
        part_kind = _PARTS[kind]
        if self._open is None or self._open["type"] != kind:
            more: Object = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._add(kind, {**more, "content": []})
            part: Object = {
                "type": part_kind,
                "text": "",
                **({"annotations": [], "logprobs": []} if more.get("role") else {}),
            }
            yield self._of_item("response.content_part.added", content_index=0, part=dict(part))
            self._items[-1]["content"].append(part)
        part = self._items[-1]["content"][0]
        part["text"] += text
        found = (logprobs or {}).get("content") or []
        if kind == "message":
            part["logprobs"] += found
            yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=found)
        else:
            yield self._of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _call(self, index: int, call: Object) -> Iterator[bytes]:
        function = call.get("function") or {}
        if index not in self._calls:
            head = {
                "call_id": call.get("id") or f"call_{self._id}{index}",
                "name": function.get("name"),
                "arguments": "",
            }
            yield from self._add("function_call", head)
            self._calls[index] = self._items[-1]
        arguments = function.get("arguments")
        if arguments:
            self._calls[index]["arguments"] += arguments
            yield self._of_item("response.function_call_arguments.delta", delta=arguments)

    def _add(self, kind: str, members: Object) -> Iterator[bytes]:
        yield from self._close()
        item_id = f"{_PREFIXES[kind]}_{self._id}{len(self._items)}"
        self._open = {"id": item_id, "type": kind, "status": "in_progress", **members}
        self._items.append(self._open)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._open)

    def _close(self) -> Iterator[bytes]:
        item, self._open = self._open, None
        if item is None:
            return
        item["status"] = "completed" if self._reason not in _INCOMPLETE else "incomplete"
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._of_item("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._of_item(f"response.{part['type']}.done", content_index=0, text=part["text"], **logprobs)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _response(self, status: str = "") -> Object:
        reason = _INCOMPLETE.get(self._reason or "")
        return {
            **self._head,
            "status": status or ("incomplete" if reason else "completed"),
            "error": None,
            "incomplete_details": {"reason": reason} if reason and not status else None,
            "output": [] if status else self._items,
            "usage": None if status else self._usage,
        }

    def _of_item(self, kind: str, **members: object) -> bytes:
        place = len(self._items) - 1
        return self._event(kind, item_id=self._items[place]["id"], output_index=place, **members)

    def _event(self, kind: str, **members: object) -> bytes:
        document = {"type": kind, "sequence_number": self._number, **members}
        self._number += 1
        return b"event: %b\ndata: %b" % (kind.encode(), dump(document))


_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def _usage(usage: Object) -> Object:
    details = usage.get("prompt_tokens_details") or {}
    prompt, made = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": details.get("cached_tokens", 0)},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + made,
    }
