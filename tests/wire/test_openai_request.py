"""Requests of OpenAI's API for models that do not speak it: what is taken, what is refused, and by which name."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid, not_found, unavailable, unsupported
from charonia.core.statistics import TokenUsage
from charonia.wire.openai_answer import (
    AnswerHead,
    decode_embeddings_request,
    encode_embeddings,
    error_object,
    normalized,
    padded_tokens,
    pooled,
    shortened,
    usage_object,
)
from charonia.wire.openai_models import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    TOKENIZE,
    engine_routes,
    model_ids,
    path_of,
    routes_of,
)
from charonia.wire.openai_request import TextRequest, check_engine_request, decode_text_request

TEXT = ModelInput("text_input", DataType.BYTES, dims=(1,))
OUTPUT = ModelOutput("text_output", DataType.BYTES, (1,))


def model(*inputs: ModelInput, **more: Any) -> ModelConfig:
    return ModelConfig(name="m", input=(TEXT, *inputs), output=(OUTPUT,), **more)


def given(name: str, datatype: DataType = DataType.BYTES) -> ModelInput:
    return ModelInput(name, datatype, dims=(1,), optional=True)


def chat(config: ModelConfig, **members: Any) -> TextRequest:
    messages = members.pop("messages", [{"role": "user", "content": "hi"}])
    return decode_text_request(config, {"model": "m", "messages": messages, **members}, is_chat=True)


def refusal(config: ModelConfig, **members: Any) -> str:
    with pytest.raises(ServingError) as refused:
        chat(config, **members)
    return refused.value.message


def test_sampling_parameters_go_to_inputs_of_their_names_else_into_the_json_object() -> None:
    config = model(given("temperature", DataType.FP32), given("sampling_parameters"))

    asked = chat(config, temperature=0.5, top_p=0.9, max_completion_tokens=5, seed=3)

    assert asked.inputs == {"temperature": 0.5, "sampling_parameters": {"top_p": 0.9, "max_tokens": 5, "seed": 3}}
    assert asked.max_tokens == 5
    assert not asked.is_streamed
    assert chat(config, stream=True).is_streamed
    assert asked.inputs_of(2)["sampling_parameters"] == {"top_p": 0.9, "max_tokens": 5, "seed": 5}
    assert chat(model(given("seed", DataType.INT64)), seed=3).inputs_of(1) == {"seed": 4}


def test_any_other_member_goes_to_an_input_of_its_name() -> None:
    schema = {"type": "json_object"}

    assert chat(model(given("response_format")), response_format=schema).inputs == {"response_format": schema}
    assert chat(model(given("language")), language="de").inputs == {"language": "de"}


def test_a_python_model_may_read_request_parameters() -> None:
    python = model(given("seed", DataType.INT64), backend="python")
    members = {"max_tokens": 5, "temperature": 1, "ignore_eos": True, "seed": 3}

    assert chat(python, **members).inputs == members
    assert chat(python, max_completion_tokens=5, tool_choice="none", user="u").inputs == {"max_tokens": 5}
    assert refusal(python, temperature=3).startswith("temperature: expected 0 to 2")
    assert refusal(python, tools=[{}]).startswith("tools: model 'm' cannot answer this")
    assert refusal(python, logprobs=True).startswith("logprobs: model 'm' cannot answer this")
    assert refusal(python, response_format={"type": "json_object"}).startswith("response_format: model 'm' has no")
    with_json = model(given("sampling_parameters"), backend="python")
    assert refusal(with_json, ignore_eos=True).startswith("ignore_eos: model 'm' has no input for it")


@pytest.mark.parametrize(
    "members",
    [
        {"temperature": 1, "top_p": 1.0, "n": 1, "presence_penalty": 0, "logprobs": False, "tools": []},
        {"user": "u", "metadata": {"a": 1}, "store": True, "seed": None, "response_format": {"type": "text"}},
        {"tool_choice": "none", "logit_bias": {}, "modalities": ["text"]},
        {"min_p": 0, "frequency_penalty": 0, "repetition_penalty": 1, "top_k": -1, "min_tokens": 0, "top_logprobs": 0},
        {"tool_choice": "auto", "functions": [], "function_call": "none", "top_k": 0, "best_of": 1, "suffix": ""},
    ],
)
def test_what_changes_nothing_is_accepted(members: dict[str, Any]) -> None:
    assert chat(model(), **members).inputs == {}


@pytest.mark.parametrize(
    ("members", "beginning"),
    [
        ({"temperature": 0.5}, "temperature: model 'm' has no input for it"),
        ({"temperature": "hot"}, "temperature: expected a number, got a string"),
        ({"temperature": True}, "temperature: expected a number, got a boolean"),
        ({"logprobs": True}, "logprobs: model 'm' cannot answer this"),
        ({"tools": [{}]}, "tools: model 'm' cannot answer this"),
        ({"logit_bias": {"5": 1}}, "logit_bias: model 'm' has no input for it"),
        ({"stop": [1]}, "stop: expected a string"),
        ({"stop": ["x"] * 17}, "stop: expected a string, or at most 16"),
        ({"stream": "yes"}, "stream: expected a boolean"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage: expected a boolean"),
        ({"messages": []}, "messages: expected 1 to 10000 messages, got 0"),
        ({"messages": ["hi"]}, "messages[0]: expected an object with a role"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content[0]: expected a part of type text"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: expected a string"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content: expected a string"),
        ({"messages": [{"role": "assistant", "content": 5}]}, "messages[0].content: expected a string"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(members: dict[str, Any], beginning: str) -> None:
    assert refusal(model(), **members).startswith(beginning)


def test_all_prompts_of_a_request_share_the_limit_of_answers() -> None:
    asked = decode_text_request(model(), {"prompt": ["a", "b"], "n": 64}, is_chat=False)
    assert (asked.count, asked.prompts) == (64, ("a", "b"))

    with pytest.raises(ServingError, match="n: expected at most 128 answers to a request, got 130"):
        decode_text_request(model(), {"prompt": ["a", "b"], "n": 65}, is_chat=False)


@pytest.mark.parametrize(
    ("name", "low", "high", "words"),
    [
        ("temperature", 0, 2, "0 to 2"),
        ("top_p", 0, 1, "0 to 1"),
        ("min_p", 0, 1, "0 to 1"),
        ("presence_penalty", -2, 2, "-2 to 2"),
        ("frequency_penalty", -2, 2, "-2 to 2"),
        ("repetition_penalty", 0, 10, "0 to 10"),
        ("max_tokens", 1, None, "at least 1"),
        ("min_tokens", 0, None, "at least 0"),
        ("top_k", -1, None, "at least -1"),
        ("seed", -(2**63), None, f"at least {-(2**63)}"),
        ("n", 1, 128, "at "),
    ],
)
def test_numbers_have_limits(name: str, low: int, high: int | None, words: str) -> None:
    config = model(given("sampling_parameters"))

    assert refusal(config, **{name: low - 1}).startswith(f"{name}: expected {words}")
    chat(config, **{name: low})
    if high is not None:
        chat(config, **{name: high})
        assert refusal(config, **{name: high + 1}).startswith(f"{name}: expected {words}")


def test_parts_of_a_message_are_text_and_pictures() -> None:
    picture = base64.b64encode(b"picture").decode()
    parts = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
    ]
    messages = [{"role": "user", "content": parts}]

    asked = chat(model(given("image")), messages=messages)

    assert asked.images == (picture,)
    assert asked.messages[0]["content"] == [{"type": "text", "text": "What is this?"}, {"type": "image"}]
    assert "takes no pictures: it has no input 'image'" in refusal(model(), messages=messages)
    remote = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]
    assert "expected a data URL" in refusal(model(given("image")), messages=remote)
    broken = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}}]}]
    assert "not base64" in refusal(model(given("image")), messages=broken)
    assert chat(model(), messages=[{"role": "user", "content": parts[:1]}]).messages[0]["content"] == "What is this?"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_prompts_are_text_or_tokens(prompt: object, read: object) -> None:
    assert decode_text_request(model(), {"prompt": prompt}, is_chat=False).prompts == read


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "prompt: expected a string, tokens, or an array of either"),
        (5, "prompt: expected a string, tokens, or an array of either"),
        ([], "prompt: expected 1 to 2048 texts, got 0"),
        ([[]], "prompt: expected no empty text, got one at 0"),
        (["a", 1], "prompt: expected a string, tokens, or an array of either"),
    ],
)
def test_other_prompts_are_refused(prompt: object, message: str) -> None:
    with pytest.raises(ServingError, match=message):
        decode_text_request(model(), {"prompt": prompt}, is_chat=False)


def test_models_are_known_by_their_inputs_and_outputs() -> None:
    engine = model(parameters={"openai_routes": "completions, responses", "lora_adapters": "a,b"})
    vector = ModelOutput("vector", DataType.FP32, (3,))
    ids = tuple(ModelInput(name, DataType.INT64, dims=(-1,)) for name in ("input_ids", "attention_mask"))

    assert engine_routes(engine) == ("completions", "responses")
    assert routes_of(engine) == ("completions", "responses")
    assert model_ids(engine) == ["m", "m:a", "m:b"]
    assert routes_of(model()) == ("chat/completions", "completions", "responses")
    assert routes_of(ModelConfig(name="m", input=(TEXT,), output=(vector,))) == ("embeddings",)
    assert routes_of(ModelConfig(name="m", input=ids, output=(vector,))) == ("embeddings",)
    assert routes_of(ModelConfig(name="m", input=ids[:1], output=(vector,))) == ()


def test_errors_name_the_member_and_have_the_status_of_this_api() -> None:
    assert error_object(invalid("top_p: expected 0 to 1, got 2", hint="h")) == {
        "message": "top_p: expected 0 to 1, got 2 (hint: h)",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": None,
    }
    assert error_object(not_found("model: there is no model 'x'"))["code"] == "model_not_found"
    overflow = invalid("the model's maximum context length is 8 tokens, the request has 9")
    assert error_object(overflow)["code"] == "context_length_exceeded"
    assert error_object(unavailable("full"))["type"] == "server_error"
    assert error_object(unsupported("tools: no"))["type"] == "invalid_request_error"
    assert error_object(invalid("messages[3].content: expected text"))["param"] == "messages[3].content"
    assert error_object(invalid("model 'm': no"))["param"] is None
    assert error_object(invalid("no key"), 401) == {
        "message": "no key",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_api_key",
    }


def test_the_paths_of_routes_begin_with_the_version_of_the_api_except_those_of_other_engines() -> None:
    assert (path_of(CHAT), path_of(TOKENIZE)) == ("/v1/chat/completions", "/tokenize")


def test_embeddings_are_pooled_over_tokens_and_not_over_padding() -> None:
    tokens, mask = padded_tokens([[5, 6], [7]])
    output = np.array([[[1, 2], [3, 4]], [[5, 6], [100, 100]]], np.float32)

    assert tokens.tolist() == [[5, 6], [7, 0]]
    assert pooled(output, mask, "mean").tolist() == [[2, 3], [5, 6]]
    assert pooled(output, mask, "cls").tolist() == [[1, 2], [5, 6]]
    assert pooled(output[:, 0], mask, "mean").tolist() == [[1, 2], [5, 6]]
    assert normalized(np.array([[3, 4], [0, 0]], np.float32)).ravel().tolist() == pytest.approx([0.6, 0.8, 0, 0])
    assert shortened(np.array([[3, 4, 12]], np.float32), 2).ravel().tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"input": []}, "input: expected 1 to 2048 texts, got 0"),
        ({"input": ["a", ""]}, "input: expected no empty text, got one at 1"),
        ({"input": {"a": 1}}, "input: expected a string, tokens, or an array of either, got an object"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format: expected float or base64"),
        ({"input": "a", "dimensions": -1}, "dimensions: expected a positive integer"),
        ({"input": "a", "truncate": True}, "truncate: is not known here"),
    ],
)
def test_requests_for_embeddings_are_refused_by_name(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ServingError) as refused:
        decode_embeddings_request(document)

    assert refused.value.message.startswith(message)


@pytest.mark.parametrize(
    ("route", "member", "good", "bad"),
    [
        (CHAT, "messages", [{"role": "user", "content": "a"}], []),
        (COMPLETIONS, "prompt", "a", 5),
        (EMBEDDINGS, "input", "a", 5),
    ],
)
def test_what_every_engine_needs_is_checked_by_route(route: str, member: str, good: object, bad: object) -> None:
    assert check_engine_request(route, {member: good, "stream": True})
    assert not check_engine_request(route, {member: good, "stream": None})
    with pytest.raises(ServingError, match=member):
        check_engine_request(route, {member: bad})


def test_an_engine_may_get_embedded_prompts_and_messages_to_embed() -> None:
    assert not check_engine_request(COMPLETIONS, {"prompt_embeds": "AAAA"})
    assert not check_engine_request(EMBEDDINGS, {"messages": []})
    assert not check_engine_request("/v1/audio", {})


def test_chunks_and_documents_have_the_form_of_their_route() -> None:
    chat, text = AnswerHead(True, "i", 7, "m"), AnswerHead(False, "i", 7, "m")
    call: dict[str, object] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def choices(document: bytes, kind: str) -> list[Any]:
        whole = json.loads(document)
        assert (whole["id"], whole["object"], whole["created"], whole["model"]) == ("i", kind, 7, "m")
        return list(whole["choices"])

    def choice(index: int, reason: str | None = None, **content: object) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": None, "finish_reason": reason}

    chunk = "chat.completion.chunk"
    assert choices(chat.first(1), chunk) == [choice(1, delta={"role": "assistant", "content": ""})]
    assert choices(chat.piece(1, "a"), chunk) == [choice(1, delta={"content": "a"})]
    assert choices(chat.calls(1, [call]), chunk) == [choice(1, delta={"tool_calls": [{"index": 0, **call}]})]
    assert choices(chat.last(1, "stop"), chunk) == [choice(1, "stop", delta={})]
    assert choices(text.piece(1, "a"), "text_completion") == [choice(1, text="a")]
    assert choices(text.last(1, "stop"), "text_completion") == [choice(1, "stop", text="")]
    assert json.loads(chat.usage({"x": 1}))["usage"] == {"x": 1}
    assert choices(chat.usage({}), chunk) == []
    assert choices(text.document([("a", (), "stop"), ("b", (), "length")], {}), "text_completion") == [
        choice(0, "stop", text="a"),
        choice(1, "length", text="b"),
    ]
    plain, called = choices(chat.document([("a", (), "stop"), ("", [call], "tool_calls")], {}), "chat.completion")
    assert plain == choice(0, "stop", message={"role": "assistant", "content": "a", "refusal": None})
    message: dict[str, object] = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    assert called == choice(1, "tool_calls", message=message)


@pytest.mark.parametrize(
    ("usage", "is_estimated", "more"),
    [
        (TokenUsage(3, 4), False, {}),
        (TokenUsage(3, 4), True, {"estimated": True}),
        (TokenUsage(3, 4, 2), False, {"prompt_tokens_details": {"cached_tokens": 2}}),
    ],
)
def test_usage_says_what_is_estimated_and_what_was_cached(
    usage: TokenUsage, is_estimated: bool, more: dict[str, object]
) -> None:
    expected = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, **more}
    assert usage_object(usage, is_estimated=is_estimated) == expected


def test_embeddings_are_numbers_or_base64_and_have_usage_where_it_is_known() -> None:
    vectors = np.array([[1, 2], [3, 4]], np.float32)

    numbers = json.loads(encode_embeddings(vectors, "m", as_base64=False, usage=TokenUsage(5, 0)))
    text = json.loads(encode_embeddings(vectors[:1], "m", as_base64=True, usage=None))

    assert numbers == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1, 2]},
            {"object": "embedding", "index": 1, "embedding": [3, 4]},
        ],
        "model": "m",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    assert text["data"][0]["embedding"] == "AACAPwAAAEA="
    assert "usage" not in text
