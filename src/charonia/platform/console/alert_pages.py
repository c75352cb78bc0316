"""The page of alerts: what fires, the alerts of a project, and a form for another one."""

from fastapi import APIRouter, Response

from charonia.platform.console.pages import ROWS_MAX, OnPage

router = APIRouter(prefix="/p/{project}/alerts", include_in_schema=False)

_CHOICES = (
    ("error_rate", "Failed requests, in %"),
    ("p99_ms", "p99 latency, in ms"),
    ("not_ready", "A deployment is not ready"),
    ("job_failed", "A job has failed"),
    ("disk", "Free disk space, in %"),
)


@router.get("")
def show(visit: OnPage) -> Response:
    alerts = visit.platform.alerts
    values = {
        "events": alerts.events(visit.who, visit.project, limit=ROWS_MAX),
        "alerts": alerts.list(visit.who, visit.project),
        "choices": _CHOICES,
    }
    return visit.show("alerts.html", values)
