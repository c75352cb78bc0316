"""Requests of OpenAI's API as llama.cpp reads them: one list of members a route, every other member is refused. Pure.

llama.cpp ignores members that it does not know, and takes some values wrongly or in part. A request is checked against
the lists here, and members that llama.cpp knows by another name or in another form are translated: sampling parameters
have vLLM's names. Answers get the form of OpenAI's API: names, ids, log probabilities, usage. Source: OpenAI's API
reference.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ...language.worker.members import (
    ABOVE_0,
    FLAG,
    FORMAT,
    IDS,
    OBJECT,
    STOPS,
    TEXT,
    TEXTS,
    MemberError,
    RequestMember,
    check,
    closest_hint,
    integer,
    is_texts,
    number,
    read_members,
)


class AnswerForm:
    """The form of the answer to one request.

    Args:
        route: The route of the request.
        served: llama.cpp's name of the model.
        body: The client's document.
    """

    def __init__(self, route: str, served: str, body: Mapping[str, Any]) -> None:
        self._is_completion = route == COMPLETIONS
        self._counts_each = bool((body.get("stream_options") or {}).get("continuous_usage_stats"))
        self._has_logprobs = self._is_completion and body.get("logprobs") is not None
        self._lengths: dict[int, int] = {}  # of the text of each choice
        self._replaced: list[tuple[bytes, bytes]] = []  # texts between quotes, which no text of an answer can hold
        asked = body.get("model")
        if isinstance(asked, str) and asked != served:
            self._replaced.append((b'"model":' + json.dumps(served).encode(), b'"model":' + json.dumps(asked).encode()))
        prefix = {COMPLETIONS: b"cmpl-", MESSAGES: b"msg_"}.get(route)
        if prefix is not None:
            self._replaced.append((b'"id":"chatcmpl-', b'"id":"' + prefix))

    def of(self, document: bytes) -> bytes:
        """Return a chunk, or a document, for the client."""
        if self._counts_each or self._has_logprobs:
            document = json.dumps(self.completed(json.loads(document)), separators=(",", ":")).encode()
        for old, new in self._replaced:
            document = document.replace(old, new)
        return document

    def completed(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return a chunk, or a document, with what llama.cpp leaves out."""
        timings = document.get("timings")
        if self._counts_each and timings and "usage" not in document:
            prompt, made = timings["prompt_n"] + timings["cache_n"], timings["predicted_n"]
            document["usage"] = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        if self._is_completion:
            document["id"] = document["id"].replace("chatcmpl-", "cmpl-", 1)
            for choice in document["choices"]:
                if choice.get("logprobs"):
                    choice["logprobs"] = self._logprobs(choice)
        return document

    def _logprobs(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        tokens = choice["logprobs"]["content"]
        offsets = []
        at = self._lengths.get(choice["index"], 0)
        for token in tokens:
            offsets.append(at)
            at += len(token["token"])
        self._lengths[choice["index"]] = at
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [{each["token"]: each["logprob"] for each in token["top_logprobs"]} for token in tokens],
            "text_offset": offsets,
        }


SEED_MAX = 2**32 - 1
"""Seeds have 32 bits; the largest one stands for any."""

SAMPLED_LOGPROBS_MAX = 100
"""Most tokens of which a request of Triton's contract may have the probabilities at each place."""

_NAMES = {"max_tokens": "n_predict", "logprobs": "n_probs", "n": "n_cmpl"}
"""Names of llama.cpp, where they differ."""


