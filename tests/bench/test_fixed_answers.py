"""Clients take the server with fixed responses for a real one, over both protocols."""

from collections.abc import Iterator

import numpy as np
import pytest
from bench.models import MODEL
from bench.servers import Server

from charonia.client import Client


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("fixed:identity") as server:
        yield server


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_inferences_and_the_start_of_a_load_generator_are_answered(server: Server, protocol: str) -> None:
    before = server.inference_count()
    with Client(f"{protocol}://{getattr(server, protocol)}") as client:
        results = [client.infer(MODEL, {"INPUT0": np.zeros(16, np.float32)})["OUTPUT0"] for _ in range(3)]

        assert [output.shape for output in client.model_metadata(MODEL).outputs] == [(16,)]
        assert client.model_config(MODEL)["name"] == MODEL
        assert str(client.statistics(MODEL)[0]["inference_count"]) == str(before + 3)
    assert [result.tolist() for result in results] == 3 * [list(range(16))]
    assert server.inference_count() == before + 3
