"""Requests by the contract of Triton's backend and of OpenAI's API: the prompt, sampling parameters, and answers.

Sources: the reference of TensorRT-LLM's LLM API, "SamplingParams"; OpenAI's API reference, "Chat completions" and
"Completions". Other members are those of `trtllm-serve`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...language.worker.members import (
    ABOVE_0,
    FLAG,
    FORMAT,
    IDS,
    OBJECT,
    RequestMember,
    check,
    closest_hint,
    integer,
    is_texts,
    number,
    read_members,
)
from ...language.worker.text_stream import CHAT, COMPLETIONS, returned
from ...language.worker.text_stream import usage_of as counted

if TYPE_CHECKING:
    from typing import Any

PREFIX = "sampling_param_"
"""Prefix of the inputs of Triton's backend."""

_STOPS = RequestMember(
    "a string or an array of strings, none of them empty",
    lambda value: value != "" and (isinstance(value, str) or (is_texts(value) and all(value))),
)

PARAMETERS = {
    **dict.fromkeys(("max_tokens", "n", "best_of", "no_repeat_ngram_size", "truncate_prompt_tokens"), integer(1)),
    **dict.fromkeys(("min_tokens", "top_k", "top_p_reset_ids", "early_stopping", "logprobs"), integer(0)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "length_penalty"), number()),
    **dict.fromkeys(("top_p", "top_p_min", "top_p_decay"), number(ABOVE_0, 1)),
    **dict.fromkeys(("temperature", "beam_search_diversity_rate"), number(0)),
    **dict.fromkeys(("use_beam_search", "ignore_eos", "return_perf_metrics", "add_special_tokens"), FLAG),
    **dict.fromkeys(("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"), FLAG),
    **dict.fromkeys(("stop", "bad"), _STOPS),
    **dict.fromkeys(("stop_token_ids", "bad_token_ids"), IDS),
    "exclude_input_from_output": FLAG,  # of the token ids: the text never holds the prompt
    "guided_decoding": OBJECT,
    "min_p": number(0, 1),
    "repetition_penalty": number(ABOVE_0),
    "seed": integer(0, 2**64 - 1),
}


def read_sampling(given: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters; a temperature of 0 takes the most likely token.

    Args:
        given: Members by name, also with the prefix of Triton's inputs; None stands for the default.

    Raises:
        ValueError: One is unknown, or has a value that it cannot have.
    """
    members = read_members({name.removeprefix(PREFIX): value for name, value in given.items()}, PARAMETERS)
    members.pop("exclude_input_from_output", None)
    if members.get("temperature") == 0:
        del members["temperature"]
        members.pop("top_p", None)
        members["top_k"] = 1
    return members


def sampling_params(members: dict[str, Any], *, stream: bool) -> Any:
    """Return TensorRT-LLM's sampling parameters. Raises ValueError: They do not go together."""
    from tensorrt_llm import SamplingParams
    from tensorrt_llm.llmapi import GuidedDecodingParams

    if stream and (members.get("use_beam_search") or members.get("best_of", 1) > members.get("n", 1)):
        name = "use_beam_search" if members.get("use_beam_search") else "best_of"
        raise ValueError(f"{name}: the best answer is known at the end only, so it cannot be streamed")
    members = dict(members)
    guided = members.pop("guided_decoding", None)
    if guided is not None:
        try:
            members["guided_decoding"] = GuidedDecodingParams(**guided)
        except TypeError as error:
            raise ValueError(f"guided_decoding: {error}") from None
    return SamplingParams(**members)


MAX_TOKENS = 16
"""Default of `max_tokens` in completions; in chats it is the room that the context has left."""

_SAMPLING = (PARAMETERS.keys() | {"max_completion_tokens", "response_format"}) - {
    "best_of", "use_beam_search", "logprobs", "return_perf_metrics", "exclude_input_from_output", "guided_decoding",
}  # fmt: skip
_COMMON = _SAMPLING | {"model", "stream", "stream_options"}
_MEMBERS = {
    CHAT: _COMMON | {"messages", "add_generation_prompt", "chat_template_kwargs"},
    COMPLETIONS: _COMMON | {"prompt"},
}
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_WITHOUT_EFFECT_UNSET = {"tools", "logprobs", "echo", "suffix", "best_of", "logit_bias", "tool_choice", "functions"}
"""Members that may be there if they ask for nothing: null, false, 0, "", [] or {}; `tool_choice` may be "none"."""


class OpenAiPrompt(NamedTuple):
    """The request of the engine.

    Attributes:
        prompt: Text, or ids of tokens.
        sampling: Members of `SamplingParams`.
    """

    prompt: str | list[int]
    sampling: dict[str, Any]
    stream: bool


def read_body(route: str, body: dict[str, Any], tokenizer: Any) -> OpenAiPrompt:
    """Return what a client's document asks for; front ends have checked its messages, its prompt and `stream`.

    Args:
        route: `CHAT` or `COMPLETIONS`.
        tokenizer: The engine's, with the chat template.

    Raises:
        ValueError: A member is wrong, or asks for what this backend does not have; the message begins with its name.
    """
    for name, value in body.items():
        if name in _WITHOUT_EFFECT or name in _MEMBERS[route]:
            continue
        if name not in _WITHOUT_EFFECT_UNSET:
            raise ValueError(
                f"{name}: the tensorrtllm backend has no such parameter{closest_hint(name, _MEMBERS[route])}"
            )
        if value and not (name == "tool_choice" and value == "none") and not (name == "best_of" and value == 1):
            raise ValueError(f"{name}: the tensorrtllm backend does not support it")
    check("stream_options", body.get("stream_options") or {}, OBJECT)
    stream = bool(body.get("stream"))
    sampling = _sampling(route, body)
    if stream and sampling.get("n", 1) > 1:
        raise ValueError("n: expected 1 with `stream`")
    prompt = _chat_prompt(body, tokenizer) if route == CHAT else _prompt(body.get("prompt"))
    return OpenAiPrompt(prompt, sampling, stream)


def _sampling(route: str, body: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if name in PARAMETERS and name in _SAMPLING}
    if body.get("max_completion_tokens") is not None:
        given["max_tokens"] = body["max_completion_tokens"]
    given["temperature"] = 1.0 if given.get("temperature") is None else given["temperature"]
    given["guided_decoding"] = _guided(body.get("response_format"))
    sampling = read_sampling(given)
    if "top_k" not in sampling:
        sampling.setdefault("top_p", 1.0)  # without both of them the engine takes the most likely token
    sampling.setdefault("max_tokens", None if route == CHAT else MAX_TOKENS)
    return sampling


def _guided(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    check("response_format", given, FORMAT)
    if given["type"] == "json_schema":
        return {"json": given["json_schema"]["schema"]}
    return {"json_object": True} if given["type"] == "json_object" else None


def _prompt(given: Any) -> str | list[int]:
    prompt: str | list[int] = given[0] if isinstance(given[0], str | list) and len(given) == 1 else given
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        raise ValueError(f"prompt: expected one text, or a list of ids of tokens, got {json.dumps(given)[:100]}")
    return prompt


def _chat_prompt(body: dict[str, Any], tokenizer: Any) -> list[int]:
    conversation = [_message(index, message) for index, message in enumerate(body["messages"])]
    more = body.get("chat_template_kwargs") or {}
    check("chat_template_kwargs", more, OBJECT)
    begins_answer = body.get("add_generation_prompt") is not False
    try:
        text = tokenizer.apply_chat_template(
            conversation, tokenize=False, **{**more, "add_generation_prompt": begins_answer}
        )
    except Exception as error:  # whatever the template raises, about these messages
        raise ValueError(f"messages: the chat template refuses them: {error}") from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)  # the template writes them
    return ids


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"messages[{index}].content[{number}]: expected a part of type text")
        content = "\n".join(part["text"] for part in content)
    return {**message, "content": content or ""}


