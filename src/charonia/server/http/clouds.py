"""The routes of Amazon SageMaker and Google Vertex AI, each on a separate port.

A request is rewritten into one of the KServe v2 protocol, which the front end's router answers, with the same checks of
keys and restrictions; the response is rewritten into the form of the cloud. The content
type announces binary tensors, in requests in place of Inference-Header-Content-Length.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import quote_from_bytes

from charonia.config.backends import ENSEMBLE
from charonia.config.json_form import to_json
from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError, invalid, not_found
from charonia.server.access.rules import Refusal
from charonia.server.http.exchange import JSON_TYPE, Exchange, Reshaped
from charonia.server.http.limits import JSON_SIZE
from charonia.server.http.parser import Request
from charonia.wire.http_status import REFUSED
from charonia.wire.json_text import dump, parse_object

ARCHIVES = "/opt/ml/models"
"""Folder into which SageMaker extracts the archives of a multi-model endpoint."""

REDIRECT_HEADER = b"x-vertex-ai-triton-redirect"

INFERENCE_TYPES = ("infer", "generate", "generate_stream")

_BINARY = b"application/vnd.%b-triton.binary+json;json-header-size="
_JSON_SIZE_LINE = re.compile(rb"Inference-Header-Content-Length: (\d+)\r\n")
_MODELS = re.compile(rb"/models(?:/([^/]+))?(/invoke)?/?")
_ARCHIVE = re.compile(r"[0-9A-Za-z_][0-9A-Za-z._-]*/model(?:/[0-9A-Za-z_][0-9A-Za-z._-]*)?", re.ASCII)
_INT_MAX = 2**31
_GET_REDIRECTS = re.compile(
    rb"v2(?:/health/(?:live|ready)|/models/stats|/models/[^/]+(?:/versions/\d+)?(?:/(?:ready|config|stats))?"
    rb"|/(?:system|cuda)sharedmemory(?:/region/[^/]+)?/status)?"
)
_POST_REDIRECTS = re.compile(rb"v2/(?:models/[^/]+(?:/versions/\d+)?/infer|repository/index)")
_NO_MEMORY = (b"out of memory", b"out_of_memory", b"outofmemory", b"memoryerror", b"no space left on device")

Handle = Callable[[Exchange], None]


class SageMaker:
    """`/ping`, `/invocations`, and the models of a multi-model endpoint.

    Args:
        handle: Answers requests of the KServe v2 protocol.
        admit: Returns whether a request may be handled if a page of a browser has sent it; if not, answers it.
        refusal: Returns why a caller may not send a request of the KServe v2 protocol, None if it may.
        environment: SAGEMAKER_TRITON_DEFAULT_MODEL_NAME, _INFERENCE_TYPE and _PING_MODE.
        repository: Folder of the server's model repository, in which models of an endpoint appear; "" for none.

    Raises:
        ServingError: INVALID_ARG for an unknown type of inference.
    """

    def __init__(
        self,
        handle: Handle,
        admit: Callable[[Exchange], bool],
        refusal: Callable[[Request], Refusal | None],
        environment: Mapping[str, str],
        repository: str,
    ) -> None:
        self._handle, self._admit, self._refusal = handle, admit, refusal
        self._model = environment.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "")
        self._kind = environment.get("SAGEMAKER_TRITON_INFERENCE_TYPE", INFERENCE_TYPES[0])
        if self._kind not in INFERENCE_TYPES:
            raise invalid(f"SAGEMAKER_TRITON_INFERENCE_TYPE: expected {', '.join(INFERENCE_TYPES)}, got '{self._kind}'")
        mode = environment.get("SAGEMAKER_TRITON_PING_MODE", "ready")
        self._ping = b"/v2/health/live" if mode == "live" else b"/v2/health/ready"
        self._repository = Path(repository)
        self._can_load = bool(repository)
        self._models: dict[str, str] = {}  # URL by name

    def handle(self, exchange: Exchange) -> None:
        guarded(exchange, self._admit, self._route)

    def _route(self, exchange: Exchange) -> None:
        method, path = exchange.request.method, exchange.request.url.partition(b"?")[0]
        found = _MODELS.fullmatch(path)
        if path == b"/ping":
            self._pass(exchange, self._ping, b"GET")
        elif path == b"/invocations":
            if not self._model:
                raise invalid(
                    "no model for /invocations: expected the environment variable SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
                )
            self._infer(exchange, self._model, self._kind)
        elif found is None:
            exchange.respond(400, [])
        elif (refusal := self._refusal(replace(exchange.request, url=_needed(method, bool(found[2]))))) is not None:
            exchange.fail(
                invalid(refusal.message), REFUSED[refusal.kind]
            )  # before a caller learns of models or folders
        elif not found[1]:
            self._list(exchange) if method == b"GET" else self._load(exchange)
        else:
            name = found[1].decode("latin-1")
            if name not in self._models:
                raise not_found(f"model_name: '{name:.200}' is not loaded", hint="POST /models loads a model")
            if found[2]:
                self._infer(exchange, name, INFERENCE_TYPES[0])
            elif method == b"GET":
                shown = dump(_shown(name, self._models[name]))
                self._pass(exchange, b"/v2/repository/index", b"POST", b"", lambda _: [shown])
            else:
                self._unload(exchange, name)

    def _infer(self, exchange: Exchange, model: str, kind: str) -> None:
        url = b"/v2/models/%b/%b" % (quote_from_bytes(model.encode(), safe="").encode(), kind.encode())
        infer(exchange, url, b"sagemaker", as_sagemaker)
        self._handle(exchange)

    def _list(self, exchange: Exchange) -> None:
        shown = dump({"models": [_shown(name, url) for name, url in self._models.items()]})
        self._pass(exchange, b"/v2/repository/index", b"POST", b"", lambda _: [shown])

    def _load(self, exchange: Exchange) -> None:
        if exchange.request.method != b"POST":
            exchange.respond(400, [])
            return
        asked = parse_object(exchange.request.body)
        name, url = asked.get("model_name"), asked.get("url")
        if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
            raise invalid(f"model_name: expected the name of a model, got {name!r}")
        folder = archive_of(url)
        if name in self._models:
            exchange.fail(invalid(f"model_name: '{name}' is already loaded"), 409)
            return
        if not self._can_load:
            raise invalid(
                "models cannot be added to the repository of this server: it is an object store",
                hint="start the server with --model-repository of an empty folder",
            )
        links, config = links_of(folder, name)
        taken = [each for each in links if (self._repository / each).exists()]
        if taken:
            exchange.fail(invalid(f"the repository already has a model '{taken[0]}'"), 409)
            return
        for each, target in links.items():
            (self._repository / each).symlink_to(target, target_is_directory=True)

        def loaded(status: int) -> None:
            if status == 200:
                self._models[name] = str(url)
            else:
                self._discard(links)

        body = dump({"parameters": {"config": config} if config else {}})
        self._pass(exchange, _control(name, b"load"), b"POST", body, loaded)

    def _unload(self, exchange: Exchange, name: str) -> None:
        if exchange.request.method != b"DELETE":
            exchange.respond(400, [])
            return

        def unloaded(status: int) -> None:
            if status == 200:
                self._discard(links_of(archive_of(self._models.pop(name)), name)[0])

        body = dump({"parameters": {"unload_dependents": True}})
        self._pass(exchange, _control(name, b"unload"), b"POST", body, unloaded)

    def _discard(self, links: Mapping[str, Path]) -> None:
        for each in links:
            (self._repository / each).unlink(missing_ok=True)

    def _pass(
        self,
        exchange: Exchange,
        url: bytes,
        method: bytes,
        body: bytes | None = None,
        done: Callable[[int], list[bytes | memoryview] | None] = lambda _: None,
    ) -> None:
        """Answer with the router's response to another request; `done` receives its status and can return a body."""

        def reshape(response: Reshaped) -> Reshaped:
            shown = done(response.status)
            return as_sagemaker(response if shown is None or response.status != 200 else response._replace(body=shown))

        request = exchange.request
        headers = request.headers if body is None else {k: v for k, v in request.headers.items() if k != JSON_SIZE}
        content = request.body if body is None else body
        if body is None and request.method != method:
            raise invalid(f"method {request.method.decode()} is not allowed here", hint=f"allowed: {method.decode()}")
        exchange.request = replace(request, method=method, url=url, headers=headers, body=content)
        exchange.reshape = reshape
        self._handle(exchange)


