"""Chromium, driven by Playwright, for tests of the server's page."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, expect, sync_playwright

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""The first needs a third less CPU time for the same tests: it has no windows, extensions or services of a desktop."""

_PATH = next((path for name in _NAMES if (path := shutil.which(name)) is not None), None)

needed = pytest.mark.skipif(_PATH is None, reason="there is no Chromium here (apt-get install chromium-headless-shell)")
"""Skips tests where there is none."""

TIMEOUT_MS = 100_000.0
"""Other programs may need the processors, too."""


@contextmanager
def chromium(*more: str) -> Iterator[Browser]:
    """Run a browser without a window, with more arguments."""
    # Its sandbox needs rights that containers withhold, and root has none at all.
    arguments = [*more, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_PATH, args=arguments, timeout=TIMEOUT_MS)
        try:
            yield browser
        finally:
            browser.close()


def new_tab(browser: Browser) -> Page:
    """Return a tab without animations, in a context of its own."""
    tab = browser.new_context(reduced_motion="reduce").new_page()
    tab.set_default_timeout(TIMEOUT_MS)
    expect.set_options(timeout=TIMEOUT_MS)
    return tab


@contextmanager
def without_faults(tab: Page) -> Iterator[None]:
    """Fail if scripts of the page do, or if something is refused by the content security policy."""
    faults: list[str] = []

    def note_error(error: Error) -> None:
        faults.append(str(error))

    def note_line(line: ConsoleMessage) -> None:
        if "Content Security" in line.text:
            faults.append(line.text)

    tab.on("pageerror", note_error)
    tab.on("console", note_line)
    yield
    tab.remove_listener("pageerror", note_error)
    tab.remove_listener("console", note_line)
    assert faults == [], faults
