"""Responses of one inference as server-sent events.

Each response, and each error, is an event `data: <JSON>`, sent when it is there; the body ends after the last. The
first one fixes the status. An error before the model was asked is a plain JSON document with its status, as on other
routes.

A client that reads more slowly than the model answers has its request given up once `stream_unsent_bytes_max` wait for
it: a model cannot be made to wait. One that leaves cancels it.

Source: Triton's generate extension; WHATWG HTML, "Server-sent events".
"""

import logging
from collections.abc import Callable

from charonia.core.calls import Outcome, Reply
from charonia.core.errors import ServingError, internal, unavailable
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.server.facade import Engine
from charonia.server.http.exchange import Exchange
from charonia.server.http.traced import begin
from charonia.server.tracing.requests import Tracing
from charonia.wire.http_status import STATUS
from charonia.wire.json_text import encode_error

_log = logging.getLogger(__name__)

EVENT_STREAM = b"text/event-stream"
_EVENT_TYPE = EVENT_STREAM + b"; charset=utf-8"

Encode = Callable[[InferResponse], bytes]
"""Returns the JSON text of a response, or raises a ServingError."""


def stream_events(
    engine: Engine,
    exchange: Exchange,
    request: InferRequest,
    encode: Encode,
    unsent_bytes_max: int,
    tracer: Tracing | None = None,
) -> None:
    """Run a request and answer with its responses as events.

    Args:
        engine: What answers it.
        exchange: Where the answer goes.
        request: The request.
        encode: Makes the text of an event; without line ends.
        unsent_bytes_max: Bytes that may wait for the client.
        tracer: What traces requests, None where none can be traced.
    """
    stream = _EventStream(exchange, encode, unsent_bytes_max)
    exchange.request_id = request.id
    reply: Reply = stream.reply
    if tracer is not None:
        reply = begin(tracer, request, reply, exchange)
    ticket = engine.infer(request, reply)
    stream.is_asked = True
    if exchange.is_open:
        exchange.ticket = ticket
    else:
        ticket.cancel()


class _EventStream:
    """Takes the outcomes of one request."""

    __slots__ = ("_encode", "_exchange", "_unsent_bytes_max", "is_asked")

    def __init__(self, exchange: Exchange, encode: Encode, unsent_bytes_max: int) -> None:
        self._exchange = exchange
        self._encode = encode
        self._unsent_bytes_max = unsent_bytes_max
        self.is_asked = False  # whether the engine has taken the request

    def reply(self, outcome: Outcome, final: bool) -> None:
        exchange = self._exchange
        if not exchange.is_open:
            return
        if isinstance(outcome, ServingError) and final and not self.is_asked and not exchange.has_begun:
            exchange.fail(outcome)
            return
        if outcome is not None:
            self._send(outcome)
        elif not exchange.has_begun:
            exchange.begin(200, _EVENT_TYPE)
        if final:
            exchange.end()
        elif exchange.unsent_bytes > self._unsent_bytes_max:
            self._give_up()

    def _send(self, outcome: InferResponse | ServingError) -> None:
        exchange = self._exchange
        try:
            data = encode_error(outcome) if isinstance(outcome, ServingError) else self._encode(outcome)
        except ServingError as error:
            outcome, data = error, encode_error(error)
        except Exception as fault:  # the model's output is not what it says: an error of this response, nothing else
            _log.exception("a response of model '%s' cannot be written", exchange.model)
            outcome = internal(f"a response of model '{exchange.model}' is broken: {type(fault).__name__}")
            data = encode_error(outcome)
        exchange.outcome = outcome
        if not exchange.has_begun:
            exchange.begin(STATUS[outcome.code] if isinstance(outcome, ServingError) else 200, _EVENT_TYPE)
        exchange.send(b"data: %b\n\n" % data)

    def _give_up(self) -> None:
        ticket = self._exchange.ticket
        self._send(
            unavailable(
                f"the request is given up: more than {self._unsent_bytes_max} bytes of responses wait for the client",
                hint="read the events as they come",
            )
        )
        self._exchange.end()
        if ticket is not None:
            ticket.cancel()
