"""The page, the OpenAPI document and code samples over HTTP, in memory; and how a request was run, for who asks."""

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from tests.support.fake_engine import FakeEngine, identity_config
from tests.support.http_memory import MemoryClient, Response, request
from tests.support.process import until

from charonia.core.errors import internal
from charonia.core.metadata import ModelIndexEntry, ModelState
from charonia.core.response import ExecutionRecord, InferResponse
from charonia.server.access.rules import Api, Gate, KeyRing, Restriction, parse_keys
from charonia.server.facade import Services
from charonia.server.http.frontend import HttpFrontend, HttpLimits

KEY = "k" * 20
PAGE = Services(page_scheme="http")
FILES = ("/", "/page.css", "/page.js")
BODY = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
ASKS = {"Prefer": "server-timing"}


def echo() -> FakeEngine:
    return FakeEngine(models={"identity": identity_config(dims=(2,))})


def exchange(data: bytes, services: Services = PAGE, engine: FakeEngine | None = None) -> Response:
    async def main() -> Response:
        client = MemoryClient(HttpFrontend(engine or echo(), HttpLimits(), services=services))
        client.send(data)
        await until(lambda: client.responses)
        return client.responses[0]

    return asyncio.run(main())


def get(url: str, services: Services = PAGE, **headers: str) -> Response:
    return exchange(request(url, method="GET", headers=headers), services)


def with_keys(lines: str = f"reader read {KEY}\nuser infer {KEY[::-1]}x") -> Services:
    keys = KeyRing(parse_keys(lines).keys, b"secret")
    return Services(page_scheme="http", http_gate=Gate((), keys, what="API"))


@pytest.mark.parametrize(
    ("services", "may"),
    [
        (PAGE, False),
        (Services(page_scheme="http", controls_models=True), True),
        (replace(with_keys(), controls_models=True), False),
        (replace(with_keys(f"reader read,admin {KEY}"), controls_models=True), True),
    ],
)
def test_models_are_controlled_where_server_and_key_permit_it(services: Services, may: bool) -> None:
    document = json.loads(get("/openapi.json", services, Authorization=f"Bearer {KEY}").body)

    assert document["x-model-control"] is may


@pytest.mark.parametrize(("url", "kind"), [*zip(FILES, ("text/html", "text/css", "text/javascript"), strict=True)])
def test_the_files_of_the_page(url: str, kind: str) -> None:
    response = get(url)

    assert response.status == 200
    assert response.headers["content-type"] == f"{kind}; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert len(response.body) > 500


@pytest.mark.parametrize("url", [*FILES, "/openapi.json"])
def test_the_header_alone_is_that_of_the_document(url: str) -> None:
    async def main() -> bytes:
        client = MemoryClient(HttpFrontend(echo(), HttpLimits(), services=PAGE))
        client.send(request(url, method="HEAD"))
        await until(lambda: client.received)
        return client.received

    head, _, body = asyncio.run(main()).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"Content-Length: %d" % len(get(url).body) in head
    assert body == b""


def test_the_policy_allows_the_files_of_the_page_and_nothing_else() -> None:
    policy = dict(part.strip().split(" ", 1) for part in get("/").headers["content-security-policy"].split(";"))

    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in str(policy)


def test_the_page_loads_nothing_from_elsewhere_and_has_no_script_or_style_in_its_markup() -> None:
    page, style, script = (get(url).body.decode() for url in FILES)

    assert re.findall(r"(?:src|href)=\"(?!data:)([^\"]+)\"", page) == [
        "page.css",
        "page.js",
        "#",
        *["openapi.json"] * 2,
    ]
    assert not re.search(r"<style|style=|<script(?! type=\"module\" src=)|\son\w+=", page)
    assert "url(" not in style
    assert "@import" not in style
    assert re.findall(r"https?://[^\s\"'`]*", script) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|document\.write", script)


@pytest.mark.parametrize("url", [*FILES, "/openapi.json"])
def test_without_the_page_none_of_it_is_there(url: str) -> None:
    response = get(url, Services())

    assert response.status == 404
    assert "--allow-page" in json.loads(response.body)["error"]


def test_the_document_has_the_models_that_are_ready() -> None:
    response = get("/openapi.json", Host="example.org:81")

    document = json.loads(response.body)
    assert response.headers["content-type"] == "application/json"
    assert [model["name"] for model in document["x-models"]] == ["identity"]
    assert "curl http://example.org:81/v2/models/identity/" in document["x-models"][0]["samples"][0]["source"]


@pytest.mark.parametrize(
    ("services", "headers", "url"),
    [
        (Services(page_scheme="https"), {"Host": "a:1"}, "https://a:1/"),
        (PAGE, {"Host": "a:1", "X-Forwarded-Proto": "https"}, "https://a:1/"),
        (PAGE, {"Host": "a;rm -rf"}, "http://localhost:8000/"),
    ],
)
def test_samples_go_where_the_client_went(services: Services, headers: dict[str, str], url: str) -> None:
    document = json.loads(get("/openapi.json", services, **headers).body)

    assert f"curl {url}v2" in document["x-models"][0]["samples"][0]["source"]


def test_a_model_that_cannot_be_reached_by_its_name_is_left_out() -> None:
    engine = FakeEngine(index=[ModelIndexEntry(name, "1", ModelState.READY) for name in ("identity", "gone")])

    document = json.loads(exchange(request("/openapi.json", method="GET"), PAGE, engine).body)

    assert [model["name"] for model in document["x-models"]] == ["identity"]


