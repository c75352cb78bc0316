"""Functions that take and return any JSON, over HTTP; what they answer fits the OpenAPI document."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import requests
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate
from tests.support.process import SHAPES, ServeProcess

SERVICE = """
import datetime, enum, logging
from collections.abc import Iterator
from typing import Annotated, Literal

import charonia
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

class Size(enum.Enum):
    SMALL = "S"
    LARGE = "L"

class Item(BaseModel):
    name: str = Field(description="What it is")
    count: int = Field(1, ge=1)

class Order(BaseModel):
    items: list[Item]
    when: datetime.date
    size: Size = Size.SMALL

@charonia.model
def matrix(x: list[list[float]]) -> list[list[float]]:
    return x

@charonia.model
def order(order: Order) -> Order:
    return order

@charonia.model
def total(orders: list[Order], note: str | None = None) -> dict:
    logging.getLogger("shop").info("%s orders", len(orders))
    return {"total": sum(item.count for order in orders for item in order.items), "note": note, "nan": float("nan")}

@charonia.model
def maybe(a: float | None = None, mode: Literal["a", "b"] = "a") -> float | None:
    return a

@charonia.model(max_batch_size=8)
def vectors(text: list[str]) -> Annotated[NDArray[np.float32], charonia.Shape(-1, 2)]:
    return np.array([[len(each), np.nan] for each in text], np.float32)

@charonia.model(max_batch_size=8)
def tagged(x: list[dict]) -> list[dict]:
    return [{"got": each} for each in x]

@charonia.model
def raw(data: bytes) -> bytes:
    return data[::-1]

@charonia.model(path="/orders/price", method="PUT")
def price(order: Order, request: charonia.Request) -> dict:
    return {"for": request.headers["x-user"], "at": request.client, "count": order.items[0].count, **request.query}

@charonia.model(path="/repeat", method="GET")
def repeat(word: str, count: int = 2) -> list[str]:
    return [word] * count

@charonia.model(path="/steps")
def counted(n: int) -> Iterator[int]:
    yield from range(n)
"""


@pytest.fixture(scope="module", params=SHAPES)
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    path: Path = tmp_path_factory.mktemp("service") / "service.py"
    path.write_text(SERVICE)
    with ServeProcess(path, "--kserve-v1", *request.param) as started:
        yield started


def post(server: ServeProcess, path: str, body: Any) -> tuple[int, Any]:
    try:
        with urlopen(Request(f"http://{server.http}{path}", json.dumps(body).encode())) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)["error"]


@pytest.fixture(scope="module")
def document(server: ServeProcess) -> dict[str, Any]:
    found: dict[str, Any] = server.ask("/openapi.json")
    validate(found)
    return found


CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("matrix", {"x": [[1, 2], [3, 4]]}, {"output": [[1, 2], [3, 4]]}),
    ("matrix", {"x": [[1, 2]]}, {"output": [[1, 2]]}),
    (
        "order",
        {"items": [{"name": "pen"}], "when": "2024-02-03"},
        {"items": [{"name": "pen", "count": 1}], "when": "2024-02-03", "size": "S"},
    ),
    (
        "total",
        {"orders": [{"items": [{"name": "pen", "count": 3}], "when": "2024-02-03"}], "note": None},
        {"output": {"total": 3, "note": None, "nan": None}},
    ),
    ("maybe", {"a": None}, {"output": None}),
    ("maybe", {"a": 2, "mode": "b"}, {"output": 2.0}),
    ("vectors", {"text": "ab"}, {"output": [2, None]}),
    ("vectors", {"text": ["ab"]}, {"output": [[2, None]]}),
    ("tagged", {"x": {"a": 1}}, {"output": {"got": {"a": 1}}}),
    ("tagged", {"x": [{"a": 1}, {}]}, {"output": [{"got": {"a": 1}}, {"got": {}}]}),
    ("raw", {"data": "abc"}, {"output": "cba"}),
    ("raw", {"data": {"b64": "AP8="}}, {"output": {"b64": "/wA="}}),
]


@pytest.mark.parametrize(("model", "body", "expected"), CALLS)
def test_values_are_json_and_fit_the_document(
    server: ServeProcess, document: dict[str, Any], model: str, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    route = f"/v2/models/{model}/generate"
    status, found = post(server, route, body)

    assert status == 200, found
    assert {name: value for name, value in found.items() if not name.startswith("model_")} == expected
    operation = document["paths"][route]["post"]
    for value, part in ((body, operation["requestBody"]), (found, operation["responses"]["200"])):
        schema = part["content"]["application/json"]["schema"]
        OAS31Validator({**schema, "components": document["components"]}).validate(value)


def test_messages_of_logging_are_in_the_servers_log(server: ServeProcess) -> None:
    post(server, "/v2/models/total/generate", {"orders": [{"items": [], "when": "2024-02-03"}] * 7})

    assert server.logs("7 orders")


def test_functions_answer_at_their_own_paths_and_see_the_request(server: ServeProcess) -> None:
    base = f"http://{server.http}"
    order: Any = {"items": [{"name": "pen", "count": 3}], "when": "2024-02-03"}
    priced = requests.put(f"{base}/orders/price", params={"tax": "7"}, json=order, headers={"X-User": "ada"})

    assert (priced.status_code, priced.json()) == (200, {"for": "ada", "at": "127.0.0.1", "count": 3, "tax": "7"})
    assert requests.get(f"{base}/repeat", params={"word": "a"}).json() == ["a", "a"]
    assert requests.get(f"{base}/repeat").status_code == 400
    assert requests.post(f"{base}/steps", json={"n": 2}).text == "data: 0\n\ndata: 1\n\n"
    assert requests.post(f"{base}/repeat").status_code == 405


def test_the_document_has_the_paths_of_functions(document: dict[str, Any]) -> None:
    get = document["paths"]["/repeat"]["get"]
    names = {each["name"]: each["required"] for each in get["parameters"]}

    assert names == {"word": True, "count": False}
    assert get["responses"]["200"]["content"]["application/json"]["schema"]["type"] == "array"
    assert "requestBody" in document["paths"]["/orders/price"]["put"]
    assert document["paths"]["/steps"]["post"]["responses"]["200"]["content"].keys() == {"text/event-stream"}
