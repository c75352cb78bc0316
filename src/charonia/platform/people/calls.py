"""Authenticates calls: by an API key, or by the session cookie of a browser."""

import contextlib
import hmac
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import APIKeyCookie, HTTPAuthorizationCredentials, HTTPBearer

from charonia.core.errors import RefusalKind, ServingError
from charonia.platform import idempotency
from charonia.platform.database.connection import now
from charonia.platform.database.tables import KeyRow
from charonia.platform.people import keys, users
from charonia.platform.people.access import NotPermittedError, Principal
from charonia.platform.state import Platform, PlatformDep

CSRF_HEADER = "X-CSRF-Token"
CSRF_FIELD = "csrf"

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_FORM = "application/x-www-form-urlencoded"


async def _sent_token(request: Request) -> str:
    """Return the token that a browser sends with a change: a header, or a field of a form without files."""
    token = request.headers.get(CSRF_HEADER, "")
    if not token and request.method not in _SAFE and request.headers.get("content-type", "").startswith(_FORM):
        token = str((await request.form()).get(CSRF_FIELD, ""))
    return token


def caller(
    request: Request,
    platform: PlatformDep,
    token: Annotated[str, Depends(_sent_token)],
    bearer: Annotated[
        HTTPAuthorizationCredentials | None,
        Depends(HTTPBearer(scheme_name="key", description="An API key.", auto_error=False)),
    ],
    cookie: Annotated[
        str | None,
        Depends(
            APIKeyCookie(
                name=users.COOKIE,
                scheme_name="session",
                description=f"The session of a browser. Changes need its token, too, as {CSRF_HEADER}.",
                auto_error=False,
            )
        ),
    ],
) -> Principal:
    """Return the caller. `request.state.csrf` is then the token for forms, "" for an API key."""
    address = request.client.host if request.client else ""
    request.state.csrf = ""
    if bearer is not None:
        principal = _by_key(platform, bearer.credentials, address)
        idempotency.demand_first(platform.database, principal.name)
        return principal
    visitor = None
    if cookie:
        with platform.database.reading() as session:
            visitor = users.visitor(session, cookie, address)
    if visitor is None:
        raise NotPermittedError(
            RefusalKind.UNAUTHENTICATED, "expected an API key as 'Authorization: Bearer KEY', or a signed-in browser"
        )
    if request.method not in _SAFE and not hmac.compare_digest(token.encode(), visitor.csrf.encode()):
        raise NotPermittedError(
            RefusalKind.FORBIDDEN, f"expected the token of the session as {CSRF_HEADER}, got none or another"
        )
    request.state.csrf = visitor.csrf
    idempotency.demand_first(platform.database, visitor.principal.name)
    return visitor.principal


Caller = Annotated[Principal, Depends(caller)]
"""The caller, as a parameter of a route."""


def _by_key(platform: Platform, secret: str, address: str) -> Principal:
    with platform.database.reading() as session:
        found = keys.holder(session, secret, address)
    if found is None:
        raise NotPermittedError(RefusalKind.UNAUTHENTICATED, "the API key is unknown or has expired")
    principal, key = found
    if now() - key.used > keys.USED_S:
        with contextlib.suppress(ServingError), platform.database.transaction() as session:
            session.query(KeyRow).filter(KeyRow.id == key.id).update({"used": now()})
    return principal
