"""Routes for signing in and out."""

import logging

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from charonia.core.errors import Code, ServingError, invalid, not_found
from charonia.platform.people import users
from charonia.platform.people.calls import Caller
from charonia.platform.people.oidc import CALLBACK_PATH, SIGN_IN_S, Provider
from charonia.platform.settings import PlatformSettings
from charonia.platform.state import Platform, PlatformDep
from charonia.platform.values import Text

LOGIN_PAGE = "/login"
LINK_PATH = "/login/link"
SIGN_ON_PATH = "/login/sso"

SIGN_IN_COOKIE = "charonia_sign_in"

NEXT_CHARS_MAX = 2000
"""Longest path of the page to return to: a cookie holds it."""

_log = logging.getLogger(__name__)

router = APIRouter(include_in_schema=False)


@router.get(LINK_PATH)
def use_link(request: Request, platform: PlatformDep, token: Text = "") -> Response:
    """Sign in with a link, which works one time."""
    with platform.database.transaction() as session:
        cookie = users.use_link(session, token, _address(request))
    return _not_signed_in("link") if cookie is None else _signed_in(platform.settings, cookie, "/")


@router.get(SIGN_ON_PATH)
def go_to_provider(request: Request, platform: PlatformDep, next: Text = "/") -> Response:
    """Send a browser to the provider of single sign-on."""
    try:
        address, cookie = _provider(platform).send(_address(request), local_path(next))
    except ServingError as error:
        return _explained(error)
    response = RedirectResponse(address, 303)
    response.set_cookie(
        SIGN_IN_COOKIE,
        cookie,
        max_age=int(SIGN_IN_S),
        path=LOGIN_PAGE,
        httponly=True,
        samesite="lax",
        secure=platform.settings.is_https,
    )
    return response


@router.get(CALLBACK_PATH)
def come_back(request: Request, platform: PlatformDep, code: Text = "", state: Text = "") -> Response:
    """Sign in a user who returns from the provider."""
    try:
        provider = _provider(platform)
        sent = provider.returned(request.cookies.get(SIGN_IN_COOKIE, ""), state)
        if not code:
            raise invalid("single sign-on: the provider sent the browser back without a code")
        who = provider.identity(code, sent)
        with platform.database.transaction() as session:
            is_admin = bool(who.email) and who.email.lower() in (a.lower() for a in platform.settings.oidc.admins)
            user = users.signed_in(session, who, is_admin=is_admin)
            cookie = users.begin_session(session, user, _address(request))
    except ServingError as error:
        return _explained(error)
    response = _signed_in(platform.settings, cookie, sent.next)
    response.delete_cookie(SIGN_IN_COOKIE, path=LOGIN_PAGE)
    return response


@router.post("/logout")
def sign_out(request: Request, platform: PlatformDep, who: Caller) -> Response:
    """End the session of the browser."""
    with platform.database.transaction() as session:
        users.end_session(session, request.cookies.get(users.COOKIE, ""))
    response = RedirectResponse(LOGIN_PAGE, 303)
    response.delete_cookie(users.COOKIE)
    return response


def link(settings: PlatformSettings, secret: str) -> str:
    return f"{settings.url}{LINK_PATH}?token={secret}"


def local_path(path: str) -> str:
    """Return a path on this site, "/" for anything else."""
    is_local = path.startswith("/") and not path.startswith("//") and path.isprintable() and "\\" not in path
    return path if is_local and len(path.encode()) <= NEXT_CHARS_MAX else "/"


def _provider(platform: Platform) -> Provider:
    if platform.provider is None:
        raise not_found("this platform has no single sign-on", hint="charonia platform --oidc-issuer sets it up")
    return platform.provider


def _signed_in(settings: PlatformSettings, cookie: str, path: str) -> Response:
    """Return the response that gives a browser its session, and redirects it to a page."""
    response = RedirectResponse(path, 303)
    response.set_cookie(
        users.COOKIE,
        cookie,
        max_age=int(users.SESSION_S),
        httponly=True,
        samesite="lax",
        secure=settings.is_https,
    )
    return response


def _explained(error: ServingError) -> Response:
    _log.warning("%s", error)
    return _not_signed_in("provider" if error.code in (Code.UNAVAILABLE, Code.NOT_FOUND) else "refused")


def _not_signed_in(problem: str) -> Response:
    """Redirect a browser to the login page with the kind of problem: `link`, `provider` or `refused`."""
    return RedirectResponse(f"{LOGIN_PAGE}?problem={problem}", 303)


def _address(request: Request) -> str:
    return request.client.host if request.client else ""
