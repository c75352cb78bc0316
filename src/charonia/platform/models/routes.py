"""The API of the registry."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from pydantic import Field
from starlette.requests import ClientDisconnect

from charonia.core.errors import not_found, too_large
from charonia.platform.artifacts.manifest import from_json
from charonia.platform.models import follow, registry, uploads, version_import
from charonia.platform.models.records import (
    AddedVersion,
    ModelPage,
    ModelRecord,
    UploadRecord,
    VersionRecord,
)
from charonia.platform.models.registry import NOTES_CHARS_MAX, DetailsBody, VersionDifference
from charonia.platform.models.sources import VersionSource
from charonia.platform.people import projects
from charonia.platform.people.calls import Caller
from charonia.platform.state import Limit, Offset, Platform, PlatformDep
from charonia.platform.values import Number, RequestBody, Size, Text

PIECE_BYTES = 1024 * 1024
"""Bytes of a body that are collected before a write."""

HOOK_BYTES_MAX = 4 * 1024 * 1024
"""Longest body of a webhook."""

router = APIRouter(prefix="/api/v1/projects/{project}", tags=["models"])
hooks = APIRouter(tags=["models"])


class ModelBody(DetailsBody):
    """A model to create."""

    name: Text


class VersionBody(RequestBody):
    """A version to add."""

    source: VersionSource
    notes: Text = Field("", max_length=NOTES_CHARS_MAX)


class NotesBody(RequestBody):
    """Notes about a version."""

    notes: Text = Field(max_length=NOTES_CHARS_MAX)


class FileBody(RequestBody):
    """A file to upload."""

    path: Text
    size: Size


class UploadBody(RequestBody):
    """Files to upload."""

    files: list[FileBody]
    batch: Text = Field("", description="A batch that they are added to, empty for a new one.")


@router.get("/models")
def list_models(
    project: Text,
    who: Caller,
    platform: PlatformDep,
    search: Text = "",
    tag: Text = "",
    limit: Limit = 50,
    offset: Offset = 0,
) -> ModelPage:
    """Return the models of a project by name; `search` is a part of name, owner, description or a tag."""
    with platform.database.reading() as session:
        return registry.models(session, who, project, search=search, tag=tag, limit=limit, offset=offset)


@router.post("/models", status_code=201)
def make_model(project: Text, body: ModelBody, who: Caller, platform: PlatformDep) -> ModelRecord:
    """Create a model without versions."""
    with platform.database.transaction() as session:
        registry.create(session, who, project, body.name, body)
        return registry.model(session, who, project, body.name)


@router.get("/models/{model}")
def get_model(project: Text, model: Text, who: Caller, platform: PlatformDep) -> ModelRecord:
    """Return a model with its versions."""
    with platform.database.reading() as session:
        return registry.model(session, who, project, model)


@router.patch("/models/{model}")
def change_model(project: Text, model: Text, body: DetailsBody, who: Caller, platform: PlatformDep) -> ModelRecord:
    """Change the descriptive fields of a model."""
    with platform.database.transaction() as session:
        registry.change(session, who, project, model, body)
        return registry.model(session, who, project, model)


@router.delete("/models/{model}", status_code=204)
def delete_model(project: Text, model: Text, who: Caller, platform: PlatformDep) -> None:
    """Delete a model with all versions, unless a deployment uses it."""
    with platform.database.transaction() as session:
        registry.delete(session, who, project, model)


@router.post("/models/{model}/versions", status_code=202)
def add_version(project: Text, model: Text, body: VersionBody, who: Caller, platform: PlatformDep) -> AddedVersion:
    """Add a version, and the model if it does not exist. The task imports the files and checks them."""
    with platform.database.transaction() as session:
        return version_import.add(session, platform.uploads, who, project, model, body.source, body.notes)


@router.get("/models/{model}/follow")
def get_follow(project: Text, model: Text, who: Caller, platform: PlatformDep) -> follow.Follow:
    """Return the branch that a model follows."""
    with platform.database.reading() as session:
        return follow.get(session, who, project, model)


@router.get("/follows")
def list_follows(project: Text, who: Caller, platform: PlatformDep) -> Mapping[str, follow.Follow]:
    """Return the branches that models follow, by model."""
    with platform.database.reading() as session:
        return dict(follow.every(session, who, project))


@router.put("/models/{model}/follow")
def put_follow(
    project: Text, model: Text, body: follow.FollowBody, who: Caller, platform: PlatformDep
) -> follow.Follow:
    """Let a model follow a branch: a new commit adds a version, with the permissions that its caller has then."""
    with platform.database.transaction() as session:
        return follow.put(session, platform.workloads.secrets, who, project, model, body)


@router.delete("/models/{model}/follow", status_code=204)
def remove_follow(project: Text, model: Text, who: Caller, platform: PlatformDep) -> None:
    """Let a model follow no branch."""
    with platform.database.transaction() as session:
        follow.remove(session, who, project, model)


@hooks.post("/hooks/{project}/{model}", status_code=202, include_in_schema=False)
async def receive_hook(project: Text, model: Text, platform: PlatformDep, request: Request) -> AddedVersion | None:
    """Receive a webhook of GitHub, GitLab or Gitea. Its signature is checked; there is no caller."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > HOOK_BYTES_MAX:
            raise too_large(f"body of the push: expected at most {HOOK_BYTES_MAX} bytes, got more")
    return await run_in_threadpool(_receive, platform, project, model, request.headers, body)


