import pytest
from tests.support import python_model


@pytest.fixture(params=["process", "thread"])
def execution_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test twice: with models in worker processes and in threads."""
    mode = str(request.param)
    monkeypatch.setattr(python_model, "default_mode", mode)
    return mode
