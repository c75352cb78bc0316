"""Which interpreter checks a version: the platform's own, or that of an environment that has what its code imports."""

from collections.abc import Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.platform.models.conftest import add_files

from charonia.core.errors import invalid
from charonia.platform.database.tables import EnvironmentRow, ProjectRow
from charonia.platform.models import version_import
from charonia.platform.models.check import CheckingPython, absent_module
from charonia.platform.state import Platform

ABSENT = "load failed: ModuleNotFoundError: No module named 'own_tools.text'"


def add_environment(platform: Platform, name: str, packages: Sequence[str], state: str = "ready") -> None:
    python = platform.settings.data / "environments" / "1" / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    with platform.database.transaction() as session:
        project = session.query(ProjectRow).filter_by(name="default").one()
        row = EnvironmentRow(project_id=project.id, name=name, python="3.11", requirements="", digest=name, state=state)
        row.packages, row.created = [[package, "1.0"] for package in packages], 0.0
        session.add(row)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Checks of code that only environments have the imports of; returns the environments that checked."""
    made: list[str] = []

    def check(run: Any, name: str, files: Any, store: Any, python: CheckingPython, isolation: Any) -> dict[str, Any]:
        made.append(python.name)
        if not python.name:
            raise invalid(ABSENT)
        return {"is_checked": True, "checked_with": python.name}

    monkeypatch.setattr(version_import, "full_check", check)
    return made


def test_code_that_imports_what_an_environment_has_is_checked_with_it(
    admin: TestClient, platform: Platform, checks: list[str]
) -> None:
    add_environment(platform, "text", ["Own_Tools", "numpy"])
    add_environment(platform, "other", ["numpy"])
    add_environment(platform, "broken", ["own-tools"], state="failed")

    version = add_files(admin, "reader", {"config.pbtxt": b'backend: "python"', "1/model.py": b"import own_tools.text"})

    assert checks == ["", "text"]
    assert (version["state"], version["report"]["checked_with"]) == ("ready", "text")


def test_code_that_imports_what_no_environment_has_is_refused_with_its_words(
    admin: TestClient, platform: Platform, checks: list[str]
) -> None:
    add_environment(platform, "other", ["numpy"])

    version = add_files(admin, "reader", {"config.pbtxt": b'backend: "python"', "1/model.py": b"import own_tools.text"})

    assert checks == [""]
    assert version["state"] == "refused"
    assert ABSENT in str(version["report"])


@pytest.mark.parametrize(
    ("message", "module"),
    [(ABSENT, "own-tools"), ("ModuleNotFoundError: No module named 'PIL'", "pil"), ("ImportError: libGL.so.1", "")],
)
def test_the_package_is_that_of_the_message(message: str, module: str) -> None:
    assert absent_module(message) == module
