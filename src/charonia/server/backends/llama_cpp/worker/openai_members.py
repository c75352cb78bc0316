"""Requests of OpenAI's API that llama.cpp would take wrongly, or in part, without a word. Pure."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LOGPROBS_MAX = 20
"""Most tokens of which a request may have the probabilities at each place."""

LOGIT_BIAS_MAX = 100

_NO_TOOLS = "the chat template of the model has no place for tools (hint: parameter chat_template sets another)"


class MemberError(ValueError):
    """What is wrong with a member; the text begins with its name."""


class Expected(NamedTuple):
    """What a member may be.

    Attributes:
        words: What it expects.
        fits: Whether a value is that.
    """

    words: str
    fits: Callable[[Any], bool]


def check_members(route: str, body: Mapping[str, Any], *, takes_tools: bool) -> None:
    """Check a request.

    Args:
        route: Its route.
        body: Its document.
        takes_tools: Whether the model's chat template has a place for tools.

    Raises:
        MemberError: A value is out of range, or asks for what llama.cpp does not do.
    """
    for name, value in body.items():
        known = MEMBERS.get(name) if name != "logprobs" else _LOGPROBS.get(route)
        if known is not None and value is not None and not known.fits(value):
            raise MemberError(f"{name}: expected {known.words}, got {json.dumps(value)[:100]}")
    if body.get("tools") and body.get("tool_choice") != "none" and not takes_tools:
        raise MemberError(f"tools: {_NO_TOOLS}")


def _number(least: float, most: float) -> Expected:
    def fits(value: Any) -> bool:
        return type(value) in (int, float) and least <= value <= most

    return Expected(f"a number from {least} to {most}", fits)


def _integer(least: int, most: int | None = None) -> Expected:
    def fits(value: Any) -> bool:
        return type(value) is int and least <= value and (most is None or value <= most)

    return Expected(f"a whole number {f'of at least {least}' if most is None else f'from {least} to {most}'}", fits)


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        token.isdecimal() and _number(-LOGIT_BIAS_MAX, LOGIT_BIAS_MAX).fits(bias) for token, bias in value.items()
    )


def _is_tools(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and each.get("type") == "function" for each in value)


def _only(value: object) -> Expected:
    return Expected(f"{json.dumps(value)}: llama.cpp can do nothing else", lambda given: given == value)


MEMBERS = {
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _number(-2, 2)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "n"), _integer(1)),
    "top_logprobs": _integer(0, LOGPROBS_MAX),
    "stop": Expected("a string or an array of strings", _is_stop),
    "logit_bias": Expected(f"an object with a number up to {LOGIT_BIAS_MAX} for each token's id", _is_bias),
    "tools": Expected("an array of tools of type function", _is_tools),
    **dict.fromkeys(("echo", "background"), _only(False)),
    "functions": _only([]),
    "suffix": _only(""),
    "best_of": _only(1),
}
"""Members that are the same in all routes."""

_LOGPROBS = {
    "chat/completions": Expected("a boolean", lambda value: type(value) is bool),
    "completions": _integer(0, LOGPROBS_MAX),
}
