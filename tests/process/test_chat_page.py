"""The page's conversation with a language model, in Chromium."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect
from tests.support.browser import chromium, needed, new_tab, without_faults
from tests.support.language_models import write_language_models
from tests.support.process import ServeProcess, eventually

pytestmark = needed


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
    # A clock that goes on between pieces, also when all of them are read at once.
    tab.evaluate("() => { let milliseconds = 0; performance.now = () => (milliseconds += 5); }")
    say(view, "one")
    expect(view.locator(".theirs .said").last).to_have_text("user: one\n\nassistant:", use_inner_text=True)
    expect(view.locator(".theirs .note").last).to_have_text(re.compile(r"^\d+ tokens · .* tokens/s · first after "))
    say(view, "two")
    expect(view.locator(".theirs .said").last).to_contain_text("user: one")
    expect(view.locator(".theirs .said").last).to_contain_text("user: two")

    view.get_by_role("button", name="New conversation").click()
    expect(view.locator(".message")).to_have_count(0)
    view.locator("summary", has_text="Settings").click()
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

    expect(view.locator(".theirs .note")).to_contain_text("Stopped")
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


def test_an_answer_is_markdown_and_never_markup(tab: Page, server: ServeProcess) -> None:
    view = chat(tab, server, "plain")
    say(
        view,
        "**bold** `code` <b>no</b> [a](https://example.org) [b](javascript:alert)\n\n- one\n\n```python\nx = *y*\n```",
    )
    said = view.locator(".theirs .said")

    expect(said.locator("strong")).to_have_text("bold")
    expect(said.locator("p code")).to_have_text("code")
    expect(said.locator("li")).to_have_text("one")
    expect(said.locator(".code pre")).to_have_text("x = *y*")
    expect(said.locator("a")).to_have_attribute("href", "https://example.org")
    expect(said).to_contain_text("<b>no</b>")
    expect(said).to_contain_text("[b](javascript:alert)")


def test_an_answer_is_asked_for_again(tab: Page, server: ServeProcess) -> None:
    view = chat(tab, server, "plain")
    say(view, "one")
    view.locator("summary", has_text="Settings").click()
    view.get_by_role("spinbutton", name=re.compile("Longest answer")).fill("4")
    view.get_by_role("button", name="Try again").click()

    expect(view.locator(".theirs .said")).to_have_text("user")
    expect(view.locator(".message")).to_have_count(2)


def test_two_models_answer_side_by_side(tab: Page, server: ServeProcess) -> None:
    view = chat(tab, server, "plain")
    view.get_by_label("Compare with").select_option("engine")
    say(view, "hello")

    expect(view.locator(".log").first.locator(".theirs .said")).to_contain_text("user: hello")
    expect(view.locator(".log").last.locator(".theirs .said")).to_have_text("0 1 2", use_inner_text=True)
    expect(view.locator(".theirs .note")).to_have_text([re.compile("first after"), re.compile("first after")])


def test_the_conversation_is_code_for_clients_of_openai(tab: Page, server: ServeProcess) -> None:
    view = chat(tab, server, "plain")
    say(view, "it's me")
    expect(view.locator(".theirs .note")).to_have_text(re.compile("first after"))
    view.get_by_text("The same conversation as code").click()

    source = view.locator("details .code pre")
    expect(source).to_contain_text(f'base_url="http://{server.http}/v1"')
    expect(source).to_contain_text('{"role":"user","content":"it\'s me"}')
    view.get_by_role("button", name="curl").click()
    expect(source).to_contain_text("it'\\''s me")


def test_an_ensemble_shows_its_pipeline(tab: Page, server: ServeProcess) -> None:
    tab.goto(f"http://{server.http}/#steps")

    expect(tab.locator(".pipeline .step")).to_have_text(re.compile(r"^\s*whole(idle|.* ms .*) · 1 instance$"))
    expect(tab.locator(".pipeline .arrow")).to_have_text(["text_input", "text_output"])
    tab.locator(".pipeline .step").click()
    expect(tab.locator("article h1")).to_contain_text("whole")
