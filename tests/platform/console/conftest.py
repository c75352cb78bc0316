"""A browser for the tests of a module; its platform is the fixture `running` of the module."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.support.browser import chromium, new_tab, without_faults
from tests.support.running_platform import RunningPlatform


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def tab(browser: Browser, running: RunningPlatform) -> Iterator[Page]:
    opened = new_tab(browser)
    expect.set_options(timeout=60_000)  # a check or a start is three processes, beside those of other tests
    opened.goto(running.login_link())
    yield opened
    opened.context.close()


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    with without_faults(tab):
        yield tab
