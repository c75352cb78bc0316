"""Sampling parameters: names and meanings of vLLM's, as llama.cpp takes them. Pure."""

import math
from collections.abc import Mapping
from typing import Any

from ...language.worker.members import FLAG, OBJECT, TEXTS, RequestMember, integer, number, read_members

SEED_MAX = 2**32 - 1
"""Seeds have 32 bits; the largest one stands for any."""

TEMPERATURE_MAX = 2

LOGPROBS_MAX = 100
"""Most tokens of which a request may have the probabilities at each place."""

_NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "n": "n_cmpl",
}
"""Names of llama.cpp, where they differ."""


def completion_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a request of llama.cpp for these sampling parameters.

    Numbers and truth values may be texts, as some clients send them. None stands for the default.

    Raises:
        ValueError: One is unknown, or has a value that it cannot have; the message begins with its name.
    """
    return {_NAMES.get(name, name): value for name, value in read_members(sampling, PARAMETERS).items()}


def _biases(value: Any) -> list[list[float]]:
    return [[int(token), float(bias)] for token, bias in OBJECT.read(value).items()]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


_ABOVE_0 = math.ulp(0.0)
_SHARE = number("a number from 0 to 1", 0, 1)
_PENALTY = number("a number from -2 to 2", -2, 2)

PARAMETERS = {
    "max_tokens": integer(1),
    "temperature": number(f"a number from 0 to {TEMPERATURE_MAX}", 0, TEMPERATURE_MAX),
    "top_p": number("a number above 0 and up to 1", _ABOVE_0, 1),
    "top_k": integer(-1),
    **dict.fromkeys(("min_p", "typical_p"), _SHARE),
    "seed": integer(-1, SEED_MAX),
    "stop": TEXTS,
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _PENALTY),
    "repetition_penalty": number("a number above 0", _ABOVE_0),
    "logprobs": integer(0, LOGPROBS_MAX),
    "logit_bias": RequestMember("an object with a number for each token's id", _biases),
    "ignore_eos": FLAG,
    "json_schema": OBJECT,
    "grammar": RequestMember("a text, in llama.cpp's notation for grammars", _text),
    "n": RequestMember("1: a response has one text", integer(1, 1).read),
}
"""The parameters, by their names for clients."""
