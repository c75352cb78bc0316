"""The routes that run models: infer, generate and generate_stream.

Each decodes a request, passes it to the engine and encodes the outcome: as one response, or as server-sent events. An
event is `data: <JSON>`, a response or an error, sent when it is ready; the body ends after the last event. The
first event determines the status, which is 200 if there is none in `BEGIN_STREAM_S`; a comment is sent when there is no
event for `stream_keep_alive_s`. An error before the model runs is a plain JSON document, as on other routes.

If a client reads events too slowly, its request is aborted once `stream_unsent_bytes_max` are waiting, since a model
cannot be paused. If a client leaves, its request is cancelled.

With `Prefer: server-timing`, a response has its timing in the header field Server-Timing; a stream, the timing of its
first response.

Source: KServe v2 protocol; Triton's generate extension; WHATWG HTML, "Server-sent events"; W3C Server Timing; RFC 7240.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from charonia.config.model import ModelConfig
from charonia.core.errors import Code, ServingError, internal, invalid, unavailable, unsupported
from charonia.core.request import InferRequest
from charonia.core.response import InferResponse, Outcome
from charonia.server.facade import Engine, Services, SingleResponse, first_error
from charonia.server.http.browsers import refuse_foreign
from charonia.server.http.exchange import CONTENT_ENCODING, JSON_TYPE, Exchange, Submitter, Tasks, retry_after
from charonia.server.http.limits import DIGITS_MAX, JSON_SIZE, HttpLimits
from charonia.server.http.results import Results
from charonia.server.http.routes import Handler, Route, RouteTarget
from charonia.wire.compression import COMPRESS_FROM_BYTES, choose_coding, compress
from charonia.wire.example_request import body_hint
from charonia.wire.form_bodies import form_document, query_document
from charonia.wire.http_status import status_of
from charonia.wire.json_text import encode_error
from charonia.wire.v2_generate import GenerateCall, StreamedText, decode_generate, encode_generated, raw_answer
from charonia.wire.v2_request import HttpInferCall, InferDecoder, raw_call, raw_tensor
from charonia.wire.v2_response import encode_response

_log = logging.getLogger(__name__)

BINARY_TYPE: Final = b"application/octet-stream"
EVENT_STREAM: Final = b"text/event-stream"
_EVENT_TYPE: Final = EVENT_STREAM + b"; charset=utf-8"
SERVER_TIMING: Final = b"server-timing"
"""The preference of a client that requests the timing of its request."""

FOREIGN_TYPES: Final = ("multipart/", "application/x-www-form-urlencoded", "image/", "audio/", "video/", "text/html")
"""Beginnings of content types that are never a request."""

_START_BYTES: Final = 64
"""Bytes of a body in which a JSON document begins."""

_NOT_ONE: Final = unsupported(
    "HTTP end point doesn't support models with decoupled transaction policy that send no response, or several",
    hint="ask for its responses as events, with the header field 'Accept: text/event-stream', or over gRPC",
)
_NOT_ONE_GENERATED: Final = unsupported(
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number "
    "of responses"
)

Encode = Callable[[InferResponse], bytes]
"""Returns the JSON text of a response, or raises a ServingError."""

End = Callable[[], ServingError | None]
"""Returns an error if a stream ended incomplete, None otherwise."""


def _nothing_missing() -> None:
    return None


class InferenceHandlers:
    """The inference routes of models."""

    def __init__(self, engine: Engine, limits: HttpLimits, services: Services, tasks: Tasks, results: Results) -> None:
        self._results = results
        self._engine = engine
        self._limits = limits
        self._submit = Submitter(engine, services).submit
        self._services = services
        self._decoder = InferDecoder(limits.body_bytes_max, services.regions)
        self._tasks = tasks

    def routes(self) -> list[Route]:
        model = "/v2/models/{model}"
        return [
            route
            for base in (model, model + "/versions/{version}")
            for route in (
                Route(base + "/infer", {b"POST": self._infer}),
                Route(base + "/generate", {b"POST": self._generate}),
                Route(base + "/generate_stream", {b"POST": self._generate_stream}),
            )
        ]

    # Requests.

    def _infer(self, exchange: Exchange, target: RouteTarget, body: bytes | memoryview | None = None) -> None:
        """Run a model; `body` is the decompressed body, None where it was not compressed."""
        headers = exchange.request.headers
        if body is None:
            exchange.model, exchange.version = target
            if CONTENT_ENCODING in headers:
                self._tasks.start(exchange, self._infer_compressed(exchange, target))
                return
            body = exchange.request.body
        json_size = headers.get(JSON_SIZE)
        try:
            if json_size is None:
                call = self._decoder.decode(target.model, target.version, body)
            else:
                size = json_size_of(json_size)
                call = (
                    self._decoder.decode(target.model, target.version, body, size) if size else self._raw(target, body)
                )
        except ServingError as error:
            raise self._unreadable(exchange, target, body, error) from error
        accepted = headers.get(b"accept")
        if accepted is not None and EVENT_STREAM in accepted:
            self._infer_stream(exchange, call)
        else:
            submit = self._submit
            if b"prefer" in headers:
                self._results.run(exchange, lambda own: submit(own, call.request, partial(self._reply, own, call)))
            else:
                submit(exchange, call.request, partial(self._reply, exchange, call))

    def _unreadable(
        self, exchange: Exchange, target: RouteTarget, body: bytes | memoryview, error: ServingError
    ) -> ServingError:
        """Return the error of a body that cannot be read, with one that can be as its hint."""
        first = first_error(self._engine, self._services, *target, error)
        if first is not error or error.hint or error.code is not Code.INVALID_ARG:
            return first
        kind = exchange.request.headers.get(b"content-type", b"").partition(b";")[0].strip().decode("latin-1")
        message = error.message
        # curl and others label every body as a form.
        if kind.startswith(FOREIGN_TYPES) and not bytes(body[:_START_BYTES]).lstrip().startswith((b"{", b"[")):
            message = f"expected the inputs as JSON, got a body of type '{kind}'"
        hint = ""
        with suppress(ServingError):  # the model may be one that is loaded by its first request
            hint = body_hint(self._engine.model_config(*target))
        return ServingError(error.code, message, hint=hint)

    async def _infer_compressed(self, exchange: Exchange, target: RouteTarget) -> None:
        try:
            body = await self._tasks.body(exchange.request)
        except ServingError as error:
            raise first_error(self._engine, self._services, *target, error) from error
        if exchange.is_open:
            self._infer(exchange, target, body)

    def _infer_stream(self, exchange: Exchange, call: HttpInferCall) -> None:
        if call.binary or any(call.forms.values()):
            raise invalid("an event stream carries outputs as JSON only", hint="do not ask for binary outputs")

        def encode(response: InferResponse) -> bytes:
            return encode_response(response, False, {}, call.places)[0]

        self._stream(exchange, call.request, encode)

    def _raw(self, target: RouteTarget, body: bytes | memoryview) -> HttpInferCall:
        model, version = target
        config = self._engine.model_config(model, version)
        if len(config.input) != 1 or config.input[0].data_type is None:
            raise invalid(
                f"Raw request must only have 1 input (found 1) to be deduced but got {len(config.input)} inputs in "
                f"'{model}' model configuration",
                hint="send the inputs as JSON, or in binary form after a JSON header",
            )
        only = config.input[0]
        tensor = raw_tensor(only.name, config.input[0].data_type, only.dims, config.max_batch_size > 0, body)
        return raw_call(model, version, tensor)

    def _generate(self, exchange: Exchange, target: RouteTarget) -> None:
        self._answer(exchange, self._generate_call(exchange, target))

    def _answer(self, exchange: Exchange, call: GenerateCall) -> None:
        def submit(own: Exchange) -> None:
            self._submit(own, call.request, partial(self._reply, own, call), call.config)

        self._results.run(exchange, submit)

    def at_path(self, path: str) -> dict[bytes, Handler]:
        """Return the handlers of the models that have a path of their own, by HTTP method."""
        return {method: partial(self._own, name) for method, name in self._engine.models_at(path).items()}

    def _own(self, model: str, exchange: Exchange, target: RouteTarget) -> None:
        if refuse_foreign(exchange):  # also a GET: it runs a model
            return
        call = self._generate_call(exchange, RouteTarget(model))._replace(is_bare=True)
        if call.config.is_decoupled:
            self._send_events(exchange, call)
        else:
            self._answer(exchange, call)

    def _generate_stream(self, exchange: Exchange, target: RouteTarget) -> None:
        self._send_events(exchange, self._generate_call(exchange, target))

    def _send_events(self, exchange: Exchange, call: GenerateCall) -> None:
        text = StreamedText(call)
        self._stream(exchange, call.request, text.encode, text.end, call.config)

    def _generate_call(self, exchange: Exchange, target: RouteTarget) -> GenerateCall:
        exchange.model, exchange.version = target
        coding = exchange.request.headers.get(CONTENT_ENCODING)
        if coding is not None and coding.lower() != b"identity":
            raise unsupported("a request to generate cannot be compressed", hint="leave out Content-Encoding")
        config = self._engine.model_config(target.model, target.version)
        request = exchange.request
        kind = request.headers.get(b"content-type", b"")
        is_get = request.method == b"GET"
        form = query_document(config, request.url) if is_get else form_document(config, kind, request.url, request.body)
        return decode_generate(config, target.version, request.body, self._limits.body_bytes_max, form)

    def _stream(
        self,
        exchange: Exchange,
        request: InferRequest,
        encode: Encode,
        end: End = _nothing_missing,
        config: ModelConfig | None = None,
    ) -> None:
        stream = exchange.stream = _EventStream(exchange, encode, end, self._limits.stream_unsent_bytes_max)
        self._submit(exchange, request, stream.reply, config)
        stream.is_asked = True
        exchange.keep_streaming(partial(exchange.begin, 200, _EVENT_TYPE), self._limits.stream_keep_alive_s)

    # Responses.

    def _reply(self, exchange: Exchange, call: HttpInferCall | GenerateCall, outcome: Outcome, final: bool) -> None:
        """Answer with the only response; `call` has the form of its outputs."""
        exchange.is_over = final
        if not exchange.is_open:
            return
        if not final or outcome is None or exchange.single is not None:
            if exchange.single is None:
                exchange.single = SingleResponse(_NOT_ONE_GENERATED if isinstance(call, GenerateCall) else _NOT_ONE)
            outcome = exchange.single.take(outcome, final)
        if outcome is None:
            return
        ticket = None if final else exchange.ticket
        try:
            if isinstance(outcome, ServingError):
                exchange.fail(outcome)
            elif isinstance(call, GenerateCall):
                exchange.outcome = outcome
                timing = _server_timing(exchange, outcome)
                raw = raw_answer(outcome, call, exchange.request.headers.get(b"accept", b""))
                if raw is None:
                    exchange.respond(200, [encode_generated(outcome, call)], extra=timing)
                else:
                    exchange.respond(raw.status, [raw.body], raw.content_type, timing + raw.headers)
            else:
                self._respond(exchange, call, outcome)
        except ServingError as error:
            exchange.fail(error)
        except Exception as fault:  # the model's output is malformed: only this request fails
            exchange.fail(_broken(exchange, fault))
        if ticket is not None:  # after the response, which the outcome of cancellation would replace
            ticket.cancel()

    def _respond(self, exchange: Exchange, call: HttpInferCall, response: InferResponse) -> None:
        exchange.outcome = response
        document, blobs = encode_response(response, call.binary, call.forms, call.places)
        content_type, extra = JSON_TYPE, _server_timing(exchange, response)
        if any(len(blob) for blob in blobs):  # compiled as a loop
            content_type = BINARY_TYPE
            extra += b"Inference-Header-Content-Length: %d\r\n" % len(document)
        accepted = exchange.request.headers.get(b"accept-encoding")
        coding = choose_coding(accepted) if accepted is not None else ""
        body = [document, *blobs]
        if not coding or sum(map(len, body)) < COMPRESS_FROM_BYTES:
            exchange.respond(200, body, content_type, extra)
        else:
            extra += b"Content-Encoding: %b\r\n" % coding.encode()
            self._tasks.start(exchange, _respond_compressed(exchange, body, coding, content_type, extra))


class _EventStream:
    """Sends the outcomes of one request as events."""

    __slots__ = ("_encode", "_end", "_exchange", "_unsent_bytes_max", "is_asked")

    def __init__(self, exchange: Exchange, encode: Encode, end: End, unsent_bytes_max: int) -> None:
        self._exchange = exchange
        self._encode = encode
        self._end = end
        self._unsent_bytes_max = unsent_bytes_max
        self.is_asked = False  # whether the engine has accepted the request

    def reply(self, outcome: Outcome, final: bool) -> None:
        exchange = self._exchange
        exchange.is_over = final
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
            missing = self._end() if not isinstance(outcome, ServingError) else None
            if missing is not None:
                self._send(missing)
            exchange.end()
        elif exchange.unsent_bytes > self._unsent_bytes_max:
            self.stop(
                unavailable(
                    f"the request is aborted: more than {self._unsent_bytes_max} bytes of responses wait for the "
                    "client",
                    hint="read the events as they arrive",
                )
            )

    def stop(self, error: ServingError, status: int = 0) -> None:
        """End the response with an error, and cancel its inference; `status` counts if the response has not begun."""
        ticket = self._exchange.ticket
        if self._exchange.has_begun:
            self._send(error)
            self._exchange.end()
        else:
            self._exchange.fail(error, status)
        if ticket is not None:
            ticket.cancel()

    def _send(self, outcome: InferResponse | ServingError) -> None:
        exchange = self._exchange
        try:
            data = encode_error(outcome) if isinstance(outcome, ServingError) else self._encode(outcome)
        except ServingError as error:
            outcome, data = error, encode_error(error)
        except Exception as fault:  # the model's output is malformed: only this response is an error
            outcome = _broken(exchange, fault)
            data = encode_error(outcome)
        exchange.outcome = outcome
        if not exchange.has_begun:
            if isinstance(outcome, ServingError):
                exchange.begin(status_of(outcome), _EVENT_TYPE, retry_after(outcome))
            else:
                exchange.begin(200, _EVENT_TYPE, _server_timing(exchange, outcome))
        exchange.send(b"data: %b\n\n" % data)


async def _respond_compressed(
    exchange: Exchange, body: list[bytes | memoryview], coding: str, content_type: bytes, extra: bytes
) -> None:
    exchange.respond(200, [await asyncio.to_thread(compress, body, coding)], content_type, extra)


def _server_timing(exchange: Exchange, response: InferResponse) -> bytes:
    """Return the header line with the timing of a response, b"" unless the client requests it."""
    prefer, run = exchange.request.headers.get(b"prefer"), response.execution
    if prefer is None or run is None or SERVER_TIMING not in prefer.lower():
        return b""
    line = b"Server-Timing: queue;dur=%.3f, compute;dur=%.3f, batch;desc=%d\r\n"
    return line % (run.queue_ns / 1e6, run.compute_ns / 1e6, run.batch_size)


def _broken(exchange: Exchange, fault: Exception) -> ServingError:
    """Log the current exception and return the error for a response that cannot be encoded."""
    _log.exception("the response of model '%s' cannot be encoded", exchange.model)
    return internal(f"the response of model '{exchange.model}' is broken: {type(fault).__name__}")


def json_size_of(text: bytes) -> int:
    """Return the length of the JSON part of a body, from the header's value.

    Raises:
        ServingError: INVALID_ARG when it is not a number.
    """
    if not text.isdigit() or len(text) >= DIGITS_MAX:
        raise invalid(
            f"Inference-Header-Content-Length: expected a number of bytes, got '{text[:DIGITS_MAX].decode('latin-1')}'"
        )
    return int(text)
