"""A platform behind a real port, in this process, over a target of records: for those who call its API."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import uvicorn
from tests.support.fake_target import FakeTarget

from charonia.platform import app
from charonia.platform.data_folder import announce, claim
from charonia.platform.deployments import reconciler
from charonia.platform.serve import prepare_owner
from charonia.platform.settings import PlatformSettings
from charonia.platform.state import Platform
from charonia.platform.targets.api import Observed


class BriskTarget(FakeTarget):
    """A target of records where time passes with every look."""

    def observe(self, deployment: str) -> Observed:
        self.pass_s(self.start_s)
        return super().observe(deployment)

    def temporary_folders(self) -> set[Path]:
        """Return none: it starts no process."""
        return set()


@dataclass(frozen=True, slots=True)
class ServedPlatform:
    """A platform."""

    platform: Platform
    target: BriskTarget
    url: str
    link: str

    @property
    def data(self) -> Path:
        return self.platform.settings.data

    @property
    def key(self) -> str:
        return (self.data / "owner.key").read_text().strip()


@contextmanager
def served_platform(data: Path) -> Iterator[ServedPlatform]:
    """Start a platform, and end it."""
    target = BriskTarget()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with (
        closing(listener),
        claim(data),
        patch.object(app, "LocalTarget", lambda *_: target),
        patch.object(reconciler, "STEADY_S", 0.02),
        patch.object(reconciler, "MOVING_S", 0.02),
    ):
        made = app.make_app(PlatformSettings(data, isolation="available"))
        with made.state.platform.database.transaction() as session:
            link = prepare_owner(session, data)
        announce(data, url)
        server = uvicorn.Server(uvicorn.Config(made, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, args=([listener],), name="served platform")
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield ServedPlatform(made.state.platform, target, url, link)
        finally:
            server.should_exit = True
            thread.join()
