"""The API of alerts."""

from collections.abc import Sequence

from fastapi import APIRouter
from pydantic import BaseModel, Field

from charonia.platform.alerts.alerts import AlertRule
from charonia.platform.database.tables import copied
from charonia.platform.people.calls import Caller
from charonia.platform.state import Limit, PlatformDep
from charonia.platform.values import Number, Text

router = APIRouter(prefix="/api/v1/projects/{project}", tags=["alerts"])


class AlertBody(AlertRule):
    """An alert."""

    author: str
    created: float


class EventBody(BaseModel):
    """An event of an alert."""

    id: int
    alert: str
    subject: str
    message: str
    created: float
    ended: float = Field(description="When its condition held no longer, 0 while it does.")
    acknowledged_by: str
    problem: str = Field(description="Why the webhook was not told, empty if it was.")


@router.get("/alerts")
def list_alerts(project: Text, platform: PlatformDep, who: Caller) -> Sequence[AlertBody]:
    """List the alerts of a project."""
    return [copied(AlertBody, row) for row in platform.alerts.list(who, project)]


@router.post("/alerts", status_code=201)
def create_alert(project: Text, asked: AlertRule, platform: PlatformDep, who: Caller) -> None:
    """Create an alert."""
    platform.alerts.create(who, project, asked)


@router.delete("/alerts/{name}", status_code=204)
def remove_alert(project: Text, name: Text, platform: PlatformDep, who: Caller) -> None:
    """Delete an alert and its events."""
    platform.alerts.remove(who, project, name)


@router.post("/alerts/{name}/test", status_code=204)
def send_test(project: Text, name: Text, platform: PlatformDep, who: Caller) -> None:
    """Send a test to the webhook of an alert."""
    platform.alerts.test(who, project, name)


@router.get("/alert-events")
def list_events(project: Text, platform: PlatformDep, who: Caller, limit: Limit = 100) -> Sequence[EventBody]:
    """List the latest events, latest first."""
    return [copied(EventBody, row, alert=row.alert.name) for row in platform.alerts.events(who, project, limit=limit)]


@router.post("/alert-events/{number}/acknowledge", status_code=204)
def acknowledge(project: Text, number: Number, platform: PlatformDep, who: Caller) -> None:
    """Acknowledge an event."""
    platform.alerts.acknowledge(who, project, number)
