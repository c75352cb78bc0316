"""The generate routes: one JSON object in; one JSON object, or a stream of them, out."""

import logging
from functools import partial

from charonia.core.calls import Outcome, Reply
from charonia.core.errors import ServingError, internal, unsupported
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse
from charonia.server.facade import Engine, Services
from charonia.server.http.event_stream import stream_events
from charonia.server.http.exchange import Exchange
from charonia.server.http.forwarding import forward_headers
from charonia.server.http.limits import HttpLimits
from charonia.server.http.routes import Route, Target
from charonia.server.http.traced import begin
from charonia.server.single_response import SoleResponse
from charonia.wire.v2_generate import decode_generate, encode_generated

_log = logging.getLogger(__name__)

_NOT_ONE = unsupported(
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)


class GenerateHandlers:
    """The routes `generate` and `generate_stream` of every model."""

    def __init__(self, engine: Engine, limits: HttpLimits, services: Services) -> None:
        self._engine = engine
        self._limits = limits
        self._forward = services.http_headers
        self._tracer = services.tracer

    def routes(self) -> list[Route]:
        """Return the routes."""
        model = "/v2/models/{model}"
        return [
            route
            for base in (model, model + "/versions/{version}")
            for route in (
                Route(base + "/generate", {b"POST": self._generate}),
                Route(base + "/generate_stream", {b"POST": self._generate_stream}),
            )
        ]

    def _generate(self, exchange: Exchange, target: Target) -> None:
        request = self._request(exchange, target)
        exchange.request_id = request.id
        reply: Reply = partial(_reply, exchange, SoleResponse(_NOT_ONE))
        if self._tracer is not None:
            reply = begin(self._tracer, request, reply, exchange)
        ticket = self._engine.infer(request, reply)
        if exchange.is_open:
            exchange.ticket = ticket
        else:
            ticket.cancel()

    def _generate_stream(self, exchange: Exchange, target: Target) -> None:
        request = self._request(exchange, target)
        limit = self._limits.stream_unsent_bytes_max
        stream_events(self._engine, exchange, request, encode_generated, limit, self._tracer)

    def _request(self, exchange: Exchange, target: Target) -> InferRequest:
        exchange.model, exchange.version = target
        coding = exchange.headers.get(b"content-encoding")
        if coding is not None and coding.lower() != b"identity":
            raise unsupported("a request to generate cannot be compressed", hint="leave out Content-Encoding")
        config = self._engine.model_config(target.model, target.version)
        request = decode_generate(config, target.version, exchange.body, self._limits.body_bytes_max)
        if self._forward is not None:
            forward_headers(self._forward, exchange, request)
        return request


def _reply(exchange: Exchange, sole: SoleResponse, outcome: Outcome, final: bool) -> None:
    answer = sole.take(outcome, final) if exchange.is_open else None
    if answer is None:
        return
    ticket = None if final else exchange.ticket
    try:
        if isinstance(answer, InferResponse):
            exchange.outcome = answer
            exchange.respond(200, [encode_generated(answer)])
        else:
            exchange.fail(answer)
    except ServingError as error:
        exchange.fail(error)
    except Exception as fault:  # the model's output is not what it says: this request fails, nothing else
        _log.exception("the response of model '%s' cannot be written", exchange.model)
        exchange.fail(internal(f"the response of model '{exchange.model}' is broken: {type(fault).__name__}"))
    if ticket is not None:  # after the answer, which the outcome of cancelling would take the place of
        ticket.cancel()