def completion_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a request of llama.cpp for these sampling parameters of Triton's contract.

    Raises:
        MemberError: One is unknown, or has a value that it cannot have.
    """
    request = read_members(sampling, SAMPLING)
    _set_sampling(request)
    return {_NAMES.get(name, name): value for name, value in request.items()}


CHAT = "chat/completions"
COMPLETIONS = "completions"
EMBEDDINGS = "embeddings"
MESSAGES = "messages"
TOKENIZE = "tokenize"
DETOKENIZE = "detokenize"

LOGPROBS_MAX = 20
"""Most tokens of which a request may have the probabilities at each place."""

LOGIT_BIAS_MAX = 100

CHOICES_MAX = 1000
"""Most choices of `guided_choice`."""


class Capabilities(NamedTuple):
    """Abilities of a model.

    Attributes:
        tools: Whether its chat template has a place for tools.
        images: Whether it takes images.
        audio: Whether it takes sound.
    """

    tools: bool = False
    images: bool = False
    audio: bool = False


def llama_request(route: str, body: Mapping[str, Any], model: Capabilities) -> dict[str, Any]:
    """Return a request as llama.cpp reads it.

    Args:
        model: Abilities of the model.

    Raises:
        MemberError: A member is unknown, a value is out of range, or asks for what llama.cpp does not do.
    """
    known = MEMBERS[route]
    request = {name: value for name, value in body.items() if value is not None}
    for name, value in request.items():
        if name not in known:
            raise MemberError(f"{name}: llama.cpp does not support this member{closest_hint(name, known)}")
        check(name, value, known[name])
    if route == TOKENIZE:
        return _tokenize_request(request)
    if route == MESSAGES and request.get("tools") and not model.tools:
        raise MemberError(f"tools: {_NO_TOOLS}")
    if route not in (CHAT, COMPLETIONS):
        return request
    options = request.get("stream_options", {})
    for name, value in options.items():
        if name in _STREAM_OPTIONS:
            check(f"stream_options.{name}", value, _STREAM_OPTIONS[name])
        elif value is not None:
            raise MemberError(f"stream_options.{name}: is not supported{closest_hint(name, _STREAM_OPTIONS)}")
    if options.get("continuous_usage_stats"):
        request["timings_per_token"] = True
    if route == CHAT:
        _check_parts(request.get("messages", ()), model)
        _choose_tools(request)
        if request.get("tools") and request.get("tool_choice") != "none" and not model.tools:
            raise MemberError(f"tools: {_NO_TOOLS}")
    _set_sampling(request)
    _set_grammar(route, request)
    if route == COMPLETIONS and request.get("suffix"):
        _set_infill(request)
    return request


def _set_infill(request: dict[str, Any]) -> None:
    """Make a request for a text between two others: it has `input_prefix`, and llama.cpp's own names."""
    given = next((name for name, least in (("logprobs", 1), ("n", 2)) if request.get(name, 0) >= least), "")
    if given:
        raise MemberError(f"{given}: llama.cpp does not support this with suffix")
    if not isinstance(request["prompt"], str):
        raise MemberError("prompt: expected one string with suffix")
    request["input_prefix"], request["input_suffix"] = request.pop("prompt"), request.pop("suffix")
    most = request.pop("max_completion_tokens", request.pop("max_tokens", None))
    if most is not None:
        request["n_predict"] = most


def _tokenize_request(request: Mapping[str, Any]) -> dict[str, Any]:
    given = [name for name in ("prompt", "content") if name in request]
    if len(given) != 1:
        raise MemberError("prompt: expected a string")
    return {
        "content": request[given[0]],
        "add_special": request.get("add_special_tokens", request.get("add_special", True)),
        "with_pieces": request.get("return_token_strs", request.get("with_pieces", False)),
    }


def _check_parts(messages: Iterable[Any], model: Capabilities) -> None:
    takes = {"text": True, "refusal": True, "image_url": model.images, "input_audio": model.audio}
    for position, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            where = f"messages[{position}].content[{place}]"
            if kind not in takes:
                raise MemberError(f"{where}: expected a part of type {', '.join(takes)}, got {json.dumps(part)[:100]}")
            if not takes[kind]:
                raise MemberError(f"{where}: the model takes no parts of type {kind} (hint: parameter mmproj)")


def _choose_tools(request: dict[str, Any]) -> None:
    """Replace the choice of functions by a list of just these: llama.cpp knows only whether one must be called."""
    choice = request.get("tool_choice", "auto")
    if choice in ("none", "auto"):
        return
    tools = request.get("tools") or ()
    names = [tool["function"]["name"] for tool in tools]
    if not tools:
        raise MemberError(f"tool_choice: expected none or auto for a request without tools, got {json.dumps(choice)}")
    if choice == "required":
        return
    allowed = choice.get("allowed_tools", {"mode": "required", "tools": [choice]})
    try:
        chosen = [tool["function"]["name"] for tool in allowed["tools"]]
        request["tool_choice"] = {"auto": "auto", "required": "required"}[allowed["mode"]]
    except (KeyError, TypeError):
        raise MemberError(f"tool_choice: {_CHOICE.words}, got {json.dumps(choice)[:100]}") from None
    missing = next((name for name in chosen if name not in names), None)
    if missing is not None:
        raise MemberError(f"tool_choice: expected one of {', '.join(names)}, got {json.dumps(missing)[:100]}")
    request["tools"] = [tool for tool in tools if tool["function"]["name"] in chosen]


