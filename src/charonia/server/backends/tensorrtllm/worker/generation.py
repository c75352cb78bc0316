"""Requests that follow the contract of Triton's backend: a prompt, and what of the outputs is wanted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

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
    """Turns the outputs of one request into responses: one, or with `stream` one for each of the engine's.

    Args:
        request: The request.
    """

    def __init__(self, request: Any) -> None:
        self._request = request
        self._texts: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    def take(self, output: Any) -> None:
        """Take an output of the engine, whose choices hold all text so far."""
        request, choices = self._request, output.outputs
        prompt = request.text if request.excludes_input is False else ""
        new = [self._new(choice) for choice in choices]
        outputs: dict[str, Any] = {"text_output": [(prompt + text).encode("utf-8", "replace") for text, _ in new]}
        values: dict[str, Callable[[], list[Any]]] = {
            "finish_reason": lambda: [str(choice.finish_reason).encode() for choice in choices],
            "stop_reason": lambda: [str(choice.stop_reason).encode() for choice in choices],
            "cumulative_logprob": lambda: [
                float("nan") if choice.cumulative_logprob is None else choice.cumulative_logprob for choice in choices
            ],
            "logprobs": lambda: [_logprobs(choice) for choice in choices],
            "num_input_tokens": lambda: [len(output.prompt_token_ids)],
            "num_output_tokens": lambda: [count for _, count in new],
        }
        outputs.update({name: values[name]() for name in request.returns if name in values})
        measured = getattr(choices[0], "request_perf_metrics", None)
        if measured is not None:
            outputs.update(_measured(measured))
        request.send(outputs, usage_of(output) if output.finished else None, final=output.finished)

    def _new(self, choice: Any) -> tuple[str, int]:
        """Return the text of a choice that has come since the last output, and of how many tokens it is."""
        texts, tokens = self._texts.get(choice.index, 0), self._tokens.get(choice.index, 0)
        self._texts[choice.index], self._tokens[choice.index] = len(choice.text), len(choice.token_ids)
        return choice.text[texts:], max(0, len(choice.token_ids) - tokens)


def usage_of(output: Any) -> dict[str, int]:
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(choice.token_ids) for choice in output.outputs),
        "cached_tokens": int(getattr(output, "cached_tokens", 0) or 0),
    }


def _logprobs(choice: Any) -> bytes:
    """Return the alternatives at each place so far as JSON text, by the token's id."""
    return json.dumps(
        [
            {token: {"logprob": each.logprob, "rank": each.rank} for token, each in alternatives.items()}
            for alternatives in choice.logprobs or ()
        ]
    ).encode()


def _measured(metrics: Any) -> dict[str, Any]:
    """Return the outputs for `return_perf_metrics`."""
    found = {name: np.array([getattr(metrics.kv_cache_metrics, member)], dtype) for name, member, dtype in _KV_CACHE}
    for name in _TIMES:  # of type timedelta
        nanoseconds = round(getattr(metrics.timing_metrics, name).total_seconds() * 1e9)
        found[f"{name}_ns"] = np.array([nanoseconds], np.int64)
    for name, dtype in _SPECULATION:
        found[name] = np.array([getattr(metrics.speculative_decoding, name)], dtype)
    return found
