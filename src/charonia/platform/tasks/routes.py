"""The API of tasks: lists, logs, result files, cancellation."""

import mimetypes
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import FileResponse, StreamingResponse
from pydantic import BaseModel, Field

from charonia.core.errors import not_found
from charonia.platform.database.tables import TaskRow, copied
from charonia.platform.people import projects
from charonia.platform.people.calls import Caller
from charonia.platform.state import Limit, Platform, PlatformDep
from charonia.platform.tasks import queue
from charonia.platform.values import Number, Size, Text

LOG_PIECE_BYTES = 256 * 1024
"""Most bytes of a log in one answer."""

REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
"""A report is one file with its script. It may run its script, but has no access to the network or the session."""

router = APIRouter(prefix="/api/v1", tags=["tasks"])


class TaskBody(BaseModel):
    """A task."""

    id: int
    kind: str
    project: str
    subject: str = Field(description="Its object: an environment, MODEL/VERSION, a deployment.")
    state: str = Field(description="`waiting`, `running`, `done`, `failed` or `cancelled`.")
    progress: float = Field(description="From 0 to 1.")
    doing: str
    reason: str = Field(description="Why it has failed.")
    result: dict[str, Any]
    author: str
    created: float
    started: float = Field(description="0 before the start, as `ended`.")
    ended: float
    files: list[str] = Field(description="Result files; only for a single task.")

    @classmethod
    def of(cls, row: TaskRow, files: list[str] | None = None) -> "TaskBody":
        return copied(cls, row, project=row.project.name, files=files or [])


@router.get("/projects/{project}/tasks")
def list_tasks(
    platform: PlatformDep,
    who: Caller,
    project: Text,
    kind: Annotated[Text, Query(description="Only tasks of this kind.")] = "",
    before: Annotated[Number, Query(description="Only tasks with a smaller number; 0 for all.")] = 0,
    limit: Limit = 100,
) -> list[TaskBody]:
    """List the tasks of a project, newest first."""
    with platform.database.reading() as session:
        owner = projects.find(session, who, project)
        return [TaskBody.of(row) for row in queue.page(session, owner, kind=kind, before=before, limit=limit)]


@router.get("/tasks/{number}")
def get_task(platform: PlatformDep, who: Caller, number: Number) -> TaskBody:
    """Return a task."""
    with platform.database.reading() as session:
        row = queue.find(session, who, number)
        return TaskBody.of(row, _files(platform, number))


@router.get("/tasks/{number}/log")
def get_log(
    platform: PlatformDep,
    who: Caller,
    number: Number,
    offset: Annotated[Size, Query(description="Bytes that the caller has already.")] = 0,
) -> StreamingResponse:
    """Return the log of a task from an offset on; the header X-Log-Offset says where the next piece begins."""
    with platform.database.reading() as session:
        queue.find(session, who, number)
    piece = log_piece(platform, number, offset)
    headers = {"X-Log-Offset": str(offset + len(piece)), "Cache-Control": "no-store"}
    return StreamingResponse(iter([piece]), headers=headers, media_type="text/plain; charset=utf-8")


@router.post("/tasks/{number}/cancel")
def cancel_task(platform: PlatformDep, who: Caller, number: Number) -> TaskBody:
    """Cancel a task: immediately if it waits, as soon as it notices if it runs."""
    with platform.database.transaction() as session:
        return TaskBody.of(queue.cancel(session, who, number))


@router.get("/tasks/{number}/files/{name}")
def get_file(platform: PlatformDep, who: Caller, number: Number, name: Text) -> FileResponse:
    """Return a result file of a task, such as a report."""
    with platform.database.reading() as session:
        queue.find(session, who, number)
    if name not in _files(platform, number):
        raise not_found(f"task {number} has no result file '{name}'")
    headers = {"Content-Security-Policy": REPORT_POLICY, "Cache-Control": "no-store"}
    kind = mimetypes.guess_type(name)[0] or "text/plain"
    return FileResponse(platform.tasks.folder(number) / name, headers=headers, media_type=kind)


def log_piece(platform: Platform, number: int, offset: int) -> bytes:
    """Return a piece of the log of a task, from an offset on."""
    path = platform.tasks.folder(number) / "log"
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(LOG_PIECE_BYTES)


def _files(platform: Platform, number: int) -> list[str]:
    def found() -> Iterator[str]:
        folder = platform.tasks.folder(number)
        for path in folder.iterdir() if folder.exists() else ():
            if path.is_file() and path.name != "log":
                yield path.name

    return sorted(found())
