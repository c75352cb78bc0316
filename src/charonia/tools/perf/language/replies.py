"""The responses of language models: pieces of text with their times, tokens, and the figures of a level.

While requests are in flight, only bytes and times are kept. They are decoded here, when a response is complete.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from charonia.core.errors import ServingError
from charonia.core.latency import LatencyHistogram
from charonia.core.tensor import Tensor
from charonia.tools.perf.language.plan import LanguageEndpoint, Tokenizer
from charonia.tools.perf.language.requests import LanguageSource
from charonia.tools.perf.samples import DONE, FIRST, INTENDED, OUTCOME, RESPONSES, WIDTH, ReceivedResponse, Rows
from charonia.tools.results.language import LanguageFigures, Spread, TokenCounter
from charonia.wire.grpc_codec import decode_stream_response

Times = NDArray[np.int64]

UNKNOWN = -1
"""A number of tokens that the server does not report."""

DONE_MARK = b"[DONE]"
"""The last event of OpenAI's streams."""

_BREAK = re.compile(rb"\r?\n\r?\n")
_LINE = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class Reply:
    """A decoded response.

    Attributes:
        times_ns: When each piece with content arrived, int64 [pieces]; one time for a response without a stream.
        reasoning: The text of the model's reasoning, if the server separates it.
        prompt_tokens: Tokens of the prompt by the server's count, or `UNKNOWN`.
        error: An error within the stream, "" for none.
    """

    times_ns: Times
    is_stream: bool
    content: str
    reasoning: str
    prompt_tokens: int = UNKNOWN
    completion_tokens: int = UNKNOWN
    error: str = ""


@dataclass(slots=True)
class _Piece:
    """The content of one event."""

    content: str = ""
    reasoning: str = ""
    prompt_tokens: int = UNKNOWN
    completion_tokens: int = UNKNOWN
    error: str = ""
    has_content: bool = False


def read_reply(endpoint: LanguageEndpoint, received: ReceivedResponse, is_grpc: bool = False) -> Reply:
    """Return the response that was received.

    Raises:
        ValueError: It does not follow the API.
    """
    arrivals = np.frombuffer(received.arrivals, np.int64).reshape(-1, 2)
    if is_grpc:
        return _joined(_messages(received.body, arrivals), is_stream=True, adds=True)
    read, adds = _READERS[endpoint], not endpoint.is_openai
    if received.body.lstrip()[:1] == b"{":
        last_ns = int(arrivals[-1, 0]) if len(arrivals) else 0
        return _joined([(_decoded(received.body, read), last_ns)], is_stream=False, adds=adds)
    pieces = [(_decoded(data, read), at) for data, at in events(received.body, arrivals) if data != DONE_MARK]
    return _joined(pieces, is_stream=True, adds=adds)


def events(body: bytes, arrivals: Times) -> Iterator[tuple[bytes, int]]:
    """Yield the data of each server-sent event, and the time at which its end arrived.

    Args:
        arrivals: int64 [parts, 2]: the time of each part, and the size of the body with it.
    """
    spans = list(_spans(body))
    if not spans or not len(arrivals):
        return
    ends = np.array([end for _, _, end in spans], np.int64)
    parts = np.minimum(np.searchsorted(arrivals[:, 1], ends), len(arrivals) - 1)
    for (first, last, _), at in zip(spans, arrivals[parts, 0].tolist(), strict=True):
        data = _data(body[first:last])
        if data:
            yield data, at


