"""The OpenAPI document of a running server: every example in it is answered."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from openapi_spec_validator import validate
from tests.support.page_models import write_page_models
from tests.support.process import SHAPES, ServeProcess


@pytest.fixture(scope="module", params=SHAPES)
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    folder: Path = tmp_path_factory.mktemp("models")
    write_page_models(folder)
    with ServeProcess(folder, "--exit-on-error=false", "--strict-readiness=false", *request.param) as started:
        yield started


@pytest.fixture(scope="module")
def document(server: ServeProcess) -> dict[str, Any]:
    found: dict[str, Any] = server.ask("/openapi.json")
    return found


def test_the_document_is_valid_and_has_every_model_that_is_ready(document: dict[str, Any]) -> None:
    validate(document)

    assert [model["name"] for model in document["x-models"]] == [
        *("classes", "numbers", "picture", "steps", "story", "text")
    ]


def test_every_example_is_answered(server: ServeProcess, document: dict[str, Any]) -> None:
    answered = {}
    for path, item in document["paths"].items():
        for media in item.get("post", {}).get("requestBody", {}).get("content", {}).values():
            if "example" in media:
                headers = {"Content-Type": "application/json"}
                if "story" in path:
                    headers["Accept"] = "text/event-stream"
                sent = Request(f"http://{server.http}{path}", json.dumps(media["example"]).encode(), headers)
                with urlopen(sent) as answer:  # an error raises
                    answered[path] = answer.read()

    # FP16 and BF16 of the model `numbers` have no JSON form.
    models = ("classes", "picture", "steps", "text")
    expected = [f"/v2/models/{model}/{route}" for model in models for route in ("infer", "generate")]
    assert sorted(answered) == sorted([*expected, "/v2/models/story/infer", "/v2/models/story/generate_stream"])
    assert b"hello," in answered["/v2/models/story/infer"]


def test_the_paths_of_the_server_answer(server: ServeProcess, document: dict[str, Any]) -> None:
    statuses = {}
    for path, item in document["paths"].items():
        if "get" in item and "{result}" not in path:  # there is none
            with urlopen(f"http://{server.http}{path.replace('{model}', 'classes')}") as answer:
                statuses[path] = answer.status

    assert set(statuses.values()) == {200}
    assert {"/v2", "/v2/models/{model}/explain"} <= statuses.keys()


def test_without_the_page_there_is_no_document(tmp_path: Path) -> None:
    with ServeProcess(tmp_path, "--allow-page=false") as server:
        for path in ("/", "/openapi.json"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(f"http://{server.http}{path}")
