"""Chromium, driven by Playwright, for tests of the server's page."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium_path() -> str | None:
    """Return the program of a Chromium on this machine, None if there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    """Run a browser without a window."""
    # Its sandbox needs rights that containers withhold, and root has none at all.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()
