"""Requests of OpenAI's API before llama.cpp sees them, and its events after."""

import json
from typing import Any

import pytest

from charonia.server.backends.llama_cpp.worker.openai_members import MemberError, check_members
from charonia.server.backends.llama_cpp.worker.openai_responses import ResponseEvents, response_request

CHAT = "chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("route", "name", "value"),
    [
        (CHAT, "temperature", 2.1),
        (CHAT, "temperature", -0.1),
        (CHAT, "temperature", "1"),
        (CHAT, "temperature", True),
        (CHAT, "temperature", float("nan")),
        (CHAT, "top_p", 1.1),
        (CHAT, "presence_penalty", 2.1),
        (CHAT, "frequency_penalty", -2.1),
        (CHAT, "max_tokens", 0),
        (CHAT, "max_completion_tokens", 1.5),
        ("responses", "max_output_tokens", -1),
        (CHAT, "n", 0),
        (CHAT, "logprobs", 3),
        (CHAT, "top_logprobs", 21),
        ("completions", "logprobs", 21),
        ("completions", "logprobs", True),
        (CHAT, "stop", 5),
        (CHAT, "stop", ["a", 5]),
        (CHAT, "logit_bias", "x"),
        (CHAT, "logit_bias", {"word": 1}),
        (CHAT, "logit_bias", {"5": 101}),
        (CHAT, "tools", {}),
        ("responses", "tools", [{"type": "web_search"}]),
        (CHAT, "functions", [{}]),
        ("completions", "echo", True),
        ("completions", "suffix", "x"),
        ("completions", "best_of", 2),
        ("responses", "background", True),
    ],
)
def test_a_member_that_does_not_fit_is_named(route: str, name: str, value: Any) -> None:
    with pytest.raises(MemberError, match=rf"^{name}: expected .*, got "):
        check_members(route, {name: value}, takes_tools=True)


def test_what_fits_and_null_and_what_is_not_known_here_is_left_to_llama_cpp() -> None:
    bounds = {"temperature": 2, "top_p": 0, "presence_penalty": -2, "max_tokens": 1, "n": 1, "top_logprobs": 20}
    others = {"stop": "x", "logit_bias": {"5": -100}, "tools": [TOOL], "echo": False, "seed": None, "min_p": 0.1}
    check_members(CHAT, {**bounds, **others, "logprobs": True}, takes_tools=True)
    check_members("completions", {"logprobs": 20, "stop": None, "best_of": 1}, takes_tools=False)


def test_tools_need_a_place_in_the_template() -> None:
    check_members(CHAT, {"tools": []}, takes_tools=False)
    check_members(CHAT, {"tools": [TOOL], "tool_choice": "none"}, takes_tools=False)
    with pytest.raises(MemberError, match=r"^tools: the chat template of the model has no place for tools"):
        check_members(CHAT, {"tools": [TOOL]}, takes_tools=False)


def test_the_format_of_a_response_is_where_chats_have_it() -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    schema = {"name": "a", "schema": {"type": "object"}, "strict": True}

    assert response_request({"text": {"format": form}})["response_format"] == {
        "type": "json_schema",
        "json_schema": schema,
    }
    assert response_request({"text": {"format": {"type": "json_object"}}})["response_format"] == {"type": "json_object"}
    assert response_request({"input": "x", "text": {"verbosity": "low"}}) == {
        "input": "x",
        "text": {"verbosity": "low"},
    }
    assert response_request({"tools": [{"name": "f", "description": None}]}) == {"tools": [{"name": "f"}]}


def test_events_say_which_item_and_content_they_are_about() -> None:
    events = ResponseEvents()

    def complete(**document: Any) -> dict[str, Any]:
        event = b"event: %b\ndata: %b" % (document["type"].encode(), json.dumps(document).encode())
        head, _, data = events.complete(event).partition(b"\ndata: ")
        assert head == b"event: " + document["type"].encode()
        found: dict[str, Any] = json.loads(data)
        return found

    assert complete(type="response.created", response={"id": "r"})["response"] == {"id": "r", "output": []}
    assert complete(type="response.output_item.added", item={"id": "a"})["output_index"] == 0
    delta = complete(type="response.output_text.delta", item_id="a", delta="é")
    assert (delta["output_index"], delta["content_index"], delta["sequence_number"]) == (0, 0, 2)
    assert complete(type="response.output_item.added", item={"id": "b"})["output_index"] == 1
    assert "content_index" not in complete(type="response.function_call_arguments.delta", item_id="b", delta="{")
