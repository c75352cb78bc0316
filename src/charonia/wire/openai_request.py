"""Requests to /v1/chat/completions and /v1/completions, for models that do not speak OpenAI's API themselves.

A member that the answer depends on must be known to the server or to the model: the model has an input of its name, or
an input `sampling_parameters` that takes the parameters of sampling as a JSON object. Otherwise the request is refused,
unless the value has no effect. A Python model without `sampling_parameters` may read request
parameters, which its configuration does not tell; strings, numbers and booleans are passed on to it as such.

Source: OpenAI's API reference, "Chat" and "Completions"; Triton's vLLM backend for the names of inputs.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from charonia.config.model import ModelConfig
from charonia.config.parameters import TEXT_INPUT
from charonia.core.errors import ServingError, invalid, unsupported
from charonia.wire.json_text import Object, kind_of
from charonia.wire.openai_answer import Text, decode_texts
from charonia.wire.openai_models import CHAT, COMPLETIONS, EMBEDDINGS

SAMPLING_INPUT = "sampling_parameters"
IMAGE_INPUT = "image"

CHOICES_MAX = 128
"""Most answers to one request: `n` for each prompt."""

STOPS_MAX = 16
"""Most stop strings of a request."""

MESSAGES_MAX = 10_000
"""Most messages of a request."""

_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 10),
}
"""Smallest and largest value of the parameters of sampling that are numbers."""

_INTEGERS: dict[str, int] = {"max_tokens": 1, "min_tokens": 0, "top_k": -1, "seed": -(2**63)}
"""Smallest value of each integer member."""

_WITHOUT_EFFECT = frozenset(
    {
        "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "user",
    }
)  # fmt: skip
"""Members that change no answer."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_tokens": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
}
"""Values that are as good as none."""

_NOT_IN_ANSWER = frozenset(
    {
        "audio", "best_of", "function_call", "functions", "logprobs", "modalities", "suffix", "tool_choice",
        "tools", "top_logprobs",
    }
)  # fmt: skip
"""Members that only an engine can answer."""

_STREAM_OPTIONS = ("include_usage",)

