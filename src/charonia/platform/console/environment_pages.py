"""The pages of environments: the list, the form for a new one, one with its build log; the choice of one."""

from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Response

from charonia.config.backends import PYTHON, Preset, presets, record_of
from charonia.core.errors import ServingError
from charonia.platform.console.deploy_form import text_of
from charonia.platform.console.pages import INVALID, ROWS_MAX, OnPage, PageContext, Sent, go, problems_of
from charonia.platform.database.tables import EnvironmentRow
from charonia.platform.environments import builder, catalog
from charonia.platform.environments.catalog import EnvironmentRequest
from charonia.platform.models.records import VersionReport
from charonia.platform.people import projects
from charonia.platform.values import OLDER_PYTHONS, Number, Text

router = APIRouter(prefix="/p/{project}/environments", include_in_schema=False)

_FORM = ("name", "python", "requirements", "imports")
_FIELDS = {"environment": "name", "script": "requirements"} | dict(zip(_FORM, _FORM, strict=True))


@router.get("")
def show_all(visit: OnPage, offset: Number = 0) -> Response:
    """List environments."""
    with visit.platform.database.reading() as session:
        found = projects.find(session, visit.who, visit.project)
        rows = catalog.page(session, found, limit=ROWS_MAX + 1, offset=offset)
    names = {row.name for row in rows}
    values = {
        "environments": rows[:ROWS_MAX],
        "presets": [preset for preset in presets() if preset.name not in names],
        "pages": visit.pages(offset, len(rows)),
    }
    return visit.show("environments.html", values)


@router.get("/new")
def show_form(visit: OnPage) -> Response:
    """Show the form for a new environment."""
    visit.demand_deployer()
    return _form(visit, dict.fromkeys(_FORM, ""))


@router.post("")
def add(visit: OnPage, sent: Sent) -> Response:
    """Create an environment from a form."""
    form = {name: text_of(sent, name) for name in _FORM}
    try:
        with visit.platform.database.transaction() as session:
            row, _ = catalog.add(session, visit.who, visit.project, _wanted(**form))
    except ServingError as error:
        return _form(visit, form, problems=problems_of(error, _FIELDS.get))
    return go(visit.path("environments", row.name))


@router.get("/{name}")
def show(visit: OnPage, name: Text) -> Response:
    """Show an environment with its build log."""
    with visit.platform.database.reading() as session:
        row = catalog.get(session, projects.find(session, visit.who, visit.project), name)
        task = catalog.newest_task(session, row)
    values = {"it": row, "job": task, "log": visit.task_log(task.id) if task is not None else ""}
    return visit.show("environment.html", values)


def _wanted(name: str, python: str, requirements: str, imports: str) -> EnvironmentRequest:
    """Return the environment described by a form; a script contains its own requirements."""
    text = {"script" if "# /// script" in requirements else "requirements": requirements.replace("\r\n", "\n")}
    return EnvironmentRequest(name=name, python=python, imports=imports.replace(",", " ").split(), **text)


def _form(visit: PageContext, form: Mapping[str, str], problems: Mapping[str, str] | None = None) -> Response:
    pythons = [
        ("", f"{builder.pythons()[0]}, as the platform"),
        *(
            (version, f"{version}, for Python models only" if version in OLDER_PYTHONS else version)
            for version in builder.pythons()[1:]
        ),
    ]
    values = {"form": form, "pythons": pythons, "problems": problems or {}}
    is_wrong = problems is not None
    return visit.show(
        "environment_new.html", values, block="form" if is_wrong else "", status=INVALID if is_wrong else 200
    )


def suggested(report: VersionReport, environments: Sequence[EnvironmentRow]) -> str:
    """Return the name of an environment in which a version can be loaded, "" for the platform's own Python.

    If none fits, the answer is "", too: the deployment then reports the missing packages.
    """
    if report.checked_with:
        return report.checked_with
    stated = [
        line.partition("==")[0].partition(">")[0].partition("[")[0].strip() for line in report.requirements.splitlines()
    ]
    missing = {_plain(need.name) for need in report.needs if not need.is_here} | {
        _plain(name) for name in stated if name
    }
    if not missing:
        return ""
    for environment in environments:
        is_older = environment.python in OLDER_PYTHONS and report.backend != PYTHON
        if (
            environment.state == "ready"
            and not is_older
            and missing <= {_plain(name) for name, _ in environment.packages}
        ):
            return str(environment.name)
    return ""


def to_build(report: VersionReport, environments: Sequence[EnvironmentRow]) -> Preset | None:
    """Return the preset of the backend if a version needs packages that no environment has, None otherwise."""
    is_missing = any(not need.is_here for need in report.needs) and not suggested(report, environments)
    preset = record_of(report.backend).preset if is_missing else None
    is_there = preset is not None and any(row.name == preset.name and row.state == "ready" for row in environments)
    return None if is_there else preset


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
