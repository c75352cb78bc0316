"""`charonia platform` as a process, and its API as a script uses it."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import charonia
from charonia.platform.api_client import PlatformClient, path_of

PROJECT = "default"
STOP_TIMEOUT_S = 30.0
LOOK_S = 0.1

_LINK = re.compile(r"(http://\S+?)/login/link\?\S+")


class Platform:
    """A platform that runs.

    Attributes:
        link: The address that signs its owner in, once.
        process: Its process.
        url: Its address.
    """

    def __init__(self, process: subprocess.Popen[str], link: str, url: str, key: str) -> None:
        self.process, self.link, self.url = process, link, url
        self._client = PlatformClient(url, key)

    def call(self, method: str, *parts: str | int, body: Any = None, query: Mapping[str, Any] | None = None) -> Any:
        """Make a call below /api/v1/projects/default, and return its answer."""
        return self._client.call(method, path_of("projects", PROJECT, *parts), body, query=query)

    def there(self, *parts: str | int) -> Any:
        """Return the resource at a path of the API, None if it does not exist."""
        try:
            return self.call("GET", *parts)
        except charonia.ServingError as error:
            if error.code is not charonia.Code.NOT_FOUND:
                raise
            return None

    def send_folder(self, folder: Path) -> str:
        """Send the files of a model's folder, and return their batch."""
        files = {str(file.relative_to(folder.parent)): file for file in folder.rglob("*") if file.is_file()}
        return self._client.send_files(PROJECT, files, progress=_silent)

    def until_serving(self, deployment: str, revision: int, timeout_s: float = 120.0) -> Mapping[str, Any]:
        """Wait until a revision serves, and return its deployment. Raises ServingError if it fails, or takes longer."""

        def look() -> Any:
            view = self.call("GET", "deployments", deployment)
            if view["revision"] == revision and view["latest_state"] == "failed":
                raise charonia.ServingError(charonia.Code.INTERNAL, f"revision {revision}: {view['latest_reason']}")
            return view if view["serving"] >= revision and view["state"] == "ready" else None

        view: Mapping[str, Any] = until(look, f"revision {revision} of '{deployment}' serves", timeout_s)
        return view

    def remove(self, deployment: str) -> None:
        """Remove a deployment, if it is there, and wait until its servers have ended."""
        if self.there("deployments", deployment):
            self.call("DELETE", "deployments", deployment)
            until(lambda: not self.there("deployments", deployment), f"'{deployment}' has ended", STOP_TIMEOUT_S)


def _silent(sent: int, total: int) -> None:
    """Report no progress."""


def until(look: Callable[[], Any], what: str, timeout_s: float) -> Any:
    """Return what `look` returns as soon as that is something. Raises ServingError if it takes longer."""
    give_up = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > give_up:
            raise charonia.ServingError(charonia.Code.UNAVAILABLE, f"after {timeout_s:.0f} s, not yet: {what}")
        time.sleep(LOOK_S)
    return found


@contextmanager
def running_platform(data: Path, port: int, *options: str) -> Iterator[Platform]:
    """Start a platform with options, port 0 for a free one, and wait until it answers; end it in order on exit.

    The servers of its deployments outlive it: remove them first.
    """
    command = [sys.executable, "-P", "-m", "charonia", "platform", f"--data={data}", f"--port={port}", *options]
    # In its own session: Ctrl-C reaches this program only, which then stops the platform.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        link = next(filter(None, map(_LINK.search, process.stdout)), None)
        if link is None:
            raise charonia.ServingError(charonia.Code.UNAVAILABLE, "the platform has not started; see above")
        yield Platform(process, link[0], link[1], (data / "owner.key").read_text().strip())
    finally:
        process.send_signal(signal.SIGTERM)  # has no effect on a process that has exited
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
