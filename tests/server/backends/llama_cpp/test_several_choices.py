"""Answers of several choices, from the chunks of a stream of llama.cpp."""

from typing import Any

import pytest

from charonia.server.backends.llama_cpp.worker.exchange import SeveralChoices, choices_count, streamed_request

HEAD = {"id": "7", "model": "file", "created": 1}


def text_chunk(index: int, text: str, reason: str | None = None, timings: dict[str, int] | None = None) -> Any:
    choice = {"text": text, "index": index, "logprobs": None, "finish_reason": reason}
    counts = {"timings": timings, "usage": {"prompt_tokens": 99}} if timings else {}
    return {**HEAD, "object": "text_completion", "choices": [choice], **counts}


def chat_chunk(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> Any:
    choice = {"finish_reason": reason, "index": index, "delta": delta}
    return {**HEAD, "object": "chat.completion.chunk", "choices": [choice], **more}


def timings(prompt: int, cached: int, made: int) -> dict[str, int]:
    return {"prompt_n": prompt, "cache_n": cached, "predicted_n": made}


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": ["a"]}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": [[1], [2, 3]], "n": 2}, 4),
        ({"messages": [], "n": 3}, 3),
        ({"messages": [], "n": None}, 1),
    ],
)
def test_choices_are_those_of_each_prompt(body: dict[str, Any], count: int) -> None:
    assert choices_count(body) == count


def test_they_are_asked_for_as_a_stream() -> None:
    asked = streamed_request({"n": 2, "stream": False, "stream_options": {"include_usage": True}})
    assert asked == {"n": 2, "stream": True}


def test_texts_are_joined_and_tokens_added_up_those_of_a_prompt_once() -> None:
    choices = SeveralChoices({"model": "mine", "prompt": ["a", "b"], "n": 2})
    for chunk in [
        text_chunk(1, "y"),
        text_chunk(0, "x"),
        text_chunk(1, "", "stop", timings(1, 2, 1)),
        text_chunk(2, "z"),
        text_chunk(0, "x"),
        text_chunk(0, "", "length", timings(3, 0, 2)),
        text_chunk(2, "", "length", timings(1, 3, 5)),
        text_chunk(3, "", "stop", timings(1, 3, 0)),
    ]:
        passed = choices.take(chunk)
        assert passed["model"] == "mine"
        assert "usage" not in passed
    document = choices.document()
    assert [choice["text"] for choice in document["choices"]] == ["xx", "y", "z", ""]
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2, 3]
    assert [choice["finish_reason"] for choice in document["choices"]] == ["length", "stop", "length", "stop"]
    assert document["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 8,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert (document["object"], document["id"], document["model"]) == ("text_completion", "7", "mine")
    assert choices.usage_chunk()["usage"] == document["usage"]
    assert choices.usage == {"prompt_tokens": 7, "completion_tokens": 8, "cached_tokens": 3}


def test_pieces_of_chats_become_messages_with_calls_and_probabilities() -> None:
    choices = SeveralChoices({"model": "m", "n": 2})
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    pieces: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"role": "assistant", "content": None}, {}),
        ({"content": "He"}, {"logprobs": {"content": [{"token": "He"}]}}),
        ({"content": "y"}, {"logprobs": {"content": [{"token": "y"}]}}),
        ({"tool_calls": [first]}, {}),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}, {}),
        ({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}, {}),
        ({"tool_calls": [{"index": 1, "id": "c2", "type": "function", "function": {"name": "g"}}]}, {}),
    ]
    for delta, more in pieces:
        chunk = chat_chunk(0, delta)
        chunk["choices"][0] |= more
        choices.take(chunk)
    choices.take(chat_chunk(0, {}, "tool_calls", timings=timings(4, 0, 9)))
    choices.take(chat_chunk(1, {"role": "assistant", "content": "No"}, None))
    choices.take(chat_chunk(1, {}, "stop", timings=timings(1, 3, 1)))
    document = choices.document()
    assert document["object"] == "chat.completion"
    called, said = document["choices"]
    assert called["message"]["content"] == "Hey"
    assert called["message"]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "c2", "type": "function", "function": {"name": "g"}},
    ]
    assert called["logprobs"] == {"content": [{"token": "He"}, {"token": "y"}]}
    assert (called["finish_reason"], said["finish_reason"]) == ("tool_calls", "stop")
    assert said["message"] == {"role": "assistant", "content": "No"}
    assert document["usage"]["prompt_tokens"] == 4
    assert document["usage"]["completion_tokens"] == 10
