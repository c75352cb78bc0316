"""The API against its own OpenAPI document, by cases that schemathesis makes of it."""

import pytest
from fastapi import FastAPI
from tests.support.described import of_app, unlike_its_document

from charonia.platform.app import OPENAPI_PATH
from charonia.platform.state import Platform


@pytest.mark.timeout(900)
def test_every_call_answers_as_the_document_says(app: FastAPI, platform: Platform, link: str) -> None:
    """Nothing works in the background, so what the cases create waits.

    400 is among the answers to what fits the document: names, specifications and requirements have rules that a schema
    cannot state.
    """
    key = (platform.settings.data / "owner.key").read_text().strip()
    expected = ["2xx", "400", "401", "403", "404", "409"]

    found = unlike_its_document(
        of_app(OPENAPI_PATH, app),
        {"Authorization": f"Bearer {key}"},
        positive_data_acceptance={"expected-statuses": expected},
    )

    assert found == ""
