"""The pages of deployments: the list, and one deployment with its figures, revisions, explanations and log."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import yaml
from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from sqlalchemy import select

from charonia.core.errors import ServingError
from charonia.platform.console import deployment_figures as shown
from charonia.platform.console.deploy_form import numbers_of
from charonia.platform.console.model_pages import difference
from charonia.platform.console.pages import ROWS_MAX, OnPage, PageContext
from charonia.platform.database.connection import now
from charonia.platform.database.tables import ModelRow
from charonia.platform.deployments.reads import DeploymentView
from charonia.platform.deployments.servers import LOG_LINES_MAX
from charonia.platform.deployments.spec import changes, read_spec
from charonia.platform.models import registry
from charonia.platform.models.pipeline import diagrams
from charonia.platform.people import projects
from charonia.platform.values import Number, Text

router = APIRouter(prefix="/p/{project}/deployments", include_in_schema=False)

RANGES = (
    ("10m", "10 min", 600.0),
    ("1h", "1 hour", 3600.0),
    ("24h", "24 hours", 86_400.0),
    ("30d", "30 days", 2_592_000.0),
)
"""What charts show: key, title and seconds; the first by default."""

LOG_LINES = 300

SORTED_MAX = 1000
"""Deployments, by name, that are sorted by another column."""


@router.get("")
def show_all(visit: OnPage, search: Text = "", sort: Text = "", offset: Number = 0) -> Response:
    """List deployments, by name or by a column."""
    key = shown.SORTS.get(sort.removeprefix("-"))
    first, most = (0, SORTED_MAX) if key else (offset, ROWS_MAX)
    reads = visit.platform.deployments.reads
    found, total = reads.list(visit.who, visit.project, search=search, limit=most, offset=first)
    if key:
        found = sorted(found, key=key, reverse=sort.startswith("-"))[offset : offset + ROWS_MAX]
    with visit.platform.database.reading() as session:
        has_models = bool(found or search) or session.scalar(select(ModelRow.id).limit(1)) is not None
    values = {
        "deployments": [shown.line(view) for view in found],
        "has_models": has_models,
        "search": search,
        "sort": sort,
        "pages": visit.pages(offset, total - offset),
    }
    return visit.show("deployments.html", values)


@router.get("/{name}/figures")
def figures(visit: OnPage, name: Text, range: Text = "") -> dict[str, Any]:
    """Return the data of the charts."""
    reads, seconds = visit.platform.deployments.reads, next((each[2] for each in RANGES if each[0] == range), 600.0)
    since_s = now() - seconds
    points = reads.figures(visit.who, visit.project, name, since_s)
    marks = reads.marks(visit.who, visit.project, name, since_s)
    return {"now": now(), "since": since_s, "marks": marks, **shown.charts(points)}


@router.get("/{name}/revisions")
def revisions(visit: OnPage, name: Text, offset: Number = 0) -> Response:
    """List the revisions of a deployment."""
    deployments = visit.platform.deployments
    view = deployments.reads.get(visit.who, visit.project, name)
    found, total = deployments.reads.revisions(visit.who, visit.project, name, limit=ROWS_MAX, offset=offset)
    latest = read_spec(view.spec)
    effects = {each.number: changes(latest, read_spec(each.spec)) for each in found}
    values = {"revisions": found, "effects": effects, "pages": visit.pages(offset, total - offset)}
    return page(visit, view, "revisions.html", "revisions", values)


@router.get("/{name}/revisions/{number}")
def revision(visit: OnPage, name: Text, number: Number) -> Response:
    """Show a revision as a file."""
    deployments = visit.platform.deployments
    view = deployments.reads.get(visit.who, visit.project, name)
    found = deployments.reads.revision(visit.who, visit.project, name, number)
    text = as_file(found.spec)
    lines = difference(text, as_file(view.spec)) if number != view.revision else []
    values = {"revision": found, "document": text, "differences": lines}
    return page(visit, view, "revision.html", "revisions", values)


@router.get("/{name}/explain")
def explain(visit: OnPage, name: Text) -> Response:
    """Show the server's findings about each model: bottlenecks, and suggested changes."""
    deployments = visit.platform.deployments
    view = deployments.reads.get(visit.who, visit.project, name)
    sections, problem = [], ""
    for model in view.spec.get("models", ()) if view.http else ():
        try:
            sections.append(deployments.servers.explain(visit.who, visit.project, name, model["name"]))
        except ServingError as error:
            problem = error.message
    return page(visit, view, "explain.html", "explain", {"sections": sections, "problem": problem})


