"""The pages of models: the list, one model with its versions, and the form to add one."""

import difflib
import json
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import RedirectResponse
from pydantic import ValidationError

from charonia.config import pbtxt
from charonia.config.backends import Preset
from charonia.config.json_form import from_json
from charonia.core.errors import Code, ServingError, invalid
from charonia.platform.artifacts.manifest import Blob
from charonia.platform.console.deploy_form import numeric, text_of
from charonia.platform.console.environment_pages import suggested, to_build
from charonia.platform.console.pages import INVALID, ROWS_MAX, OnPage, PageContext, Sent, go, problems_of
from charonia.platform.console.text import size_text
from charonia.platform.database.tables import EnvironmentRow, TaskRow, named
from charonia.platform.environments import catalog
from charonia.platform.environments.catalog import preset_request
from charonia.platform.models import follow, registry, version_import
from charonia.platform.models.git import is_git, parse_git
from charonia.platform.models.pipeline import as_one, diagrams
from charonia.platform.models.records import (
    ARRIVING,
    CHECKING,
    REFUSED,
    VersionRecord,
    VersionReport,
)
from charonia.platform.models.registry import DetailsBody
from charonia.platform.models.sources import SourceKind, VersionSource, default_name
from charonia.platform.people import projects
from charonia.platform.values import Number, Text

router = APIRouter(prefix="/p/{project}/models", include_in_schema=False)

WAYS = (("upload", "Upload"), ("store", "Object store"), ("git", "Git"), ("folder", "Folder"), ("mlflow", "MLflow"))
"""Sources of a model: the value in addresses, and the title."""

_KINDS: Mapping[str, SourceKind] = {"git": "git", "folder": "folder", "mlflow": "mlflow"}

_OPEN = (ARRIVING, CHECKING)

ENVIRONMENTS_MAX = 200

README_BYTES_MAX = 256 * 1024
"""Largest README that is shown."""

_FORM = {"name": "", "notes": "", "source": "", "tracking_uri": "", "secret": "", "fixed": False}

_FOLLOW = {
    **dict.fromkeys(("name", "place", "secret", "hook", "deployment"), ""),
    "every_s": "300",
    "strategy": "canary",
}


_NO_VERSION = SimpleNamespace(number=0, state="", runs_code=False)
"""In place of the version of a model that has none."""


@router.get("")
def show_all(visit: OnPage, search: Text = "", tag: Text = "", sort: Text = "", offset: Number = 0) -> Response:
    """List models."""
    with visit.platform.database.reading() as session:
        chosen = {"search": search, "tag": tag, "sort": sort}
        page = registry.models(session, visit.who, visit.project, **chosen, limit=ROWS_MAX, offset=offset)
    values = {
        "models": page.models,
        "total": page.total,
        "tags": list(page.tags)[:12],
        **chosen,
        "pages": visit.pages(offset, page.total - offset),
    }
    return visit.show("models.html", values)


@router.get("/add")
def show_form(visit: OnPage, model: Text = "", way: Annotated[Text, Query(alias="from")] = "upload") -> Response:
    """Show the form to add a model, or a version of one."""
    visit.demand_deployer()
    form = {**_FORM, "name": model, "fixed": bool(model)}
    return _form(visit, way if way in dict(WAYS) else "upload", form)


@router.post("/add")
def add(visit: OnPage, sent: Sent) -> Response:
    """Add a version from an address, a Git repository, a folder or MLflow."""
    way, source = text_of(sent, "from"), text_of(sent, "source")
    if way == "store" and is_git(source):
        way = "git"
    fields = {name: text_of(sent, name) for name in _FORM.keys() - {"fixed"}}
    form = {**_FORM, **fields}
    try:
        wanted, server = fields["name"] or _default_name(source, way), fields["tracking_uri"]
        with visit.platform.database.transaction() as session:
            place = VersionSource(kind=_KINDS.get(way, "address"), place=source, server=server, secret=fields["secret"])
            added = version_import.add(
                session, visit.platform.uploads, visit.who, visit.project, wanted, place, fields["notes"]
            )
    except ServingError as error:
        problems = problems_of(error, {"model": "name"}.get, other="source")
        return _form(visit, way, form, status=INVALID, problems=problems)
    return go(visit.path("models", added.model, "versions", added.number))


@router.get("/branches")
def show_branches(visit: OnPage) -> Response:
    return _branches(visit)