def _receive(
    platform: Platform, project: str, model: str, headers: Mapping[str, str], body: bytes
) -> AddedVersion | None:
    with platform.database.transaction() as session:
        secrets = platform.workloads.secrets
        return follow.received(session, platform.uploads, secrets, project, model, headers, body)


@router.get("/models/{model}/versions/{number}")
def get_version(project: Text, model: Text, number: Number, who: Caller, platform: PlatformDep) -> VersionRecord:
    """Return a version: its signature, its files, the result of its check."""
    with platform.database.reading() as session:
        return registry.version(session, who, project, model, number)


@router.patch("/models/{model}/versions/{number}")
def annotate_version(
    project: Text, model: Text, number: Number, body: NotesBody, who: Caller, platform: PlatformDep
) -> VersionRecord:
    """Set the notes of a version."""
    with platform.database.transaction() as session:
        registry.annotate(session, who, project, model, number, body.notes)
        return registry.version(session, who, project, model, number)


@router.delete("/models/{model}/versions/{number}", status_code=204)
def delete_version(project: Text, model: Text, number: Number, who: Caller, platform: PlatformDep) -> None:
    """Delete a version, unless a deployment uses it."""
    with platform.database.transaction() as session:
        registry.delete_version(session, who, project, model, number)


@router.post("/models/{model}/versions/{number}/check", status_code=202)
def check_version(project: Text, model: Text, number: Number, who: Caller, platform: PlatformDep) -> AddedVersion:
    """Check a version again, with the current environments."""
    with platform.database.transaction() as session:
        return registry.check_again(session, who, project, model, number)


@router.get("/models/{model}/versions/{number}/difference")
def compare_versions(
    project: Text,
    model: Text,
    number: Number,
    who: Caller,
    platform: PlatformDep,
    before: Annotated[Number, Query(alias="from")],
) -> VersionDifference:
    """Return the differences from another version, `from`: the configuration, the files."""
    with platform.database.reading() as session:
        return registry.compare(session, who, project, model, before, number)


@router.get("/models/{model}/versions/{number}/files/{path:path}", response_class=FileResponse)
def get_file(
    project: Text, model: Text, number: Number, path: Text, who: Caller, platform: PlatformDep
) -> FileResponse:
    """Return a file of a version."""
    with platform.database.reading() as session:
        owner = registry.find(session, projects.find(session, who, project), model)
        files = from_json(registry.find_version(session, owner, number).files)
    if path not in files:
        raise not_found(f"version {number} of '{model}' has no file '{path}'")
    headers = {"ETag": f'"{files[path].sha256}"', "X-Content-Type-Options": "nosniff"}
    local = platform.artifacts.fetch(files[path])
    return FileResponse(local, headers=headers, media_type="application/octet-stream", filename=Path(path).name)


@router.post("/uploads", status_code=201)
def begin_uploads(project: Text, body: UploadBody, who: Caller, platform: PlatformDep) -> list[UploadRecord]:
    """Begin to upload files. When all have arrived, their batch is the place of a version's source."""
    files = [(file.path, file.size) for file in body.files]
    with platform.database.transaction() as session:
        return uploads.begin(session, platform.uploads, who, project, files, body.batch)


@router.get("/uploads")
def list_uploads(project: Text, batch: Text, who: Caller, platform: PlatformDep) -> list[UploadRecord]:
    """Return the files of a batch, and how much of each has arrived."""
    with platform.database.reading() as session:
        return uploads.records(session, platform.uploads, who, project, batch)


@router.delete("/uploads", status_code=204)
def drop_uploads(project: Text, batch: Text, who: Caller, platform: PlatformDep) -> None:
    """Discard the files of a batch."""
    with platform.database.transaction() as session:
        uploads.drop(session, platform.uploads, who, project, batch)


@router.get("/uploads/{key}")
def get_upload(project: Text, key: Text, who: Caller, platform: PlatformDep) -> UploadRecord:
    """Return how much of a file has arrived; the upload continues from there."""
    with platform.database.reading() as session:
        return uploads.record(platform.uploads, uploads.find(session, who, project, key))


@router.put(
    "/uploads/{key}",
    max_body_size=uploads.FILE_BYTES_MAX,
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
)
async def send_piece(
    project: Text,
    key: Text,
    request: Request,
    who: Caller,
    platform: PlatformDep,
    offset: Annotated[Size, Query(description="Where in the file the body begins.")] = 0,
) -> UploadRecord:
    """Write a piece of a file, or all the rest of it. Received bytes are kept when the connection breaks."""

    def find() -> tuple[int, str, str]:
        with platform.database.reading() as session:
            row = uploads.find(session, who, project, key)
            return row.size, row.batch, row.path

    size, batch, path = await run_in_threadpool(find)
    writing = platform.uploads.writing(key, offset, size)
    writer = await run_in_threadpool(writing.__enter__)
    try:
        waiting = bytearray()
        async for piece in request.stream():
            waiting += piece
            if len(waiting) >= PIECE_BYTES:
                await run_in_threadpool(writer.write, bytes(waiting))
                waiting.clear()
        await run_in_threadpool(writer.write, bytes(waiting))
    except ClientDisconnect:
        await run_in_threadpool(writer.write, bytes(waiting))
        raise
    finally:
        writing.__exit__(None, None, None)
    return UploadRecord(key, batch, path, size, await run_in_threadpool(platform.uploads.received, key))
