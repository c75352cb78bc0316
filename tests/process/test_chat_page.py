"""The page's conversation with a language model, in Chromium."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect
from tests.support.browser import chromium, needed, new_tab, without_faults
from tests.support.language_models import write_language_models
from tests.support.process import ServeProcess, eventually

pytestmark = [needed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_language_models(folder)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServeProcess]:
    with ServeProcess(repository) as started:
        yield started


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with chromium() as browser:
        opened = new_tab(browser)
        with without_faults(opened):
            yield opened


def chat(tab: Page, server: ServeProcess, model: str) -> Locator:
    tab.goto("about:blank")
    tab.goto(f"http://{server.http}/#{model}")
    expect(tab.locator("article h1")).to_contain_text(model)
    return tab.locator(".chat")


def say(view: Locator, text: str) -> None:
    view.get_by_role("textbox", name="Message", exact=True).fill(text)
    view.get_by_role("textbox", name="Message", exact=True).press("Enter")


def test_a_conversation_goes_on_until_a_new_one_begins(tab: Page, server: ServeProcess) -> None:
    view = chat(tab, server, "plain")
    say(view, "one")
    expect(view.locator(".theirs .said").last).to_have_text("user: one\n\nassistant:", use_inner_text=True)
    expect(view.locator(".theirs .note").last).to_have_text(re.compile(r"^\d+ tokens · .* tokens/s · first after "))
    say(view, "two")
    expect(view.locator(".theirs .said").last).to_contain_text("user: one")
    expect(view.locator(".theirs .said").last).to_contain_text("user: two")

    view.get_by_role("button", name="New conversation").click()
    expect(view.locator(".message")).to_have_count(0)
    view.locator("summary").click()
    view.get_by_role("textbox", name="System message").fill("Be brief.")
    view.get_by_role("spinbutton", name=re.compile("Longest answer")).fill("17")
    say(view, "three")
    expect(view.locator(".theirs .said").last).to_have_text("system: Be brief.")


def test_an_answer_can_be_stopped_and_is_kept(tab: Page, server: ServeProcess, repository: Path) -> None:
    mark = repository / "engine" / "1" / "cancelled"
    mark.unlink(missing_ok=True)
    view = chat(tab, server, "engine")
    say(view, "slow")
    expect(view.locator(".theirs .said")).to_contain_text("xxx")

    view.get_by_role("button", name="Stop").click()

    expect(view.locator(".theirs .note")).to_have_text("Stopped")
    assert eventually(mark.exists, 10)
    say(view, "hello")
    expect(view.locator(".theirs .said").last).to_have_text("0 1 2", use_inner_text=True)


def test_a_refusal_is_shown_and_the_message_counts_as_unsaid(tab: Page, server: ServeProcess) -> None:
    view = chat(tab, server, "plain")
    say(view, "fail")
    expect(view.locator(".problem")).to_contain_text("no capacity")
    say(view, "hello")

    expect(view.locator(".theirs .said").last).to_have_text("user: hello\n\nassistant:", use_inner_text=True)


def test_only_models_that_chat_have_it(tab: Page, server: ServeProcess) -> None:
    expect(chat(tab, server, "numbers")).to_have_count(0)
    expect(chat(tab, server, "embedding")).to_have_count(0)
