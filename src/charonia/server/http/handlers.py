"""What each route does: decode, call the engine, encode."""

import asyncio
import logging
from functools import partial

from charonia.config.json_form import to_json
from charonia.core.calls import Outcome, Reply
from charonia.core.errors import ServingError, internal, invalid, unsupported
from charonia.core.response import InferResponse
from charonia.server.facade import NO_SERVICES, Engine, Services
from charonia.server.http.connection import DIGITS_MAX, JSON_SIZE
from charonia.server.http.event_stream import EVENT_STREAM, stream_events
from charonia.server.http.exchange import JSON_TYPE, Exchange
from charonia.server.http.explain import ExplainHandlers
from charonia.server.http.forwarding import forward_headers
from charonia.server.http.generate import GenerateHandlers
from charonia.server.http.limits import HttpLimits
from charonia.server.http.on_demand import on_demand
from charonia.server.http.rate_limits import RateLimitHandlers
from charonia.server.http.routes import Handler, Route, Target
from charonia.server.http.sequences import SequenceHandlers
from charonia.server.http.settings import SettingsHandlers
from charonia.server.http.shared_memory import SharedMemoryHandlers
from charonia.server.http.traced import begin
from charonia.server.http.work import CONTENT_ENCODING, Work
from charonia.server.single_response import SoleResponse
from charonia.wire import v2_control as describe
from charonia.wire.compression import COMPRESS_FROM_BYTES, choose_coding, compress
from charonia.wire.json_text import dump
from charonia.wire.v2_control import decode_index, decode_load, decode_unload
from charonia.wire.v2_request import InferCall, InferDecoder, raw_call, raw_tensor
from charonia.wire.v2_response import encode_response

_log = logging.getLogger(__name__)

BINARY_TYPE = b"application/octet-stream"

_NOT_ONE = unsupported(
    "HTTP end point doesn't support models with decoupled transaction policy that send no response, or several",
    hint="ask for its responses as events, with the header field 'Accept: text/event-stream', or over gRPC",
)


