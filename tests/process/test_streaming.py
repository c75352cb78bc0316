"""Streams of responses, with real models in worker processes, over real sockets."""

import http.client
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tests.support.models import COUNT, COUNT_PBTXT, answering, write_model
from tests.support.process import SHAPES, ServeProcess
from tests.support.stock_clients import infer_input

SQUARE_CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
SQUARES_CONFIG = """
platform: "ensemble"
input [ { name: "UPTO" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "SQUARE" data_type: TYPE_INT32 dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "count" model_version: -1
    input_map { key: "UPTO" value: "UPTO" } output_map { key: "NUMBER" value: "number" } },
  { model_name: "square" model_version: -1
    input_map { key: "IN" value: "number" } output_map { key: "OUT" value: "SQUARE" } } ] }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "count", COUNT, config=COUNT_PBTXT)
    write_model(folder, "square", answering("array * array", "OUT"), config=SQUARE_CONFIG)
    write_model(folder, "squares", "", config=SQUARES_CONFIG)
    return folder


@pytest.fixture(scope="module", params=SHAPES)
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    with ServeProcess(repository, *request.param) as process:
        yield process


def post(server: ServeProcess, path: str, document: object, **headers: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(server.http, timeout=200)
    connection.request("POST", path, json.dumps(document), headers)
    return connection


def events(connection: http.client.HTTPConnection) -> Iterator[Any]:
    response = connection.getresponse()
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    while line := response.readline():
        assert line.startswith(b"data: ")
        yield json.loads(line.removeprefix(b"data: "))
        assert response.readline() == b"\n"
    connection.close()


@pytest.mark.parametrize(("model", "output"), [("count", "NUMBER"), ("squares", "SQUARE")])
def test_generate_stream_sends_each_response(server: ServeProcess, model: str, output: str) -> None:
    connection = post(server, f"/v2/models/{model}/generate_stream", {"UPTO": 4})

    numbers = [event[output] for event in events(connection)]

    expected = [number if output == "NUMBER" else number * number for number in range(4)]
    assert sorted(numbers) == expected
    assert numbers == expected or model == "squares"  # the branches of an ensemble may overtake each other


def test_ordinary_and_decoupled_models_share_one_stream_of_the_stock_client(server: ServeProcess) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for model, name, value, label in (
            ("count", "UPTO", 3, "a"),
            ("square", "IN", 5, "b"),
            ("squares", "UPTO", 2, "c"),
            ("none", "IN", 0, "d"),
            ("square", "IN", 6, "e"),
        ):
            tensor = infer_input(grpcclient, name, np.array([value], np.int32))
            client.async_stream_infer(model, [tensor], request_id=label, enable_empty_final_response=True)
        client.stop_stream()

    found: dict[str, list[int | None]] = {}
    finals: list[str] = []
    errors = 0
    while not answers.empty():
        result, error = answers.get()
        if error is not None:
            errors += 1
            continue
        response = result.get_response()
        values = [int(np.frombuffer(raw, np.int32)[0]) for raw in response.raw_output_contents]
        found.setdefault(response.id, []).extend(values)
        if response.parameters["triton_final_response"].bool_param:
            finals.append(response.id)
    assert {label: sorted(values) for label, values in found.items()} == {  # type: ignore[type-var]  # numbers all
        "a": [0, 1, 2],
        "b": [25],
        "c": [0, 1],
        "e": [36],
    }
    assert sorted(finals) == ["a", "b", "c", "e"]
    assert finals.index("b") < finals.index("e")
    assert errors == 1
