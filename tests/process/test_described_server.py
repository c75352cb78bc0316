"""A server against its own OpenAPI document, by cases that schemathesis makes of it."""

from pathlib import Path

import pytest
from tests.support.described import of_server, unlike_its_document
from tests.support.models import identity

from charonia.testing.plugin import StartServer


@pytest.mark.timeout(600)
def test_every_call_answers_as_the_document_says(tmp_path: Path, charonia_server: StartServer) -> None:
    """400 is among the answers to what fits the document, which does not say how many elements a tensor has. The answer
    about a model that cannot be loaded is 500, as Triton's."""
    (tmp_path / "echo" / "1").mkdir(parents=True)
    (tmp_path / "echo" / "1" / "model.onnx").write_bytes(identity(dims=(16,)))
    server = charonia_server(tmp_path, http=True, control_mode="explicit", load_models=["*"])

    found = unlike_its_document(
        of_server(f"http://{server.http_url}"),
        {},
        operations=[
            {
                "include-path": "/v2/repository/models/{model}/load",
                "checks": {"not_a_server_error": {"enabled": False}, "positive_data_acceptance": {"enabled": False}},
            }
        ],
        positive_data_acceptance={"expected-statuses": ["2xx", "400", "404"]},
    )

    assert found == ""
