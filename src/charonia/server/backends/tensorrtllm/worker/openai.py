"""Requests of OpenAI's API: what the engine is asked, and the document of an answer that is not streamed.

Source: OpenAI's API reference, "Chat completions" and "Completions"; further members are those of `trtllm-serve`.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, NamedTuple

from ...language.worker.chunks import CHAT, COMPLETIONS
from ...language.worker.members import near
from .sampling import PARAMETERS, read_sampling

if TYPE_CHECKING:
    from typing import Any

MAX_TOKENS = 16
"""Default of `max_tokens` in completions; in chats it is the room that the context has left."""

_SAMPLING = (PARAMETERS.keys() | {"max_completion_tokens", "response_format"}) - {
    *("best_of", "use_beam_search", "logprobs", "return_perf_metrics", "exclude_input_from_output", "guided_decoding")
}
_COMMON = _SAMPLING | {"model", "stream", "stream_options"}
_MEMBERS = {
    CHAT: _COMMON | {"messages", "add_generation_prompt", "chat_template_kwargs"},
    COMPLETIONS: _COMMON | {"prompt"},
}
_WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_WITHOUT_EFFECT_UNSET = {"tools", "logprobs", "echo", "suffix", "best_of", "logit_bias", "tool_choice", "functions"}
"""Members that may be there if they ask for nothing: null, false, 0, "", [] or {}; `tool_choice` may be "none"."""


class OpenAiPrompt(NamedTuple):
    """What the engine is asked.

    Attributes:
        prompt: Text, or ids of tokens.
        sampling: Members of `SamplingParams`.
        stream: Whether the answer is streamed.
    """

    prompt: str | list[int]
    sampling: dict[str, Any]
    stream: bool


def read_body(route: str, body: dict[str, Any], tokenizer: Any) -> OpenAiPrompt:
    """Return what a client's document asks for.

    Args:
        route: `CHAT` or `COMPLETIONS`.
        body: The document.
        tokenizer: The engine's, with the chat template.

    Raises:
        ValueError: A member is wrong, or asks for what this backend does not have; the message begins with its name.
    """
    for name, value in body.items():
        if name in _WITHOUT_EFFECT or name in _MEMBERS[route]:
            continue
        if name not in _WITHOUT_EFFECT_UNSET:
            raise ValueError(f"{name}: the tensorrtllm backend has no such parameter{near(name, _MEMBERS[route])}")
        if value and not (name == "tool_choice" and value == "none") and not (name == "best_of" and value == 1):
            raise ValueError(f"{name}: the tensorrtllm backend does not support it")
    stream = body.get("stream") or False
    if not isinstance(stream, bool):
        raise ValueError(f"stream: expected true or false, got {json.dumps(stream)[:100]}")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise ValueError("stream_options: expected an object")
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
    if given is None or given == {"type": "text"}:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "json_object":
        return {"json_object": True}
    schema = given.get("json_schema") if isinstance(given, dict) else None
    if kind == "json_schema" and isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return {"json": schema["schema"]}
    raise ValueError(
        f"response_format: expected the type text, json_object, or json_schema with its schema, "
        f"got {json.dumps(given)[:100]}"
    )


def _prompt(given: Any) -> str | list[int]:
    prompt = given[0] if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int) else given
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(each) is int and each >= 0 for each in prompt):
        return prompt
    raise ValueError(f"prompt: expected one text, or a list of ids of tokens, got {json.dumps(given)[:100]}")


def _chat_prompt(body: dict[str, Any], tokenizer: Any) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: expected a list of at least one message")
    conversation = [_message(index, message) for index, message in enumerate(messages)]
    more = body.get("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        raise ValueError("chat_template_kwargs: expected an object")
    begins_answer = body.get("add_generation_prompt") is not False
    try:
        text = tokenizer.apply_chat_template(
            conversation, tokenize=False, **{**more, "add_generation_prompt": begins_answer}
        )
    except Exception as error:  # whatever the template raises, about these messages
        raise ValueError(f"messages: the chat template refuses them: {error}") from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)  # the template writes them
    return ids


def _message(index: int, message: Any) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where}: expected an object with a role")
    content = message.get("content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"{where}.content[{number}]: expected a part of type text")
        content = "\n".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"{where}.content: expected a text or a list of parts")
    return {**message, "content": content or ""}


def document(route: str, request_id: str, model: str, output: Any, usage: dict[str, int]) -> bytes:
    """Return the answer to a request that is not streamed.

    Args:
        route: `CHAT` or `COMPLETIONS`.
        request_id: Id of the answer.
        model: The client's name for the model.
        output: The last output of the engine.
        usage: Tokens of the request.
    """
    choices = []
    for choice in output.outputs:
        of_route = (
            {"message": {"role": "assistant", "content": choice.text}} if route == CHAT else {"text": choice.text}
        )
        end = {"logprobs": None, "finish_reason": choice.finish_reason or "stop", "stop_reason": choice.stop_reason}
        choices.append({"index": choice.index, **of_route, **end})
    counts = {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
        "prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]},
    }
    kind = "chat.completion" if route == CHAT else "text_completion"
    head = {"id": request_id, "object": kind, "created": int(time.time()), "model": model}
    return json.dumps({**head, "choices": choices, "usage": counts}).encode()
