"""The addresses by which browsers sign in and out."""

from typing import Annotated

from fastapi import APIRouter, Cookie, Request, Response
from fastapi.responses import RedirectResponse

from charonia.platform.people import sessions
from charonia.platform.people.calls import Caller
from charonia.platform.settings import PlatformSettings
from charonia.platform.state import Here

LOGIN_PAGE = "/login"
LINK_PATH = "/login/link"

router = APIRouter(include_in_schema=False)


@router.get(LINK_PATH)
def use_link(request: Request, platform: Here, token: str = "") -> Response:
    """Sign in with a link, which works once."""
    with platform.database.transaction() as session:
        cookie = sessions.use_link(session, token, request.client.host if request.client else "")
    if cookie is None:
        return RedirectResponse(f"{LOGIN_PAGE}?problem=link", 303)
    return signed_in(platform.settings, cookie, "/")


@router.post("/logout")
def sign_out(platform: Here, who: Caller, charonia_session: Annotated[str, Cookie()] = "") -> Response:
    """End the session of the browser."""
    with platform.database.transaction() as session:
        sessions.end(session, charonia_session)
    response = RedirectResponse(LOGIN_PAGE, 303)
    response.delete_cookie(sessions.COOKIE)
    return response


def signed_in(settings: PlatformSettings, cookie: str, path: str) -> Response:
    """Return the response that gives a browser its session, and leads it to a page."""
    response = RedirectResponse(path, 303)
    response.set_cookie(
        sessions.COOKIE,
        cookie,
        max_age=int(sessions.SESSION_S),
        httponly=True,
        samesite="lax",
        secure=settings.is_https,
    )
    return response


def link(settings: PlatformSettings, secret: str) -> str:
    """Return the address that signs somebody in."""
    return f"{settings.url}{LINK_PATH}?token={secret}"


def local_path(path: str) -> str:
    """Return a path on this site, "/" for anything else."""
    is_local = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() and "\\" not in path
    return path if is_local else "/"
