"""Sampling parameters: names and meanings of vLLM's, as llama.cpp takes them. Pure."""

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

SEED_MAX = 2**32 - 1
"""Seeds have 32 bits; the largest one stands for any."""

TEMPERATURE_MAX = 2

LOGPROBS_MAX = 100
"""Most tokens of which a request may have the probabilities at each place."""

_INTEGER_MAX = 2**31 - 1


class SamplingError(ValueError):
    """What is wrong with a sampling parameter."""


class SamplingParameter(NamedTuple):
    """One parameter.

    Attributes:
        member: Its name in a request of llama.cpp.
        words: What it expects.
        read: Returns the value for llama.cpp; raises ValueError or TypeError for one that it does not expect.
    """

    member: str
    words: str
    read: Callable[[Any], Any]


def completion_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a request of llama.cpp for these sampling parameters.

    Numbers and truth values may be texts, as some clients send them. None stands for the default.

    Raises:
        SamplingError: One is unknown, or has a value that it cannot have.
    """
    body: dict[str, Any] = {}
    for name, value in sampling.items():
        known = PARAMETERS.get(name)
        if known is None:
            near = difflib.get_close_matches(name, PARAMETERS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(sorted(PARAMETERS))}"
            raise SamplingError(f"sampling parameter '{name}' is unknown (hint: {hint})")
        if value is None:
            continue
        try:
            body[known.member] = known.read(value)
        except (AttributeError, LookupError, TypeError, ValueError):
            text = json.dumps(value)[:100]
            raise SamplingError(f"sampling parameter '{name}': expected {known.words}, got {text}") from None
    return body


def _number(least: float, most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        number = float(value)
        if isinstance(value, bool) or not least <= number <= most:
            raise ValueError
        return number

    return read


def _integer(least: int, most: int = _INTEGER_MAX) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        number = float(value)
        if isinstance(value, bool) or not number.is_integer() or not least <= number <= most:
            raise ValueError
        return int(number)

    return read


def _flag(value: Any) -> bool:
    flags = {"true": True, "false": False}
    return value if isinstance(value, bool) else flags[value.lower()]


def _texts(value: Any) -> list[str]:
    if isinstance(value, str) and value.startswith('["'):  # a list, from a client that sends everything as text
        value = json.loads(value)
    texts = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(text, str) and text for text in texts):
        _refuse()
    return texts


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _refuse()


def _object(value: Any) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    return found if isinstance(found, dict) else _refuse()


def _biases(value: Any) -> list[list[float]]:
    return [[int(token), float(bias)] for token, bias in _object(value).items()]


def _refuse() -> Any:
    raise ValueError


_SHARE = ("a number between 0 and 1", _number(0, 1))
_PENALTY = ("a number between -2 and 2", _number(-2, 2))

PARAMETERS = {
    "max_tokens": SamplingParameter("n_predict", "a whole number of at least 1", _integer(1)),
    "temperature": SamplingParameter(
        "temperature", f"a number from 0 to {TEMPERATURE_MAX}", _number(0, TEMPERATURE_MAX)
    ),
    "top_p": SamplingParameter("top_p", "a number above 0 and up to 1", _number(math.ulp(0.0), 1)),
    "top_k": SamplingParameter("top_k", "a whole number, -1 or 0 for no limit", _integer(-1)),
    "min_p": SamplingParameter("min_p", *_SHARE),
    "typical_p": SamplingParameter("typical_p", *_SHARE),
    "seed": SamplingParameter("seed", f"a whole number from 0 to {SEED_MAX}, or -1 for any", _integer(-1, SEED_MAX)),
    "stop": SamplingParameter("stop", "a text or a list of texts, none of them empty", _texts),
    "presence_penalty": SamplingParameter("presence_penalty", *_PENALTY),
    "frequency_penalty": SamplingParameter("frequency_penalty", *_PENALTY),
    "repetition_penalty": SamplingParameter("repeat_penalty", "a number above 0", _number(math.ulp(0.0), 1e6)),
    "logprobs": SamplingParameter("n_probs", f"a whole number from 0 to {LOGPROBS_MAX}", _integer(0, LOGPROBS_MAX)),
    "logit_bias": SamplingParameter("logit_bias", "an object with a number for each token's id", _biases),
    "ignore_eos": SamplingParameter("ignore_eos", "true or false", _flag),
    "json_schema": SamplingParameter("json_schema", "a JSON schema, which is an object", _object),
    "grammar": SamplingParameter("grammar", "a text, in llama.cpp's notation for grammars", _text),
    "n": SamplingParameter("n_cmpl", "1: a response has one text", _integer(1, 1)),
}
"""The parameters, by their names for clients."""
