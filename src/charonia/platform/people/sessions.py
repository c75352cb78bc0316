"""Sessions of browsers: started with a link or through single sign-on, identified by a cookie."""

from typing import NamedTuple

from sqlalchemy import delete, select
from sqlalchemy.orm import Session, joinedload

from charonia.platform.database.connection import now
from charonia.platform.database.tables import LoginLinkRow, SessionRow, UserRow
from charonia.platform.people import audit, users
from charonia.platform.people.access import Principal, digest_of, new_secret

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


def begin(session: Session, user: UserRow, address: str) -> str:
    """Start a session, and return the value of its cookie."""
    session.execute(delete(SessionRow).where(SessionRow.expires <= now()))
    secret = new_secret()
    session.add(
        SessionRow(
            digest=digest_of(secret), user_id=user.id, csrf=new_secret(), expires=now() + SESSION_S, created=now()
        )
    )
    audit.note(session, users.principal(user, address), "session.begin", users.principal(user).name)
    return secret


def use_link(session: Session, secret: str, address: str) -> str | None:
    """Start the session that a link permits; return the value of its cookie, None if the link is no longer valid."""
    session.execute(delete(LoginLinkRow).where(LoginLinkRow.expires <= now()))
    user_id = session.scalar(
        delete(LoginLinkRow).where(LoginLinkRow.digest == digest_of(secret)).returning(LoginLinkRow.user_id)
    )
    return None if user_id is None else begin(session, session.get_one(UserRow, user_id), address)


def visitor(session: Session, cookie: str, address: str) -> Visitor | None:
    """Return the user of a session cookie, None if the session has ended."""
    found = session.scalar(
        select(SessionRow)
        .options(joinedload(SessionRow.user))
        .where(SessionRow.digest == digest_of(cookie), SessionRow.expires > now())
    )
    return None if found is None else Visitor(users.principal(found.user, address), found.csrf)


def end(session: Session, cookie: str) -> None:
    session.execute(delete(SessionRow).where(SessionRow.digest == digest_of(cookie)))
