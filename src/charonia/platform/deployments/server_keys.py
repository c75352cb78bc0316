"""API keys of the servers of deployments. Any thread may call."""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence

from sqlalchemy import delete, select

from charonia.core.errors import conflict, invalid, not_found, unavailable
from charonia.platform.database.connection import Database, now
from charonia.platform.database.tables import DeploymentRow, ServerKeyRow
from charonia.platform.deployments.reads import find
from charonia.platform.deployments.views import NewServerKey, ServerKeyView
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.people import audit
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.targets.api import DeploymentTarget

SERVER_KEYS_MAX = 1000
"""Most API keys of a deployment."""

SCOPES = ("infer", "read", "admin")

_KEY_BYTES = 32
_KEY_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,128}")


class ServerKeys:
    """The API keys of servers."""

    def __init__(self, database: Database, targets: Mapping[str, DeploymentTarget], workloads: Workloads) -> None:
        self._database = database
        self._targets = targets
        self._workloads = workloads

    def list(self, who: Principal, project: str, name: str) -> Sequence[ServerKeyView]:
        """Return the API keys of the servers of a deployment."""
        with self._database.reading() as session:
            row, _ = find(session, who, project, name, ProjectRole.DEPLOYER)
            query = select(ServerKeyRow).where(ServerKeyRow.deployment_id == row.id).order_by(ServerKeyRow.name)
            return [
                ServerKeyView(key.name, key.scopes, key.author, key.created)
                for key in session.scalars(query.limit(SERVER_KEYS_MAX))
            ]

    def add(self, who: Principal, project: str, name: str, key_name: str, scopes: Sequence[str]) -> NewServerKey:
        """Create an API key of the servers of a deployment; it works immediately."""
        if not _KEY_NAME.fullmatch(key_name):
            raise invalid(f"name of a key: expected up to 128 of letters, digits and _.@-, got '{key_name}'")
        if not scopes or not set(scopes) <= set(SCOPES):
            raise invalid(f"scopes: expected some of {', '.join(SCOPES)}, got {', '.join(scopes) or 'none'}")
        secret = secrets.token_urlsafe(_KEY_BYTES)
        with self._database.transaction() as session:
            row, _ = find(session, who, project, name, ProjectRole.DEPLOYER)
            of_this = ServerKeyRow.deployment_id == row.id
            names = session.scalars(select(ServerKeyRow.name).where(of_this)).all()
            if key_name in names:
                raise conflict(f"deployment '{name}' already has a key '{key_name}'")
            if len(names) >= SERVER_KEYS_MAX:
                raise unavailable(f"deployment '{name}' has {len(names)} keys", hint="delete some of them")
            digest = hashlib.sha256(secret.encode()).hexdigest()
            session.add(
                ServerKeyRow(
                    deployment_id=row.id,
                    name=key_name,
                    scopes=sorted(set(scopes)),
                    digest=digest,
                    author=who.name,
                    created=now(),
                )
            )
            detail = {"key": key_name, "scopes": sorted(set(scopes))}
            audit.note(session, who, "deployment.key.add", f"{project}/{name}", detail, project_id=row.project_id)
        self._set_keys(row, project)
        return NewServerKey(key_name, sorted(set(scopes)), secret)

    def remove(self, who: Principal, project: str, name: str, key_name: str) -> None:
        """Delete an API key of the servers of a deployment; it stops working immediately."""
        with self._database.transaction() as session:
            row, _ = find(session, who, project, name, ProjectRole.DEPLOYER)
            of_key = (ServerKeyRow.deployment_id == row.id) & (ServerKeyRow.name == key_name)
            found = session.execute(delete(ServerKeyRow).where(of_key).returning(ServerKeyRow.id))
            if found.first() is None:
                raise not_found(f"deployment '{name}' has no key '{key_name}'")
            detail = {"key": key_name}
            audit.note(session, who, "deployment.key.remove", f"{project}/{name}", detail, project_id=row.project_id)
        self._set_keys(row, project)

    def _set_keys(self, row: DeploymentRow, project: str) -> None:
        with self._database.reading() as session:
            lines = self._workloads.key_lines(session, row.project_id, row.name)
        target = self._targets.get(row.target)
        if target is not None:
            target.set_keys(f"{project}/{row.name}", lines)