class Handlers:
    """The routes of the KServe v2 protocol and its extensions."""

    def __init__(self, engine: Engine, limits: HttpLimits, services: Services = NO_SERVICES) -> None:
        self._engine = engine
        self._services = services
        self._tracer = services.tracer
        self._forward = services.http_headers
        self._decoder = InferDecoder(limits.body_bytes_max, services.regions)
        self._limits = limits
        self._work = Work(limits.body_bytes_max)

    def routes(self) -> list[Route]:
        """Return the route table."""
        model = "/v2/models/{model}"
        version = model + "/versions/{version}"
        table = [
            Route("/v2", {b"GET": self._server}),
            Route("/v2/health/live", {b"GET": self._live}),
            Route("/v2/health/ready", {b"GET": self._ready}),
            Route("/v2/models/stats", {b"GET": self._statistics}),
            Route("/v2/repository/index", {b"POST": self._index}),
            Route("/v2/repository/models/{model}/load", {b"POST": self._load}),
            Route("/v2/repository/models/{model}/unload", {b"POST": self._unload}),
            Route("/v2/repository/{repository}/index", {b"POST": _named_repository}),
            Route("/v2/repository/{repository}/models/{model}/load", {b"POST": _named_repository}),
            Route("/v2/repository/{repository}/models/{model}/unload", {b"POST": _named_repository}),
        ]
        for base in (model, version):
            table += [
                Route(base, {b"GET": self._model}),
                Route(base + "/ready", {b"GET": self._model_ready}),
                Route(base + "/config", {b"GET": self._config}),
                Route(base + "/stats", {b"GET": self._statistics}),
                Route(base + "/infer", {b"POST": self._infer}),
            ]
        table += GenerateHandlers(self._engine, self._limits, self._services).routes()
        table += SettingsHandlers(self._engine, self._services, self._work).routes()
        table += RateLimitHandlers(self._services.rate_limits).routes()
        table += SequenceHandlers(self._services.sequences).routes()
        table += ExplainHandlers(self._services.explain).routes()
        table += SharedMemoryHandlers(self._services.regions, self._work).routes()
        return on_demand(table, self._services.demand, self._work)

    # Inference.

    def _infer(self, exchange: Exchange, target: Target) -> None:
        exchange.model, exchange.version = target
        if CONTENT_ENCODING in exchange.headers:
            self._work.start(exchange, self._infer_encoded(exchange, target))
        else:
            self._submit(exchange, target, exchange.body)

    async def _infer_encoded(self, exchange: Exchange, target: Target) -> None:
        body = await self._work.body(exchange)
        if exchange.is_open:
            self._submit(exchange, target, body)

    def _submit(self, exchange: Exchange, target: Target, body: bytes | memoryview) -> None:
        json_size = exchange.headers.get(JSON_SIZE)
        if json_size is None:
            call = self._decoder.decode(target.model, target.version, body)
        else:
            size = _json_size(json_size)
            call = self._decoder.decode(target.model, target.version, body, size) if size else self._raw(target, body)
        if self._forward is not None:
            forward_headers(self._forward, exchange, call.request)
        exchange.request_id = call.request.id
        accepted = exchange.headers.get(b"accept")
        if accepted is not None and EVENT_STREAM in accepted:
            self._stream(exchange, call)
            return
        reply: Reply = partial(self._reply, exchange, call)
        if self._tracer is not None:
            reply = begin(self._tracer, call.request, reply, exchange)
        ticket = self._engine.infer(call.request, reply)
        if exchange.is_open:
            exchange.ticket = ticket
        else:
            ticket.cancel()

    def _stream(self, exchange: Exchange, call: InferCall) -> None:
        if call.binary or any(call.forms.values()):
            raise invalid("an event stream carries outputs as JSON only", hint="do not ask for binary outputs")
        limit = self._limits.stream_unsent_bytes_max

        def encode(response: InferResponse) -> bytes:
            return encode_response(response, False, {}, call.places)[0]

        stream_events(self._engine, exchange, call.request, encode, limit, self._tracer)

    def _raw(self, target: Target, body: bytes | memoryview) -> InferCall:
        model, version = target
        config = self._engine.model_config(model, version)
        if len(config.input) != 1 or config.input[0].data_type is None:
            raise invalid(
                f"raw binary request: model '{model}' has {len(config.input)} inputs, such a request carries just one",
                hint="send the inputs as JSON, or in binary form after a JSON header",
            )
        only = config.input[0]
        tensor = raw_tensor(only.name, config.input[0].data_type, only.dims, config.max_batch_size > 0, body)
        return raw_call(model, version, tensor)

    def _reply(self, exchange: Exchange, call: InferCall, outcome: Outcome, final: bool) -> None:
        if not exchange.is_open:
            return
        if not final or outcome is None or exchange.sole is not None:
            if exchange.sole is None:
                exchange.sole = SoleResponse(_NOT_ONE)
            outcome = exchange.sole.take(outcome, final)
        if outcome is None:
            return
        ticket = None if final else exchange.ticket
        try:
            if isinstance(outcome, InferResponse):
                self._respond(exchange, call, outcome)
            else:
                exchange.fail(outcome)
        except ServingError as error:
            exchange.fail(error)
        except Exception as error:  # the model's output is not what it says: this request fails, nothing else
            _log.exception("the response of model '%s' cannot be written", exchange.model)
            exchange.fail(internal(f"the response of model '{exchange.model}' is broken: {type(error).__name__}"))
        if ticket is not None:  # after the answer, which the outcome of cancelling would take the place of
            ticket.cancel()

    def _respond(self, exchange: Exchange, call: InferCall, response: InferResponse) -> None:
        exchange.outcome = response
        document, blobs = encode_response(response, call.binary, call.forms, call.places)
        content_type, extra = JSON_TYPE, b""
        if blobs:
            content_type, extra = BINARY_TYPE, b"Inference-Header-Content-Length: %d\r\n" % len(document)
        accepted = exchange.headers.get(b"accept-encoding")
        coding = choose_coding(accepted) if accepted is not None else ""
        body = [document, *blobs]
        if not coding or sum(map(len, body)) < COMPRESS_FROM_BYTES:
            exchange.respond(200, body, content_type, extra)
        else:
            extra += b"Content-Encoding: %b\r\n" % coding.encode()
            self._work.start(exchange, _respond_compressed(exchange, body, coding, content_type, extra))

    # Health and metadata.

    def _live(self, exchange: Exchange, target: Target) -> None:
        exchange.respond(200 if self._engine.is_live() else 400, [])

    def _ready(self, exchange: Exchange, target: Target) -> None:
        exchange.respond(200 if self._engine.is_ready() else 400, [])

    def _model_ready(self, exchange: Exchange, target: Target) -> None:
        async def answer() -> None:
            if not await self._engine.model_ready(*target):
                raise invalid("Model version not ready")
            exchange.respond(200, [])

        self._work.start(exchange, answer())

    def _server(self, exchange: Exchange, target: Target) -> None:
        _json(exchange, describe.server_metadata(self._engine.server_metadata()))

    def _model(self, exchange: Exchange, target: Target) -> None:
        _json(exchange, describe.model_metadata(self._engine.model_metadata(*target)))

    def _config(self, exchange: Exchange, target: Target) -> None:
        _json(exchange, to_json(self._engine.model_config(*target)))

    def _statistics(self, exchange: Exchange, target: Target) -> None:
        _json(exchange, describe.statistics(self._engine.model_statistics(*target)))

    # The repository. What waits, or has a body that may be compressed, runs as a task.

    def _index(self, exchange: Exchange, target: Target) -> None:
        async def answer() -> None:
            ready_only = decode_index(await self._work.body(exchange))
            _json(exchange, describe.index(self._engine.repository_index(ready_only)))

        self._work.start(exchange, answer())

    def _load(self, exchange: Exchange, target: Target) -> None:
        async def answer() -> None:
            config, files = decode_load(await self._work.body(exchange))
            await self._engine.load_model(target.model, config, files or None)
            exchange.respond(200, [])

        exchange.model = target.model
        self._work.start(exchange, answer())

    def _unload(self, exchange: Exchange, target: Target) -> None:
        async def answer() -> None:
            dependents = decode_unload(await self._work.body(exchange))
            await self._engine.unload_model(target.model, dependents)
            exchange.respond(200, [])

        exchange.model = target.model
        self._work.start(exchange, answer())


async def _respond_compressed(
    exchange: Exchange, body: list[bytes | memoryview], coding: str, content_type: bytes, extra: bytes
) -> None:
    exchange.respond(200, [await asyncio.to_thread(compress, body, coding)], content_type, extra)


def _json_size(text: bytes) -> int:
    text = text.rstrip()  # the parser leaves white space behind a value with it
    if not text.isdigit() or len(text) >= DIGITS_MAX:
        raise invalid(
            f"Inference-Header-Content-Length: expected a number of bytes, got '{text[:DIGITS_MAX].decode('latin-1')}'"
        )
    return int(text)


def _json(exchange: Exchange, document: object) -> None:
    exchange.respond(200, [dump(document)])


def _absent(feature: str) -> Handler:
    def handler(exchange: Exchange, target: Target) -> None:
        raise unsupported(f"{feature} is not available in this version of the server")

    return handler


def _named_repository(exchange: Exchange, target: Target) -> None:
    raise unsupported("'repository_name' specification is not supported", hint="leave it out of the path")
