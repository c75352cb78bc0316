"""The parts of a running platform, for the handlers of its calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query, Request

from charonia.platform.alerts.alerts import Alerts
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.artifacts.uploads import UploadFolder
from charonia.platform.database.connection import Database
from charonia.platform.database.lease import PlatformLease
from charonia.platform.deployments.service import Deployments
from charonia.platform.deployments.workloads import Workloads
from charonia.platform.models.follow import Polls
from charonia.platform.people.oidc import Provider
from charonia.platform.settings import PlatformSettings
from charonia.platform.targets.kubernetes.target import KubernetesTarget
from charonia.platform.tasks.runner import TaskRunner
from charonia.platform.trials import Trials
from charonia.platform.values import LIMIT_MAX, Number


@dataclass(frozen=True, slots=True)
class Platform:
    """A running platform. The application has it as `app.state.platform`."""

    settings: PlatformSettings
    database: Database
    tasks: TaskRunner
    artifacts: ArtifactStore
    uploads: UploadFolder
    workloads: Workloads
    deployments: Deployments
    trials: Trials
    alerts: Alerts
    lease: PlatformLease
    polls: Polls
    provider: Provider | None = None
    clusters: Sequence[KubernetesTarget] = ()


def _platform(request: Request) -> Platform:
    platform = request.app.state.platform
    assert isinstance(platform, Platform)
    return platform


PlatformDep = Annotated[Platform, Depends(_platform)]
"""The platform, as a parameter of a route."""

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="How many entries to return.")]
Offset = Annotated[Number, Query(description="How many entries to skip.")]
