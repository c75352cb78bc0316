"""Shared by all pages: the templates, the visitor, and the response."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.meta import find_referenced_templates
from jinja2.runtime import Context
from pydantic import ValidationError

from charonia.core.errors import ServingError, invalid
from charonia.platform.api_client import path_of
from charonia.platform.console import deployment_figures, text
from charonia.platform.console.assets import PREFIX, address
from charonia.platform.console.deploy_form import by_field
from charonia.platform.database.connection import now
from charonia.platform.people import projects, users
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.people.calls import Caller, caller
from charonia.platform.state import PlatformDep
from charonia.platform.values import Text, check_json
from charonia.platform.values import problems_of as messages

PLACES = (
    ("deployments", "Deployments", "deployments"),
    ("models", "Models", "models"),
    ("environments", "Environments", "environments"),
    ("jobs", "Jobs", "jobs"),
    ("alerts", "Alerts", "alerts"),
    ("audit", "Audit", "audit"),
    ("people", "Users and API keys", "people"),
)
"""Entries of the navigation: the path within a project, the title, the icon."""

ROWS_MAX = 50
"""Rows of a list on one page."""

LOG_BYTES_MAX = 64 * 1024
"""Most bytes of a log on a page, from its end."""

INVALID = 422
"""Status of a form that is returned with problems."""


Block = Callable[[Context], Iterator[str]]
"""Renders a part of a template."""


class PageContext:
    """A user who visits a page of a project."""

    def __init__(self, request: Request, platform: PlatformDep, who: Caller, project: Text = projects.DEFAULT) -> None:
        who.demand(ProjectRole.VIEWER, project)
        self.request = request
        self.platform = platform
        self.who: Principal = who
        self.project = project
        request.state.visit = self

    @property
    def is_deployer(self) -> bool:
        return (self.who.role(self.project) or 0) >= ProjectRole.DEPLOYER

    @property
    def is_admin(self) -> bool:
        return self.who.role(self.project) is ProjectRole.ADMIN

    def demand_deployer(self) -> None:
        self.who.demand(ProjectRole.DEPLOYER, self.project)

    def path(self, *parts: object) -> str:
        return "/".join(["/p", *(quote(str(part), safe="") for part in (self.project, *parts))])

    def api(self, *parts: str | int) -> str:
        """Return the path of a call of the API about the project."""
        return path_of("projects", self.project, *parts)

    def task_log(self, number: int) -> str:
        """Return the end of the log of a task."""
        path = self.platform.tasks.folder(number) / "log"
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES_MAX))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def show(self, template: str, values: Mapping[str, Any], *, block: str = "", status: int = 200) -> Response:
        """Return a page, or the part of it that the browser requests.

        Args:
            block: The block to send, "" for the block whose element the browser will replace, or the whole page.
        """
        found = _environment().get_template(template)
        wanted = block or self.request.headers.get("hx-target", "")
        context = {**self._frame(), **values, "problems": defaultdict(str, values.get("problems", {}))}
        blocks = _blocks(template)
        if wanted in blocks and (block or "hx-request" in self.request.headers):
            content = "".join(blocks[wanted](found.new_context(context)))
            return HTMLResponse(content, status)
        with self.platform.database.reading() as session:
            context["projects"] = [row.name for row in projects.visible(session, self.who)]
        return HTMLResponse(found.render(context), status)

    def query(self, **changes: object) -> str:
        """Return the query of this address with changes; "" removes a parameter."""
        found = {**self.request.query_params, **changes}
        return "?" + urlencode({key: value for key, value in found.items() if value != ""})

    def pages(self, offset: int, count: int) -> dict[str, str]:
        """Return the addresses of the previous and the next page of a list, "" for none.

        Args:
            count: Rows found from there on; one more than fit if there is a next page.
        """
        return {
            "before": self.query(offset=max(0, offset - ROWS_MAX)) if offset else "",
            "after": self.query(offset=offset + ROWS_MAX) if count > ROWS_MAX else "",
        }

    def _frame(self) -> dict[str, Any]:
        return {
            "csrf": getattr(self.request.state, "csrf", ""),
            "who": self.who,
            "project": self.project,
            "place": (self.request.url.path.split("/") + [""] * 4)[3],
            "here": self.request.url.path + self.query(),
            "visit": self,
        }


OnPage = Annotated[PageContext, Depends()]
"""The visitor and the project, as a parameter of a route."""


def visit_of(request: Request) -> PageContext | None:
    """Return the visit of an address without a page, in its project or the visitor's first one; None for no user."""
    platform: PlatformDep = request.app.state.platform
    known: PageContext | None = getattr(request.state, "visit", None)
    if known is None and "authorization" in request.headers:
        return None
    who = caller(request, platform, "", None, request.cookies.get(users.COOKIE)) if known is None else known.who
    with platform.database.reading() as session:
        visible = [row.name for row in projects.visible(session, who)]
    asked = (request.url.path.split("/") + [""] * 2)[2]
    return PageContext(request, platform, who, asked if asked in visible else visible[0]) if visible else None


