"""The tokens of language models: how many, and how fast they come. Pure.

A response of a stream counts as a token here: engines send one response a token, or a few together under load. The
model reports the usage of a request: response parameters of engines, else the outputs `num_input_tokens` and
`num_output_tokens`. Only requests with more than one response have times.

Source: OpenTelemetry, "Semantic conventions for generative AI metrics", for the names with `gen_ai_` and their
buckets.
"""

from charonia.config.parameters import INPUT_TOKENS, OUTPUT_TOKENS
from charonia.core.response import InferResponse
from charonia.core.statistics import TokenUsage, usage_of
from charonia.server.metrics.metric_families import Histogram

_US = 1_000
_MS = 1_000_000

FIRST_TOKEN_BOUNDS_NS = tuple(
    each * _MS for each in (1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1000, 2500, 5000, 7500, 10_000)
)
PER_TOKEN_BOUNDS_NS = tuple(
    each * _US
    for each in (
        100, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 75_000, 100_000, 150_000, 200_000, 300_000,
        400_000, 500_000, 750_000, 1_000_000, 2_500_000,
    )
)  # fmt: skip
USAGE_BOUNDS = tuple(4**power for power in range(14))

PROMPT_TOKENS = "nv_llm_prompt_tokens_total"
COMPLETION_TOKENS = "nv_llm_completion_tokens_total"
CACHED_TOKENS = "nv_llm_cached_tokens_total"
FIRST_TOKEN = "nv_llm_time_to_first_token_seconds"
BETWEEN_TOKENS = "nv_llm_inter_token_latency_seconds"
GEN_AI_FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
GEN_AI_PER_TOKEN = "gen_ai_server_time_per_output_token_seconds"
GEN_AI_USAGE = "gen_ai_client_token_usage"


class TokenMetrics:
    """The tokens of one version of a language model.

    Attributes:
        is_cumulative: Whether each response has all text so far, and the number of all its tokens.
        prompt: Tokens of prompts.
        completion: Tokens of answers.
        cached: Tokens of prompts whose computation was saved.
        first_ns: Histogram of the time from arrival to the first response of a stream.
        between_ns: Histogram of the time between two responses of a stream.
        per_token_ns: Histogram of the time for each token after the first, one value a stream.
        prompts: Histogram of the tokens of a prompt.
        completions: Histogram of the tokens of an answer.
    """

    def __init__(self, *, is_cumulative: bool = False) -> None:
        self.is_cumulative = is_cumulative
        self.prompt = self.completion = self.cached = 0
        self.first_ns = Histogram(FIRST_TOKEN_BOUNDS_NS)
        self.between_ns = Histogram(PER_TOKEN_BOUNDS_NS)
        self.per_token_ns = Histogram(PER_TOKEN_BOUNDS_NS)
        self.prompts = Histogram(USAGE_BOUNDS)
        self.completions = Histogram(USAGE_BOUNDS)

    def answered(self, response: InferResponse) -> None:
        """Count the only response to a request."""
        answer = TokenStream(self, 0)
        answer.take(response, 0)
        answer.end()

    def used(self, usage: TokenUsage) -> None:
        """Count the tokens of a request."""
        self.prompt += self.prompts.add(usage.prompt)
        self.completion += self.completions.add(usage.completion)
        self.cached += usage.cached


class TokenStream:
    """The responses to one request.

    Args:
        metrics: The metrics that count them.
        arrival_ns: When the request arrived.
    """

    __slots__ = ("_arrival_ns", "_completion", "_count", "_first_ns", "_last_ns", "_metrics", "_prompt", "_usage")

    def __init__(self, metrics: TokenMetrics, arrival_ns: int) -> None:
        self._metrics = metrics
        self._arrival_ns = arrival_ns
        self._count = 0
        self._first_ns = 0
        self._last_ns = 0
        self._prompt = -1
        self._completion = 0
        self._usage: TokenUsage | None = None

    def take(self, response: InferResponse, now_ns: int) -> None:
        """Count a response."""
        outputs = response.outputs
        if response.parameters:
            self._usage = usage_of(response.parameters) or self._usage
        if len(outputs) > 1:
            for tensor in outputs:
                if tensor.name == OUTPUT_TOKENS and tensor.array.size:
                    before = 0 if self._metrics.is_cumulative else self._completion
                    self._completion = before + int(tensor.array.sum())
                elif tensor.name == INPUT_TOKENS and tensor.array.size:
                    self._prompt = int(tensor.array.flat[0])
        if not outputs:
            return
        self._count += 1
        if self._count == 1:
            self._first_ns = now_ns
        else:
            if self._count == 2:
                self._metrics.first_ns.add(self._first_ns - self._arrival_ns)
            self._metrics.between_ns.add(now_ns - self._last_ns)
        self._last_ns = now_ns

    def usage(self) -> TokenUsage | None:
        """Return the usage as the model has reported it so far, None if it has not."""
        if self._usage is None and self._prompt >= 0:
            return TokenUsage(self._prompt, self._completion)
        return self._usage

    def end(self) -> None:
        """Count the usage of the completed request."""
        usage = self.usage()
        if usage is not None:
            self._metrics.used(usage)
        tokens = usage.completion if usage is not None and usage.completion else self._count
        if self._count > 1 and tokens > 1:
            self._metrics.per_token_ns.add((self._last_ns - self._first_ns) // (tokens - 1))
