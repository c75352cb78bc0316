"""What a running platform consists of, for those who handle its calls."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from charonia.platform.database.connection import Database
from charonia.platform.settings import PlatformSettings
from charonia.platform.tasks.runner import TaskRunner


@dataclass(frozen=True, slots=True)
class Platform:
    """A running platform. The application has it as `app.state.platform`."""

    settings: PlatformSettings
    database: Database
    tasks: TaskRunner


def _platform(request: Request) -> Platform:
    platform = request.app.state.platform
    assert isinstance(platform, Platform)
    return platform


Here = Annotated[Platform, Depends(_platform)]
"""The platform, as a parameter of a route."""
