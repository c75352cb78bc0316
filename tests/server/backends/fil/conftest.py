"""What the tests of forests have in common."""

from collections.abc import Iterator

import pytest

for library in ("treelite", "xgboost", "lightgbm", "sklearn"):
    pytest.importorskip(library)

from tests.support.standing_template import StandingTemplate  # noqa: E402

from charonia.server.backends.fil import probe  # noqa: E402
from charonia.server.backends.python.template import WorkerTemplate  # noqa: E402


@pytest.fixture(scope="package", autouse=True)
def _one_template() -> Iterator[None]:
    """Files are tried in forks of one process, which imports the libraries once for all tests."""
    template = StandingTemplate([probe.__name__, "xgboost", "lightgbm"], {})

    def standing(prober: probe.Prober, library: str) -> WorkerTemplate:
        return template

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe.Prober, "_template", standing)
        yield
    template.end()