_PYTHON = "python"
"""Backend whose models read request parameters."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for text.

    Attributes:
        messages: The conversation, for the chat template; empty for a request to /v1/completions.
        images: The pictures of its messages, as files in base64.
        prompts: The prompts of a request to /v1/completions.
        count: Answers for each prompt.
        stops: Strings before which an answer ends.
        is_streamed: Whether the answer is streamed.
        includes_usage: Whether a stream ends with a chunk that has the usage.
        echoes: Whether an answer begins with its prompt.
        max_tokens: Most tokens of an answer, 0 for no limit.
        inputs: Values of other inputs of the model, and of request parameters, by name.
    """

    messages: tuple[Object, ...] = ()
    images: tuple[str, ...] = ()
    prompts: tuple[Text, ...] = ()
    count: int = 1
    stops: tuple[str, ...] = ()
    is_streamed: bool = False
    includes_usage: bool = False
    echoes: bool = False
    max_tokens: int = 0
    inputs: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether it was sent to /v1/chat/completions."""
        return bool(self.messages)

    @property
    def passes_limit(self) -> bool:
        """Whether the model gets `max_tokens`."""
        sampling = self.inputs.get(SAMPLING_INPUT)
        return "max_tokens" in self.inputs or (isinstance(sampling, dict) and "max_tokens" in sampling)

    def inputs_of(self, index: int) -> Mapping[str, object]:
        """Return the inputs of an answer: each of several has its own seed."""
        return _with_seed(self.inputs, index) if index else self.inputs


def _with_seed(values: Mapping[str, object], index: int) -> dict[str, object]:
    return {
        name: value + index
        if name == "seed" and type(value) is int
        else _with_seed(value, index)
        if name == SAMPLING_INPUT and isinstance(value, dict)
        else value
        for name, value in values.items()
    }


def decode_text_request(config: ModelConfig, document: Object, *, is_chat: bool) -> TextRequest:
    """Return the request in a document.

    Args:
        config: Configuration of the model.
        is_chat: Whether it was sent to /v1/chat/completions.

    Raises:
        ServingError: INVALID_ARG or UNSUPPORTED; the message begins with the member.
    """
    rest = {key: value for key, value in document.items() if value is not None and key not in _WITHOUT_EFFECT}
    rest.pop("model", None)
    messages: tuple[Object, ...] = ()
    images: tuple[str, ...] = ()
    prompts: tuple[Text, ...] = ()
    if is_chat:
        messages, images = _messages(config, rest.pop("messages", None))
    else:
        prompts = decode_texts("prompt", rest.pop("prompt", None))
    count = _integer("n", rest.pop("n", 1), 1)
    if count * max(1, len(prompts)) > CHOICES_MAX:
        raise invalid(f"n: expected at most {CHOICES_MAX} answers to a request, got {count * max(1, len(prompts))}")
    is_streamed = _boolean("stream", rest.pop("stream", False))
    options = _object("stream_options", rest.pop("stream_options", {}))
    unknown = next((name for name in options if name not in _STREAM_OPTIONS and options[name]), None)
    if unknown is not None:
        raise unsupported(f"stream_options.{unknown}: expected {' or '.join(_STREAM_OPTIONS)}")
    stops = _stops(rest.pop("stop", ()))
    echoes = not is_chat and _boolean("echo", rest.pop("echo", False))
    if "max_completion_tokens" in rest:
        rest["max_tokens"] = rest.pop("max_completion_tokens")
    max_tokens = _integer("max_tokens", rest["max_tokens"], 1) if "max_tokens" in rest else 0
    return TextRequest(
        messages,
        images,
        prompts,
        count,
        stops,
        is_streamed,
        _boolean("stream_options.include_usage", options.get("include_usage", False)),
        echoes,
        max_tokens,
        _model_inputs(config, rest),
    )


def _model_inputs(config: ModelConfig, members: Mapping[str, object]) -> dict[str, object]:
    """Return the values of the model's inputs, and of request parameters, that the rest of a request sets."""
    all_names = {tensor.name for tensor in config.input}
    names = all_names - {TEXT_INPUT, SAMPLING_INPUT, IMAGE_INPUT}
    takes_sampling = SAMPLING_INPUT in all_names
    reads_parameters = config.backend == _PYTHON and not takes_sampling
    inputs: dict[str, object] = {}
    sampling: dict[str, object] = {}
    for name, value in members.items():
        _check_sampling(name, value)
        if name in names and name not in _NOT_IN_ANSWER:
            inputs[name] = value
        elif (name in _NUMBERS or name in _INTEGERS) and takes_sampling:
            sampling[name] = value
        elif reads_parameters and name not in _NOT_IN_ANSWER and isinstance(value, str | int | float):
            inputs[name] = value
        elif name != "max_tokens" and value not in _NEUTRAL.get(name, ()):  # which the server enforces
            raise _refused(config, name)
    return inputs | ({SAMPLING_INPUT: sampling} if sampling else {})


def _refused(config: ModelConfig, name: str) -> ServingError:
    if name in _NOT_IN_ANSWER:
        return unsupported(f"{name}: model '{config.name}' cannot answer this: only engines of language models can")
    hint = f"the model may have an input of this name, or {SAMPLING_INPUT}" if name in _NUMBERS | _INTEGERS else ""
    return unsupported(f"{name}: model '{config.name}' has no input for it", hint=hint)


def _check_sampling(name: str, value: object) -> None:
    if name in _NUMBERS:
        low, high = _NUMBERS[name]
        if type(value) not in (int, float):
            raise invalid(f"{name}: expected a number, got {kind_of(value)}")
        if not low <= value <= high:  # type: ignore[operator]
            raise invalid(f"{name}: expected {low:g} to {high:g}, got {value}")
    elif name in _INTEGERS:
        _integer(name, value, _INTEGERS[name])