class VertexAi:
    """The routes that Vertex AI names in AIP_PREDICT_ROUTE and AIP_HEALTH_ROUTE.

    Args:
        handle: Answers requests of the KServe v2 protocol.
        admit: Returns whether a request may be handled if a page of a browser has sent it; if not, answers it.
        environment: Variables with the routes.
        model: The model that predictions run without a redirection.

    Raises:
        ServingError: INVALID_ARG when a route is missing.
    """

    def __init__(
        self, handle: Handle, admit: Callable[[Exchange], bool], environment: Mapping[str, str], model: str
    ) -> None:
        self._handle, self._admit = handle, admit
        for variable in ("AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"):
            if not environment.get(variable):
                raise invalid(f"{variable} is not defined for Vertex AI endpoint")
        self._predict, self._health = (
            environment[variable].encode() for variable in ("AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE")
        )
        self._infer = b"/v2/models/%b/infer" % quote_from_bytes(model.encode(), safe="").encode()

    def handle(self, exchange: Exchange) -> None:
        guarded(exchange, self._admit, self._route)

    def _route(self, exchange: Exchange) -> None:
        request = exchange.request
        path = request.url.partition(b"?")[0]
        if path == self._health:
            exchange.request = replace(request, url=b"/v2/health/ready")
        elif path == self._predict:
            redirected = request.headers.get(REDIRECT_HEADER)
            if redirected is None:
                infer(exchange, self._infer, b"vertex-ai")
            elif _POST_REDIRECTS.fullmatch(redirected):
                infer(exchange, b"/" + redirected, b"vertex-ai")
            elif _GET_REDIRECTS.fullmatch(redirected):
                exchange.request = replace(request, method=b"GET", url=b"/" + redirected, body=b"")
            else:
                is_known = redirected.startswith((b"v2/repository/", b"v2/systemsharedmemory", b"v2/cudasharedmemory"))
                exchange.respond(403 if is_known else 400, [])
                return
        else:
            exchange.respond(400, [])
            return
        self._handle(exchange)


