"""Requests of OpenAI's API before llama.cpp sees them, and its events after."""

import json
from typing import Any

import pytest

from charonia.server.backends.language.worker.members import MemberError
from charonia.server.backends.llama_cpp.worker.openai_members import AnswerForm, Capabilities, llama_request

CHAT = "chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
OTHER = {"type": "function", "function": {"name": "g"}}
ALL = Capabilities(tools=True, images=True, audio=True)


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
        (CHAT, "min_tokens", -1),
        (CHAT, "seed", "x"),
        (CHAT, "top_k", "x"),
        (CHAT, "stream_options", []),
        (CHAT, "response_format", 5),
        (CHAT, "response_format", {"type": "json_schema"}),
        (CHAT, "tool_choice", "perhaps"),
        (CHAT, "tools", [{"type": "function"}]),
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
        (CHAT, "tools", [{"type": "web_search"}]),
        ("embeddings", "encoding_format", "hex"),
        (CHAT, "functions", [{}]),
        ("completions", "echo", True),
        ("completions", "best_of", 2),
    ],
)
def test_a_member_that_does_not_fit_is_named(route: str, name: str, value: Any) -> None:
    with pytest.raises(MemberError, match=rf"^{name}: expected .*, got "):
        llama_request(route, {name: value}, ALL)


@pytest.mark.parametrize("route", [CHAT, "completions", "embeddings"])
def test_what_llama_cpp_would_ignore_is_refused(route: str) -> None:
    with pytest.raises(MemberError, match=r"^encoding_fromat: llama.cpp does not support this member"):
        llama_request(route, {"encoding_fromat": "float"}, ALL)
    if route != "embeddings":
        with pytest.raises(MemberError, match=r"^temprature: .*; did you mean 'temperature'\?"):
            llama_request(route, {"temprature": 1}, ALL)
        with pytest.raises(MemberError, match=r"^stream_options.x: is not supported"):
            llama_request(route, {"stream_options": {"x": 1}}, ALL)
        with pytest.raises(MemberError, match=r"^stream_options.include_usage: expected a boolean"):
            llama_request(route, {"stream_options": {"include_usage": 1}}, ALL)


def test_what_fits_is_sent_and_null_is_left_out() -> None:
    bounds = {"temperature": 2, "top_p": 0, "presence_penalty": -2, "max_tokens": 1, "n": 1, "top_logprobs": 20}
    others = {"logit_bias": {"5": -100}, "tools": [TOOL], "min_p": 0.1, "logprobs": True, "user": "me"}

    assert llama_request(CHAT, {**bounds, **others, "seed": None}, ALL) == {**bounds, **others}
    assert llama_request(
        "completions", {"logprobs": 20, "stop": None, "best_of": 1, "echo": False}, Capabilities()
    ) == {
        "logprobs": 20,
        "best_of": 1,
        "echo": False,
    }


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"stop": ["", "a", ""]}, {"stop": ["a"]}),
        ({"stop": ""}, {"stop": []}),
        ({"seed": 2**40 + 5}, {"seed": 5}),
        ({"repetition_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"min_tokens": 0}, {}),
        ({"min_tokens": 4, "max_tokens": 4}, {"max_tokens": 4, "ignore_eos": True}),
        ({"min_tokens": 4, "ignore_eos": True}, {"ignore_eos": True}),
        ({"guided_json": '{"type": "object"}'}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"json": {"type": "array"}}}, {"json_schema": {"type": "array"}}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"guided_choice": ["a", 'say "b"\n']}, {"grammar": 'root ::= "a" | "say \\"b\\"\\n"'}),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, {"grammar": 'root ::= "x"'}),
    ],
)
@pytest.mark.parametrize("route", [CHAT, "completions"])
def test_members_of_other_names_are_translated(route: str, given: dict[str, Any], sent: dict[str, Any]) -> None:
    assert llama_request(route, given, ALL) == sent


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"min_tokens": 3}, "min_tokens"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "guided_json": {}}, "guided_choice"),
        ({"guided_json": "no"}, "guided_json"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}, "grammar": "x"}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice"),
    ],
)
def test_what_llama_cpp_cannot_do_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(MemberError, match=rf"^{named.replace('.', '[.]')}: "):
        llama_request(CHAT, given, ALL)


