"""The page at `/`, and the OpenAPI document that it reads.

The page itself is the same on every server. Without a valid key, where keys are in use, it comes with status 401, and
prompts for it; the routes of its content require it.
"""

import asyncio
import re
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from charonia.config.model import ModelConfig
from charonia.config.parameters import MOUNTED_APP
from charonia.core.errors import ServingError, not_found
from charonia.server.access.rules import Operation, Scope, operation_of_route
from charonia.server.facade import Engine, Services
from charonia.server.http.exchange import Exchange, Tasks
from charonia.server.http.inference import json_size_of
from charonia.server.http.limits import JSON_SIZE, HttpLimits
from charonia.server.http.routes import Handler, Route, RouteTarget
from charonia.server.page.openapi import ServedModel, openapi_document, samples
from charonia.wire.example_request import ExampleRequest
from charonia.wire.http_status import REFUSED
from charonia.wire.json_text import dump, parse_object, string_at
from charonia.wire.v2_request import InferDecoder

HTML_TYPE = b"text/html; charset=utf-8"
CSS_TYPE = b"text/css; charset=utf-8"
SCRIPT_TYPE = b"text/javascript; charset=utf-8"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content security policy: the page's own files only, without scripts and styles in markup."""

_HEADERS = (
    b"Content-Security-Policy: %b\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
    b"Cross-Origin-Opener-Policy: same-origin\r\nCache-Control: no-cache\r\n"
) % POLICY.encode()

_SCRIPTS = (
    "elements.js", "tensors.js", "server.js", "inputs.js", "answer.js", "trial.js",
    "markdown.js", "chat.js", "live.js", "page.js",
)  # fmt: skip
"""The parts of the page's script, in this order."""

_ALIVE = b'{"status":"alive"}'
"""What clients of KServe's v1 protocol expect at the path of the page."""

_HOST = re.compile(rb"[A-Za-z0-9.\-_\[\]:]{1,255}")


def _read(handler: Handler) -> dict[bytes, Handler]:
    """Return the handlers of a document, for GET and HEAD."""
    return {b"GET": handler, b"HEAD": handler}


