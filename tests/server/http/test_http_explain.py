"""The route that explains a model, in memory."""

import asyncio
import json

import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.http_memory import MemoryClient, Response, request
from tests.support.process import until

from charonia.core.errors import not_found
from charonia.server.explain.explainer import Explanation, explanation_json
from charonia.server.explain.rules import Activity, Facts, ModelSetup
from charonia.server.facade import Document, Services
from charonia.server.http.frontend import HttpFrontend, HttpLimits


async def explained(name: str, version: str) -> Document:
    if name != "m":
        raise not_found(f"no model '{name}'")
    return explanation_json(Explanation.of(Facts(ModelSetup(name, version or "7"), Activity())))


def get(url: str, services: Services) -> Response:
    async def main() -> Response:
        client = MemoryClient(HttpFrontend(FakeEngine(), HttpLimits(), services=services))
        client.send(request(url, method="GET"))
        await until(lambda: client.responses)
        return client.responses[0]

    return asyncio.run(main())


@pytest.mark.parametrize(("path", "version"), [("/v2/models/m/explain", "7"), ("/v2/models/m/versions/3/explain", "3")])
def test_a_model_and_a_version_of_it_are_explained(path: str, version: str) -> None:
    answer = get(path, Services(explain=explained))

    assert answer.status == 200
    assert json.loads(answer.body) == asyncio.run(explained("m", version))


def test_who_is_not_there_is_not_explained() -> None:
    answer = get("/v2/models/x/explain", Services(explain=explained))

    assert answer.status == 404
    assert "no model 'x'" in json.loads(answer.body)["error"]


def test_a_front_end_without_an_explainer_says_so() -> None:
    assert get("/v2/models/m/explain", Services()).status == 404
