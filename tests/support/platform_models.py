"""Versions of models in the tables and the store of a platform, as the registry has them when they are checked."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from sqlalchemy import select

from charonia.platform.artifacts.manifest import digest, size, to_json
from charonia.platform.artifacts.store import open_artifacts
from charonia.platform.database.connection import Database, now
from charonia.platform.database.tables import ModelRow, ProjectRow, VersionRow
from charonia.platform.jobs.commands import PerfJob, TuneJob


def add_version(
    database: Database,
    data: Path,
    model: str,
    files: Mapping[str, bytes],
    *,
    state: str = "ready",
    runs_code: bool = False,
    project: str = "default",
    artifacts: str = "",
) -> int:
    """Add a version of a model and return its number.

    Args:
        data: The data folder, with the store.
        model: Name of the model, which is made if there is none.
        files: Content by path in the model's folder; those of the version lie in `1/`.
        project: Its project, which is made if there is none.
        artifacts: Address of the store, "" for a folder in the data folder.
    """
    store = open_artifacts(artifacts, data)
    manifest = {path: store.add([content], what=path) for path, content in files.items()}
    with database.transaction() as session:
        found = session.scalar(select(ProjectRow).where(ProjectRow.name == project))
        if found is None:
            found = ProjectRow(name=project, created=now())
            session.add(found)
            session.flush()
        row = session.scalar(select(ModelRow).where(ModelRow.project_id == found.id, ModelRow.name == model))
        if row is None:
            row = ModelRow(project_id=found.id, name=model, created=now())
            session.add(row)
            session.flush()
        number = len(row.versions) + 1
        session.add(
            VersionRow(
                model_id=row.id,
                number=number,
                state=state,
                digest=digest(manifest),
                size=size(manifest),
                files=to_json(manifest),
                runs_code=runs_code,
                created=now(),
            )
        )
    return number


def short_levels(monkeypatch: pytest.MonkeyPatch, requests: int = 60) -> None:
    """Let each level of a measurement be of three windows of so many requests: its precision is of no interest."""
    command = PerfJob.command

    def short(job: PerfJob, url: str, folder: str) -> list[str]:
        given = [each if each != "adaptive" else "count_windows" for each in command(job, url, folder)]
        return [*given, f"--measurement-request-count={requests}", "--stability-percentage=99", "--max-trials=3"]

    monkeypatch.setattr(PerfJob, "command", short)


def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches take six seconds."""
    command = TuneJob.command
    monkeypatch.setattr(
        TuneJob, "command", lambda job, *given: command(job.model_copy(update={"minutes": 0.1}), *given)
    )
