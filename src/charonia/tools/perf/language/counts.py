"""The times and tokens of each request, from the received data: rows of integers, and the figures of a level."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from charonia.core.errors import ServingError
from charonia.core.latency import LatencyHistogram
from charonia.tools.perf.language.plan import LanguageEndpoint, Tokenizer
from charonia.tools.perf.language.received import Received
from charonia.tools.perf.language.replies import UNKNOWN, Reply, Times, read_reply
from charonia.tools.perf.language.requests import LanguageSource
from charonia.tools.perf.samples import DONE, FIRST, INTENDED, OUTCOME, RESPONSES, WIDTH, Rows
from charonia.tools.results.language import CountedBy, LanguageFigures, Spread

SECOND, INPUT_TOKENS, OUTPUT_TOKENS = range(WIDTH, WIDTH + 3)
"""Additional columns of the rows of language models.

SECOND: when the second piece arrived, 0 for none. INPUT_TOKENS, OUTPUT_TOKENS: `UNKNOWN` if not counted. FIRST
and DONE are the times of the first piece and of the last, RESPONSES is the number of pieces.
"""

EMPTY = "EMPTY"
"""Kind of the error of a response without content."""

GARBLED = "GARBLED"
"""Kind of the error of a response that does not follow its API."""

STREAM_ERROR = "STREAM_ERROR"
"""Kind of an error that came within a stream."""

_INPUTS_KEPT_MAX = 100_000
_PLACE_MASK = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Counted:
    """A response and its tokens.

    Attributes:
        reply: The response.
        input_tokens: Tokens of the prompt, or `UNKNOWN`.
        output_tokens: Tokens of the response, or `UNKNOWN`.
    """

    reply: Reply
    input_tokens: int
    output_tokens: int


class ReplyReader:
    """Decodes responses and counts their tokens.

    Args:
        source: The requests.
        endpoint: Their API.
        tokenizer: Counts the tokens, None for the counts of the server.
        is_grpc: Whether responses are messages of gRPC.

    Attributes:
        input_counted_by: Who counted the tokens of prompts so far; the least reliable one.
        output_counted_by: The same for responses.
    """

    def __init__(
        self, source: LanguageSource, endpoint: LanguageEndpoint, tokenizer: Tokenizer | None, is_grpc: bool
    ) -> None:
        self._source = source
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self._is_grpc = is_grpc
        self._inputs: dict[int, int] = {}
        default = CountedBy.SERVER if tokenizer is None else CountedBy.TOKENIZER
        self.input_counted_by = default
        self.output_counted_by = default

    def read(self, place: int, received: Received) -> Counted:
        """Return the response to the request at a place of the data.

        Raises:
            ValueError: It does not follow its API.
        """
        try:
            reply = read_reply(self._endpoint, received, self._is_grpc)
        except ServingError as error:
            raise ValueError(error.message) from None
        return Counted(reply, self._input_tokens(place, received, reply), self._output_tokens(reply))

    def _input_tokens(self, place: int, received: Received, reply: Reply) -> int:
        if self._tokenizer is None:
            if reply.prompt_tokens == UNKNOWN:
                self.input_counted_by = CountedBy.NOBODY
            return reply.prompt_tokens
        known = None if received.history else self._inputs.get(place)
        if known is None:
            text = self._source.texts(place >> 32, place & _PLACE_MASK, received.history)
            known = self._tokenizer.counts([text])[0]
            if not received.history and len(self._inputs) < _INPUTS_KEPT_MAX:
                self._inputs[place] = known
        return known

    def _output_tokens(self, reply: Reply) -> int:
        if self._endpoint is LanguageEndpoint.EMBEDDINGS:
            return UNKNOWN
        if self._tokenizer is not None:
            return sum(self._tokenizer.counts([text for text in (reply.reasoning, reply.content) if text]))
        if reply.completion_tokens != UNKNOWN:
            return reply.completion_tokens
        self.output_counted_by = CountedBy.PIECES if reply.is_stream else CountedBy.NOBODY
        return len(reply.times_ns) if reply.is_stream else UNKNOWN


def problem(reply: Reply) -> tuple[str, str]:
    """Return kind and message of the problem of a response, two empty texts for none."""
    if reply.error:
        return STREAM_ERROR, reply.error
    if not len(reply.times_ns):
        return EMPTY, "the response has no content"
    return "", ""


def fill(row: Times, counted: Counted) -> Times:
    """Write the times and tokens of a successful response into its row, and return the gaps between its pieces."""
    times, is_stream = counted.reply.times_ns, counted.reply.is_stream
    row[FIRST] = times[0] if is_stream else 0
    row[SECOND] = times[1] if is_stream and len(times) > 1 else 0
    row[DONE] = times[-1]
    row[RESPONSES] = len(times)
    row[INPUT_TOKENS], row[OUTPUT_TOKENS] = counted.input_tokens, counted.output_tokens
    gaps: Times = np.diff(times) if is_stream else np.empty(0, np.int64)
    return gaps


def widened(rows: Rows) -> Rows:
    """Return rows with the additional columns, without tokens."""
    wide = np.zeros((len(rows), OUTPUT_TOKENS + 1), np.int64)
    wide[:, :WIDTH] = rows
    wide[:, INPUT_TOKENS:] = UNKNOWN
    return wide


def values_of(rows: Rows) -> Mapping[str, NDArray[np.float64]]:
    """Return the figures of each request by name, float64 [requests], NaN where a request has none."""
    latency = (rows[:, DONE] - rows[:, INTENDED]).astype(np.float64)
    output = np.where(rows[:, OUTPUT_TOKENS] >= 0, rows[:, OUTPUT_TOKENS], np.nan)
    is_stream = rows[:, FIRST] > 0
    first = np.where(is_stream, rows[:, FIRST] - rows[:, INTENDED], np.nan)
    second = np.where(rows[:, SECOND] > 0, rows[:, SECOND] - rows[:, FIRST], np.nan)
    counted = is_stream & (rows[:, OUTPUT_TOKENS] >= 2)
    inter = np.full(len(rows), np.nan)
    inter[counted] = (latency[counted] - first[counted]) / (output[counted] - 1)
    rate = np.full(len(rows), np.nan)
    rate[inter > 0] = 1e9 / inter[inter > 0]
    return {
        "first_token": first,
        "second_token": second,
        "inter_token": inter,
        "latency": latency,
        "user_rate": rate,
        "input_tokens": np.where(rows[:, INPUT_TOKENS] >= 0, rows[:, INPUT_TOKENS], np.nan),
        "output_tokens": output,
    }


def figures(rows: Rows, gaps: Sequence[Times], duration_ns: int, reader: ReplyReader) -> LanguageFigures:
    """Return the figures of a level.

    Args:
        rows: Its successful requests, with the additional columns.
        gaps: The gaps between the pieces of each.
        duration_ns: The time that they took.
        reader: Counted the tokens.
    """
    values = {name: found[~np.isnan(found)] for name, found in values_of(rows).items()}
    gaps_ns = np.concatenate([np.empty(0, np.int64), *gaps])
    seconds = max(duration_ns, 1) / 1e9
    return LanguageFigures(
        input_counted_by=reader.input_counted_by,
        output_counted_by=reader.output_counted_by,
        output_rate=float(values["output_tokens"].sum()) / seconds,
        input_rate=float(values["input_tokens"].sum()) / seconds,
        request_rate=len(rows) / seconds,
        inter_chunk=Spread.of(gaps_ns.astype(np.float64)),
        first_token_times=LatencyHistogram.of(values["first_token"].astype(np.int64)),
        inter_token_times=LatencyHistogram.of(values["inter_token"].astype(np.int64)),
        inter_chunk_times=LatencyHistogram.of(gaps_ns),
        **{name: Spread.of(found) for name, found in values.items()},
    )


def is_good(rows: Rows, limits: Sequence[tuple[str, float]]) -> NDArray[np.bool_]:
    """Return which requests meet all limits, with values on the better side.

    Args:
        rows: Requests, with the additional columns.
        limits: Fields of `LanguageFigures` with their limits: a lowest rate, else a longest time.
    """
    values = values_of(rows)
    good: NDArray[np.bool_] = rows[:, OUTCOME] == 0
    for name, limit in limits:
        found = values[name]
        good = good & (found >= limit if name == "user_rate" else found <= limit)
    return good
