"""API keys, for programs."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, or_, select
from sqlalchemy.orm import Session

from charonia.core.errors import conflict, invalid, not_found
from charonia.platform.database.connection import now
from charonia.platform.database.tables import GrantRow, KeyRow, ProjectRow, UserRow
from charonia.platform.people import audit, users
from charonia.platform.people.access import Grant, Principal, ProjectRole, digest_of, new_secret, permits
from charonia.platform.people.projects import demand_all, kept, new_rows
from charonia.platform.values import TIME_S_MAX, check_name

PREFIX = "charonia_"
"""Prefix of all keys, so that programs that search for leaked secrets recognise them."""

USED_S = 60.0
"""Resolution of the time of last use, in seconds."""


def create(
    session: Session, who: Principal, name: str, grants: Sequence[Grant], *, expires: float = 0.0
) -> tuple[KeyRow, str]:
    """Create a key, and return it with the secret, which is not stored.

    Args:
        who: The caller, who administers every project that it has a role in.
        expires: When it expires, in seconds since the epoch; 0 for never.
    """
    check_name("key", name)
    if not grants:
        raise invalid(f"key '{name}': expected at least one role, got none")
    if not 0 <= expires <= TIME_S_MAX:
        raise invalid(f"expires: expected 0 or a time up to the year 9999, got {expires:g}")
    demand_all(who, grants)  # before the name is looked up: a stranger must not learn which names there are
    if session.scalar(select(KeyRow.id).where(KeyRow.name == name)) is not None:
        raise conflict(f"key '{name}' already exists", hint="revoke it, or choose another name")
    secret = new_secret(PREFIX)
    key = KeyRow(
        name=name, digest=digest_of(secret), expires=expires, grants=new_rows(session, who, grants), created=now()
    )
    session.add(key)
    session.flush()
    audit.record(session, who, "key.create", name, {"roles": [audit.role_text(grant) for grant in grants]})
    return key, secret


def visible(session: Session, who: Principal, *, offset: int = 0, limit: int = 100) -> Sequence[KeyRow]:
    """Return keys by name: those with a role in a project that the caller administers."""
    return session.scalars(_administered(who).order_by(KeyRow.name).offset(offset).limit(limit)).all()


def revoke(session: Session, who: Principal, name: str) -> None:
    """Delete a key; calls with it are refused from now on."""
    key = session.scalar(_administered(who).where(KeyRow.name == name))
    if key is None:
        raise not_found(f"key '{name}' does not exist")
    demand_all(who, kept(key.grants))
    session.delete(key)
    audit.record(session, who, "key.revoke", name)


def holder(session: Session, secret: str, address: str) -> tuple[Principal, KeyRow] | None:
    """Return the owner of a key, None for one that is unknown or has expired."""
    key = session.scalar(select(KeyRow).where(KeyRow.digest == digest_of(secret), _is_valid()))
    return None if key is None else (principal(key, address), key)


def principal(key: KeyRow, address: str = "") -> Principal:
    """Return the caller that a key stands for."""
    return Principal.of(f"key {key.name}", kept(key.grants), address, f"key {key.digest}")


def standing(session: Session, id: str) -> Principal | None:
    """Return a caller, by `Principal.id`, with the roles that it has now; None if the key or user is gone."""
    kind, _, own = id.partition(" ")
    if kind == "key":
        key = session.scalar(select(KeyRow).where(KeyRow.digest == own, _is_valid()))
        return None if key is None else principal(key)
    user = session.scalar(select(UserRow).where(UserRow.issuer + " " + UserRow.subject == own))
    return None if user is None else users.principal(user)


def standing_deployer(session: Session, id: str, name: str, project: str) -> Principal:
    """Return a caller who is still a deployer of a project, for work that was ordered earlier. Raises ServingError."""
    who = standing(session, id)
    if who is None or not permits(who.demand, ProjectRole.DEPLOYER, project):
        raise invalid(f"'{name}' is no longer a deployer of project '{project}'", hint="let a deployer order it again")
    return who


def _is_valid() -> Any:
    return or_(KeyRow.expires == 0, KeyRow.expires > now())


def _administered(who: Principal) -> Select[KeyRow]:
    """Return the query for the keys with a role in a project that the caller administers."""
    projects = who.administered()
    query = select(KeyRow)
    return (
        query
        if projects is None
        else query.where(KeyRow.grants.any(GrantRow.project.has(ProjectRow.name.in_(projects))))
    )
