"""The routes of KServe's v1 protocol, in memory."""

import asyncio
import gzip
import json
from typing import Any

from tests.support.fake_engine import FakeEngine, identity_config
from tests.support.http_memory import MemoryClient, Response, request
from tests.support.process import until

from charonia.core.dtypes import DataType
from charonia.core.errors import unavailable
from charonia.server.access.rules import Gate, KeyRing, parse_keys
from charonia.server.facade import Services
from charonia.server.http.frontend import HttpFrontend, HttpLimits

PREDICT = "/v1/models/identity:predict"
KEY = "0123456789abcdefghijklmnopqrstuv"
ROW = [float(number) for number in range(16)]


def ask(
    message: bytes,
    engine: FakeEngine | None = None,
    *,
    v1: bool = True,
    openai: bool = False,
    gate: Gate | None = None,
) -> Response:
    async def main() -> Response:
        services = Services(has_openai=openai, has_kserve_v1=v1, page_scheme="http", http_gate=gate)
        client = MemoryClient(HttpFrontend(engine or FakeEngine(), HttpLimits(), services=services))
        client.send(message)
        await until(lambda: client.responses)
        return client.responses[0]

    return asyncio.run(main())


def predict(document: object, engine: FakeEngine | None = None, url: str = PREDICT) -> Response:
    return ask(request(url, body=json.dumps(document).encode()), engine)


def get(url: str, engine: FakeEngine | None = None, *, openai: bool = False) -> tuple[int, Any]:
    response = ask(request(url, method="GET"), engine, openai=openai)
    return response.status, json.loads(response.body)


def test_rows_are_answered_with_rows() -> None:
    response = predict({"instances": [ROW, ROW]})

    assert (response.status, json.loads(response.body)) == (200, {"predictions": [ROW, ROW]})


def test_a_compressed_request_is_read() -> None:
    body = gzip.compress(json.dumps({"instances": [ROW]}).encode())
    response = ask(request(PREDICT, body=body, headers={"Content-Encoding": "gzip"}))

    assert json.loads(response.body) == {"predictions": [ROW]}


def test_errors_are_sentences_with_the_status_of_what_is_wrong() -> None:
    failing = FakeEngine(errors={"identity": unavailable("busy")})
    wrong, unknown = predict({"rows": []}), predict({"instances": [ROW]}, url="/v1/models/none:predict")
    busy, other = predict({"instances": [ROW]}, failing), predict({}, url="/v1/models/identity")

    assert [each.status for each in (wrong, unknown, busy, other)] == [400, 404, 503, 404]
    assert "instances" in json.loads(wrong.body)["error"]
    assert "hint: /v1/models/identity:predict" in str(json.loads(other.body)["error"])


def test_what_the_protocol_has_beside_predict_is_named_by_what_there_is() -> None:
    explained = predict({"instances": [ROW]}, url="/v1/models/identity:explain")

    assert explained.status == 404
    assert f"(hint: {PREDICT}; " in json.loads(explained.body)["error"]


def test_a_model_with_no_single_response_is_refused() -> None:
    assert predict({"instances": [ROW]}, FakeEngine(outcomes=[[(None, True)]])).status == 501


def test_an_output_that_cannot_be_written_fails_its_request_only() -> None:
    engine = FakeEngine(models={"identity": identity_config(datatype=DataType.BYTES)})
    broken = engine.echo

    def echo(asked: Any) -> Any:
        response: Any = broken(asked)
        response.outputs[0].array[0, 0] = 5  # no bytes
        response.outputs[0].array[0, 1] = None
        return response

    engine.echo = echo  # type: ignore[assignment, method-assign]
    assert predict({"instances": [["a"] * 16]}, engine).status == 500


def test_models_are_listed_and_ready() -> None:
    assert get("/v1/models") == (200, {"models": ["identity"]})
    assert get("/v1/models/identity") == (200, {"name": "identity", "ready": True})
    assert get("/v1/models/none")[0] == 404


def test_with_openai_the_answers_have_what_both_ask_for() -> None:
    listed = get("/v1/models", openai=True)[1]

    assert listed == {"models": ["identity"], "object": "list", "data": []}


def test_the_root_says_that_the_server_lives_and_browsers_get_the_page() -> None:
    page = ask(request("/", method="GET", headers={"Accept": "text/html,*/*"}))

    assert get("/") == (200, {"status": "alive"})
    assert page.body.startswith(b"<!doctype html>")


def test_without_the_option_there_is_no_such_route() -> None:
    assert ask(request(PREDICT, body=b"{}"), v1=False).status == 404


def test_predictions_need_a_key_for_inference() -> None:
    keys = KeyRing(parse_keys(f"reader read {KEY}\nuser infer {KEY[::-1]}").keys, b"secret")
    gate = Gate((), keys, what="API")
    body = json.dumps({"instances": [ROW]}).encode()

    def status(key: str) -> int:
        return ask(request(PREDICT, body=body, headers={"Authorization": f"Bearer {key}"}), gate=gate).status

    assert [status(KEY), status(KEY[::-1])] == [403, 200]