@router.get("/{name}/log")
def log(visit: OnPage, name: Text, search: Text = "", level: Text = "") -> Response:
    """Show the end of the log, or of its entries with a text and a level."""
    view = visit.platform.deployments.reads.get(visit.who, visit.project, name)
    text, problem, servers = "", "", visit.platform.deployments.servers
    try:
        text = servers.log(visit.who, visit.project, name, lines=LOG_LINES, search=search, level=level)
    except ServingError as error:
        problem = error.message
    query = urlencode({key: value for key, value in (("search", search), ("level", level)) if value})
    levels = [("", "all levels"), ("error", "errors"), ("warning", "warnings and errors"), ("info", "without details")]
    values = {"log": text, "lines": LOG_LINES, "problem": problem, "search": search, "level": level, "levels": levels}
    return page(visit, view, "deployment_log.html", "log", {**values, "query": query and f"?{query}"})


@router.get("/{name}/log/download")
def download_log(visit: OnPage, name: Text, search: Text = "", level: Text = "") -> Response:
    """Return the log as a file."""
    servers = visit.platform.deployments.servers
    text = servers.log(visit.who, visit.project, name, lines=LOG_LINES_MAX, search=search, level=level)
    headers = {"Content-Disposition": f'attachment; filename="{name}.log"'}
    return PlainTextResponse(text, headers=headers)


@router.get("/{name}/try")
def try_it(visit: OnPage, name: Text) -> Response:
    """Show the form to try the models."""
    view = visit.platform.deployments.reads.get(visit.who, visit.project, name)
    tops = pipelines_of(visit, view.spec)
    return page(visit, view, "try.html", "try", {"first": tops[0][0].name if tops else ""})


def pipelines_of(visit: PageContext, spec: Mapping[str, Any]) -> list[Any]:
    """Return the diagrams of the pipelines of a specification. See `diagrams`."""
    roots = {model["name"]: max(numbers_of(model), default=0) for model in spec.get("models", ())}
    with visit.platform.database.reading() as session:
        project = projects.find(session, visit.who, visit.project)
        return diagrams(registry.pipeline(session, project.id, roots))


@router.get("/{name}")
def show(visit: OnPage, name: Text) -> Response:
    """Show a deployment."""
    view = visit.platform.deployments.reads.get(visit.who, visit.project, name)
    is_quiet = visit.platform.deployments.reads.is_quiet(visit.who, visit.project, name)
    keys = visit.platform.deployments.keys
    has_keys = view.spec.get("keys") and visit.is_deployer
    context = {
        "charts": shown.charts_of(view.figures),
        "servers": view.replicas,
        "model_names": [(model["name"], model["name"]) for model in view.spec["models"]],
        "keys": keys.list(visit.who, visit.project, name) if has_keys else (),
        "is_quiet": is_quiet,
        "ranges": RANGES,
        "range": visit.request.query_params.get("range", RANGES[0][0]),
    }
    response = page(visit, view, "deployment.html", "", context)
    if visit.request.headers.get("hx-target") == "quiet" and not is_quiet:
        response.headers["HX-Trigger"] = "renew"  # charts take the place of the code
    return response


def page(
    visit: PageContext, view: DeploymentView, template: str, tab: str, values: dict[str, Any], **more: Any
) -> Response:
    return visit.show(template, {"it": view, "tab": tab, "waits": shown.waits(view), **values}, **more)


def as_file(spec: Any) -> str:
    """Return a specification as `charonia apply` reads it."""
    return yaml.safe_dump(json.loads(json.dumps(spec)), sort_keys=False, allow_unicode=True)
