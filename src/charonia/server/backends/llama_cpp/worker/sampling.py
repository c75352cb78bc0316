"""Sampling parameters: names and meanings of vLLM's, as llama.cpp takes them. Pure."""

from __future__ import annotations

import difflib
import json
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SEED_MAX = 2**32 - 1
"""Seeds have 32 bits; the largest one stands for any."""

LOGPROBS_MAX = 100


class SamplingError(ValueError):
    """What is wrong with a sampling parameter."""


def completion_of(sampling: dict[str, Any]) -> dict[str, Any]:
    """Return the members of a request of llama.cpp for these sampling parameters.

    Numbers and truth values may be texts, as some clients send them. None stands for the default.

    Raises:
        SamplingError: One is unknown, or has a value that it cannot have.
    """
    body: dict[str, Any] = {}
    for name, value in sampling.items():
        known = _KNOWN.get(name)
        if known is None:
            near = difflib.get_close_matches(name, _KNOWN, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(sorted(_KNOWN))}"
            raise SamplingError(f"sampling parameter '{name}' is unknown (hint: {hint})")
        if value is None:
            continue
        member, read = known
        try:
            body[member] = read(value)
        except (TypeError, ValueError):
            text = json.dumps(value)[:100]
            raise SamplingError(f"sampling parameter '{name}': expected {read.__doc__}, got {text}") from None
    body.pop("n", None)
    return body


def _number(least: float, most: float, words: str) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        number = float(value)
        if isinstance(value, bool) or not least <= number <= most:
            raise ValueError
        return number

    read.__doc__ = words
    return read


def _integer(least: int, most: int, words: str) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        number = float(value)
        if isinstance(value, bool) or not number.is_integer() or not least <= number <= most:
            raise ValueError
        return int(value)

    read.__doc__ = words
    return read


def _positive(most: float, words: str) -> Callable[[Any], float]:
    return _number(math.ulp(0.0), most, words)


def _flag(value: Any) -> bool:
    """true or false"""  # noqa: D400, D403, D415 # what an error says
    flags = {"true": True, "false": False}
    if not isinstance(value, bool) and str(value).lower() not in flags:
        raise ValueError
    return value if isinstance(value, bool) else flags[value.lower()]


def _texts(value: Any) -> list[str]:
    """a text or a list of texts, none of them empty"""  # noqa: D400, D403, D415 # what an error says
    if isinstance(value, str) and value.startswith("["):  # a list, from a client that sends everything as text
        value = json.loads(value)
    texts = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError
    return texts


def _text(value: Any) -> str:
    """a text"""  # noqa: D400, D403, D415 # what an error says
    if not isinstance(value, str):
        raise TypeError
    return value


def _schema(value: Any) -> Any:
    """a JSON schema"""  # noqa: D400, D403, D415 # what an error says
    schema = json.loads(value) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise TypeError
    return schema


def _biases(value: Any) -> list[list[Any]]:
    """an object of numbers by token"""  # noqa: D400, D403, D415 # what an error says
    given = json.loads(value) if isinstance(value, str) else value
    return [[int(token), float(bias)] for token, bias in given.items()]


_PENALTY = _number(-2, 2, "a number between -2 and 2")
_SHARE = _number(0, 1, "a number between 0 and 1")

_KNOWN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "max_tokens": ("n_predict", _integer(1, 2**31 - 1, "a whole number of at least 1")),
    "temperature": ("temperature", _number(0, 1e6, "a number of at least 0")),
    "top_p": ("top_p", _positive(1, "a number above 0 and up to 1")),
    "top_k": ("top_k", _integer(-1, 2**31 - 1, "a whole number, -1 or 0 for no limit")),
    "min_p": ("min_p", _SHARE),
    "typical_p": ("typical_p", _SHARE),
    "seed": ("seed", _integer(-1, SEED_MAX, f"a whole number up to {SEED_MAX}")),
    "stop": ("stop", _texts),
    "presence_penalty": ("presence_penalty", _PENALTY),
    "frequency_penalty": ("frequency_penalty", _PENALTY),
    "repetition_penalty": ("repeat_penalty", _positive(1e6, "a number above 0")),
    "logprobs": ("n_probs", _integer(0, LOGPROBS_MAX, f"a whole number up to {LOGPROBS_MAX}")),
    "logit_bias": ("logit_bias", _biases),
    "ignore_eos": ("ignore_eos", _flag),
    "json_schema": ("json_schema", _schema),
    "grammar": ("grammar", _text),
    "n": ("n", _integer(1, 1, "1")),
}