def choice_of(route: str, choice: Any) -> dict[str, Any]:
    """Return a choice of an answer that is not streamed."""
    text = {"message": {"role": "assistant", "content": choice.text}} if route == CHAT else {"text": choice.text}
    end = {"logprobs": None, "finish_reason": choice.finish_reason or "stop", "stop_reason": choice.stop_reason}
    return {"index": choice.index, **text, **end}


class NewText:
    """What is new in outputs of the engine, whose choices hold all text so far."""

    def __init__(self) -> None:
        self._texts: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    def of(self, choice: Any) -> tuple[str, int]:
        """Return the text of a choice that has come since the last output, and of how many tokens it is."""
        texts, tokens = self._texts.get(choice.index, 0), self._tokens.get(choice.index, 0)
        self._texts[choice.index], self._tokens[choice.index] = len(choice.text), len(choice.token_ids)
        return choice.text[texts:], max(0, len(choice.token_ids) - tokens)


_KV_CACHE = (
    ("kv_cache_reused_block", "num_reused_blocks", np.int32),
    ("kv_cache_missed_block", "num_missed_blocks", np.int32),
    ("kv_cache_alloc_new_blocks", "num_new_allocated_blocks", np.int32),
    ("kv_cache_alloc_total_blocks", "num_total_allocated_blocks", np.int32),
    ("kv_cache_hit_rate", "kv_cache_hit_rate", np.float32),
)
_TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time")
_SPECULATION = (
    ("acceptance_rate", np.float32),
    ("total_accepted_draft_tokens", np.int32),
    ("total_draft_tokens", np.int32),
)


class TritonAnswer:
    """Turns the outputs of one request into responses: one, or with `stream` one for each of the engine's."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._new = NewText()

    def take(self, output: Any) -> None:
        """Take an output of the engine, whose choices hold all text so far."""
        request, choices = self._request, output.outputs
        prompt = request.text if request.excludes_input is False else ""
        new = list(map(self._new.of, choices))
        outputs: dict[str, Any] = {"text_output": [(prompt + text).encode("utf-8", "replace") for text, _ in new]}
        counts = [count for _, count in new]
        outputs.update(returned(request.returns, choices, len(output.prompt_token_ids), counts))
        measured = getattr(choices[0], "request_perf_metrics", None)
        if measured is not None:
            outputs.update(_measured(measured))
        request.send(outputs, usage_of(output) if output.finished else None, final=output.finished)


def usage_of(output: Any) -> dict[str, int]:
    made = sum(len(choice.token_ids) for choice in output.outputs)
    return counted(len(output.prompt_token_ids), made, int(getattr(output, "cached_tokens", 0) or 0))


def _measured(metrics: Any) -> dict[str, Any]:
    """Return the outputs for `return_perf_metrics`."""
    found = {name: np.array([getattr(metrics.kv_cache_metrics, member)], dtype) for name, member, dtype in _KV_CACHE}
    for name in _TIMES:  # of type timedelta
        nanoseconds = round(getattr(metrics.timing_metrics, name).total_seconds() * 1e9)
        found[f"{name}_ns"] = np.array([nanoseconds], np.int64)
    for name, dtype in _SPECULATION:
        found[name] = np.array([getattr(metrics.speculative_decoding, name)], dtype)
    return found
