"""The tokens of language models: counted once, and the times between them."""

import numpy as np

from charonia.core.dtypes import DataType
from charonia.core.request import ParameterValue
from charonia.core.response import InferResponse
from charonia.core.tensor import Tensor
from charonia.server.metrics.tokens import (
    FIRST_TOKEN_BOUNDS_NS,
    PER_TOKEN_BOUNDS_NS,
    USAGE_BOUNDS,
    TokenMetrics,
    TokenStream,
)

MS = 1_000_000
TEXT = Tensor("text_output", DataType.BYTES, np.array([b"x"], object))


def response(*more: Tensor, **parameters: ParameterValue) -> InferResponse:
    return InferResponse("m", "1", "", [TEXT, *more], parameters)


def number(name: str, value: int) -> Tensor:
    return Tensor(name, DataType.UINT32, np.array([value], np.uint32))


def test_a_stream_has_a_first_token_and_times_between_the_others() -> None:
    metrics = TokenMetrics()
    stream = TokenStream(metrics, 100 * MS)

    for at_ms in (130, 140, 160):
        stream.take(response(), at_ms * MS)
    stream.take(response(prompt_tokens=9, completion_tokens=7, cached_tokens=4), 190 * MS)
    stream.end()

    assert (metrics.first_ns.count, metrics.first_ns.total) == (1, 30 * MS)
    assert (metrics.between_ns.count, metrics.between_ns.total) == (3, 60 * MS)
    assert (metrics.per_token_ns.count, metrics.per_token_ns.total) == (1, 10 * MS)
    assert (metrics.prompt, metrics.completion, metrics.cached) == (9, 7, 4)


def test_an_answer_in_one_response_has_tokens_and_no_times() -> None:
    metrics = TokenMetrics()
    stream = TokenStream(metrics, 0)

    stream.take(response(prompt_tokens=9, completion_tokens=7), 5 * MS)
    stream.end()

    assert (metrics.prompt, metrics.completion) == (9, 7)
    assert metrics.first_ns.count == metrics.between_ns.count == metrics.per_token_ns.count == 0


def test_outputs_tell_the_tokens_of_each_response() -> None:
    metrics = TokenMetrics()
    stream = TokenStream(metrics, 0)

    for made in (1, 2, 0):
        stream.take(response(number("num_input_tokens", 5), number("num_output_tokens", made)), MS)
    stream.end()

    assert (metrics.prompt, metrics.completion) == (5, 3)
    assert (metrics.prompts.count, metrics.completions.count) == (1, 1)


def test_a_model_that_repeats_its_text_tells_all_tokens_each_time() -> None:
    metrics = TokenMetrics(is_cumulative=True)
    stream = TokenStream(metrics, 0)

    for made in (1, 2, 3):
        stream.take(response(number("num_input_tokens", 5), number("num_output_tokens", made)), MS)
    stream.end()

    assert (metrics.prompt, metrics.completion) == (5, 3)


def test_a_model_that_tells_nothing_counts_no_tokens() -> None:
    metrics = TokenMetrics()
    stream = TokenStream(metrics, 0)

    stream.take(response(), 2 * MS)
    stream.take(response(), 6 * MS)
    stream.end()

    assert metrics.prompts.count == 0
    assert metrics.per_token_ns.total == 4 * MS


def test_the_buckets_are_those_of_the_convention() -> None:
    first_ms = [1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1000, 2500, 5000, 7500, 10_000]
    per_token_ms = [10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 2500]

    assert tuple(each * MS for each in first_ms) == FIRST_TOKEN_BOUNDS_NS
    assert PER_TOKEN_BOUNDS_NS[-len(per_token_ms) :] == tuple(each * MS for each in per_token_ms)
    assert USAGE_BOUNDS[:3] == (1, 4, 16)
    assert USAGE_BOUNDS[-1] == 67_108_864