# Keys.


def test_without_a_key_the_page_is_refused_and_asks_for_one() -> None:
    response = get("/", with_keys())

    assert response.status == 401
    assert b'id="keyform"' in response.body
    assert get("/page.js", with_keys()).status == get("/page.css", with_keys()).status == 200


def test_the_page_knows_nothing_of_this_server() -> None:
    for url in FILES:
        assert b"identity" not in get(url, with_keys()).body
        assert get(url, with_keys(), Authorization=f"Bearer {KEY}").body == get(url).body


@pytest.mark.parametrize(("key", "status"), [("", 401), ("x" * 20, 401), (KEY[::-1] + "x", 403), (KEY, 200)])
@pytest.mark.parametrize("url", ["/", "/openapi.json"])
def test_models_are_shown_to_keys_that_may_read(url: str, key: str, status: int) -> None:
    assert get(url, with_keys(), Authorization=f"Bearer {key}").status == status


def test_samples_need_a_key_too() -> None:
    assert exchange(request("/samples/identity", body=json.dumps(BODY).encode()), with_keys()).status == 401


def test_where_metadata_is_restricted_so_is_the_page() -> None:
    gate = Gate([Restriction((Api.METADATA,), "X-Key", "secret")], None, what="API")
    services = Services(page_scheme="http", http_gate=gate)

    for url in (*FILES, "/openapi.json"):
        assert get(url, services).status == 403
        assert get(url, services, **{"X-Key": "secret"}).status == 200


# Samples.


def samples(body: Mapping[str, object], blob: bytes = b"", model: str = "identity") -> Response:
    head = json.dumps(body).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))} if blob else {}
    return exchange(request(f"/samples/{model}", body=head + blob, headers=headers))


def sources(response: Response) -> dict[str, str]:
    assert response.status == 200, response.body
    return {sample["label"]: sample["source"] for sample in json.loads(response.body)}


def test_an_edited_request_as_code() -> None:
    written = sources(samples({**BODY, "parameters": {"priority": 2}}))

    assert '"INPUT0":[1.0,2.0]' in written["curl"]
    assert '"priority":2' in written["curl"]
    assert '"INPUT0": [[1.0, 2.0]],' in written["Python"]
    assert "parameters={'priority': 2}" in written["Python"]


def test_an_edited_request_names_its_version() -> None:
    written = sources(samples(BODY, model="identity/versions/1"))

    assert "/v2/models/identity/versions/1/generate" in written["curl"]
    assert 'version="1"' in written["Python"]


def test_an_edited_request_may_be_binary() -> None:
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}

    written = sources(samples({"inputs": [entry]}, np.array([3, 4], np.float32).tobytes()))

    assert "[[3.0, 4.0]]" in written["Python"]


@pytest.mark.parametrize(
    ("file", "labels"),
    [("x.npy", ["Python", "charonia infer"]), ("cat.jpg", ["charonia infer"])],
)
def test_a_file_is_named_where_it_can_be_read(file: str, labels: list[str]) -> None:
    entry: object = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "parameters": {"file": file}}

    written = sources(samples({"inputs": [entry]}))

    assert list(written) == labels
    assert f"INPUT0=@{file}" in written["charonia infer"]
    assert "Python" not in labels or f'np.load("{file}")' in written["Python"]


@pytest.mark.parametrize("body", [{}, {"inputs": 1}, {"inputs": [3]}, {"inputs": [{"name": "x"}]}])
def test_a_request_that_is_none_has_no_samples(body: dict[str, object]) -> None:
    assert samples(body).status == 400


def test_an_unknown_model_has_no_samples() -> None:
    assert samples(BODY, model="nobody").status == 404


# How a request was run.

RUN = ExecutionRecord("identity_0", 3, 1_500_000, 20_250_000)
TIMING = "queue;dur=1.500, compute;dur=20.250, batch;desc=3"


def answered(run: ExecutionRecord | None) -> FakeEngine:
    engine = echo()
    engine.outcomes = [[(InferResponse("identity", "1", "", [], execution=run), True)]]
    return engine


@pytest.mark.parametrize(
    ("route", "headers"),
    [("infer", {}), ("generate", {}), ("generate_stream", {}), ("infer", {"Accept": "text/event-stream"})],
)
def test_who_asks_is_told_how_the_request_was_run(route: str, headers: dict[str, str]) -> None:
    body = json.dumps(BODY if route == "infer" else {"INPUT0": [1, 2]}).encode()

    def ask(headers: dict[str, str], run: ExecutionRecord | None) -> Response:
        return exchange(request(f"/v2/models/identity/{route}", body=body, headers=headers), PAGE, answered(run))

    assert ask({**headers, **ASKS}, RUN).headers["server-timing"] == TIMING
    assert "server-timing" not in ask(headers, RUN).headers
    assert "server-timing" not in ask({**headers, "Prefer": "wait=5"}, RUN).headers
    assert "server-timing" not in ask({**headers, **ASKS}, None).headers  # nothing ran: from the cache


def test_an_error_has_no_timing() -> None:
    engine = FakeEngine()
    engine.outcomes = [[(internal("it broke"), True)]]

    response = exchange(
        request("/v2/models/identity/infer", body=json.dumps(BODY).encode(), headers=ASKS), PAGE, engine
    )

    assert response.status == 500
    assert "server-timing" not in response.headers
