"""Credentials of this machine's owner at each start: a key for commands, and a link for a browser."""

from pathlib import Path

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from charonia.platform.data_folder import KEY_FILE, write_private
from charonia.platform.database.tables import KeyRow
from charonia.platform.people import keys, projects, users
from charonia.platform.people.access import Grant, Principal, ProjectRole
from charonia.platform.people.secrets import digest_of

KEY_NAME = "owner"


def prepare(session: Session, data: Path) -> str:
    """Create the initial records where they are missing, and return the secret of a link for the owner.

    The key in the data folder is kept as long as the platform knows it.
    """
    projects.ensure_default(session)
    path = data / KEY_FILE
    secret = path.read_text().strip() if path.exists() else ""
    if not secret or session.scalar(select(KeyRow.id).where(KeyRow.digest == digest_of(secret))) is None:
        session.execute(delete(KeyRow).where(KeyRow.name == KEY_NAME))
        platform = Principal("platform", everywhere=ProjectRole.ADMIN)
        write_private(path, keys.create(session, platform, KEY_NAME, [Grant(ProjectRole.ADMIN)])[1] + "\n")
    return users.new_link(session, users.owner(session))