def _messages(config: ModelConfig, value: object) -> tuple[tuple[Object, ...], tuple[str, ...]]:
    """Return messages, with text as a string where they have no pictures, and the pictures."""
    takes_images = any(tensor.name == IMAGE_INPUT for tensor in config.input)
    messages: list[Object] = []
    images: list[str] = []
    for number, message in enumerate(checked_messages(value)):
        where = f"messages[{number}]"
        content = message.get("content")
        if type(content) is list:
            parts = [_part(config, f"{where}.content[{n}]", part, takes_images) for n, part in enumerate(content)]
            found = [part.data for part in parts if isinstance(part, _Picture)]
            images += found
            content = [_described(part) for part in parts] if found else "\n".join(map(str, parts))
        messages.append({**message, "content": content or ""})
    return tuple(messages), tuple(images)


def check_engine_request(route: str, document: Object) -> bool:
    """Check the members that every engine needs, and return whether the answer is streamed.

    Raises:
        ServingError: As of `decode_text_request`.
    """
    if route == CHAT:
        checked_messages(document.get("messages"))
    elif route == COMPLETIONS and "prompt_embeds" not in document:
        decode_texts("prompt", document.get("prompt"))
    elif route == EMBEDDINGS and "messages" not in document:
        decode_texts("input", document.get("input"))
    return _boolean("stream", document.get("stream") or False)


def checked_messages(value: object) -> list[Object]:
    """Return the messages of a chat: objects with a role, and content.

    Raises:
        ServingError: INVALID_ARG; the message begins with the member.
    """
    if type(value) is not list or not 0 < len(value) <= MESSAGES_MAX:
        got = len(value) if type(value) is list else _shown(value)
        raise invalid(f"messages: expected 1 to {MESSAGES_MAX} messages, got {got}")
    for number, message in enumerate(value):
        where = f"messages[{number}]"
        if type(message) is not dict or type(message.get("role")) is not str:
            raise invalid(f"{where}: expected an object with a role, got {_shown(message)}")
        content = message.get("content")
        if type(content) not in (str, list) and not (content is None and message["role"] == "assistant"):
            raise invalid(f"{where}.content: expected a string or an array of parts, got {kind_of(content)}")
    return value


class _Picture(NamedTuple):
    """A picture: its file in base64."""

    data: str


def _described(part: str | _Picture) -> Object:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def _part(config: ModelConfig, where: str, part: object, takes_images: bool) -> str | _Picture:
    """Return the text, or the picture, of a part of a message."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind in ("text", "input_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if type(text) is not str:
            raise invalid(f"{where}.text: expected a string, got {kind_of(text)}")
        return text
    if isinstance(part, dict) and kind == "image_url":
        if not takes_images:
            raise unsupported(f"{where}: model '{config.name}' takes no pictures: it has no input '{IMAGE_INPUT}'")
        source = part.get("image_url")
        return _image(where, source.get("url") if isinstance(source, dict) else source)
    raise unsupported(f"{where}: expected a part of type text or image_url, got {_shown(kind or part)}")


def _image(where: str, url: object) -> _Picture:
    if type(url) is not str or not url.startswith("data:"):
        raise invalid(
            f"{where}.image_url: expected a data URL, got {_shown(url)}", hint="the server fetches no pictures"
        )
    head, _, data = url.partition(",")
    if not head.endswith(";base64"):
        raise invalid(f"{where}.image_url: expected data:TYPE;base64,DATA")
    try:
        base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid(f"{where}.image_url: not base64: {error}") from error
    return _Picture(data)


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if type(value) is str else value
    if not isinstance(stops, Sequence) or len(stops) > STOPS_MAX or any(type(each) is not str for each in stops):
        raise invalid(f"stop: expected a string, or at most {STOPS_MAX} of them, got {_shown(value)}")
    return tuple(each for each in stops if each)


def _integer(name: str, value: object, low: int) -> int:
    if type(value) is not int:
        raise invalid(f"{name}: expected an integer, got {kind_of(value)}")
    if value < low:
        raise invalid(f"{name}: expected at least {low}, got {value}")
    return value


def _boolean(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise invalid(f"{name}: expected a boolean, got {kind_of(value)}")
    return value


def _object(name: str, value: object) -> Object:
    if type(value) is not dict:
        raise invalid(f"{name}: expected an object, got {kind_of(value)}")
    return value


def _shown(value: object) -> str:
    return repr(value)[:40] if isinstance(value, str | int | float) else kind_of(value)
