"""Sampling parameters of a request: members of `tensorrt_llm.SamplingParams` by name.

Source: the reference of TensorRT-LLM's LLM API, "SamplingParams".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ...language.worker.members import FLAG, IDS, OBJECT, TEXTS, integer, number, read_members

if TYPE_CHECKING:
    from typing import Any

PREFIX = "sampling_param_"
"""Prefix of the inputs of Triton's backend."""

_ABOVE_0 = math.ulp(0.0)
_SHARE = number("a number above 0 and up to 1", _ABOVE_0, 1)
_ANY = number("a number")
_POSITIVE = number("a number above 0", _ABOVE_0)
_NOT_NEGATIVE = number("a number of at least 0", 0)

PARAMETERS = {
    **dict.fromkeys(("max_tokens", "n", "best_of", "no_repeat_ngram_size", "truncate_prompt_tokens"), integer(1)),
    **dict.fromkeys(("min_tokens", "top_k", "top_p_reset_ids", "early_stopping", "logprobs"), integer(0)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "length_penalty"), _ANY),
    **dict.fromkeys(("top_p", "top_p_min", "top_p_decay"), _SHARE),
    **dict.fromkeys(("temperature", "beam_search_diversity_rate"), _NOT_NEGATIVE),
    **dict.fromkeys(("use_beam_search", "ignore_eos", "return_perf_metrics", "add_special_tokens"), FLAG),
    **dict.fromkeys(("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"), FLAG),
    **dict.fromkeys(("stop", "bad"), TEXTS),
    **dict.fromkeys(("stop_token_ids", "bad_token_ids"), IDS),
    "exclude_input_from_output": FLAG,  # of the token ids: the text never holds the prompt
    "guided_decoding": OBJECT,
    "min_p": number("a number from 0 to 1", 0, 1),
    "repetition_penalty": _POSITIVE,
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
    """Return TensorRT-LLM's sampling parameters.

    Raises:
        ValueError: They do not go together.
    """
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
