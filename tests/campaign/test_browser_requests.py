"""A sample of the campaign's requests of browsers."""

import random
from pathlib import Path

import pytest
from tests.campaign.browser_requests import run


@pytest.mark.timeout(300)
def test_a_page_of_another_site_gets_403_and_everything_else_does_not(tmp_path: Path) -> None:
    found = run(tmp_path, random.Random(1), 400)

    assert {name: wrong for name, (_, wrong) in found.items() if wrong} == {}
    assert all(sent >= 200 for sent, _ in found.values())
    listeners = {f"one process, {name}" for name in ("metrics", "gRPC", "Sagemaker", "Vertex AI")}
    listeners |= {f"front ends, {name}" for name in ("metrics", "gRPC", "replica")}
    assert found.keys() == {"one process", "front ends", "platform", *listeners}
