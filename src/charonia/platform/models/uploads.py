"""Uploads of users: started, found, removed."""

import secrets
from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from charonia.core.errors import Code, ServingError, conflict, invalid, not_found, too_large, too_many
from charonia.platform.artifacts.manifest import FILES_MAX, check_together, safe_path
from charonia.platform.artifacts.uploads import UploadFolder
from charonia.platform.database.connection import now
from charonia.platform.database.tables import ProjectRow, UploadRow, copied
from charonia.platform.models.records import UploadRecord
from charonia.platform.people import projects
from charonia.platform.people.access import Principal, ProjectRole

FILE_BYTES_MAX = 2**40
"""Size of a file."""

UPLOADS_MAX = 5 * FILES_MAX
"""Most files of a project that are uploaded at the same time."""

UPLOADS_BYTES_MAX = 2 * FILE_BYTES_MAX
"""Most bytes of the files of a project that are uploaded at the same time."""

UNUSED_S_MAX = 24 * 3600.0
"""An upload without progress for this time is discarded."""


def begin(
    session: Session,
    folder: UploadFolder,
    who: Principal,
    project: str,
    files: Sequence[tuple[str, int]],
    batch: str = "",
) -> list[UploadRecord]:
    """Begin to upload files.

    Args:
        batch: An existing batch to add them to, "" for a new one.

    Raises:
        TooManyError: The project uploads too many files.
        TooLargeError: They have too many bytes.
        StorageFullError: There is no room for them.
    """
    found = projects.find(session, who, project, ProjectRole.DEPLOYER)
    remove_abandoned(session, folder)
    earlier = list_batch(session, found, batch) if batch else []
    if not files or len(files) + len(earlier) > FILES_MAX:
        raise invalid(f"expected 1 to {FILES_MAX} files, got {len(files) + len(earlier)}", hint="send an archive")
    paths = [safe_path(path) for path, _ in files]
    check_together([*paths, *(row.path for row in earlier)])
    for path, size in files:
        if not 0 <= size <= FILE_BYTES_MAX:
            raise invalid(f"file '{path}': expected a size of 0 to {FILE_BYTES_MAX} bytes, got {size}")
    own = select(func.count(), func.sum(UploadRow.size)).where(UploadRow.project_id == found.id)
    count, sent_bytes = session.execute(own).one()
    hint = "complete or delete other uploads; those without progress are removed after a day"
    if count + len(files) > UPLOADS_MAX:
        raise too_many(
            f"uploads to '{project}': expected at most {UPLOADS_MAX} files at a time, got {count + len(files)}",
            hint=hint,
        )
    size = int(sent_bytes or 0) + sum(size for _, size in files)
    if size > UPLOADS_BYTES_MAX:
        raise too_large(
            f"uploads to '{project}': expected at most {UPLOADS_BYTES_MAX} bytes at a time, got {size}", hint=hint
        )
    batch = batch or secrets.token_hex(16)
    rows = [
        UploadRow(
            key=secrets.token_hex(16),
            project_id=found.id,
            path=path,
            batch=batch,
            size=size,
            author=who.name,
            created=now(),
        )
        for path, (_, size) in zip(paths, files, strict=True)
    ]
    folder.begin({row.key: row.size for row in rows})
    session.add_all(rows)
    return [UploadRecord(row.key, batch, row.path, row.size, 0) for row in rows]


def find(session: Session, who: Principal, project: str, key: str) -> UploadRow:
    """Return a file being uploaded."""
    found = projects.find(session, who, project, ProjectRole.DEPLOYER)
    row = session.scalar(select(UploadRow).where(UploadRow.project_id == found.id, UploadRow.key == key))
    if row is None:
        raise not_found(f"upload '{key}' does not exist", hint="start again: it was imported, or has expired")
    if row.is_taken:
        raise ServingError(Code.CANCELLED, f"upload '{key}' is complete and being imported")
    return row


def records(session: Session, folder: UploadFolder, who: Principal, project: str, batch: str) -> list[UploadRecord]:
    """Return the files of a batch, and how much of each has arrived."""
    found = projects.find(session, who, project, ProjectRole.DEPLOYER)
    return [record(folder, row) for row in list_batch(session, found, batch)]


def record(folder: UploadFolder, row: UploadRow) -> UploadRecord:
    return copied(UploadRecord, row, received=folder.received(row.key))


def list_batch(session: Session, project: ProjectRow, batch: str) -> Sequence[UploadRow]:
    """Return the files of a batch."""
    query = select(UploadRow).where(UploadRow.project_id == project.id, UploadRow.batch == batch)
    rows = session.scalars(query.order_by(UploadRow.id)).all()
    if not rows:
        raise not_found(f"upload batch '{batch}' does not exist", hint="start again: it was imported, or has expired")
    return rows


def take(session: Session, folder: UploadFolder, project: ProjectRow, batch: str) -> Sequence[UploadRow]:
    """Seal the files of a batch for a version: uploads to them end."""
    rows = list_batch(session, project, batch)
    if any(row.is_taken for row in rows):
        raise conflict(f"upload batch '{batch}' is already being imported as a version")
    for row in rows:
        received = folder.received(row.key)
        if received != row.size:
            raise invalid(
                f"file '{row.path}': expected {row.size} bytes, {received} have arrived", hint="upload the rest first"
            )
    for row in rows:
        row.is_taken = True
    return rows


def drop(session: Session, folder: UploadFolder, who: Principal, project: str, batch: str) -> None:
    """Discard the files of a batch."""
    found = projects.find(session, who, project, ProjectRole.DEPLOYER)
    rows = list_batch(session, found, batch)
    if any(row.is_taken for row in rows):
        raise conflict(f"upload batch '{batch}' is being imported as a version")
    remove(session, folder, rows)


def remove(session: Session, folder: UploadFolder, rows: Sequence[UploadRow]) -> None:
    """Remove files, including incomplete ones."""
    session.execute(delete(UploadRow).where(UploadRow.id.in_([row.id for row in rows])))
    for row in rows:
        folder.remove(row.key)


def remove_abandoned(session: Session, folder: UploadFolder) -> int:
    """Remove uploads without progress for `UNUSED_S_MAX`, and orphaned files; return their number."""
    keys = folder.unused(UNUSED_S_MAX)
    taken = set(session.scalars(select(UploadRow.key).where(UploadRow.is_taken)))
    gone = [key for key in keys if key not in taken]
    for start in range(0, len(gone), 500):
        session.execute(delete(UploadRow).where(UploadRow.key.in_(gone[start : start + 500])))
    for key in gone:
        folder.remove(key)
    return len(gone)