def _set_sampling(request: dict[str, Any]) -> None:
    if "seed" in request:
        request["seed"] &= SEED_MAX
    if "repetition_penalty" in request:
        request["repeat_penalty"] = request.pop("repetition_penalty")
    if "stop" in request:
        stops = [request["stop"]] if isinstance(request["stop"], str) else request["stop"]
        request["stop"] = [stop for stop in stops if stop]
    least = request.pop("min_tokens", 0)
    most = request.get("max_completion_tokens", request.get("max_tokens"))
    if least and least == most:
        request["ignore_eos"] = True
    elif least and not request.get("ignore_eos"):
        raise MemberError(f"min_tokens: expected 0, max_tokens, or any number with ignore_eos, got {least}")


def _set_grammar(route: str, request: dict[str, Any]) -> None:
    """Replace members that describe the form of an answer by a schema or a grammar for llama.cpp."""
    given = {name: request.pop(name) for name in _GUIDED if name in request}
    structured = request.pop("structured_outputs", {})
    given |= {f"structured_outputs.{name}": value for name, value in structured.items() if value is not None}
    form = request.get("response_format", {})
    several = [*given, *(name for name in ("json_schema", "grammar") if name in request)]
    several += ["response_format"] if form.get("type", "text") != "text" else []
    if len(several) > 1:
        raise MemberError(f"{several[1]}: expected one description of the answer, got {' and '.join(several)}")
    for name, value in given.items():
        request.update(_grammar(name, value))
    if route == COMPLETIONS and form:  # which llama.cpp reads in chats only
        del request["response_format"]
        if form["type"] != "text":
            request["json_schema"] = form.get("json_schema", {}).get("schema", {"type": "object"})


def _grammar(name: str, value: Any) -> dict[str, Any]:
    kind = name.rpartition(".")[2].removeprefix("guided_")
    try:
        if kind == "json":
            value = json.loads(value) if isinstance(value, str) else value
            return {"json_schema": {**value}}
        if kind == "json_object":
            return {"json_schema": {"type": "object"}} if value is True else {}
    except (TypeError, ValueError):
        raise MemberError(f"{name}: expected a JSON schema, got {json.dumps(value)[:100]}") from None
    if kind == "grammar" and isinstance(value, str):
        return {"grammar": value}
    if kind == "choice":
        if is_texts(value) and 0 < len(value) <= CHOICES_MAX:
            return {"grammar": f"root ::= {' | '.join(json.dumps(each, ensure_ascii=False) for each in value)}"}
        raise MemberError(f"{name}: expected 1 to {CHOICES_MAX} strings, got {json.dumps(value)[:100]}")
    raise MemberError(f"{name}: llama.cpp does not support this (hint: it follows json, choice and grammar)")


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        token.isdecimal() and number(-LOGIT_BIAS_MAX, LOGIT_BIAS_MAX).fits(bias) for token, bias in value.items()
    )


def _is_tools(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and each.get("type") == "function"
        and isinstance(each.get("function"), dict)
        and isinstance(each["function"].get("name"), str)
        for each in value
    )


def _only(value: object) -> RequestMember:
    return RequestMember(f"{json.dumps(value)}: llama.cpp can do nothing else", lambda given: given == value)


_NO_TOOLS = "the chat template of the model has no place for tools (hint: parameter chat_template sets another)"
_ANY = RequestMember("a value", lambda _: True)
_MODES = ("none", "auto", "required")
_CHOICE = RequestMember(
    "none, auto, required, or an object that names functions", lambda value: isinstance(value, dict) or value in _MODES
)
_GUIDED = ("guided_json", "guided_choice", "guided_grammar", "guided_regex")

_STREAM_OPTIONS = {
    **dict.fromkeys(("include_usage", "continuous_usage_stats"), FLAG),
    "include_obfuscation": _only(False),
}