@router.post("/branches")
def follow_branch(visit: OnPage, sent: Sent) -> Response:
    """Let a model follow a branch."""
    form = {name: text_of(sent, name) for name in _FOLLOW}
    try:
        wanted = {**form, "every_s": numeric(form["every_s"])}
        name = wanted.pop("name") or _default_name(form["place"], "git")
        with visit.platform.database.transaction() as session:
            chosen = follow.FollowBody.model_validate(wanted)
            follow.put(session, visit.platform.workloads.secrets, visit.who, visit.project, str(name), chosen)
    except (ServingError, ValidationError) as error:
        return _branches(visit, status=INVALID, form=form, problems=problems_of(error))
    return _branches(visit)


def _branches(visit: PageContext, *, status: int = 200, form: Mapping[str, str] = _FOLLOW, **values: Any) -> Response:
    with visit.platform.database.reading() as session:
        found = follow.every(session, visit.who, visit.project)
    values |= {"follows": found, "form": form}
    return visit.show(
        "branches.html", values, block="branches" if visit.request.method == "POST" else "", status=status
    )


@router.get("/{name}")
def show_newest(visit: OnPage, name: Text, against: Number = 0) -> Response:
    return _show(visit, name, against=against)


@router.get("/{name}/versions/{number}")
def show_version(visit: OnPage, name: Text, number: Number, against: Number = 0) -> Response:
    """Show a version, with its differences from the previous one or from `against`.

    A version that has become the versions of a repository's models leads to its job.
    """
    try:
        return _show(visit, name, number, against=against)
    except ServingError as error:
        with visit.platform.database.reading() as session:
            task = registry.newest_task(session, projects.find(session, visit.who, visit.project).id, name, number)
        if error.code is not Code.NOT_FOUND or task is None:
            raise
        page = visit.path("jobs", task.id)
        return go(page) if "hx-request" in visit.request.headers else RedirectResponse(page, 303)


@router.post("/{name}/versions/{number}/about")
def describe(visit: OnPage, name: Text, number: Number, sent: Sent) -> Response:
    """Save the descriptive fields of a model and the notes of a version."""
    description, owner, tags, links, notes = (
        text_of(sent, field) for field in ("description", "owner", "tags", "links", "notes")
    )
    try:
        listed = [tag for each in tags.split(",") if (tag := each.strip())]
        details = DetailsBody(owner=owner, description=description, tags=listed, links=read_links(links))
        with visit.platform.database.transaction() as session:
            registry.change(session, visit.who, visit.project, name, details)
            if number:  # a model without versions has details, too
                registry.annotate(session, visit.who, visit.project, name, number, notes)
    except (ServingError, ValidationError) as error:
        return _show(visit, name, number, block="about", status=INVALID, problems=problems_of(error))
    return _show(visit, name, number, block="about", saved=True)


@router.post("/{name}/versions/{number}/remove")
def remove(visit: OnPage, name: Text, number: Number) -> Response:
    """Delete a version, and the model with its last version."""
    with visit.platform.database.transaction() as session:
        registry.delete_version(session, visit.who, visit.project, name, number)
        session.flush()
        is_empty = not registry.model(session, visit.who, visit.project, name).versions
        if is_empty:
            registry.delete(session, visit.who, visit.project, name)
    return go(visit.path("models") if is_empty else visit.path("models", name))


@router.post("/{name}/versions/{number}/deploy")
def deploy(visit: OnPage, name: Text, number: Number) -> Response:
    """Deploy a version with suitable settings; if its deployment already exists, show the form to edit it."""
    with visit.platform.database.reading() as session:
        found = projects.find(session, visit.who, visit.project)
        registry.version(session, visit.who, visit.project, name, number)
        report = as_one(registry.pipeline(session, found.id, {name: number}))
        environments = catalog.page(session, found, limit=ENVIRONMENTS_MAX)
        model = registry.model(session, visit.who, visit.project, name)
    if model.deployments:
        return go(f"{visit.path('deployments', model.deployments[0], 'change')}?model={name}&version={number}")
    value = {
        "name": deployment_name(name),
        "environment": suggested(report, environments),
        "models": [{"name": name, "versions": [number]}],
    }
    preset = to_build(report, environments)
    if preset is not None:
        return _build_and_deploy(visit, preset, {**value, "environment": preset.name})
    plan = visit.platform.deployments.changes.create(visit.who, visit.project, value)
    return go(visit.path("deployments", plan.spec["name"]))


