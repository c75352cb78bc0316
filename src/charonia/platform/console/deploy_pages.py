"""The form to create and edit deployments, with a preview of the changes and problems."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from charonia.core.errors import Code, ServingError, not_found
from charonia.platform.console.deploy_form import (
    FormFields,
    document,
    field_of,
    form_of,
    merged,
    numbers_of,
    sent_of,
    text_of,
)
from charonia.platform.console.deployment_pages import as_file, pipelines_of
from charonia.platform.console.job_pages import offer
from charonia.platform.console.model_pages import deployment_name
from charonia.platform.console.pages import INVALID, OnPage, PageContext, Sent, go, problems_of
from charonia.platform.console.text import size_text
from charonia.platform.database.tables import ModelRow, ProjectRow, TaskRow, VersionRow, named
from charonia.platform.deployments.reads import ChangePlan
from charonia.platform.environments import catalog
from charonia.platform.jobs import jobs
from charonia.platform.models import registry
from charonia.platform.people import projects
from charonia.platform.targets.local import this_machine
from charonia.platform.values import Number, Text
from charonia.wire.traffic import BESIDE, CANARY, REPLACE

router = APIRouter(prefix="/p/{project}/deployments", include_in_schema=False)

LISTED_MAX = 200
"""Most models, and environments, that the form offers."""

VERSIONS_MAX = 12
"""Most versions of a model that it offers: the latest, and the chosen ones."""

STRATEGIES_TEXT = (
    (REPLACE, "Replace: all requests, as soon as it is ready"),
    (CANARY, "Canary: more step by step, and back if it gets worse"),
    (BESIDE, "Load beside: no requests yet"),
)
"""How new versions get requests, in words."""

_AGAINST_NEWEST = "Review the new diff and apply again."


@router.get("/new")
def show_new(visit: OnPage, model: Text = "", search: Number = 0, variant: Number = 0) -> Response:
    """Show the form for a new deployment, with a configuration that a search has tried if one is named."""
    visit.demand_deployer()
    name = deployment_name(model) if model else ""
    form = form_of(_tuned(visit, {"name": name, "models": [{"name": model}] if model else []}, search, variant))
    return _form(visit, "", form, check=_checked(visit, sent_of(form)))


@router.post("/new")
def create(visit: OnPage, sent: Sent) -> Response:
    return _save(visit, sent, "")


@router.post("/form")
def redraw(visit: OnPage, sent: Sent, name: Text = "") -> Response:
    """Return the form with one model more or less."""
    return _redrawn(visit, sent, name)


@router.post("/check")
def check(visit: OnPage, sent: Sent) -> Response:
    """Return the preview of the changes and problems."""
    values = {"check": _checked(visit, sent), "name": "", "existing": bool(text_of(sent, "existing"))}
    return visit.show("deploy_form.html", values, block="check")


@router.get("/{name}/change")
def show_change(
    visit: OnPage, name: Text, model: Text = "", version: Number = 0, search: Number = 0, variant: Number = 0
) -> Response:
    """Show the form to edit a deployment, with a version in place of the others if one is named. See `show_new`."""
    visit.demand_deployer()
    view = visit.platform.deployments.reads.get(visit.who, visit.project, name)
    spec = _tuned(visit, view.spec, search, variant)
    if model:
        named = {"versions": [version], "traffic": {}}
        spec["models"] = [{**each, **(named if each["name"] == model else {})} for each in spec["models"]]
        spec["strategy"] = REPLACE
    plan = visit.platform.deployments.changes.plan(visit.who, visit.project, spec)
    shown = {**_planned(plan, spec), "pipelines": pipelines_of(visit, spec)}
    return _form(visit, name, {**form_of(spec), "after": view.revision}, check=shown)


@router.post("/{name}/change")
def change(visit: OnPage, name: Text, sent: Sent) -> Response:
    """Change a deployment, unless it has changed since the form was opened."""
    return _save(visit, sent, name)


def _save(visit: PageContext, sent: FormFields, name: str) -> Response:
    if text_of(sent, "add"):  # Enter in the field of a model to add
        return _redrawn(visit, sent, name)
    deployments = visit.platform.deployments
    note = text_of(sent, "note")
    try:
        value = document(sent)
        if name:
            deployments.changes.change(
                visit.who, visit.project, value, note=note, revision=int(text_of(sent, "after") or 0)
            )
        else:
            deployments.changes.create(visit.who, visit.project, value, note=note)
    except ServingError as error:
        problems, newer = problems_of(error, field_of), 0
        if error.code is Code.ALREADY_EXISTS and name:
            theirs, seen = deployments.reads.get(visit.who, visit.project, name), int(text_of(sent, "after") or 0)
            base, newer = deployments.reads.revision(visit.who, visit.project, name, seen).spec, theirs.revision
            form, problems = merged(form_of(base), form_of(theirs.spec), _sent_form(sent))
            sent = {**sent_of(form), "after": [str(newer)], "existing": ["yes"]}
            what = (
                "Its changes are now in this form, except for the marked fields"
                if problems
                else "This form now has both changes"
            )
            problems[""] = f"Revision {newer} was created while you were editing. {what}. {_AGAINST_NEWEST}"
        elif error.code is Code.ALREADY_EXISTS:
            problems = {"name": error.message}
        return _redrawn(visit, sent, name, problems=problems, newer=newer, status=INVALID)
    return go(visit.path("deployments", value["name"]))


def _redrawn(
    visit: PageContext,
    sent: FormFields,
    name: str,
    *,
    problems: Mapping[str, str] | None = None,
    newer: int = 0,
    status: int = 200,
) -> Response:
    """Return the sent form with one model more or less."""
    form = _sent_form(sent)
    form["models"] = [each for each in form["models"] if each["name"] != text_of(sent, "leave")]
    for each in form["models"]:
        if each["name"] == text_of(sent, "offer_for"):
            with visit.platform.database.reading() as session:
                project = projects.find(session, visit.who, visit.project)
                found = offer(jobs.found(session, project.id, each["name"]))
            each.update({**(found["fields"] if found else {}), "has_more": True})
    problems = dict(problems or {})
    added = text_of(sent, "add")
    if added and added in [each["name"] for each in form["models"]]:
        problems["models"] = f"'{added}' has already been added"
    elif added:
        with visit.platform.database.reading() as session:
            project = projects.find(session, visit.who, visit.project)
            if named(session, ModelRow, project.id, added) is None:
                problems["models"] = f"model '{added}' does not exist"
            else:
                form["models"].append(form_of({"models": [{"name": added}]})["models"][0])
    return _form(
        visit,
        name,
        form,
        check=_checked(visit, sent_of(form)),
        problems=problems,
        newer=newer,
        block="form",
        status=status,
    )


def _sent_form(sent: FormFields) -> dict[str, Any]:
    form: dict[str, Any] = form_of({}) | {key: values[0] for key, values in sent.items() if values}
    form["models"] = [_as_sent(sent, index, each) for index, each in enumerate(sent.get("model", ()))]
    form["keys"] = bool(text_of(sent, "keys"))
    form["gpus"] = ", ".join(sent.get("gpus", ()))
    return form


def _as_sent(sent: FormFields, index: int, name: Any) -> dict[str, Any]:
    fields: dict[str, Any] = form_of({"models": [{"name": name}]})["models"][0]
    for key in fields.keys() - {"name", "chosen", "has_more"}:
        fields[key] = text_of(sent, f"{index}.{key}")
    fields["chosen"] = [int(number) for number in sent.get(f"{index}.version", ()) if number.isdecimal()]
    fields["has_more"] = any(fields[key] for key in fields.keys() - {"name", "chosen", "has_more"})
    return fields


def _tuned(visit: PageContext, spec: Mapping[str, Any], search: int, variant: int) -> dict[str, Any]:
    """Return a specification with a configuration that a search has tried."""
    if not search:
        return {**spec}
    with visit.platform.database.reading() as session:
        project = projects.find(session, visit.who, visit.project)
        row = session.get(TaskRow, search)
    tried = row.result.get("variants", ()) if row is not None and row.project_id == project.id else ()
    if row is None or not 0 <= variant < len(tried):
        raise not_found(f"search {search}: it has not tried a configuration {variant}")
    model, change = row.subject.rpartition("/")[0], tried[variant].get("change", {})
    return {**spec, "models": [{**each, **(change if each["name"] == model else {})} for each in spec["models"]]}


def _checked(visit: PageContext, sent: FormFields) -> dict[str, Any]:
    if not sent.get("model", ()):
        return _nothing()
    shown = _nothing()
    try:
        value = document(sent)
        shown["pipelines"] = pipelines_of(visit, value)
        if not value["name"]:
            return {**shown, "hints": ["Give it a name to see what will run."]}
        plan = visit.platform.deployments.changes.plan(visit.who, visit.project, value)
    except ServingError as error:
        return {**shown, "problems": error.message.splitlines()}
    if not plan.is_new and not text_of(sent, "existing"):
        return {**shown, "taken": value["name"]}
    return {**_planned(plan, value), "pipelines": shown["pipelines"]}


def _planned(plan: ChangePlan, spec: Mapping[str, Any]) -> dict[str, Any]:
    steps = [f"Models that are called come along: {', '.join(plan.steps)}."] if plan.steps else []
    return {
        **_nothing(),
        "problems": plan.problems,
        "missing": plan.missing,
        "changes": plan.changes,
        "hints": [*steps, *_hints(spec)],
        "document": as_file(plan.spec),
    }


def _hints(spec: Mapping[str, Any]) -> list[str]:
    if spec.get("strategy", REPLACE) != REPLACE:
        return []
    several = [
        model["name"] for model in spec.get("models", ()) if len(numbers_of(model)) > 1 and not model.get("traffic")
    ]
    return [f"All requests of '{name}' go to its latest version: enter weights to split them." for name in several]


def _nothing() -> dict[str, Any]:
    return {"problems": [], "missing": [], "changes": [], "hints": [], "document": "", "taken": "", "pipelines": []}


def _form(
    visit: PageContext, name: str, form: dict[str, Any], *, block: str = "", status: int = 200, **values: Any
) -> Response:
    with visit.platform.database.reading() as session:
        project = projects.find(session, visit.who, visit.project)
        known = session.scalars(
            select(ModelRow.name)
            .where(ModelRow.project_id == project.id, registry.IS_LISTED)
            .order_by(ModelRow.name)
            .limit(LISTED_MAX)
        ).all()
        environments = catalog.page(session, project, limit=LISTED_MAX)
        offered = _versions(session, project, [model["name"] for model in form["models"]])
        found = {name: offer(jobs.found(session, project.id, name)) for name in offered}
    for model in form["models"]:
        versions = offered.get(model["name"], [])
        numbers = {row.number for row in versions[:VERSIONS_MAX]} | set(model["chosen"])
        model["versions"] = sorted(numbers, reverse=True)
        model["runs_code"] = any(row.runs_code for row in versions)
        model["offer"] = found.get(model["name"])
    choices = [("", "the platform's own Python")]
    choices += [(row.name, row.name if row.state == "ready" else f"{row.name} ({row.state})") for row in environments]
    context = {
        "name": name,
        "existing": bool(name),
        "newer": 0,
        "form": {"after": 0, "note": "", **form},
        "known": [each for each in known if each not in offered],
        "environments": choices,
        "strategies": STRATEGIES_TEXT,
        "gpus": _gpus(visit),
        "targets": [(each, each) for each in visit.platform.deployments.targets],
        "save": visit.path("deployments", name, "change") if name else visit.path("deployments", "new"),
        "redraw": visit.path("deployments", "form") + (f"?name={name}" if name else ""),
    }
    return visit.show("deploy_form.html", {**context, **values}, block=block, status=status)


def _gpus(visit: PageContext) -> list[tuple[str, str, str]]:
    """Return number, name, and memory and users of each GPU of this machine; several deployments can share one."""
    found = this_machine().gpus
    views = visit.platform.deployments.reads.list(visit.who, visit.project, limit=LISTED_MAX)[0] if found else ()
    listed = []
    for number, gpu in enumerate(found):
        free = f"{size_text(gpu.free_bytes)} of {size_text(gpu.total_bytes)} free" if gpu.total_bytes else ""
        users = [view.name for view in views if number in view.spec.get("device", {}).get("gpus", ())]
        about = [free, f"used by {', '.join(users)}" if users else ""]
        listed.append((str(number), gpu.name or "GPU", ", ".join(filter(None, about))))
    return listed


def _versions(session: Session, project: ProjectRow, names: Sequence[str]) -> dict[str, list[Any]]:
    query = (
        select(ModelRow.name, VersionRow.number, VersionRow.runs_code)
        .outerjoin(VersionRow, (VersionRow.model_id == ModelRow.id) & (VersionRow.state == "ready"))
        .where(ModelRow.project_id == project.id, ModelRow.name.in_(names))
        .order_by(VersionRow.number.desc())
    )
    found: dict[str, list[Any]] = {}
    for row in session.execute(query):
        versions = found.setdefault(row.name, [])
        if row.number is not None:
            versions.append(row)
    return found
