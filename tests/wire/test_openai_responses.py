"""Responses of OpenAI's API in terms of chats, and their events from the chunks of one."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from charonia.core.errors import ServingError
from charonia.wire.openai_responses import ResponseForm, chat_request

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "description": None}


def test_log_probabilities_are_asked_for_by_their_number() -> None:
    assert chat_request({"input": "hi", "top_logprobs": 2}, [])["logprobs"] is True
    assert "logprobs" not in chat_request({"input": "hi"}, [])


def test_members_have_their_places_in_a_chat() -> None:
    schema = {"name": "a", "schema": {"type": "object"}, "strict": True}
    chat = chat_request(
        {
            "model": "m",
            "input": "hi",
            "instructions": "be brief",
            "max_output_tokens": 5,
            "stream": True,
            "text": {"format": {"type": "json_schema", **schema}},
            "tools": [TOOL],
            "tool_choice": {"type": "function", "name": "f"},
            "include": ["message.output_text.logprobs"],
            "reasoning": {"effort": None, "summary": None},
            "background": False,
            "top_k": 3,
            "seed": None,
        },
        [{"role": "user", "content": "earlier"}],
    )

    assert chat == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "earlier"},
            {"role": "user", "content": "hi"},
        ],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": schema},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "logprobs": True,
        "top_k": 3,
    }


def test_a_choice_among_tools_has_its_place_in_a_chat() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}

    assert chat_request({"input": "a", "tool_choice": choice}, [])["tool_choice"] == {
        "type": "allowed_tools",
        "allowed_tools": allowed,
    }
    assert chat_request({"input": "a", "tool_choice": "required"}, [])["tool_choice"] == "required"


def test_items_become_messages() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "c"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "five"},
        {"role": "user", "content": [{"type": "input_text", "text": "d"}, image]},
    ]

    messages = chat_request({"input": items}, [])["messages"]

    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert [message["content"] for message in messages[:2]] == ["ab", "c"]
    assert [call["function"]["name"] for call in messages[1]["tool_calls"]] == ["f", "g"]
    assert messages[2] == {"role": "tool", "tool_call_id": "1", "content": "five"}
    assert messages[3]["content"][1] == {"type": "image_url", "image_url": {"url": image["image_url"]}}


def test_a_call_without_a_message_before_it_is_one_of_the_assistant() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}

    messages = chat_request({"input": [{"role": "user", "content": "a"}, call]}, [])["messages"]

    assert [(message["role"], message["content"]) for message in messages] == [("user", "a"), ("assistant", "")]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["1"]


def test_usage_and_settings_that_are_not_given_have_their_defaults() -> None:
    form = ResponseForm({"model": "m"}, "1", 1700)
    message = {"role": "assistant", "content": "a"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]

    document = json.loads(form.document({"choices": choices, "usage": {}}))

    assert (document["temperature"], document["top_p"]) == (1.0, 1.0)
    assert (document["usage"] or {}).get("total_tokens", 0) == 0


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"input": 5}, "input"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "reasoning": {"effort": "high"}}, "reasoning"),
        ({"input": "a", "include": ["file_search_call.results"]}, "include"),
        ({"input": "a", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "a", "text": 5}, "text"),
        ({"input": "a", "instructions": []}, "instructions"),
        ({"input": "a", "tools": {}}, "tools"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": ["a", 5]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "a"}, {"type": "web_search_call"}]}, "input[1]"),
        ({"input": "a", "tools": [TOOL, {"type": "web_search"}]}, "tools"),
        ({"input": "a", "tools": ["f"]}, "tools"),
    ],
)
def test_what_a_chat_cannot_answer_is_refused_by_name(members: dict[str, Any], named: str) -> None:
    with pytest.raises(ServingError) as refused:
        chat_request(members, [])

    assert refused.value.message.startswith(f"{named}: ")


def events_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    form = ResponseForm({"model": "m", "max_output_tokens": 3}, "1", 1700)

    def texts() -> Iterator[bytes]:
        yield from form.begin()
        for chunk in chunks:
            yield from form.take(chunk)
        yield from form.end()

    found = []
    for event in texts():
        head, _, data = event.partition(b"\ndata: ")
        document = json.loads(data)
        assert head == b"event: " + document["type"].encode()
        found.append(document)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def delta(reason: str | None = None, **members: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": members, "finish_reason": reason}]}


def test_a_truncated_answer_is_incomplete() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    events = events_of(
        [delta(role="assistant", content=""), delta(content="a"), delta(content="b", reason="length"),
         {"choices": [], "usage": usage}]
    )  # fmt: skip

    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    for event in events[:2]:
        assert (event["response"]["created_at"], event["response"]["model"]) == (1700, "m")
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
    assert (events[6]["text"], events[6]["item_id"], events[6]["output_index"]) == ("ab", "msg_10", 0)
    assert {(event["output_index"], event["content_index"]) for event in events[3:8]} == {(0, 0)}
    last = events[-1]["response"]
    assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert last["output"][0]["status"] == "incomplete"
    assert last["usage"] == {
        "input_tokens": 4,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }


def test_reasoning_text_and_calls_are_items() -> None:
    def call(index: int, **members: Any) -> dict[str, Any]:
        return delta(tool_calls=[{"index": index, **members}])

    events = events_of(
        [
            delta(reasoning_content="hm"),
            delta(content="I call"),
            call(0, id="c1", function={"name": "f", "arguments": ""}),
            call(0, function={"arguments": '{"a"'}),
            call(0, function={"arguments": ":1}"}),
            call(1, id="c2", function={"name": "g", "arguments": "{}"}),
            delta(reason="tool_calls"),
        ]
    )

    output = events[-1]["response"]["output"]
    assert events[-1]["type"] == "response.completed"
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert [(item["name"], item["call_id"], item["arguments"]) for item in output[2:]] == [
        ("f", "c1", '{"a":1}'),
        ("g", "c2", "{}"),
    ]
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert added == [0, 1, 2, 3]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(event["output_index"], event["arguments"]) for event in done] == [(2, '{"a":1}'), (3, "{}")]


def test_a_document_has_the_same_items() -> None:
    form = ResponseForm({"model": "m", "temperature": 0.5}, "1", 1700)
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": "hello", "tool_calls": calls}

    document = json.loads(form.document({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}))

    assert (document["id"], document["object"], document["status"]) == ("resp_1", "response", "completed")
    assert (document["temperature"], document["top_p"]) == (0.5, 1.0)
    assert document["output"][0]["content"][0]["text"] == "hello"
    assert document["output"][1]["call_id"] == "c1"
