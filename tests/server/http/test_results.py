"""`Prefer: respond-async`: an address for the result, which can be polled and cancelled."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.fake_engine import FakeEngine, identity_config
from tests.support.http_memory import MemoryClient, Response, request

from charonia.config.parameters import HTTP_REQUEST, RECEIVED
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, unavailable
from charonia.server.access.rules import Gate, KeyRing, parse_keys
from charonia.server.backends.python.worker.service import Request
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


def test_a_server_that_shares_its_address_has_no_results() -> None:
    (answer,) = talk(FakeEngine(), lambda ask: [ask(INFER, "POST", BODY, LATER)], Services(keeps_results=False))

    assert answer.status == 501
    assert "needs an address that no other server shares" in json.loads(answer.body)["error"]


def test_progress_is_part_of_the_state_while_the_function_runs() -> None:
    described = identity_config(datatype=DataType.FP32)
    engine = FakeEngine(hold=True, models={"identity": replace(described, parameters={HTTP_REQUEST: "true"})})

    def script(ask: Ask) -> list[Response]:
        body = json.dumps({"INPUT0": [[1] * 16]}).encode()
        url = ask("/v2/models/identity/generate", "POST", body, LATER).headers["location"]
        function = Request({}, json.loads(str(engine.tickets[0].request.parameters[RECEIVED])))
        before = ask(url)
        function.progress(0.25, "one of four")
        running = ask(url)
        with pytest.raises(ValueError, match="expected a number from 0 to 1, got 2"):
            function.progress(2)
        engine.release(0)
        function.progress(1)  # too late
        return [before, running, ask(url)]

    before, running, done = talk(engine, script)

    assert "progress" not in json.loads(before.body)
    assert json.loads(running.body)["progress"] == 0.25
    assert json.loads(running.body)["message"] == "one of four"
    assert "progress" not in json.loads(done.body)


def test_progress_without_a_client_that_polls_has_no_effect() -> None:
    Request({}, {}).progress(0.5, "nobody asks")


def test_the_files_of_progress_are_removed() -> None:
    engine = FakeEngine(hold=True)

    async def main() -> tuple[int, int, bool]:
        endpoint = HttpFrontend(engine, HttpLimits())
        MemoryClient(endpoint).send(request(INFER, method="POST", body=BODY, headers=LATER))
        folder = endpoint.results._folder
        assert folder is not None
        counts = [len(list(folder.path.iterdir()))]
        engine.release(0)
        counts.append(len(list(folder.path.iterdir())))
        await endpoint.close()
        return counts[0], counts[1], folder.path.exists()

    assert asyncio.run(main()) == (1, 0, False)


def test_a_front_end_asks_the_others_for_a_result() -> None:
    engine = FakeEngine(hold=True)

    async def main() -> list[tuple[int, str]]:
        first = HttpFrontend(engine, HttpLimits())

        async def elsewhere(method: str, id: str, owner: str) -> list[Any] | None:
            return first.results.relayed(method, id, owner)

        second = HttpFrontend(engine, HttpLimits(), services=Services(relay_result=elsewhere))
        found: list[tuple[int, str]] = []

        async def ask(method: str = "GET", url: str = "") -> None:
            client = MemoryClient(second)
            client.send(request(url, method=method))
            while not client.responses:
                await asyncio.sleep(0)
            (answer,) = client.responses
            found.append((answer.status, json.loads(answer.body).get("status", "")))

        urls = []
        for _ in range(2):
            (accepted,) = MemoryClient(first).send(request(INFER, method="POST", body=BODY, headers=LATER))
            urls.append(accepted.headers["location"])
        await ask(url=urls[0])
        engine.release(0)
        await ask(url=urls[0])
        await ask("DELETE", urls[1])
        await ask(url=urls[1])
        return found

    assert asyncio.run(main()) == [(202, "running"), (200, ""), (200, "cancelled"), (404, "")]
    assert engine.tickets[1].cancelled


async def test_what_one_front_end_gets_from_another_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RELAYED_BYTES_MAX", 10)

    endpoint = HttpFrontend(FakeEngine(), HttpLimits())
    (accepted,) = MemoryClient(endpoint).send(request(INFER, method="POST", body=BODY, headers=LATER))
    with pytest.raises(ServingError, match="front ends pass on at most 10"):
        endpoint.results.relayed("GET", accepted.headers["location"].rpartition("/")[2], "")