_WITHOUT_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
"""Members that change no answer."""

_TEXT_MEMBERS = {
    "model": TEXT,
    **dict.fromkeys(_WITHOUT_EFFECT, _ANY),
    "temperature": number(0, 2),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"), number(0, 1)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), number(-2, 2)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n"), integer(1)),
    **dict.fromkeys(("min_tokens", "n_keep"), integer(0)),
    **dict.fromkeys(("seed", "top_k", "n_predict", "repeat_last_n", "dry_penalty_last_n"), integer(-1)),
    **dict.fromkeys(("repetition_penalty", "repeat_penalty"), number(ABOVE_0)),
    **dict.fromkeys(("dynatemp_range", "dynatemp_exponent", "dry_multiplier", "dry_base"), number(0)),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), number(0)),
    "top_n_sigma": number(-1),
    "mirostat": integer(0, 2),
    "dry_allowed_length": integer(0),
    **dict.fromkeys(("dry_sequence_breakers", "samplers"), TEXTS),
    **dict.fromkeys(("ignore_eos", "cache_prompt", "stream", "timings_per_token", "return_progress"), FLAG),
    "stop": STOPS,
    "logit_bias": RequestMember(f"an object with a number up to {LOGIT_BIAS_MAX} for each token's id", _is_bias),
    "stream_options": OBJECT,
    "response_format": FORMAT,
    **dict.fromkeys(("json_schema", "structured_outputs"), OBJECT),
    "grammar": TEXT,
    **dict.fromkeys(_GUIDED, _ANY),
}

MEMBERS: Mapping[str, Mapping[str, RequestMember]] = {
    CHAT: {
        **_TEXT_MEMBERS,
        "messages": RequestMember("an array", lambda value: isinstance(value, list)),
        "logprobs": FLAG,
        "top_logprobs": integer(0, LOGPROBS_MAX),
        "tools": RequestMember("an array of tools of type function", _is_tools),
        "tool_choice": _CHOICE,
        **dict.fromkeys(("parallel_tool_calls", "add_generation_prompt", "continue_final_message"), FLAG),
        "chat_template_kwargs": OBJECT,
        "reasoning_format": TEXT,
        "functions": _only([]),
        "function_call": _only("none"),
        "modalities": _only(["text"]),
    },
    COMPLETIONS: {
        **_TEXT_MEMBERS,
        "prompt": _ANY,
        "logprobs": integer(0, LOGPROBS_MAX),
        "echo": _only(False),
        "suffix": TEXT,
        "best_of": _only(1),
    },
    EMBEDDINGS: {
        **dict.fromkeys(("model", "user"), TEXT),
        "input": _ANY,
        "encoding_format": RequestMember("float or base64", lambda value: value in ("float", "base64")),
        "embd_normalize": integer(-1),
    },
    MESSAGES: {
        "model": TEXT,
        "messages": RequestMember("an array", lambda value: isinstance(value, list)),
        "system": RequestMember("a string or an array", lambda value: isinstance(value, str | list)),
        "max_tokens": integer(1),
        "temperature": number(0, 1),
        "top_p": number(0, 1),
        "top_k": integer(0),
        "stop_sequences": TEXTS,
        "stream": FLAG,
        "tools": RequestMember("an array", lambda value: isinstance(value, list)),
        "tool_choice": OBJECT,
        "metadata": _ANY,
        "thinking": RequestMember("an object of type disabled", lambda value: value == {"type": "disabled"}),
    },
    TOKENIZE: {
        **dict.fromkeys(("model", "prompt", "content"), TEXT),
        **dict.fromkeys(("add_special", "add_special_tokens", "with_pieces", "return_token_strs"), FLAG),
    },
    DETOKENIZE: {
        "model": TEXT,
        "tokens": IDS,
    },
}
"""Every member of each route."""

SAMPLING = {
    **{name: _TEXT_MEMBERS[name] for name in (
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "typical_p", "stop", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos", "json_schema", "grammar",
    )},
    "seed": integer(-1, SEED_MAX),
    "logprobs": integer(0, SAMPLED_LOGPROBS_MAX),
    "n": RequestMember("1: a response has one text", lambda value: value == 1),
}  # fmt: skip
"""Sampling parameters of Triton's contract."""
