"""Figures of a language model: times to tokens, lengths, rates. Pure.

The definitions follow AIPerf and GenAI-Perf. Pieces are the parts of a streamed response that have content.

- Time to first token: from the request to the first piece.
- Time to second token: from the first piece to the second.
- Request latency: from the request to the last piece.
- Inter-token latency, also called time per output token: (request latency - time to first token) / (output tokens - 1),
  one value for each request of at least two tokens.
- Inter-chunk latency: the gaps between pieces that follow each other, all gaps of all requests.
- Output tokens per second: of all requests; per user, 1 / inter-token latency of each request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from charonia.core.latency import LatencyHistogram


class TokenCounter(Enum):
    """Who counted the tokens."""

    TOKENIZER = "tokenizer"
    """The tokenizer of `--tokenizer`, of all text that came."""
    SERVER = "server"
    """The server, in the usage of its responses."""
    PIECES = "pieces"
    """Not counted: each piece of a stream counts as one token."""
    NOBODY = "nobody"
    """Not counted, and no stream."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of one figure.

    Attributes:
        deviation: Sample standard deviation, 0 for a single value.
        p50: Median; between two values, percentiles are interpolated.
    """

    count: int
    mean: float
    deviation: float
    minimum: float
    maximum: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> "Spread | None":
        """Return the spread of these values, None without one."""
        if not values.size:
            return None
        p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
        deviation = float(values.std(ddof=1)) if values.size > 1 else 0.0
        ends = float(values.min()), float(values.max())
        return cls(int(values.size), float(values.mean()), deviation, *ends, p50, p90, p95, p99)


@dataclass(frozen=True, slots=True)
class LanguageFigures:
    """The figures of a level, over the successful requests of its result. Times are in nanoseconds.

    Attributes:
        output_rate: Output tokens per second, of all requests.
        input_rate: Input tokens per second, of all requests.
        request_rate: Requests per second.
        first_token: Times to first token; None without streams, like all others of streams.
        user_rate: Output tokens per second and user.
        input_tokens: Tokens of prompts, None if not counted.
    """

    input_counted_by: TokenCounter
    output_counted_by: TokenCounter
    output_rate: float
    input_rate: float
    request_rate: float
    first_token: Spread | None
    second_token: Spread | None
    inter_token: Spread | None
    inter_chunk: Spread | None
    latency: Spread | None
    user_rate: Spread | None
    input_tokens: Spread | None
    output_tokens: Spread | None
    first_token_times: LatencyHistogram
    inter_token_times: LatencyHistogram
    inter_chunk_times: LatencyHistogram

    def spread(self, figure: str) -> Spread | None:
        """Return the spread of a figure by its name in `FIGURES`."""
        found: Spread | None = getattr(self, figure)
        return found


@dataclass(frozen=True, slots=True)
class Figure:
    """How a figure is shown.

    Attributes:
        unit: "ms" for a time, "tokens", or "tokens/s/user".
    """

    title: str
    unit: str
    more_is_better: bool = False

    @property
    def factor(self) -> float:
        """From the value of the record to that in the unit."""
        return 1e-6 if self.unit == "ms" else 1.0


FIGURES: Mapping[str, Figure] = {
    "first_token": Figure("Time to first token", "ms"),
    "second_token": Figure("Time to second token", "ms"),
    "inter_token": Figure("Inter-token latency", "ms"),
    "inter_chunk": Figure("Inter-chunk latency", "ms"),
    "latency": Figure("Request latency", "ms"),
    "user_rate": Figure("Output tokens per user", "tokens/s/user", more_is_better=True),
    "input_tokens": Figure("Input sequence length", "tokens"),
    "output_tokens": Figure("Output sequence length", "tokens"),
}
"""The figures of each request by their field in `LanguageFigures`, in the order of tables."""

NAMES: Mapping[str, str] = {
    "time_to_first_token": "first_token",
    "ttft": "first_token",
    "time_to_second_token": "second_token",
    "ttst": "second_token",
    "inter_token_latency": "inter_token",
    "itl": "inter_token",
    "time_per_output_token": "inter_token",
    "tpot": "inter_token",
    "inter_chunk_latency": "inter_chunk",
    "icl": "inter_chunk",
    "request_latency": "latency",
    "latency": "latency",
    "output_token_throughput_per_user": "user_rate",
    "output_sequence_length": "output_tokens",
    "osl": "output_tokens",
    "input_sequence_length": "input_tokens",
    "isl": "input_tokens",
}
"""Fields by their names in conditions: AIPerf's names, and the usual short ones."""
