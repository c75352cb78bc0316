"""The page of a version to try it before it is deployed."""

from typing import Any

from fastapi import APIRouter, Response

from charonia.core.errors import ServingError
from charonia.platform.console.deploy_form import text_of
from charonia.platform.console.environment_choice import suggested
from charonia.platform.console.pages import INVALID, OnPage, Sent, Visit, go, problems_of
from charonia.platform.environments import catalog
from charonia.platform.models import registry
from charonia.platform.people import projects
from charonia.platform.trials.server import IDLE_S_MAX, START_S_MAX, TrialPhase
from charonia.platform.values import Number, Text

router = APIRouter(prefix="/p/{project}/models/{name}/versions/{number}/try")

ENVIRONMENTS_MAX = 200


@router.get("")
def show(visit: OnPage, name: Text, number: Number) -> Response:
    return _page(visit, name, number)


@router.post("/start")
def start(visit: OnPage, name: Text, number: Number, sent: Sent) -> Response:
    """Start the server of a version."""
    try:
        visit.platform.trials.start(visit.who, visit.project, name, number, text_of(sent, "environment"))
    except ServingError as error:
        if visit.request.headers.get("hx-target") != "form":  # the button of another page
            raise
        return _page(visit, name, number, status=INVALID, problems=problems_of(error, "environment"))
    return go(visit.path("models", name, "versions", number, "try"))


@router.post("/stop")
def stop(visit: OnPage, name: Text, number: Number) -> Response:
    """End the server of a version."""
    visit.platform.trials.stop(visit.who, visit.project, name, number)
    return go(visit.path("models", name, "versions", number, "try"))


def _page(visit: Visit, name: str, number: int, *, status: int = 200, **values: Any) -> Response:
    with visit.platform.database.reading() as session:
        version = registry.version(session, visit.who, visit.project, name, number)
        environments = catalog.page(session, projects.find(session, visit.who, visit.project), limit=ENVIRONMENTS_MAX)
    trial, log = visit.platform.trials.look(visit.who, visit.project, name, number)
    ready = [(row.name, row.name) for row in environments if row.state == "ready"]
    context = {
        "name": name,
        "number": number,
        "state": version.state,
        "runs_code": version.runs_code,
        "environments": [("", "the platform's own Python"), *ready],
        "environment": suggested(version.report, environments),
        "trial": trial,
        "log": log,
        "start_s_max": START_S_MAX,
        "idle_s_max": IDLE_S_MAX,
        "base": visit.path("models", name, "versions", number),
    }
    response = visit.show(
        "version_try.html", {**context, **values}, block="form" if status != 200 else "", status=status
    )
    if visit.request.headers.get("hx-target") == "live" and trial.phase is not TrialPhase.STARTING:
        response.headers["HX-Refresh"] = "true"  # the form of a server that has become ready needs its script
    return response
