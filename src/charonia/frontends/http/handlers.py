"""What each route does: decode, call the engine, encode."""

import asyncio
import base64
import binascii
import logging
from collections.abc import Awaitable, Callable

import orjson

from charonia.config.json_form import to_json
from charonia.core.errors import ServingError, internal, invalid, unsupported
from charonia.core.response import InferResponse
from charonia.engine.api import Engine, Outcome
from charonia.frontends.http.exchange import JSON_TYPE, Exchange
from charonia.frontends.http.limits import HttpLimits
from charonia.frontends.http.routes import Handler, Route, Target
from charonia.protocol import describe
from charonia.protocol.compression import choose_coding, compress, decompress
from charonia.protocol.v2_json import (
    InferCall,
    decode_request,
    encode_response,
    parse_object,
    raw_request,
    raw_tensor,
)

_log = logging.getLogger(__name__)

BINARY_TYPE = b"application/octet-stream"

_LENGTH_HEADER = b"inference-header-content-length"


class Handlers:
    """The routes of the KServe v2 protocol and its extensions."""

    def __init__(self, engine: Engine, limits: HttpLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()

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
        ]
        for base in (model, version):
            table += [
                Route(base, {b"GET": self._model}),
                Route(base + "/ready", {b"GET": self._model_ready}),
                Route(base + "/config", {b"GET": self._config}),
                Route(base + "/stats", {b"GET": self._statistics}),
                Route(base + "/infer", {b"POST": self._infer}),
                Route(base + "/generate", {b"POST": _absent("the generate extension")}),
                Route(base + "/generate_stream", {b"POST": _absent("the generate extension")}),
            ]
        for path in ("/v2/trace/setting", model + "/trace/setting"):
            table.append(Route(path, dict.fromkeys((b"GET", b"POST"), _absent("tracing"))))
        table.append(Route("/v2/logging", dict.fromkeys((b"GET", b"POST"), _absent("changing log settings"))))
        for kind in ("system", "cuda"):
            base = f"/v2/{kind}sharedmemory"
            table += [
                Route(base + "/status", {b"GET": _no_regions}),
                Route(base + "/region/{model}/status", {b"GET": _absent("client shared memory")}),
                Route(base + "/region/{model}/register", {b"POST": _absent("client shared memory")}),
                Route(base + "/region/{model}/unregister", {b"POST": _absent("client shared memory")}),
                Route(base + "/unregister", {b"POST": _absent("client shared memory")}),
            ]
        return table

    # Inference.

    def _infer(self, exchange: Exchange, target: Target) -> None:
        exchange.model, exchange.version = target
        call = self._decode(exchange, target)

        def reply(outcome: Outcome, final: bool) -> None:
            if exchange.response is not None:
                return
            exchange.outcome = outcome
            if isinstance(outcome, InferResponse) and final:
                try:
                    self._respond(exchange, outcome, call)
                except ServingError as error:
                    exchange.fail(error)
            elif isinstance(outcome, ServingError):
                exchange.fail(outcome)
            else:
                exchange.fail(internal(f"model '{target.model}' did not answer exactly once"))

        exchange.ticket = self._engine.infer(call.request, reply)

    def _decode(self, exchange: Exchange, target: Target) -> InferCall:
        headers = exchange.headers
        body = self._plain_body(exchange)
        length_text = headers.get(_LENGTH_HEADER)
        length: int | None = None
        if length_text is not None:
            if not length_text.isdigit() or len(length_text) > 18:
                raise invalid(
                    "Inference-Header-Content-Length: expected a number of bytes, "
                    f"got {length_text.decode('latin-1')!r}"
                )
            length = int(length_text)
            if length == 0:
                return self._raw(target, body)
        return decode_request(target.model, target.version, body, length, self._limits.body_bytes_max)

    def _raw(self, target: Target, body: bytes | memoryview) -> InferCall:
        model, version = target
        inputs = self._engine.model_config(model, version).input
        if len(inputs) != 1 or inputs[0].data_type is None:
            raise invalid(
                f"raw binary request: model '{model}' has {len(inputs)} inputs, and such a request can carry just one"
            )
        batches = self._engine.model_config(model, version).max_batch_size > 0
        tensor = raw_tensor(model, inputs[0].name, inputs[0].data_type, inputs[0].dims, batches, body)
        return raw_request(model, version, tensor)

    def _respond(self, exchange: Exchange, response: InferResponse, call: InferCall) -> None:
        document, blobs = encode_response(response, call)
        body = [document, *blobs]
        extra = b"Inference-Header-Content-Length: %d\r\n" % len(document) if blobs else b""
        accept = exchange.headers.get(b"accept-encoding")
        if accept is not None:
            coding = choose_coding(accept.decode("latin-1"))
            if coding:
                body = [compress(body, coding)]
                extra += b"Content-Encoding: %b\r\n" % coding.encode()
        exchange.respond(200, body, BINARY_TYPE if blobs else JSON_TYPE, extra)

    def _plain_body(self, exchange: Exchange) -> bytes | memoryview:
        coding = exchange.headers.get(b"content-encoding")
        if coding is None:
            return exchange.body
        return decompress(exchange.body, coding.decode("latin-1"), self._limits.body_bytes_max)

    # Health and metadata.

    def _live(self, exchange: Exchange, target: Target) -> None:
        exchange.respond(200 if self._engine.is_live() else 400, [])

    def _ready(self, exchange: Exchange, target: Target) -> None:
        # 400 is the protocol's answer of a server that is not ready yet, 503 that of one that is on its way out.
        status = 200 if self._engine.is_ready() else 503 if self._engine.is_exiting() else 400
        exchange.respond(status, [])

    def _model_ready(self, exchange: Exchange, target: Target) -> None:
        if self._engine.model_ready(*target):
            exchange.respond(200, [])
        else:
            raise invalid("Model version not ready")

    def _server(self, exchange: Exchange, target: Target) -> None:
        _json(exchange, describe.server_metadata(self._engine.server_metadata()))

    def _model(self, exchange: Exchange, target: Target) -> None:
        _json(exchange, describe.model_metadata(self._engine.model_metadata(*target)))

    def _config(self, exchange: Exchange, target: Target) -> None:
        _json(exchange, to_json(self._engine.model_config(*target)))

    def _statistics(self, exchange: Exchange, target: Target) -> None:
        _json(exchange, describe.statistics(self._engine.model_statistics(*target)))

    # The repository.

    def _index(self, exchange: Exchange, target: Target) -> None:
        ready = parse_object(self._plain_body(exchange)).get("ready", False)
        if not isinstance(ready, bool):
            raise invalid(f"Invalid value for 'ready': expected a boolean, got {ready!r}")
        _json(exchange, describe.index(self._engine.repository_index(ready)))

    def _load(self, exchange: Exchange, target: Target) -> None:
        config: str | None = None
        files: dict[str, bytes] = {}
        for key, value in _parameters(self._plain_body(exchange)).items():
            if not isinstance(value, str):
                raise invalid(f"load parameter '{key}': expected a string")
            if key == "config":
                config = value
            elif key.startswith("file:"):
                try:
                    files[key.removeprefix("file:")] = base64.b64decode(value, validate=True)
                except binascii.Error as error:
                    raise invalid(f"load parameter '{key}': the value is not base64: {error}") from error
            else:
                raise invalid(f"unrecognized load parameter '{key}'.", hint="known are 'config' and 'file:<path>'")
        self._later(exchange, lambda: self._engine.load_model(target.model, config, files or None))

    def _unload(self, exchange: Exchange, target: Target) -> None:
        dependents = _parameters(self._plain_body(exchange)).get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise invalid(f"unload parameter 'unload_dependents': expected a boolean, got {dependents!r}")
        self._later(exchange, lambda: self._engine.unload_model(target.model, dependents))

    def _later(self, exchange: Exchange, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await work()
            except ServingError as error:
                exchange.fail(error)
            except Exception as error:
                _log.exception("%s failed", exchange.url.decode("latin-1"))
                exchange.fail(internal(f"the request failed: {type(error).__name__}: {error}"))
            else:
                exchange.respond(200, [])

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _parameters(body: bytes | memoryview) -> dict[str, object]:
    parameters = parse_object(body).get("parameters", {})
    if not isinstance(parameters, dict):
        raise invalid("'parameters' must be an object")
    return parameters


def _json(exchange: Exchange, document: object) -> None:
    exchange.respond(200, [orjson.dumps(document)])


def _absent(feature: str) -> Handler:
    def handler(exchange: Exchange, target: Target) -> None:
        raise unsupported(f"{feature} is not available in this version of the server")

    return handler


def _no_regions(exchange: Exchange, target: Target) -> None:
    _json(exchange, [])