def test_the_format_of_a_completion_is_a_schema() -> None:
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}

    assert llama_request("completions", {"response_format": form}, ALL) == {"json_schema": schema}
    assert llama_request("completions", {"response_format": {"type": "text"}}, ALL) == {}
    assert llama_request(CHAT, {"response_format": form}, ALL) == {"response_format": form}


def test_tools_need_a_place_in_the_template() -> None:
    llama_request(CHAT, {"tools": []}, Capabilities())
    llama_request(CHAT, {"tools": [TOOL], "tool_choice": "none"}, Capabilities())
    with pytest.raises(MemberError, match=r"^tools: the chat template of the model has no place for tools"):
        llama_request(CHAT, {"tools": [TOOL]}, Capabilities())


def test_the_choice_of_a_function_leaves_out_the_others() -> None:
    one = {"type": "function", "function": {"name": "g"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [one]}}

    for choice, mode in ((one, "required"), (some, "auto")):
        sent = llama_request(CHAT, {"tools": [TOOL, OTHER], "tool_choice": choice}, ALL)
        assert sent == {"tools": [OTHER], "tool_choice": mode}


@pytest.mark.parametrize(("kind", "taken"), [("image_url", "images"), ("input_audio", "audio"), ("video", "")])
def test_parts_of_a_message_need_a_model_that_takes_them(kind: str, taken: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": kind}]}]}

    with pytest.raises(MemberError, match=r"^messages\[1\].content\[0\]: "):
        llama_request(CHAT, body, Capabilities())
    if taken:
        assert llama_request(CHAT, body, Capabilities(**{taken: True})) == body


def test_a_completion_has_its_own_id_and_log_probabilities() -> None:
    form = AnswerForm("completions", "smol", {"model": "smol:poet", "logprobs": 1})
    top = [{"token": "a", "logprob": -0.1}]

    def chunk(token: str) -> bytes:
        content = [{"token": token, "logprob": -0.5, "top_logprobs": top}]
        choice = {"index": 0, "text": token, "logprobs": {"content": content}}
        return json.dumps({"choices": [choice], "id": "chatcmpl-1", "model": "smol"}, separators=(",", ":")).encode()

    form.of(chunk("ab"))
    found = json.loads(form.of(chunk("c")))

    assert (found["id"], found["model"]) == ("cmpl-1", "smol:poet")
    assert found["choices"][0]["logprobs"] == {
        "tokens": ["c"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.1}],
        "text_offset": [2],
    }


def test_a_stream_can_have_the_usage_in_each_chunk() -> None:
    form = AnswerForm(CHAT, "smol", {"stream_options": {"continuous_usage_stats": True}})
    timings = {"prompt_n": 3, "cache_n": 4, "predicted_n": 2}

    found = json.loads(form.of(json.dumps({"choices": [], "timings": timings}).encode()))

    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert llama_request(CHAT, {"stream_options": {"continuous_usage_stats": True}}, ALL)["timings_per_token"] is True


def test_a_text_between_two_others_is_asked_for_in_the_words_of_llama_cpp() -> None:
    asked = {"model": "m", "prompt": "a", "suffix": "b", "max_tokens": 3, "n": 1}

    sent = llama_request("completions", asked, Capabilities())

    assert (sent["input_prefix"], sent["input_suffix"], sent["n_predict"]) == ("a", "b", 3)
    assert not {"prompt", "suffix", "max_tokens"} & set(sent)
    for name, value in {"n": 2, "logprobs": 1, "prompt": ["a"]}.items():
        with pytest.raises(MemberError, match=f"^{name}: "):
            llama_request("completions", {**asked, name: value}, Capabilities())
