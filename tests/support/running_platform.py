"""A platform that listens on this machine, in threads of the test, with the servers of its deployments."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from tests.support.ports import free_ports
from tests.support.process import eventually

from charonia.platform.app import make_app
from charonia.platform.people.access import Principal, ProjectRole
from charonia.platform.people.login import link as link_of
from charonia.platform.serve import prepare_owner
from charonia.platform.settings import PlatformSettings
from charonia.platform.state import Platform

PORTS = 30
"""Ports for deployments: for ten of them."""

OWNER = Principal("tests", everywhere=ProjectRole.ADMIN)


@dataclass(frozen=True)
class RunningPlatform:
    """A platform that runs."""

    url: str
    platform: Platform

    def login_link(self) -> str:
        """Return an address that signs the owner in, once."""
        with self.platform.database.transaction() as session:
            return link_of(self.platform.settings, prepare_owner(session, self.platform.settings.data))


@contextmanager
def running_platform(data: Path, **more: Any) -> Iterator[RunningPlatform]:
    """Start a platform with more settings; at the end, all of its deployments are removed."""
    first, last = free_ports(PORTS + 1)
    settings = PlatformSettings(data, isolation="available", port=first, ports=(first + 1, last), **more)
    app = make_app(settings)
    server = uvicorn.Server(uvicorn.Config(app, host=settings.host, port=first, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, name="platform")
    thread.start()
    try:
        assert eventually(lambda: server.started)
        yield RunningPlatform(settings.url, app.state.platform)
        _remove_all(app.state.platform)
    finally:
        server.should_exit = True
        thread.join()


def _remove_all(platform: Platform) -> None:
    reads, changes = platform.deployments.reads, platform.deployments.changes
    for view in reads.list(OWNER, "default")[0]:
        changes.remove(OWNER, "default", view.name)
    assert eventually(lambda: not reads.list(OWNER, "default")[0])
