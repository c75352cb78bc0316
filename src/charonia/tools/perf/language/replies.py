"""The responses of language models: the pieces of text with their times, and the server's counts. Pure.

While requests are in flight, only bytes and times are kept. They are decoded here, when a response is complete.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from charonia.core.errors import ServingError
from charonia.core.tensor import Tensor
from charonia.tools.perf.language.plan import LanguageEndpoint
from charonia.tools.perf.language.received import Received
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
        is_stream: Whether it came as a stream.
        content: The text.
        reasoning: The text of the model's reasoning, if the server separates it.
        prompt_tokens: Tokens of the prompt by the server's count, or `UNKNOWN`.
        completion_tokens: The same of the response.
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


def read_reply(endpoint: LanguageEndpoint, received: Received, is_grpc: bool = False) -> Reply:
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
        body: The whole stream.
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
            _read_message(message, piece)
        elif choice.get("text"):
            piece.content += choice["text"]
    piece.has_content = bool(document.get("data"))  # embeddings
    usage = document.get("usage")
    if usage:
        piece.prompt_tokens = int(usage.get("prompt_tokens", UNKNOWN))
        piece.completion_tokens = int(usage.get("completion_tokens", UNKNOWN))


def _read_message(message: Mapping[str, Any], piece: _Piece) -> None:
    piece.content += message.get("content") or ""
    piece.reasoning += message.get("reasoning_content") or message.get("reasoning") or ""
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        piece.content += (function.get("name") or "") + (function.get("arguments") or "")


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
