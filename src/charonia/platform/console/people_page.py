"""The pages of users, API keys, the API and the audit log, to sign in, and to jump; the redirect to the first page."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, FastAPI, Form, Response
from fastapi.responses import RedirectResponse
from sqlalchemy.orm import Session

from charonia.core.errors import RefusalKind, ServingError
from charonia.platform.console.pages import INVALID, PLACES, ROWS_MAX, OnPage, PageContext, plain_page, problems_of
from charonia.platform.database.connection import now
from charonia.platform.database.tables import KeyRow, UserRow
from charonia.platform.models import registry
from charonia.platform.people import audit, keys, login, projects, users
from charonia.platform.people.access import Grant, NotPermittedError, Principal, ProjectRole
from charonia.platform.people.calls import Caller
from charonia.platform.people.login import LOGIN_PAGE, SIGN_ON_PATH, local_path
from charonia.platform.people.projects import kept
from charonia.platform.state import PlatformDep
from charonia.platform.values import Number, Text

FOUND_MAX = 12
"""Models, and deployments, that a jump offers."""

router = APIRouter(include_in_schema=False)

PEOPLE = "/p/{project}/people"

PEOPLE_MAX = 200
"""Most keys and users on the page."""

_ROLES = (("viewer", "viewer: sees"), ("deployer", "deployer: changes"), ("admin", "admin: gives roles"))
_DAY_S = 86400.0

Field = Annotated[Text, Form()]
Role = Annotated[Literal["viewer", "deployer", "admin"], Form()]


@router.get(PEOPLE)
def show(visit: OnPage) -> Response:
    return _page(visit)


@router.post(PEOPLE + "/keys")
def make_key(visit: OnPage, name: Field = "", role: Role = "viewer", days: Field = "0", code: Field = "") -> Response:
    """Create a key for this project."""
    form = {"name": name, "role": role, "days": days, "code": code}
    expires = now() + float(days) * _DAY_S if days.isdecimal() and float(days) else 0.0
    try:
        grant = Grant(ProjectRole[role.upper()], visit.project, bool(code))
        with visit.platform.database.transaction() as session:
            _, secret = keys.create(session, visit.who, name.strip(), [grant], expires=expires)
    except ServingError as error:
        return _page(visit, block="keys", status=INVALID, form=form, problems=problems_of(error, other="key"))
    return _page(visit, block="keys", secret={"name": name.strip(), "key": secret})


@router.post(PEOPLE + "/users")
def add_user(visit: OnPage, user: Field = "", email: Field = "", user_role: Role = "viewer") -> Response:
    """Create a user with a role in this project, and their first link."""
    try:
        with visit.platform.database.transaction() as session:
            row = users.create(session, visit.who, user, email)
            session.flush()
            users.set_role(
                session, visit.who, row.id, visit.project, Grant(ProjectRole[user_role.upper()], visit.project)
            )
            secret = users.link(session, visit.who, row.id)
    except ServingError as error:
        return _page(visit, block="users", status=INVALID, problems=problems_of(error, other="user"))
    return _page(visit, block="users", link={"name": user, "address": login.link(visit.platform.settings, secret)})


@router.post(PEOPLE + "/users/{number}/link")
def make_link(visit: OnPage, number: Number) -> Response:
    """Create a link that signs a user in."""
    with visit.platform.database.transaction() as session:
        secret = users.link(session, visit.who, number)
        name = session.get_one(UserRow, number).name
    return _page(visit, block="users", link={"name": name, "address": login.link(visit.platform.settings, secret)})


def _page(visit: PageContext, *, block: str = "", status: int = 200, **values: Any) -> Response:
    with visit.platform.database.reading() as session:
        found = _or_none(keys.visible, session, visit.who)
        own = [_key(visit.who, row) for row in found or ()]
        own_secrets = visit.platform.workloads.secrets
        kept_secrets = own_secrets.list(session, visit.who, visit.project) if visit.is_deployer else ()
        known = [_user(row, visit.project) for row in _or_none(users.known, session, visit.who) or ()]
    form = {"name": "", "role": "viewer", "days": "90", "code": ""}
    defaults = {"secret": None, "link": None, "form": form, "problems": {}}
    context = {
        "sees_all": found is not None,
        "keys": own,
        "users": known,
        "secrets": kept_secrets,
        "roles": _ROLES,
        "user_roles": (("none", "none"), *((value, value) for value, _ in _ROLES)),
        "may_link": visit.who.everywhere is ProjectRole.ADMIN,
    }
    return visit.show("people.html", {**defaults, **context, **values}, block=block, status=status)


def _or_none(listed: Any, session: Session, who: Principal) -> Any:
    """Return a list that only administrators may see, None for others."""
    try:
        return listed(session, who, limit=PEOPLE_MAX)
    except NotPermittedError:
        return None


def _key(who: Principal, row: KeyRow) -> dict[str, Any]:
    grants = kept(row.grants)
    return {
        "name": row.name,
        "roles": [audit.role_text(grant) for grant in who.visible_roles(grants)],
        "used": row.used,
        "expires": row.expires,
        "may_revoke": all(
            (who.role(grant.project) if grant.project else who.everywhere) is ProjectRole.ADMIN for grant in grants
        ),
    }


def _user(row: UserRow, project: str) -> dict[str, Any]:
    grants = kept(row.grants)
    everywhere = max((grant.role for grant in grants if not grant.project), default=None)
    here = max((grant.role for grant in grants if grant.project == project), default=None)
    return {
        "id": row.id,
        "name": row.name,
        "email": row.email,
        "is_owner": row.subject == users.OWNER,
        "way": "with links" if row.issuer == users.LOCAL else f"through {row.issuer}",
        "role": here.name.lower() if here else "none",
        "everywhere": everywhere.name.lower() if everywhere else "",
    }


DONE: Mapping[str, str] = {
    "acknowledge": "acknowledged",
    "add": "added",
    "annotate": "described",
    "begin": "begun",
    "cancel": "cancelled",
    "change": "changed",
    "check": "checked again",
    "create": "created",
    "delete": "deleted",
    "fire": "fired",
    "follow": "follows a branch",
    "link": "got a link to sign in",
    "perf": "started: load test",
    "put": "entered",
    "rebuild": "built again",
    "remove": "removed",
    "retry": "tried again",
    "revoke": "revoked",
    "role": "got a role",
    "start": "started",
    "stop": "stopped",
    "test": "tested",
    "traffic": "traffic changed",
    "try": "tried",
    "tune": "started: search for a configuration",
    "unfollow": "no longer follows a branch",
}
"""Past participles of the verbs of actions."""


@router.get("/p/{project}/find")
def find(visit: OnPage, search: Text = "") -> Response:
    """List pages, deployments and models with a text in their names."""
    with visit.platform.database.reading() as session:
        models = registry.models(session, visit.who, visit.project, search=search, limit=FOUND_MAX).models
    deployments, _ = visit.platform.deployments.reads.list(visit.who, visit.project, search=search, limit=FOUND_MAX)
    found = [("Page", title, visit.path(key)) for key, title, _ in PLACES if search.lower() in title.lower()]
    found += [("Deployment", each.name, visit.path("deployments", each.name)) for each in deployments]
    found += [("Model", each.name, visit.path("models", each.name)) for each in models]
    return visit.show("find.html", {"found": found}, block="found")


@router.get("/p/{project}/api")
def show_api(visit: OnPage) -> Response:
    """Show the calls of the API."""
    app: FastAPI = visit.request.app
    return visit.show("api.html", {"groups": api_groups(app.openapi(), str(visit.request.base_url).rstrip("/"))})


def api_groups(document: Mapping[str, Any], base: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the calls of an OpenAPI document by tag, or by the first part of their paths."""

    def resolved(value: Mapping[str, Any]) -> Mapping[str, Any]:
        return document["components"]["schemas"][value["$ref"].rpartition("/")[2]] if "$ref" in value else value

    groups: dict[str, list[dict[str, Any]]] = {}
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            body = resolved(
                call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            )
            fields = [
                {"name": each["name"], "place": each["in"], "required": each.get("required"), **_kind(each["schema"])}
                for each in call.get("parameters", ())
            ] + [
                {"name": name, "place": "body", "required": name in body.get("required", ()), **_kind(resolved(schema))}
                for name, schema in body.get("properties", {}).items()
            ]
            curl = f"curl -H 'Authorization: Bearer KEY' -X {method.upper()} '{base}{path}'"
            if body:
                named = {each["name"]: "…" for each in fields if each["place"] == "body" and each["required"]}
                curl += f" \\\n  -H 'Content-Type: application/json' -d '{json.dumps(named, ensure_ascii=False)}'"
            place = next(iter(call.get("tags", ())), re.sub(r"^/api/v1/(projects/{\w+}/)?", "", path).partition("/")[0])
            shown = {"method": method.upper(), "path": path, "summary": call.get("summary", ""), "curl": curl}
            shown |= {"about": call.get("description", ""), "fields": fields}
            groups.setdefault(str(place).replace("_", " ").capitalize(), []).append(shown)
    return list(groups.items())