class PageHandlers:
    """The page and its data."""

    def __init__(self, engine: Engine, limits: HttpLimits, services: Services, tasks: Tasks) -> None:
        self._engine = engine
        self._bytes_max = limits.body_bytes_max
        self._gate = services.http_gate
        self._has_keys = services.http_gate is not None and services.http_gate.has_keys
        self._has_openai = services.has_openai
        self._has_kserve_v1 = services.has_kserve_v1
        self._scheme = services.page_scheme
        self._metrics_port = services.metrics_port
        self._controls_models = services.controls_models
        self._tasks = tasks

    def routes(self) -> list[Route]:
        return [
            Route("/", _read(self._page)),
            Route("/page.css", _read(self._file(CSS_TYPE, "look.css", "page.css"))),
            Route("/page.js", _read(self._file(SCRIPT_TYPE, *_SCRIPTS))),
            Route("/openapi.json", _read(self._tasks.document(self._openapi))),
            Route("/samples/{model}", {b"POST": self._tasks.document(self._samples)}),
            Route("/samples/{model}/versions/{version}", {b"POST": self._tasks.document(self._samples)}),
        ]

    def _page(self, exchange: Exchange, target: RouteTarget) -> None:
        if self._has_kserve_v1 and b"text/html" not in exchange.request.headers.get(b"accept", b""):
            exchange.respond(200, [_ALIVE])
            return
        self._offered(exchange)
        refusal = None
        if self._gate is not None:
            reads = Operation(operation_of_route("/").api, Scope.READ)
            refusal = self._gate.check(reads, exchange.request.headers.get)
        status = 200 if refusal is None else REFUSED[refusal.kind]
        exchange.respond(status, [_content("page.html")], HTML_TYPE, _HEADERS)

    def _file(self, content_type: bytes, *names: str) -> Callable[[Exchange, RouteTarget], None]:
        def answer(exchange: Exchange, target: RouteTarget) -> None:
            self._offered(exchange)
            exchange.respond(200, [_content(*names)], content_type, _HEADERS)

        return answer

    async def _openapi(self, exchange: Exchange, target: RouteTarget) -> object:
        self._offered(exchange)
        return await asyncio.to_thread(
            openapi_document,
            self._engine.server_metadata(),
            await self._models(),
            url=self._url(exchange),
            has_keys=self._has_keys,
            may_control=self._may_control(exchange),
            has_openai=self._has_openai,
            metrics_port=self._metrics_port,
        )

    async def _samples(self, exchange: Exchange, target: RouteTarget) -> object:
        self._offered(exchange)
        config = self._engine.model_config(*target)
        body = bytes(await self._tasks.body(exchange.request))
        size = exchange.request.headers.get(JSON_SIZE)
        json_size = len(body) if size is None else json_size_of(size)
        request = edited_request(
            config, body, json_size,
            version=target.version,
            url=self._url(exchange),
            has_key=self._has_keys,
            tensor_bytes_max=self._bytes_max,
        )  # fmt: skip
        return samples(request)

    def _may_control(self, exchange: Exchange) -> bool:
        """Return whether the client may load and unload models."""
        loads = operation_of_route("/v2/repository/models/{model}/load")
        return self._controls_models and (
            self._gate is None or self._gate.check(loads, exchange.request.headers.get) is None
        )

    async def _models(self) -> list[ServedModel]:
        found = []
        for name in dict.fromkeys(entry.name for entry in await self._engine.repository_index(ready_only=True)):
            try:
                metadata, config = self._engine.model_metadata(name), self._engine.model_config(name)
                if MOUNTED_APP not in config.parameters:
                    found.append(ServedModel(config, metadata.versions, metadata.platform))
            except ServingError:
                continue  # requests could not reach it either, for example under a name that two models have
        return found

    def _url(self, exchange: Exchange) -> str:
        """Return the URL by which the client reached the server."""
        headers = exchange.request.headers
        host = headers.get(b"host", b"")
        scheme = "https" if headers.get(b"x-forwarded-proto") == b"https" else self._scheme
        return f"{scheme}://{host.decode()}" if _HOST.fullmatch(host) else f"{scheme}://localhost:8000"

    def _offered(self, exchange: Exchange) -> None:
        if not self._scheme:
            path = exchange.request.url.decode("latin-1")
            raise not_found(f"there is nothing at {path:.200}", hint="--allow-page=true turns the page on")


@cache
def _content(*names: str) -> bytes:
    """Return files of the page, one after the other."""
    folder = files("charonia.server.page") / "assets"
    return b"".join((folder / name).read_bytes() for name in names)


FILE = "file"
"""Parameter of an input whose value is a file of the user: the file's name."""


def edited_request(
    config: ModelConfig, body: bytes, json_size: int, *, version: str, url: str, has_key: bool, tensor_bytes_max: int
) -> ExampleRequest:
    """Return the request of a body of `infer`, whose inputs may be names of files."""
    document = parse_object(body[:json_size])
    entries, files = document.get("inputs"), dict[str, str]()
    if isinstance(entries, list):
        named = [entry for entry in entries if _file_of(entry) is not None]
        files = {string_at(entry, "name", required=True): str(_file_of(entry)) for entry in named}
        entries = [entry for entry in entries if entry not in named]
    parameters = document.get("parameters", {})
    head = dump({"inputs": entries, "parameters": parameters}, literals=True)
    call = InferDecoder(tensor_bytes_max).decode(config.name, "", head + body[json_size:], len(head))
    return ExampleRequest(
        config, call.request.inputs, version,
        url=url,
        files=files,
        parameters=parameters if isinstance(parameters, dict) else {},
        has_key=has_key,
    )  # fmt: skip


def _file_of(entry: object) -> object:
    """Return the name of an input's file, None for other inputs."""
    parameters = entry.get("parameters") if isinstance(entry, dict) else None
    return parameters.get(FILE) if isinstance(parameters, dict) else None
