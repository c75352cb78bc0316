"""The page of alerts: what fires, the alerts of a project, and a form for another one."""

from typing import Any

from fastapi import APIRouter, Response

from charonia.core.errors import ServingError
from charonia.platform.alerts.alerts import CONDITIONS, AlertRule
from charonia.platform.console.deploy_form import text_of
from charonia.platform.console.pages import INVALID, ROWS_MAX, OnPage, Sent, Visit
from charonia.platform.database.tables import AlertRow
from charonia.platform.values import Number, Text

router = APIRouter(prefix="/p/{project}/alerts", include_in_schema=False)

_CHOICES = (
    ("error_rate", "Failed requests, in %"),
    ("p99_ms", "p99 latency, in ms"),
    ("not_ready", "A deployment is not ready"),
    ("job_failed", "A job has failed"),
    ("disk", "Free disk space, in %"),
)
_FORM = {"condition": "error_rate", "for_s": "60", "format": "json"}


@router.get("")
def show(visit: OnPage) -> Response:
    return _page(visit)


@router.post("")
def create(visit: OnPage, sent: Sent) -> Response:
    """Create an alert."""
    form = {name: text_of(sent, name) for name in AlertRule.model_fields}
    try:
        numbers = {"threshold": float(form["threshold"] or 0), "for_s": int(form["for_s"] or 0)}
        visit.platform.alerts.create(visit.who, visit.project, AlertRule(**{**form, **numbers}))  # type: ignore[arg-type]
    except ValueError:
        return _page(visit, status=INVALID, form=form, problem="threshold and time: expected numbers, 0 or more")
    except ServingError as error:
        return _page(visit, status=INVALID, form=form, problem=str(error))
    return _page(visit)


@router.post("/{name}/remove")
def remove(visit: OnPage, name: Text) -> Response:
    """Delete an alert."""
    visit.platform.alerts.remove(visit.who, visit.project, name)
    return _page(visit)


@router.post("/{name}/test")
def send_test(visit: OnPage, name: Text) -> Response:
    """Send a test to the webhook of an alert."""
    try:
        visit.platform.alerts.test(visit.who, visit.project, name)
    except ServingError as error:
        return _page(visit, status=INVALID, tested=("bad", error.message))
    return _page(visit, tested=("good", f"The webhook of '{name}' has accepted a test."))


@router.post("/events/{number}/acknowledge")
def acknowledge(visit: OnPage, number: Number) -> Response:
    """Record that the visitor takes care of an event."""
    visit.platform.alerts.acknowledge(visit.who, visit.project, number)
    return _page(visit)


def _page(
    visit: Visit,
    *,
    status: int = 200,
    form: dict[str, Any] | None = None,
    problem: str = "",
    tested: tuple[str, str] | None = None,
) -> Response:
    alerts = visit.platform.alerts
    values = {
        "events": alerts.events(visit.who, visit.project, limit=ROWS_MAX),
        "alerts": alerts.list(visit.who, visit.project),
        "rule_text": rule_text,
        "choices": _CHOICES,
        "form": {**dict.fromkeys(AlertRule.model_fields, ""), **_FORM, **(form or {})},
        "problem": problem,
        "tested": tested,
    }
    return visit.show("alerts.html", values, block="alerts" if visit.request.method == "POST" else "", status=status)


def rule_text(row: AlertRow) -> str:
    """Return the condition of an alert as a sentence."""
    where = f"deployment '{row.deployment}'" if row.deployment else "any deployment"
    text = {
        "error_rate": f"more than {row.threshold:g} % of the requests of {where} fail",
        "p99_ms": f"the p99 latency of {where} is above {row.threshold:g} ms",
        "not_ready": f"{where} is not ready",
        "job_failed": "a job has failed",
        "disk": f"less than {row.threshold:g} {CONDITIONS['disk']}",
    }[row.condition]
    text += f" for {row.for_s} s" if row.for_s and row.condition != "job_failed" else ""
    return text[0].upper() + text[1:]
