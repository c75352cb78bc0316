"""What holds for the tests of the engine."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def scheduler_fails() -> None:
    """Say that a scheduler raises in the test."""


@pytest.fixture(autouse=True)
def no_scheduler_failed(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail the test in which a scheduler raised: its requests were all answered, but not as they should have been."""
    yield
    if "scheduler_fails" not in request.fixturenames:
        said = [record.getMessage() for record in caplog.get_records("call")]
        assert not [text for text in said if text.startswith("the scheduler of model")]