async def _sent(request: Request) -> dict[str, list[str]]:
    form = await request.form()
    sent = {name: [value for value in form.getlist(name) if isinstance(value, str)] for name in form}
    try:
        check_json(sent)
    except ValueError as error:
        raise invalid(f"form: {error}") from None
    return sent


Sent = Annotated[dict[str, list[str]], Depends(_sent)]
"""The fields of a form, as a parameter of a route."""


def go(path: str) -> Response:
    """Return the response that makes a form navigate to another page."""
    return Response(status_code=204, headers={"HX-Redirect": path})


def _none(path: str) -> None:
    """Find the field for no path."""


def problems_of(
    error: ServingError | ValidationError, find: Callable[[str], str | None] = _none, *, other: str = ""
) -> dict[str, str]:
    """Return an error by field of a form, its hint with those of no field. See `by_field`."""
    if isinstance(error, ValidationError):
        return by_field("\n".join(messages(error.errors())), find, other=other)
    found = by_field(error.message, find, other=other)
    return {**found, other: "\n".join(filter(None, (found.get(other), error.hint)))}


def plain_page(template: str, values: Mapping[str, Any], status: int = 200) -> HTMLResponse:
    """Return a page without the frame, for users who have not signed in."""
    return HTMLResponse(_environment().get_template(template).render({"csrf": "", **values}), status)


def wants_page(request: Request) -> bool:
    """Whether an answer is a page for a browser, not data for a script or a program."""
    return (
        request.method == "GET"
        and not request.url.path.startswith(("/api/", PREFIX))
        and "hx-request" not in request.headers
        and "text/html" in request.headers.get("accept", "")
    )


@cache
def _blocks(template: str) -> Mapping[str, Block]:
    environment = _environment()
    assert environment.loader is not None
    source, _, _ = environment.loader.get_source(environment, template)
    found: dict[str, Block] = {}
    for parent in find_referenced_templates(environment.parse(source)):
        found |= _blocks(parent or "")
    return found | environment.get_template(template).blocks


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("charonia.platform.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ago": lambda then: text.ago_text(then, now()),
        "breakable": text.breakable,
        "date": text.date_text,
        "device": deployment_figures.device_text,
        "duration": text.duration_text,
        "field": lambda problem: next(iter(by_field(problem))),
        "figure": text.figure,
        "kind": text.kind_of,
        "models": deployment_figures.models_text,
        "ms": deployment_figures.ms_text,
        "percent": text.percent,
        "plural": text.plural,
        "size": text.size_text,
    }
    environment.globals |= {"asset": address, "places": PLACES, "project": "", "projects": (), "place": "", "now": now}
    environment.globals["parts"] = environment.get_template("parts.html").module
    return environment
