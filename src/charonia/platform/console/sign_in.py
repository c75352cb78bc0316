"""The page to sign in, and the redirect to the first page."""

from urllib.parse import urlencode

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response

from charonia.core.errors import RefusalKind
from charonia.platform.console.pages import plain_page
from charonia.platform.people import projects
from charonia.platform.people.access import NotPermittedError
from charonia.platform.people.calls import Caller
from charonia.platform.people.login import LOGIN_PAGE, SIGN_ON_PATH, local_path
from charonia.platform.state import Here
from charonia.platform.values import Text

router = APIRouter()

PROBLEMS = {
    "link": "This link was used already, or has expired.",
    "sso": "Single sign-on has failed. Try it again.",
}
"""What `?problem=` says."""


@router.get(LOGIN_PAGE)
def sign_in(platform: Here, problem: Text = "", next: Text = "/") -> Response:
    """Show the page to sign in."""
    target = f"{SIGN_ON_PATH}?{urlencode({'next': local_path(next)})}" if platform.settings.oidc.issuer else ""
    return plain_page("login.html", {"problem": PROBLEMS.get(problem, problem and PROBLEMS["sso"]), "sso": target})


@router.get("/")
def start(platform: Here, who: Caller) -> Response:
    """Redirect to the first page that the caller may see."""
    with platform.database.reading() as session:
        found = projects.visible(session, who, limit=1)
    if not found:
        raise NotPermittedError(RefusalKind.FORBIDDEN, f"{who.name}: has no role yet; ask an administrator for one")
    return RedirectResponse(f"/p/{found[0].name}/deployments", 303)
