"""Streams of server-sent events; the events of one turn of the event loop are written together.

An event is `data: <JSON>` or, where the model names it, an event with a name; the last is `data: [DONE]`. An error
before the response begins is a plain response with the status of the error; a later one is an event, and the last. The
response begins with the first event, or after `BEGIN_STREAM_S`.

A client that reads too slowly is aborted once `stream_unsent_bytes_max` are waiting, since a model cannot be paused.

Source: OpenAI's API reference, "Streaming"; WHATWG HTML, "Server-sent events".
"""

import asyncio
import time

import numpy as np

from charonia.config.model import ModelConfig
from charonia.config.parameters import TEXT_INPUT, TEXT_OUTPUT
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome
from charonia.core.statistics import usage_of
from charonia.core.tensor import Tensor
from charonia.server.facade import SingleResponse
from charonia.server.http.exchange import Exchange
from charonia.server.http.limits import HttpLimits
from charonia.wire.openai_answer import encode_openai_error
from charonia.wire.openai_models import MESSAGES, RESPONSES

EVENT_TYPE = b"text/event-stream; charset=utf-8"
_HEADERS = b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"  # nginx would collect events
DONE = b"data: [DONE]\n\n"


class EventFlusher:
    """Writes the events collected by the streams of an endpoint, at the end of the turn of the event loop."""

    def __init__(self) -> None:
        self._due: list[EventStream] = []

    def add(self, stream: "EventStream") -> None:
        """Write the collected events of a stream at the end of this turn."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._write)
        self._due.append(stream)

    def _write(self) -> None:
        due, self._due = self._due, []
        for stream in due:
            stream.write()


class EventStream:
    """The events of one exchange."""

    __slots__ = ("_events", "_is_over", "_turns", "_unsent_bytes_max", "exchange")

    def __init__(self, exchange: Exchange, turns: EventFlusher, limits: HttpLimits) -> None:
        self.exchange = exchange
        self._turns = turns
        self._unsent_bytes_max = limits.stream_unsent_bytes_max
        self._events: list[bytes] = []
        self._is_over = False
        exchange.stream = self
        exchange.keep_streaming(self._begin, limits.stream_keep_alive_s)

    def send(self, event: bytes) -> None:
        """Send an event: JSON text, or an event with a name, without the empty line that ends it."""
        self._put(b"%b\n\n" % event if event.startswith(b"event: ") else b"data: %b\n\n" % event)

    def end(self, last: bytes = DONE) -> None:
        """End the stream, with a last event as it goes out or b"" for none."""
        self._put(last)
        self._is_over = True

    def fail(self, error: ServingError, status: int = 0) -> None:
        """End the response with an error: with its status if it has not begun. `status` as in `Exchange.fail`."""
        exchange = self.exchange
        if self._is_over or not exchange.is_open:
            return
        if not (exchange.has_begun or self._events):
            self._is_over = True
            exchange.fail(error, status)
            return
        self._put(b"data: %b\n\n" % encode_openai_error(error, status))
        self._is_over = True
        exchange.outcome = error

    def stop(self, error: ServingError, status: int = 0) -> None:
        """End the response with an error, and cancel its inference. Arguments as in `fail`."""
        ticket = self.exchange.ticket
        self.fail(error, status)
        if ticket is not None:
            ticket.cancel()

    def write(self) -> None:
        """Write the collected events."""
        exchange = self.exchange
        events, self._events = self._events, []
        if not exchange.is_open:
            return
        if exchange.received_ns and not exchange.first_ns:
            exchange.first_ns = time.monotonic_ns()
        if not exchange.has_begun:
            self._begin()
        data = b"".join(events)
        if data:
            exchange.send(data)
        if self._is_over:
            exchange.end()
        elif exchange.unsent_bytes > self._unsent_bytes_max:
            self.stop(
                unavailable(
                    f"the request is aborted: more than {self._unsent_bytes_max} bytes of the answer wait for the "
                    "client",
                    hint="read the events as they arrive",
                )
            )

    def _put(self, text: bytes) -> None:
        if not self._is_over:
            if not self._events:
                self._turns.add(self)
            self._events.append(text)

    def _begin(self) -> None:
        self.exchange.begin(200, EVENT_TYPE, _HEADERS)


ROUTE_PARAMETER = "openai"
"""Request parameter with the route that was called."""

LORA_PARAMETER = "lora_name"
"""Request parameter with the LoRA adapter to use."""

_NOT_ONE = internal("the model sent no answer, or more than one")


def engine_request(config: ModelConfig, route: str, adapter: str, body: bytes | memoryview) -> InferRequest:
    """Return the request of an engine model."""
    elements = np.empty((1, 1) if config.max_batch_size > 0 else (1,), object)
    elements[...] = bytes(body)
    request = InferRequest(config.name, {TEXT_INPUT: Tensor(TEXT_INPUT, DataType.BYTES, elements)})
    request.parameters[ROUTE_PARAMETER] = route
    if adapter:
        request.parameters[LORA_PARAMETER] = adapter
    return request


class StreamedAnswer:
    """Sends the chunks of an engine model as events."""

    __slots__ = ("_last", "_stream", "exchange")

    def __init__(self, stream: EventStream, route: str) -> None:
        self.exchange = stream.exchange
        self._stream = stream
        self._last = (b"",) if route in (MESSAGES, RESPONSES) else ()  # whose streams end with their own event

    def reply(self, outcome: Outcome, final: bool) -> None:
        """Take an outcome."""
        exchange = self.exchange
        exchange.is_over = final
        if not exchange.is_open:
            return
        if isinstance(outcome, ServingError):
            if final:
                self._stream.fail(outcome)
            else:
                self._stream.stop(outcome)
            return
        if outcome is not None:
            chunk = text_of(outcome)
            if chunk:
                self._stream.send(chunk)
            if outcome.parameters:
                record_answer(exchange, outcome)
        if final:
            self._stream.end(*self._last)


class WholeAnswer:
    """Sends the document of an engine model as the response."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def reply(self, outcome: Outcome, final: bool) -> None:
        exchange = self._exchange
        exchange.is_over = final
        if not exchange.is_open:
            return
        if not final or outcome is None or exchange.single is not None:
            if exchange.single is None:
                exchange.single = SingleResponse(_NOT_ONE)
            outcome = exchange.single.take(outcome, final)
        if outcome is None:
            return
        ticket = None if final else exchange.ticket
        if isinstance(outcome, ServingError):
            exchange.fail(outcome)
        else:
            record_answer(exchange, outcome)
            document = text_of(outcome)
            exchange.respond(200, [document]) if document else exchange.fail(_NOT_ONE)
        if ticket is not None:
            ticket.cancel()


def record_answer(exchange: Exchange, response: InferResponse) -> None:
    """Keep the data of a response for the access log."""
    exchange.outcome = response
    exchange.usage = usage_of(response.parameters) or exchange.usage


def text_of(response: InferResponse) -> bytes:
    """Return the text of a response, b"" for none."""
    for tensor in response.outputs:
        if tensor.name == TEXT_OUTPUT:
            array = tensor.array
            return bytes(array.item()) if array.size == 1 else b"".join(array.ravel().tolist())
    return b""