def _kind(schema: Mapping[str, Any]) -> dict[str, str]:
    kinds = [each.get("enum") or [each.get("type", "object")] for each in schema.get("anyOf", (schema,))]
    return {"type": " or ".join(str(each) for kind in kinds for each in kind), "about": schema.get("description", "")}


@router.get("/p/{project}/audit")
def show_audit(visit: OnPage, before: Number = 0) -> Response:
    """Show the audit log."""
    with visit.platform.database.reading() as session:
        project = visit.project if visit.who.everywhere is None else ""
        found = audit.entries(session, visit.who, project=project, before=before, limit=ROWS_MAX + 1)
    after = f"?before={found[ROWS_MAX - 1].id}" if len(found) > ROWS_MAX else ""
    pages = {"before": visit.path("audit") if before else "", "after": after}
    values = {"entries": found[:ROWS_MAX], "action_text": action_text, "detail_text": detail_text, "pages": pages}
    return visit.show("audit.html", values)


def action_text(action: str) -> str:
    """Return an action as a sentence: "Deployment changed"."""
    noun, _, verb = action.rpartition(".")
    return f"{noun.replace('.', ' ').capitalize()} {DONE.get(verb, verb)}"


def detail_text(detail: Mapping[str, Any]) -> str:
    """Return the details of an entry in one line."""
    parts = []
    for name, value in detail.items():
        shown = "; ".join(map(str, value)) if isinstance(value, list) else value
        if isinstance(shown, dict):
            shown = json.dumps(shown)
        if shown not in ("", None, 0):
            parts.append(f"{name.replace('_', ' ')}: {shown}")
    return ", ".join(parts)


PROBLEMS = {
    "link": "This link was used already, or has expired.",
    "sso": "Single sign-on has failed. Try it again.",
}
"""What `?problem=` says."""


@router.get(LOGIN_PAGE)
def sign_in(platform: PlatformDep, problem: Text = "", next: Text = "/") -> Response:
    """Show the page to sign in."""
    target = f"{SIGN_ON_PATH}?{urlencode({'next': local_path(next)})}" if platform.settings.oidc.issuer else ""
    return plain_page("login.html", {"problem": PROBLEMS.get(problem, problem and PROBLEMS["sso"]), "sso": target})


@router.get("/")
def start(platform: PlatformDep, who: Caller) -> Response:
    """Redirect to the first page that the caller may see."""
    with platform.database.reading() as session:
        found = projects.visible(session, who, limit=1)
    if not found:
        raise NotPermittedError(RefusalKind.FORBIDDEN, f"{who.name}: has no role yet; ask an administrator for one")
    return RedirectResponse(f"/p/{found[0].name}/deployments", 303)
