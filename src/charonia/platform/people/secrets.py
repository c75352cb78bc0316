"""Secrets of a project: values that calls and revisions use by name, encrypted in the database, never shown again."""

import base64
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from joserfc.jwk import OctKey
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from charonia.core.errors import internal, invalid, not_found, unavailable
from charonia.platform.data_folder import write_private
from charonia.platform.database.connection import now
from charonia.platform.database.tables import SecretRow, named
from charonia.platform.people import audit, projects
from charonia.platform.people.access import Principal, ProjectRole, seal, unseal

KEY_FILE = "secrets.key"
"""In the data folder: the key with which all secrets are encrypted. Without it, they cannot be read."""

SECRETS_MAX = 200
"""Most secrets of a project."""

VALUE_BYTES_MAX = 32 * 1024

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_KEY_BYTES = 32


class ProjectSecrets:
    """The secrets of all projects.

    Args:
        data: The data folder, with the key.
    """

    def __init__(self, data: Path) -> None:
        self._path = data / KEY_FILE
        self._key: OctKey | None = None

    def put(self, session: Session, who: Principal, project: str, name: str, value: str) -> None:
        """Create a secret, or replace its value."""
        found = projects.find(session, who, project, ProjectRole.DEPLOYER)
        if not _NAME.fullmatch(name):
            raise invalid(f"name of a secret: expected up to 128 of letters, digits and _.-, got '{name}'")
        if not value or len(value.encode()) > VALUE_BYTES_MAX:
            raise invalid(f"secret '{name}': expected 1 to {VALUE_BYTES_MAX} bytes, got {len(value.encode())}")
        row = named(session, SecretRow, found.id, name)
        if row is None:
            count = session.scalar(select(func.count()).where(SecretRow.project_id == found.id)) or 0
            if count >= SECRETS_MAX:
                raise unavailable(f"project '{project}' has {count} secrets", hint="delete some of them")
            row = SecretRow(project_id=found.id, name=name)
            session.add(row)
        plain = {"of": [found.id, name], "value": value}  # a row that is copied elsewhere is not valid
        row.value, row.author, row.created = seal(plain, self._oct()), who.name, now()
        audit.record(session, who, "secret.put", f"{project}/{name}", project_id=found.id)

    def remove(self, session: Session, who: Principal, project: str, name: str) -> None:
        found = projects.find(session, who, project, ProjectRole.DEPLOYER)
        of_name = (SecretRow.project_id == found.id) & (SecretRow.name == name)
        if session.execute(delete(SecretRow).where(of_name).returning(SecretRow.id)).first() is None:
            raise not_found(f"project '{project}' has no secret '{name}'")
        audit.record(session, who, "secret.remove", f"{project}/{name}", project_id=found.id)

    def list(self, session: Session, who: Principal, project: str) -> Sequence[SecretRow]:
        """Return the secrets of a project by name; only their names, authors and times are for display."""
        found = projects.find(session, who, project, ProjectRole.DEPLOYER)
        query = select(SecretRow).where(SecretRow.project_id == found.id).order_by(SecretRow.name)
        return session.scalars(query).all()

    def value(self, session: Session, project_id: int, name: str) -> str:
        """Return the value of a secret, for the platform's own use: callers never get it."""
        row = named(session, SecretRow, project_id, name)
        if row is None:
            raise not_found(f"secret '{name}' does not exist in this project", hint="create it first")
        found = unseal(row.value, self._oct())
        if found.get("of") != [project_id, name]:
            raise internal(f"secret '{name}' cannot be decrypted with '{self._path}'", hint="enter its value again")
        return str(found["value"])

    def _oct(self) -> OctKey:
        if self._key is None:
            if not self._path.exists():
                write_private(self._path, base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode() + "\n")
            self._key = OctKey.import_key(base64.b64decode(self._path.read_text()))
        return self._key