def _spans(body: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the first byte of each event, the end of its text, and the end of the empty line after it."""
    first = 0
    if b"\r" in body:
        for found in _BREAK.finditer(body):
            yield first, found.start(), found.end()
            first = found.end()
    else:
        while (last := body.find(b"\n\n", first)) >= 0:
            yield first, last, last + 2
            first = last + 2
    if first < len(body):  # some servers leave out the last empty line
        yield first, len(body), len(body)


def _data(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:] for line in _LINE.split(event) if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b" ") for line in lines)


def _decoded(data: bytes, read: Callable[[Mapping[str, Any], _Piece], None]) -> _Piece:
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise ValueError(f"expected JSON, got {data[:80]!r}") from None
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, got {data[:80]!r}")
    piece = _Piece()
    error = document.get("error")
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        piece.error = str(message or error)
        return piece
    try:
        read(document, piece)
    except (AttributeError, KeyError, TypeError, IndexError) as problem:
        raise ValueError(f"unexpected response {data[:80]!r}: {problem!r}") from None
    piece.has_content = piece.has_content or bool(piece.content or piece.reasoning)
    return piece


def _read_openai(document: Mapping[str, Any], piece: _Piece) -> None:
    for choice in document.get("choices") or ():
        message = choice.get("delta") or choice.get("message")
        if message:
            piece.content += message.get("content") or ""
            piece.reasoning += message.get("reasoning_content") or message.get("reasoning") or ""
            for call in message.get("tool_calls") or ():
                function = call.get("function") or {}
                piece.content += (function.get("name") or "") + (function.get("arguments") or "")
        elif choice.get("text"):
            piece.content += choice["text"]
    piece.has_content = bool(document.get("data"))  # embeddings
    usage = document.get("usage")
    if usage:
        piece.prompt_tokens = int(usage.get("prompt_tokens", UNKNOWN))
        piece.completion_tokens = int(usage.get("completion_tokens", UNKNOWN))


def _read_generate(document: Mapping[str, Any], piece: _Piece) -> None:
    text = document["text_output"]
    piece.content = "".join(text) if isinstance(text, list) else text
    piece.prompt_tokens = _number(document.get("num_input_tokens"))
    piece.completion_tokens = _number(document.get("num_output_tokens"))


def _read_infer(document: Mapping[str, Any], piece: _Piece) -> None:
    data = {output["name"]: output["data"] for output in document["outputs"]}
    _read_generate(data, piece)


def _number(value: Any) -> int:
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) else UNKNOWN


_READERS: dict[LanguageEndpoint, Callable[[Mapping[str, Any], _Piece], None]] = {
    LanguageEndpoint.CHAT: _read_openai,
    LanguageEndpoint.COMPLETIONS: _read_openai,
    LanguageEndpoint.EMBEDDINGS: _read_openai,
    LanguageEndpoint.GENERATE: _read_generate,
    LanguageEndpoint.INFER: _read_infer,
}


def _messages(body: bytes, arrivals: Times) -> list[tuple[_Piece, int]]:
    pieces = []
    first = 0
    for at, last in arrivals.tolist():
        pieces.append((_message(body[first:last]), at))
        first = last
    return pieces


def _message(data: bytes) -> _Piece:
    response = decode_stream_response(data)
    if isinstance(response, ServingError):
        return _Piece(error=response.message)
    outputs = {output.name: _elements(output) for output in response.outputs}
    piece = _Piece()
    if outputs:
        _read_generate(outputs, piece)
    piece.has_content = bool(piece.content)
    return piece


def _elements(output: Tensor) -> list[Any]:
    elements = output.array.ravel().tolist()
    return [element.decode("utf-8", "replace") if isinstance(element, bytes) else element for element in elements]


def _joined(pieces: list[tuple[_Piece, int]], is_stream: bool, *, adds: bool) -> Reply:
    """Return the response of these pieces; `adds`: whether the server counts the tokens of each piece."""
    counted = [piece.completion_tokens for piece, _ in pieces if piece.completion_tokens != UNKNOWN]
    prompted = [piece.prompt_tokens for piece, _ in pieces if piece.prompt_tokens != UNKNOWN]
    completion = (sum(counted) if adds else counted[-1]) if counted else UNKNOWN
    return Reply(
        times_ns=np.array([at for piece, at in pieces if piece.has_content], np.int64),
        is_stream=is_stream,
        content="".join(piece.content for piece, _ in pieces),
        reasoning="".join(piece.reasoning for piece, _ in pieces),
        prompt_tokens=prompted[-1] if prompted else UNKNOWN,
        completion_tokens=completion,
        error=next((piece.error for piece, _ in pieces if piece.error), ""),
    )


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
class CountedResponse:
    """A response and its tokens.

    Attributes:
        input_tokens: Tokens of the prompt, or `UNKNOWN`.
        output_tokens: Tokens of the response, or `UNKNOWN`.
    """

    reply: Reply
    input_tokens: int
    output_tokens: int


class ReplyReader:
    """Decodes responses and counts their tokens.

    Args:
        tokenizer: Counts the tokens, None for the counts of the server.

    Attributes:
        input_counted_by: Who counted the tokens of prompts so far; the least reliable one.
    """

    def __init__(
        self, source: LanguageSource, endpoint: LanguageEndpoint, tokenizer: Tokenizer | None, is_grpc: bool
    ) -> None:
        self._source = source
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self._is_grpc = is_grpc
        self._inputs: dict[int, int] = {}
        default = TokenCounter.SERVER if tokenizer is None else TokenCounter.TOKENIZER
        self.input_counted_by = default
        self.output_counted_by = default

    def read(self, place: int, received: ReceivedResponse) -> CountedResponse:
        """Return the response to the request at a place of the data."""
        try:
            reply = read_reply(self._endpoint, received, self._is_grpc)
        except ServingError as error:
            raise ValueError(error.message) from None
        return CountedResponse(reply, self._input_tokens(place, received, reply), self._output_tokens(reply))

    def _input_tokens(self, place: int, received: ReceivedResponse, reply: Reply) -> int:
        if self._tokenizer is None:
            if reply.prompt_tokens == UNKNOWN:
                self.input_counted_by = TokenCounter.NOBODY
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
        self.output_counted_by = TokenCounter.PIECES if reply.is_stream else TokenCounter.NOBODY
        return len(reply.times_ns) if reply.is_stream else UNKNOWN


def problem(reply: Reply) -> tuple[str, str]:
    """Return kind and message of the problem of a response, two empty texts for none."""
    if reply.error:
        return STREAM_ERROR, reply.error
    if not len(reply.times_ns):
        return EMPTY, "the response has no content"
    return "", ""


def fill(row: Times, counted: CountedResponse) -> Times:
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
    """Return the figures of a level."""
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
        limits: Fields of `LanguageFigures` with their limits: a lowest rate, else a longest time.
    """
    values = values_of(rows)
    good: NDArray[np.bool_] = rows[:, OUTCOME] == 0
    for name, limit in limits:
        found = values[name]
        good = good & (found >= limit if name == "user_rate" else found <= limit)
    return good