def guarded(exchange: Exchange, admit: Callable[[Exchange], bool], route: Handle) -> None:
    """Answer a request that is admitted by a route; its errors are the response."""
    try:
        if admit(exchange):
            if exchange.request.by_page:  # the route may rewrite its method, by which pages are admitted
                exchange.request = replace(exchange.request, by_page=False)
            route(exchange)
    except ServingError as error:
        exchange.fail(error)
    except OSError as failure:
        exchange.fail(invalid(f"'{failure.filename}': {failure.strerror}"))


def infer(
    exchange: Exchange, url: bytes, cloud: bytes, then: Callable[[Reshaped], Reshaped] = lambda response: response
) -> None:
    """Rewrite a request into one that runs a model.

    Raises:
        ServingError: INVALID_ARG for a content type without the length of the JSON part.
    """
    request, binary = exchange.request, _BINARY % cloud
    headers = {name: value for name, value in request.headers.items() if name != JSON_SIZE}
    kind = headers.get(b"content-type", b"")
    if binary in kind:
        headers[JSON_SIZE] = b"%d" % json_size(kind, binary, len(request.body))
    exchange.request = replace(request, url=url, headers=headers)
    exchange.reshape = partial(as_binary, binary, then)


def json_size(kind: bytes, binary: bytes, size: int) -> int:
    """Return the length of the JSON part of a body of `size` bytes, from its content type.

    Raises:
        ServingError: INVALID_ARG for another content type than `binary` with a number.
    """
    text = kind.removeprefix(binary).decode("latin-1")
    if not kind.startswith(binary):
        raise invalid(f"expect MIME type for binary data starts with '{binary.decode()}', got: {text}")
    found = re.match(r"\s*([+-]?\d+)", text)
    if found is None:
        raise invalid(f"Unable to parse inference header size, got: {text}")
    value = int(found[1]) if len(found[1]) < 20 else _INT_MAX
    if not -_INT_MAX <= value < _INT_MAX:
        raise invalid(f"Unable to parse inference header size, value is out of range, got: {text}")
    if not 0 <= value <= size:
        raise invalid(f"inference header size should be in range (0, {size}), got: {text}")
    return value


