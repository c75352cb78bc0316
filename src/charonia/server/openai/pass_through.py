"""Requests to engine models, which speak OpenAI's API themselves: body and chunks pass unchanged."""

import numpy as np

from charonia.config.model import ModelConfig
from charonia.config.parameters import TEXT_INPUT, TEXT_OUTPUT
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, internal
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome
from charonia.core.statistics import usage_of
from charonia.core.tensor import Tensor
from charonia.server.facade import SingleResponse
from charonia.server.http.exchange import Exchange
from charonia.server.openai.events import EventStream
from charonia.wire.openai_models import MESSAGES, RESPONSES

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
                note_answer(exchange, outcome)
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
            note_answer(exchange, outcome)
            document = text_of(outcome)
            exchange.respond(200, [document]) if document else exchange.fail(_NOT_ONE)
        if ticket is not None:
            ticket.cancel()


def note_answer(exchange: Exchange, response: InferResponse) -> None:
    """Keep the data of a response for the access log."""
    exchange.outcome = response
    exchange.usage = usage_of(response.parameters) or exchange.usage


def text_of(response: InferResponse) -> bytes:
    """Return the text of a response, b"" for none."""
    for tensor in response.outputs:
        if tensor.name == TEXT_OUTPUT:
            elements: list[bytes] = tensor.array.ravel().tolist()
            return elements[0] if len(elements) == 1 else b"".join(elements)
    return b""
