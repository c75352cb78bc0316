"""`Prefer: respond-async`: an address for the result, which can be polled and cancelled."""

import asyncio
import json
from collections.abc import Callable

import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient, Response, request

from charonia.core.errors import unavailable
from charonia.server.access.rules import Gate, KeyRing, parse_keys
from charonia.server.facade import Services
from charonia.server.http import results
from charonia.server.http.frontend import HttpFrontend, HttpLimits

INFER = "/v2/models/identity/infer"
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [1] * 16}]}).encode()
LATER = {"Prefer": "respond-async"}
KEYS = ("0123456789abcdef", "fedcba9876543210")

Ask = Callable[..., Response]
Script = Callable[[Ask], list[Response]]


def talk(
    engine: FakeEngine, script: Callable[[Ask], list[Response]], services: Services | None = None
) -> list[Response]:
    """Return the responses of a script, which asks one request after the other."""

    async def main() -> list[Response]:
        endpoint = HttpFrontend(engine, HttpLimits(), services=services or Services())

        def ask(url: str, method: str = "GET", body: bytes = b"", headers: dict[str, str] | None = None) -> Response:
            (answer,) = MemoryClient(endpoint).send(request(url, method=method, body=body, headers=headers))
            return answer

        return script(ask)

    return asyncio.run(main())


def start(ask: Ask, **headers: str) -> str:
    location: str = ask(INFER, "POST", BODY, LATER | headers).headers["location"]
    return location


def test_the_result_is_there_when_the_model_has_answered() -> None:
    engine = FakeEngine(hold=True)

    def script(ask: Ask) -> list[Response]:
        accepted = ask(INFER, "POST", BODY, LATER)
        running = ask(accepted.headers["location"])
        engine.release(0)
        return [accepted, running, ask(accepted.headers["location"]), ask(accepted.headers["location"])]

    accepted, running, done, again = talk(engine, script)

    assert (accepted.status, accepted.headers["preference-applied"]) == (202, "respond-async")
    assert (running.status, json.loads(running.body)["status"]) == (202, "running")
    assert (done.status, json.loads(done.body)["outputs"][0]["data"]) == (200, [1.0] * 16)
    assert again.body == done.body


def test_a_cancelled_request_has_no_result() -> None:
    engine = FakeEngine(hold=True)

    def script(ask: Ask) -> list[Response]:
        url = start(ask)
        return [ask(url, "DELETE"), ask(url), ask(url, "DELETE")]

    assert [answer.status for answer in talk(engine, script)] == [200, 404, 404]
    assert engine.tickets[0].cancelled


def test_a_refused_request_and_a_failed_one_have_their_errors() -> None:
    refused = FakeEngine(errors={"identity": unavailable("full")})
    failing = FakeEngine(hold=True)

    def script(ask: Ask) -> list[Response]:
        url = start(ask)
        failing.tickets[0].answer(unavailable("lost"))
        return [ask(url), ask(INFER, "POST", b"{", LATER)]

    assert [answer.status for answer in talk(refused, lambda ask: [ask(INFER, "POST", BODY, LATER)])] == [503]
    assert [answer.status for answer in talk(failing, script)] == [503, 400]


def test_results_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS_MAX", 2)
    monkeypatch.setattr(results, "RESULTS_BYTES_MAX", 300)
    engine = FakeEngine(hold=True)

    def script(ask: Ask) -> list[Response]:
        first, second = start(ask), start(ask)
        third = ask(INFER, "POST", BODY, LATER)
        engine.release(0)
        engine.release(1)  # both together are too large
        return [third, ask(first), ask(second), ask(INFER, "POST", BODY, LATER)]

    assert [answer.status for answer in talk(engine, script)] == [503, 404, 200, 202]


def test_only_the_key_of_the_request_reads_its_result() -> None:
    lines = "".join(f"{name} infer {key}\n" for name, key in zip("ab", KEYS, strict=True))
    services = Services(http_gate=Gate((), KeyRing(parse_keys(lines).keys, b"s"), what="API"))
    own, other = ({"X-API-Key": key} for key in KEYS)

    def script(ask: Ask) -> list[Response]:
        url = start(ask, **own)
        return [ask(url), ask(url, headers=other), ask(url, "DELETE", headers=other), ask(url, headers=own)]

    assert [answer.status for answer in talk(FakeEngine(), script, services)] == [401, 404, 404, 200]


def test_a_front_end_of_several_has_no_results() -> None:
    (answer,) = talk(FakeEngine(), lambda ask: [ask(INFER, "POST", BODY, LATER)], Services(keeps_results=False))

    assert answer.status == 501
    assert "needs a server of one process" in json.loads(answer.body)["error"]
