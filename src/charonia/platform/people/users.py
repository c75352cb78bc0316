"""Users, who sign in with a link or through single sign-on, and the sessions of their browsers."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import delete, select
from sqlalchemy.orm import Session, joinedload

from charonia.core.errors import invalid, not_found
from charonia.platform.database.connection import now
from charonia.platform.database.tables import NAME_CHARS_MAX, LoginLinkRow, ProjectRow, SessionRow, UserRow
from charonia.platform.people import audit
from charonia.platform.people.access import Grant, Principal, ProjectRole, digest_of, new_secret
from charonia.platform.people.oidc import Identity
from charonia.platform.people.projects import kept, new_rows

LOCAL = "local"
"""Issuer of users who sign in with links."""

OWNER = "owner"
"""Subject of the owner of this machine."""

EMAIL_CHARS_MAX = 255

LINK_S = 24 * 3600.0
"""Lifetime of a link."""


def principal(user: UserRow, address: str = "") -> Principal:
    """Return a user with their roles, as the audit log names them."""
    name = f"{user.name} <{user.email}>" if user.email else user.name
    return Principal.of(name[:NAME_CHARS_MAX], kept(user.grants), address, f"user {user.issuer} {user.subject}")


def owner(session: Session) -> UserRow:
    """Return the owner of this machine, who administers everything; created if missing."""
    user = _find(session, LOCAL, OWNER) or _new(session, LOCAL, OWNER, "owner", "")
    _let_administer(session, user)
    return user


def create(session: Session, who: Principal, name: str, email: str = "") -> UserRow:
    """Create a user who signs in with links."""
    who.demand(ProjectRole.ADMIN)
    if not 0 < len(name.strip()) <= NAME_CHARS_MAX or not name.isprintable():
        raise invalid(f"name of a user: expected 1 to {NAME_CHARS_MAX} printable characters, got '{name}'")
    if len(email) > EMAIL_CHARS_MAX or not email.isprintable():
        raise invalid(f"email of a user: expected at most {EMAIL_CHARS_MAX} printable characters, got '{email[:80]}'")
    user = _new(session, LOCAL, new_secret(), name.strip(), email)
    audit.record(session, who, "user.create", principal(user).name)
    return user


def known(session: Session, who: Principal, *, offset: int = 0, limit: int = 100) -> Sequence[UserRow]:
    """Return users by name."""
    who.administered()
    return session.scalars(select(UserRow).order_by(UserRow.name, UserRow.id).offset(offset).limit(limit)).all()


def link(session: Session, who: Principal, user_id: int) -> str:
    """Return the secret of a link that signs a user in, one time, within `LINK_S`."""
    who.demand(ProjectRole.ADMIN)
    user = _get(session, user_id)
    audit.record(session, who, "user.link", principal(user).name)
    return new_link(session, user)


def new_link(session: Session, user: UserRow) -> str:
    """Return the secret of a link that signs a user in."""
    secret = new_secret()
    session.add(LoginLinkRow(digest=digest_of(secret), user_id=user.id, expires=now() + LINK_S, created=now()))
    return secret


def set_role(session: Session, who: Principal, user_id: int, project: str, grant: Grant | None) -> UserRow:
    """Set the role of a user in a project; None removes it.

    Args:
        project: The project, "" for all.
    """
    who.demand(ProjectRole.ADMIN, project)
    user = _get(session, user_id)
    user.grants = [row for row in user.grants if (row.project.name if row.project else "") != project]
    user.grants += new_rows(session, who, [grant] if grant else [])
    detail = {"project": project or "*", "role": audit.role_text(grant) if grant else "none"}
    project_id = session.scalar(select(ProjectRow.id).where(ProjectRow.name == project)) if project else None
    audit.record(session, who, "user.role", principal(user).name, detail, project_id=project_id)
    return user


def remove(session: Session, who: Principal, user_id: int) -> None:
    """Delete a user, with their sessions."""
    who.demand(ProjectRole.ADMIN)
    user = _get(session, user_id)
    audit.record(session, who, "user.remove", principal(user).name)
    session.delete(user)


def signed_in(session: Session, who: Identity, *, is_admin: bool) -> UserRow:
    """Return the user whom a provider has authenticated, created if new; administrators get their role."""
    user = _find(session, who.issuer, who.subject) or _new(session, who.issuer, who.subject, who.name, who.email)
    user.name, user.email = who.name[:NAME_CHARS_MAX], who.email
    if is_admin:
        _let_administer(session, user)
    return user


def _let_administer(session: Session, user: UserRow) -> None:
    if principal(user).everywhere is not ProjectRole.ADMIN:
        user.grants = new_rows(session, Principal("platform", everywhere=ProjectRole.ADMIN), [Grant(ProjectRole.ADMIN)])


def _new(session: Session, issuer: str, subject: str, name: str, email: str) -> UserRow:
    user = UserRow(issuer=issuer, subject=subject, name=name[:NAME_CHARS_MAX], email=email, grants=[], created=now())
    session.add(user)
    session.flush()
    return user


def _find(session: Session, issuer: str, subject: str) -> UserRow | None:
    return session.scalar(select(UserRow).where(UserRow.issuer == issuer, UserRow.subject == subject))


def _get(session: Session, user_id: int) -> UserRow:
    user = session.get(UserRow, user_id)
    if user is None:
        raise not_found(f"user {user_id} does not exist")
    return user


COOKIE = "charonia_session"

SESSION_S = 14 * 24 * 3600.0
"""Time after which users must sign in again."""


class Visitor(NamedTuple):
    """A signed-in user of a browser.

    Attributes:
        csrf: Token that their forms must send with a change.
    """

    principal: Principal
    csrf: str


def begin_session(session: Session, user: UserRow, address: str) -> str:
    """Start a session, and return the value of its cookie."""
    session.execute(delete(SessionRow).where(SessionRow.expires <= now()))
    secret = new_secret()
    session.add(
        SessionRow(
            digest=digest_of(secret), user_id=user.id, csrf=new_secret(), expires=now() + SESSION_S, created=now()
        )
    )
    audit.record(session, principal(user, address), "session.begin", principal(user).name)
    return secret


def use_link(session: Session, secret: str, address: str) -> str | None:
    """Start the session that a link permits; return the value of its cookie, None if the link is no longer valid."""
    session.execute(delete(LoginLinkRow).where(LoginLinkRow.expires <= now()))
    user_id = session.scalar(
        delete(LoginLinkRow).where(LoginLinkRow.digest == digest_of(secret)).returning(LoginLinkRow.user_id)
    )
    return None if user_id is None else begin_session(session, session.get_one(UserRow, user_id), address)


def visitor(session: Session, cookie: str, address: str) -> Visitor | None:
    """Return the user of a session cookie, None if the session has ended."""
    found = session.scalar(
        select(SessionRow)
        .options(joinedload(SessionRow.user))
        .where(SessionRow.digest == digest_of(cookie), SessionRow.expires > now())
    )
    return None if found is None else Visitor(principal(found.user, address), found.csrf)


def end_session(session: Session, cookie: str) -> None:
    session.execute(delete(SessionRow).where(SessionRow.digest == digest_of(cookie)))
