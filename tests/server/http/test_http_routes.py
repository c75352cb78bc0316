"""What each route answers, in memory."""

import asyncio
import gc
import gzip
import json
import zlib
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.fake_engine import FakeEngine, identity_config
from tests.support.http_memory import MemoryClient, Response, request
from tests.support.linked_engine import ServedFake, linked
from tests.support.process import until

from charonia.config.parameters import HTTP_REQUEST, HTTP_ROUTE, RECEIVED
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, invalid, unavailable
from charonia.core.metadata import ModelIndexEntry, ModelState
from charonia.core.response import InferResponse
from charonia.core.statistics import ModelStatistics
from charonia.server.access.rules import Api, Gate, KeyRing, Restriction, parse_keys
from charonia.server.facade import Services
from charonia.server.http import routes
from charonia.server.http.exchange import Exchange
from charonia.server.http.frontend import HttpEndpoint, HttpFrontend, HttpLimits, MetricsFrontend
from charonia.server.http.parser import Request
from charonia.server.http.routes import Route, Router, RouteTarget

INFER = "/v2/models/identity/infer"


link: Path | None = None
"""Folder of the link to the engine, None where the engine is in the front end's process."""


@pytest.fixture(autouse=True, params=[False, True], ids=["one-process", "front-end-apart"])
def shape(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `ask` reach the engine in the one and the other way."""
    monkeypatch.setitem(globals(), "link", tmp_path if request.param else None)


def ask(engine: FakeEngine, *requests: bytes) -> list[Response]:
    """Send requests to a front end on the engine, on an event loop, until all are answered."""

    async def main() -> list[Response]:
        if link is None:
            return await answers(HttpFrontend(engine, HttpLimits()), *requests)
        async with linked(ServedFake.of(engine), link) as seen:
            return await answers(HttpFrontend(seen, HttpLimits()), *requests)

    return asyncio.run(main())


async def answers(endpoint: HttpEndpoint, *requests: bytes) -> list[Response]:
    client = MemoryClient(endpoint)
    client.send(b"".join(requests))
    await until(lambda: len(client.responses) >= len(requests))
    return client.responses


def get(url: str, change: Callable[[FakeEngine], object] | None = None) -> Response:
    engine = FakeEngine()
    if change is not None:
        change(engine)
    return ask(engine, request(url, method="GET"))[0]


def post(
    url: str, document: object, engine: FakeEngine | None = None, headers: dict[str, str] | None = None
) -> Response:
    return ask(engine or FakeEngine(), request(url, body=json.dumps(document).encode(), headers=headers))[0]


def error(response: Response) -> str:
    message: str = json.loads(response.body)["error"]
    return message


@pytest.mark.parametrize(
    ("url", "change", "status"),
    [
        ("/v2/health/live", {}, 200),
        ("/v2/health/live", {"live": False}, 400),
        ("/v2/health/live", {"exiting": True}, 503),
        ("/v2/health/ready", {}, 200),
        ("/v2/health/ready", {"ready": False}, 400),
        ("/v2/health/ready", {"exiting": True}, 503),
        ("/v2/models/identity/ready", {}, 200),
        ("/v2/models/identity/versions/1/ready", {}, 200),
        ("/v2/models/identity/ready", {"ready": False}, 400),
        ("/v2/models/identity/versions/2/ready", {}, 400),
        ("/v2/models/identity/versions/x/ready", {}, 404),
        ("/v2/models/identity/versions/-1/ready", {}, 404),
        ("/v2/models/other/ready", {}, 400),
    ],
)
def test_health_is_a_status(url: str, change: dict[str, bool], status: int) -> None:
    assert ask(FakeEngine(**change), request(url, method="GET"))[0].status == status  # type: ignore[arg-type]


async def under_kserve(sent: bytes) -> Response:
    services = Services(has_health_documents=True)
    (response,) = await answers(HttpFrontend(FakeEngine(), HttpLimits(), services=services), sent)
    return response


@pytest.mark.parametrize(
    ("url", "document"),
    [
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        ("/v2/models/identity/ready", {"ready": True}),
    ],
)
def test_health_is_a_document_for_clients_that_ask_for_one_and_those_of_kserve(
    url: str, document: dict[str, bool]
) -> None:
    (plain,) = ask(FakeEngine(), request(url, method="GET", headers={"Accept": "*/*"}))
    (asked,) = ask(FakeEngine(), request(url, method="GET", headers={"Accept": "text/plain, application/json"}))
    kserve = asyncio.run(under_kserve(request(url, method="GET")))

    assert (plain.status, plain.body) == (200, b"")
    assert "content-type" not in plain.headers
    assert (json.loads(asked.body), json.loads(kserve.body)) == (document, document)


@pytest.mark.parametrize("path", ["infer", "generate"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"Inference-Header-Content-Length": "x"}, {"Content-Encoding": "gzip"}],
    ids=["json", "size", "gzip"],
)
def test_that_a_model_is_not_there_counts_before_a_body_that_cannot_be_read(path: str, headers: dict[str, str]) -> None:
    if path == "generate" and "Content-Encoding" in headers:
        return
    sent = request(f"/v2/models/other/{path}", body=b"no request", headers=headers)

    assert ask(FakeEngine(), sent)[0].status == 404


def test_a_model_that_is_not_ready_says_so() -> None:
    engine = FakeEngine(ready=False)

    assert error(ask(engine, request("/v2/models/identity/ready", method="GET"))[0]) == "Model version not ready"


@pytest.mark.parametrize("url", ["/v2", "/v2?a=b", "http://host:8000/v2", "/%76%32"])
def test_the_server_is_described(url: str) -> None:
    response = get(url)

    assert response.headers["content-type"] == "application/json"
    assert json.loads(response.body) == {
        "name": "charonia",
        "version": "0.1.0",
        "extensions": ["binary_tensor_data"],
    }


@pytest.mark.parametrize("url", ["/v2/models/identity", "/v2/models/identity/versions/1"])
def test_a_model_is_described(url: str) -> None:
    assert json.loads(get(url).body) == {
        "name": "identity",
        "versions": ["1"],
        "platform": "identity",
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 16]}],
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 16]}],
    }


def test_a_configuration_is_returned() -> None:
    config = json.loads(get("/v2/models/identity/config").body)

    assert (config["name"], config["backend"], config["max_batch_size"]) == ("identity", "identity", 8)


def test_ready_models_are_listed_by_name() -> None:
    entries = [
        ModelIndexEntry(name, version, ModelState.READY) for name, version in (("b", "1"), ("a", "1"), ("a", "2"))
    ]
    entries.append(ModelIndexEntry("c", "1", ModelState.UNAVAILABLE))
    (answer,) = ask(FakeEngine(index=entries), request("/v2/models", method="GET"))

    assert json.loads(answer.body) == {"models": ["a", "b"]}


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("/v2/models/stats", ["a", "b"]),
        ("/v2/models/a/stats", ["a"]),
        ("/v2/models/b/versions/2/stats", ["b"]),
    ],
)
def test_statistics_are_those_asked_for(url: str, names: list[str]) -> None:
    engine = FakeEngine(statistics=[ModelStatistics("a", "1"), ModelStatistics("b", "2")])

    document = json.loads(ask(engine, request(url, method="GET"))[0].body)

    assert [entry["name"] for entry in document["model_stats"]] == names


def test_statistics_of_an_unknown_model_are_an_error() -> None:
    assert get("/v2/models/x/stats").status == 400


@pytest.mark.parametrize(
    ("method", "url", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v2/", 404),
        ("GET", "/v3", 404),
        ("GET", "/v2/models//ready", 404),
        ("GET", "/v2/models/%ff", 400),
        ("GET", "*", 404),
        ("GET", "/metrics", 404),
        ("POST", "/v2", 405),
        ("GET", INFER, 405),
        ("HEAD", "/v2", 405),
        ("OPTIONS", INFER, 405),
        ("GET", "/v2/repository/index", 405),
        ("POST", "/v2/repository/other/index", 501),
        ("POST", "/v2/repository/other/models/m/load", 501),
        ("POST", "/v2/models/identity/generate", 400),
        ("POST", "/v2/models/identity/versions/1/generate_stream", 400),
        ("GET", "/v2/trace/setting", 501),
        ("POST", "/v2/models/identity/trace/setting", 501),
        ("GET", "/v2/logging", 501),
        ("GET", "/v2/systemsharedmemory/status", 200),
        ("GET", "/v2/cudasharedmemory/region/r/status", 501),
        ("POST", "/v2/cudasharedmemory/region/r/register", 501),
        ("POST", "/v2/systemsharedmemory/unregister", 501),
    ],
)
def test_other_routes_and_methods_have_a_clear_status(method: str, url: str, status: int) -> None:
    response, live = ask(FakeEngine(), request(url, method=method), request("/v2/health/live", method="GET"))

    assert response.status == status
    assert live.status == 200
    if method != "HEAD" and status != 200:
        assert error(response)
    if status == 405:
        assert response.headers["allow"] in ("GET", "POST")


def test_a_version_that_is_no_number_is_refused_with_those_that_are_ready() -> None:
    response = get("/v2/models/identity/versions/latest/config")

    assert response.status == 404
    assert error(response) == (
        "model 'identity': expected a number for the version, got 'latest' (hint: versions that are ready: 1)"
    )
    assert error(get("/v2/models/other/versions/x")) == "model 'other': expected a number for the version, got 'x'"


def test_the_memory_of_a_router_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "REMEMBERED_MAX", 2)
    targets: list[RouteTarget] = []
    router = Router([Route("/{model}", {b"GET": lambda exchange, target: targets.append(target)})])
    connection = MemoryClient(HttpFrontend(FakeEngine(), HttpLimits())).connection

    urls = [b"/a", b"/b", b"/c", b"/" + b"d" * 600]
    for url in urls:
        router.handle(Exchange(connection, Request(b"GET", url, {})))

    assert targets == [RouteTarget(url[1:].decode()) for url in urls]
    assert list(router._matches) == [b"/c"]


# Inference.


def test_a_refused_request_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        (response,) = ask(FakeEngine(), request(INFER, body=b"no JSON"))
        left = [each for each in gc.get_objects() if type(each) is Exchange]
    finally:
        gc.enable()

    assert response.status == 400
    assert left == []


def test_json_in_json_out() -> None:
    tensor = {"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [[1.5, 2]]}

    response = post(INFER, {"id": "7", "inputs": [tensor]})

    assert response.headers["content-type"] == "application/json"
    assert json.loads(response.body) == {
        "id": "7",
        "model_name": "identity",
        "model_version": "1",
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.0]}],
    }


def test_numbers_that_are_not_finite_go_both_ways() -> None:
    body = b'{"inputs": [{"name": "INPUT0", "shape": [3], "datatype": "FP32", "data": [NaN, Infinity, -Infinity]}]}'

    response = ask(FakeEngine(), request(INFER, body=body))[0]

    assert b'"data":[NaN,Infinity,-Infinity]' in response.body


def test_a_version_may_be_named() -> None:
    engine = FakeEngine()

    assert post("/v2/models/identity/versions/1/infer", {"inputs": []}, engine).status == 200
    assert engine.tickets[0].request.model_version == "1"
    assert post("/v2/models/identity/versions/2/infer", {"inputs": []}, engine).status == 404


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.UNKNOWN, 400),
        (Code.INTERNAL, 500),
        (Code.NOT_FOUND, 404),
        (Code.INVALID_ARG, 400),
        (Code.UNAVAILABLE, 503),
        (Code.UNSUPPORTED, 501),
        (Code.ALREADY_EXISTS, 400),
        (Code.CANCELLED, 400),
    ],
)
def test_the_engines_error_has_a_status_and_its_sentence(code: Code, status: int) -> None:
    engine = FakeEngine(errors={"identity": ServingError(code, "no", hint="yes")})

    response = post(INFER, {"inputs": []}, engine)

    assert response.status == status
    assert json.loads(response.body) == {"error": "no (hint: yes)"}


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ([(True, True)], 200),
        ([(True, False), (False, True)], 200),
        ([(False, True)], 501),
        ([(True, False), (True, True)], 501),
        ([(True, False), (True, False), (False, True)], 501),
    ],
)
def test_a_model_that_may_send_any_number_of_responses_has_to_send_one(
    outcomes: list[tuple[bool, bool]], status: int
) -> None:
    answer = InferResponse("identity", "1", "", [])

    engine = FakeEngine(outcomes=[[(answer if is_response else None, final) for is_response, final in outcomes]])

    response = post(INFER, {"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "FP32", "data": [1]}]}, engine)

    assert response.status == status
    if status != 200:
        assert "HTTP end point doesn't support models with decoupled transaction policy" in error(response)


@pytest.mark.parametrize("datatype", [d for d in DataType if d is not DataType.BYTES])
def test_a_raw_request_is_the_only_input(datatype: DataType) -> None:
    engine = FakeEngine(models={"identity": identity_config(datatype=datatype, dims=(2, -1))})
    data = bytes(6 * datatype.byte_size)

    response = ask(engine, request(INFER, body=data, headers={"Inference-Header-Content-Length": "0"}))[0]

    size = int(response.headers["inference-header-content-length"])
    assert response.headers["content-type"] == "application/octet-stream"
    assert json.loads(response.body[:size])["outputs"][0]["shape"] == [1, 2, 3]
    assert response.body[size:] == data


def test_a_raw_string_is_the_only_element() -> None:
    engine = FakeEngine(models={"identity": identity_config(datatype=DataType.BYTES, dims=(1,))})

    response = ask(engine, request(INFER, body=b"text", headers={"Inference-Header-Content-Length": "0"}))[0]

    assert response.body.endswith(b"\x04\x00\x00\x00text")


def test_a_raw_request_needs_a_model_with_one_input() -> None:
    config = identity_config()
    engine = FakeEngine(models={"identity": type(config)(name="identity")})

    response = ask(engine, request(INFER, headers={"Inference-Header-Content-Length": "0"}))[0]

    assert response.status == 400
    assert "got 0 inputs" in error(response)


@pytest.mark.parametrize("value", ["-1", "x", "1.0", "99999", "9" * 30])
def test_the_size_of_the_json_must_be_a_number_within_the_body(value: str) -> None:
    response = post(INFER, {"inputs": []}, headers={"Inference-Header-Content-Length": value})

    assert response.status == 400
    assert "Inference-Header-Content-Length" in error(response)


def test_classes_are_returned_in_either_form() -> None:
    tensor = {"name": "INPUT0", "shape": [1, 3], "datatype": "FP32", "data": [0.25, 0.5, 0.125]}
    output = {"name": "OUTPUT0", "parameters": {"classification": 2}}

    response = post(INFER, {"inputs": [tensor], "outputs": [output]})

    assert json.loads(response.body)["outputs"] == [
        {"name": "OUTPUT0", "datatype": "BYTES", "shape": [1, 2], "data": ["0.500000:1", "0.250000:0"]}
    ]


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)])
def test_a_compressed_request_is_understood(coding: str, pack: Callable[[bytes], bytes]) -> None:
    text = b'{"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "INT8", "parameters": {"binary_data_size": 1}}]}'
    headers = {"Content-Encoding": coding, "Inference-Header-Content-Length": str(len(text))}

    response = ask(FakeEngine(), request(INFER, body=pack(text + b"\x05"), headers=headers))[0]

    assert json.loads(response.body)["outputs"][0]["data"] == [5]


def test_an_unknown_content_coding_is_refused_with_those_known() -> None:
    response = post(INFER, {"inputs": []}, headers={"Content-Encoding": "br"})

    assert response.status == 501
    assert "Unsupported compression type" in error(response)
    assert response.headers["accept-encoding"] == "gzip, deflate"


def test_a_body_that_would_grow_too_large_is_refused() -> None:
    body = gzip.compress(bytes(65 * 1024 * 1024))

    response = ask(FakeEngine(), request(INFER, body=body, headers={"Content-Encoding": "gzip"}))[0]

    assert response.status == 400
    assert "Decompressed data size exceeds" in error(response)


@pytest.mark.parametrize(("accepted", "coding"), [("gzip", "gzip"), ("gzip;q=0.1, deflate", "deflate"), ("br", None)])
def test_a_response_is_compressed_as_the_client_prefers(accepted: str, coding: str | None) -> None:
    tensor = {"name": "INPUT0", "shape": [1, 2000], "datatype": "FP32", "data": [0.5] * 2000}
    document = {"inputs": [tensor], "parameters": {"binary_data_output": True}}

    response = post(INFER, document, headers={"Accept-Encoding": accepted})

    assert response.headers.get("content-encoding") == coding
    unpack: dict[str | None, Callable[[bytes], bytes]] = {
        "gzip": gzip.decompress,
        "deflate": zlib.decompress,
        None: bytes,
    }
    body = unpack[coding](response.body)
    size = int(response.headers["inference-header-content-length"])
    assert body[size:] == np.full(2000, 0.5, "<f4").tobytes()


def test_a_small_response_is_not_compressed() -> None:
    response = post(INFER, {"inputs": []}, headers={"Accept-Encoding": "gzip"})

    assert "content-encoding" not in response.headers


async def test_a_client_that_goes_while_its_request_is_decompressed_starts_no_inference() -> None:
    engine = FakeEngine()

    client = MemoryClient(HttpFrontend(engine, HttpLimits()))
    client.send(request(INFER, body=gzip.compress(b'{"inputs": []}'), headers={"Content-Encoding": "gzip"}))
    client.leave()
    await until(lambda: len(asyncio.all_tasks()) <= 1)

    assert engine.tickets == []


# The repository.


def test_the_index_is_an_array() -> None:
    assert json.loads(ask(FakeEngine(), request("/v2/repository/index"))[0].body) == [
        {"name": "identity", "version": "1", "state": "READY"},
        {"name": "unloaded"},
    ]


def test_the_index_may_be_of_ready_models() -> None:
    assert [entry["name"] for entry in json.loads(post("/v2/repository/index", {"ready": True}).body)] == ["identity"]


def test_a_model_is_loaded_with_what_the_body_brings() -> None:
    engine = FakeEngine()
    files = {"config": "{}", "file:1/model.onnx": b64encode(b"onnx").decode()}

    first, second = ask(
        engine,
        request("/v2/repository/models/a/load"),
        request("/v2/repository/models/b/load", body=json.dumps({"parameters": files}).encode()),
    )

    assert (first.status, first.body, second.status) == (200, b"", 200)
    assert engine.loads == [("a", None, None), ("b", "{}", {"1/model.onnx": b"onnx"})]


def test_a_model_is_unloaded() -> None:
    engine = FakeEngine()

    assert post("/v2/repository/models/a/unload", {"parameters": {"unload_dependents": True}}, engine).status == 200
    assert engine.unloads == [("a", True)]


@pytest.mark.parametrize("action", ["load", "unload"])
@pytest.mark.parametrize(("problem", "status"), [(unavailable("not explicit"), 503), (invalid("load failed"), 400)])
def test_a_failure_to_load_or_unload_is_reported(action: str, problem: ServingError, status: int) -> None:
    response = post(f"/v2/repository/models/a/{action}", {}, FakeEngine(control_error=problem))

    assert response.status == status
    assert error(response) == problem.message


@pytest.mark.parametrize(
    "url", ["/v2/repository/models/a/load", "/v2/repository/models/a/unload", "/v2/repository/index"]
)
def test_a_senseless_repository_request_is_refused(url: str) -> None:
    assert post(url, []).status == 400


def test_a_broken_load_fails_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    response = post("/v2/repository/models/a/load", {}, FakeEngine(control_error=KeyError("secret")))  # type: ignore[arg-type]

    assert response.status == 500
    assert "secret" not in error(response)
    assert "KeyError" in caplog.text


# The metrics page.


@pytest.mark.parametrize(
    ("method", "url", "status"), [("GET", "/metrics", 200), ("POST", "/metrics", 405), ("GET", "/v2", 404)]
)
def test_the_metrics_page_is_text(method: str, url: str, status: int) -> None:
    shown: list[bytes] = []

    async def collect() -> None:
        shown.append(b"up 1\n")

    async def main() -> list[Response]:
        return await answers(MetricsFrontend(lambda: b"".join(shown), collect), request(url, method=method))

    (response,) = asyncio.run(main())

    assert response.status == status
    if status == 200:
        assert (response.body, response.headers["content-type"]) == (b"up 1\n", "text/plain; charset=utf-8")
    if status == 404:
        assert b"GET /metrics" in response.body


@pytest.mark.parametrize(
    "url", ["/v2/models/a%00b", "/v2/models/a%00/ready", "/v2/models/a/versions/%00/infer", "/v2%00"]
)
def test_a_path_with_a_nul_character_is_refused(url: str) -> None:
    assert ask(FakeEngine(), request(url, method="GET"))[0].status == 400


def test_what_is_refused_for_lack_of_capacity_says_when_to_try_again() -> None:
    response = post("/v2/repository/models/a/load", {}, FakeEngine(control_error=unavailable("not now")))

    assert (response.status, response.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("name", ["X-Api-Key", "Authorization", "X-Secret"])
def test_a_header_that_access_depends_on_must_not_be_given_twice_with_different_values(name: str) -> None:
    restriction = Restriction((Api.HEALTH,), "X-Secret", "a")
    gate = Gate([restriction], KeyRing([], b"secret"), what="API")
    frontend = HttpFrontend(FakeEngine(), HttpLimits(), services=Services(http_gate=gate))

    def status(*values: str) -> int:
        fields = "".join(f"{name}: {value}\r\n" for value in values)
        if name != "X-Secret":
            fields += "X-Secret: a\r\n"
        return MemoryClient(frontend).send(f"GET /v2/health/live HTTP/1.1\r\n{fields}\r\n".encode())[0].status

    assert [status("a"), status("a", "a"), status("a", "b"), status("b", "a")] == [200, 200, 400, 400]


def routed(**routes: str) -> FakeEngine:
    """Return an engine whose models have these routes of their own."""
    config = identity_config(dims=(-1,))
    return FakeEngine(
        models={
            name: replace(config, name=name, parameters={HTTP_ROUTE: route, HTTP_REQUEST: "true"})
            for name, route in routes.items()
        }
    )


def test_a_model_answers_at_its_own_path_with_its_outputs() -> None:
    engine = routed(a="POST /predict", b="GET /predict")
    body = {config.name: [1.0, 2.0] for config in engine.models["a"].input}

    response = post("/predict?k=v", body, engine, {"X-A": "b"})

    assert response.status == 200
    assert json.loads(response.body) == {"OUTPUT0": [1.0, 2.0]}
    received = json.loads(str(engine.tickets[0].request.parameters[RECEIVED]))
    assert (received["method"], received["path"], received["query"], received["headers"]["x-a"]) == (
        "POST",
        "/predict",
        {"k": "v"},
        "b",
    )


def test_the_query_of_a_get_has_the_inputs() -> None:
    engine = routed(a="GET /predict")
    (name,) = (given.name for given in engine.models["a"].input)

    response = ask(engine, request(f"/predict?{name}=1&{name}=2.5", method="GET"))[0]

    assert (response.status, json.loads(response.body)) == (200, {"OUTPUT0": [1.0, 2.5]})
    assert ask(engine, request("/predict", body=b"{}"))[0].status == 405
    assert ask(engine, request("/predict/", method="GET"))[0].status == 404


def test_pages_of_other_sites_run_no_model_even_with_a_get() -> None:
    sent = request("/predict?INPUT0=1", method="GET", headers={"Origin": "https://a.org"})

    assert ask(routed(a="GET /predict"), sent)[0].status == 403


def test_a_model_at_its_own_path_needs_the_key_of_inference_which_it_does_not_see() -> None:
    gate = Gate((), KeyRing(parse_keys("a infer 0123456789abcdef").keys, b"s"), what="API")
    engine = routed(a="POST /predict")

    async def statuses(*headers: dict[str, str]) -> list[int]:
        endpoint = HttpFrontend(engine, HttpLimits(), services=Services(http_gate=gate))
        sent = [request("/predict", body=b'{"INPUT0": 1}', headers=each) for each in headers]
        return [answer.status for answer in await answers(endpoint, *sent)]

    assert asyncio.run(statuses({}, {"X-API-Key": "x"}, {"X-API-Key": "0123456789abcdef"})) == [401, 401, 200]
    assert "x-api-key" not in json.loads(str(engine.tickets[0].request.parameters[RECEIVED]))["headers"]