def _needed(method: bytes, is_inference: bool) -> bytes:
    """Return a URL of the KServe v2 protocol that needs the same permission as a call of SageMaker."""
    if is_inference:
        return b"/v2/models/m/infer"
    return b"/v2/repository/index" if method == b"GET" else b"/v2/repository/models/m/load"


def _shown(name: str, url: str) -> dict[str, str]:
    """Return a model as SageMaker's lists show it: with the folder of its archive, as the original does."""
    return {"modelName": name, "modelUrl": url.removesuffix("/model")}


def as_binary(binary: bytes, then: Callable[[Reshaped], Reshaped], response: Reshaped) -> Reshaped:
    """Return a response whose content type has the length of its JSON part."""
    found = _JSON_SIZE_LINE.search(response.extra)
    if found is not None:
        response = response._replace(content_type=binary + found[1])
    elif response.status == 200 and response.content_type != JSON_TYPE:
        response = response._replace(content_type=JSON_TYPE)
    return then(response)


def as_sagemaker(response: Reshaped) -> Reshaped:
    """Return a response with a status that SageMaker knows: 400 for most errors, 507 when memory was short."""
    if (found := _JSON_SIZE_LINE.search(response.extra)) is not None:
        response = response._replace(extra=response.extra.replace(found[0], b""))
    if response.status < 400 or response.status in (401, 403, 404, 405):
        return response
    text = b"".join(response.body).lower()
    return response._replace(status=507 if any(each in text for each in _NO_MEMORY) else 400)


def archive_of(url: object) -> Path:
    """Return the folder of an archive that SageMaker has extracted."""
    root = f"{ARCHIVES}/"
    if not isinstance(url, str) or not url.startswith(root) or not _ARCHIVE.fullmatch(url[len(root) :].rstrip("/")):
        raise invalid(f"Invalid \"url\" '{url}': expected a path of the form {ARCHIVES}/<hash>/model[/<subdir>]")
    return Path(url)


def links_of(folder: Path, name: str) -> tuple[dict[str, Path], str]:
    """Return the models of an archive by their names in the repository, and the configuration of the one to load.

    An archive is one model, or a folder of models; of several, the ensemble is the one to load, which gets the name.
    """
    models = [folder] if (folder / "config.pbtxt").exists() else sorted(p for p in folder.glob("*") if p.is_dir())
    if not models:
        raise invalid(f"'{folder}' does not contain a model")
    configs = {p: parse((p / "config.pbtxt").read_text()) for p in models if (p / "config.pbtxt").exists()}
    main = next((p for p, config in configs.items() if config.platform == ENSEMBLE), models[-1])
    config = dump(to_json(replace(configs[main], name=""))).decode() if main in configs else ""
    return {(name if p == main else p.name): p for p in models}, config


def _control(name: str, action: bytes) -> bytes:
    return b"/v2/repository/models/%b/%b" % (quote_from_bytes(name.encode(), safe="").encode(), action)
