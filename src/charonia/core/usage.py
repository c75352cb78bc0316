"""The tokens of a request to a language model."""

from collections.abc import Mapping
from typing import NamedTuple

PROMPT_TOKENS = "prompt_tokens"
COMPLETION_TOKENS = "completion_tokens"
CACHED_TOKENS = "cached_tokens"
"""Response parameters by which an engine model tells them, with its last response."""


class TokenUsage(NamedTuple):
    """The tokens of a request.

    Attributes:
        prompt: Tokens of the prompt.
        completion: Tokens of the answer.
        cached: Tokens of the prompt whose computation was saved by a cache.
    """

    prompt: int
    completion: int = 0
    cached: int = 0


def usage_of(parameters: Mapping[str, object]) -> TokenUsage | None:
    """Return the usage that the parameters of a response tell, None if they tell none."""
    prompt = parameters.get(PROMPT_TOKENS)
    if type(prompt) is not int:
        return None
    completion, cached = parameters.get(COMPLETION_TOKENS), parameters.get(CACHED_TOKENS)
    return TokenUsage(prompt, completion if type(completion) is int else 0, cached if type(cached) is int else 0)