def _build_and_deploy(visit: PageContext, preset: Preset, value: Mapping[str, Any]) -> Response:
    """Build an environment, which then deploys a version."""
    with visit.platform.database.transaction() as session:
        project = projects.find(session, visit.who, visit.project)
        if named(session, EnvironmentRow, project.id, preset.name) is None:
            catalog.add(session, visit.who, visit.project, preset_request(preset), value)
        else:
            catalog.rebuild(session, visit.who, visit.project, preset.name, value)
    return go(visit.path("environments", preset.name))


def _default_name(source: str, way: str) -> str:
    return default_name(parse_git(source).name if way == "git" else source)


def deployment_name(model: str) -> str:
    """Return the default name of a model's deployment."""
    return re.sub(r"[^a-z0-9_-]+", "-", model.lower()).strip("-_")[:63] or "model"


def read_links(text: str) -> dict[str, str]:
    """Return addresses by label from lines with a label and an address."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        label, _, address = line.strip().rpartition(" ")
        if address and not label:
            raise invalid(f"link '{address}': expected a label before the address")
        if address:
            found[label.strip(" :")] = address
    return found


def config_text(report: VersionReport) -> str:
    """Return a completed configuration as text of a config.pbtxt, "" for none."""
    return pbtxt.render(from_json(json.dumps(report.config))) if report.config else ""


def difference(before: str, after: str) -> list[str]:
    """Return the diff of two texts, in lines that begin with "+" and "-"; none if they are equal."""
    return list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))[2:]


def _form(visit: PageContext, way: str, form: Mapping[str, Any], *, status: int = 200, **values: Any) -> Response:
    block = "form" if status != 200 else ""
    return visit.show("model_add.html", {"way": way, "ways": WAYS, "form": form, **values}, block=block, status=status)


def _show(
    visit: PageContext,
    name: str,
    number: int = 0,
    *,
    against: int = 0,
    block: str = "",
    status: int = 200,
    **values: Any,
) -> Response:
    with visit.platform.database.reading() as session:
        model = registry.model(session, visit.who, visit.project, name)
        listed = [each for each in model.versions if each.size or each.state != REFUSED or each.number == number]
        number = number or next((each.number for each in [*listed, *model.versions]), 0)
        version = registry.version(session, visit.who, visit.project, name, number) if number else None
        others = [each.number for each in model.versions if each.number != number and each.state == "ready"]
        before = (
            against if against in others else next((each for each in others if each < number), max(others, default=0))
        )
        former = registry.version(session, visit.who, visit.project, name, before) if before else None
        found = projects.find(session, visit.who, visit.project)
        ready = catalog.page(session, found, limit=ENVIRONMENTS_MAX)
        models = registry.pipeline(session, found.id, {name: number})
        job = session.get(TaskRow, version.task) if version is not None and version.task else None
    context = {
        "model": model,
        "links_text": "\n".join(f"{label} {address}" for label, address in model.links.items()),
        "versions": listed,
        "pipelines": diagrams(models),
        "version": version or _NO_VERSION,
        "config": config_text(version.report) if version is not None else "",
        "before": before,
        "changes": difference(_content(former), _content(version)) if former and version else [],
        "others": others if version is not None and version.state == "ready" else [],
        "readme": "" if version is None else _readme(visit, version),
        "deployments": model.deployments,
        "job": job,
        "saved": False,
        "environment": suggested(as_one(models), ready),
        "preset": to_build(as_one(models), ready) if not model.deployments else None,
        "base": visit.path("models", name, "versions", number),
    }
    response = visit.show("model.html", {**context, **values}, block=block, status=status)
    if visit.request.headers.get("hx-target") == "live" and (version is None or version.state not in _OPEN):
        response.headers["HX-Trigger"] = "renew"  # the check is over: the whole page changes
    return response


def _content(version: VersionRecord) -> str:
    """Return the configuration of a version, and its files with their hashes, to compare them."""
    files = [f"{file.path}  {size_text(file.size)}  {file.sha256[:12]}" for file in version.files]
    return "\n".join((config_text(version.report), *files))


def _readme(visit: PageContext, version: VersionRecord) -> str:
    """Return the README of a version, without the metadata that hubs keep in its head."""
    found = [file for file in version.files if file.path.rpartition("/")[2].lower() == "readme.md"]
    if not found or found[0].size > README_BYTES_MAX:
        return ""
    path = visit.platform.artifacts.fetch(Blob(found[0].sha256, found[0].size))
    return re.sub(r"\A---\n.*?\n---\n", "", path.read_text(errors="replace").replace("\r\n", "\n"), flags=re.DOTALL)
