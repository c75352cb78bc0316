"""Further ways through the pages, in Chromium: trials, shadows, measurements, single sign-on, the keyboard alone."""

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Locator, Page, expect
from sqlalchemy import select
from tests.platform.models.mlflow_server import mlflow_server
from tests.platform.people.oidc_provider import CLIENT, SECRET, OidcProvider
from tests.support.browser import needed
from tests.support.console import infer, path, problems_of, sure, tensor
from tests.support.models import mlp
from tests.support.platform_models import add_version, short_levels, short_searches
from tests.support.running_platform import OWNER, RunningPlatform, running_platform

from charonia.platform.database.tables import TaskRow
from charonia.platform.settings import Oidc

pytestmark = [needed, pytest.mark.timeout(400)]

SHIFT_MAX = 0.05
WATCHED_MS = 4_000
WATCH = """async () => {
    if (!window.moved) {
        window.moved = [];
        const observer = new PerformanceObserver((list) => window.moved.push(...list.getEntries()));
        observer.observe({ type: "layout-shift", buffered: true });
        await new Promise((done) => setTimeout(done, 100));
    }
    return window.moved.map(({ value, sources }) =>
        [value, sources.map(({ node }) => (node?.outerHTML ?? node?.textContent ?? "").slice(0, 90)).join(" | ")]);
}"""
"""Returns what has moved since the page was loaded, with how much of it."""
READ_MS = 2_500

CODE = """
import time


class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        return []
"""
CONFIG = b"""backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
"""


@pytest.fixture(scope="module")
def provider() -> Iterator[OidcProvider]:
    with OidcProvider() as found:
        yield found


@pytest.fixture(scope="module")
def running(provider: OidcProvider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    oidc = Oidc(provider.issuer, CLIENT, SECRET, admins=("ada@example.org",))
    with running_platform(tmp_path_factory.mktemp("platform"), oidc=oidc) as started:
        started.login_link()  # the first one makes the project
        add(started, "digits", {"1/model.onnx": mlp((64, 32, 10))})
        yield started


def add(running: RunningPlatform, name: str, files: dict[str, bytes], *, runs_code: bool = False) -> int:
    platform = running.platform
    return add_version(platform.database, platform.settings.data, name, files, runs_code=runs_code)


def python(initialize: str) -> dict[str, bytes]:
    return {"1/model.py": CODE.format(initialize=initialize).encode(), "config.pbtxt": CONFIG}


def deploy(page: Page, running: RunningPlatform, model: str, version: int = 1) -> str:
    """Deploy a version, and return its address when it is ready."""
    page.goto(path(running, "models", model, "versions", str(version)))
    page.get_by_role("button", name=f"Deploy version {version}").click()
    expect(page).to_have_url(path(running, "deployments", model))
    expect(page.locator("h1 .badge")).to_have_text("ready")
    return page.locator(".address code").inner_text()


def go_to(page: Page, target: Locator) -> None:
    """Press Tab until an element has the focus, which has to be visible all the way."""
    for _ in range(60):
        page.keyboard.press("Tab")
        try:
            is_there, is_shown = target.evaluate(HAS_FOCUS_THAT_IS_SHOWN)
        except Error as error:  # a page that has changed as a whole loads itself again
            if "navigation" not in error.message:
                raise
            page.wait_for_load_state()
            continue
        assert is_shown, page.evaluate("document.activeElement.outerHTML")
        if is_there:
            return
    raise AssertionError(f"Tab does not lead to {target}")


HAS_FOCUS_THAT_IS_SHOWN = """(target) => {
    const shown = (element) => {
        const style = getComputedStyle(element);
        return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
    };
    const found = document.activeElement;
    return [found === target, found === document.body || shown(found) || shown(found.closest("label") ?? found)];
}"""


@contextmanager
def load(address: str, model: str) -> Iterator[None]:
    """Send requests to a deployment for as long as it lasts."""
    is_over = threading.Event()

    def send() -> None:
        while not is_over.wait(0.1):
            infer(address, model, {"inputs": [tensor("input", 64)]})

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_who_uses_single_sign_on_comes_back_signed_in(browser: Browser, running: RunningPlatform) -> None:
    with browser.new_context() as context:
        stranger = context.new_page()
        stranger.goto(path(running, "models"))

        stranger.get_by_role("link", name="Continue with single sign-on").click()

        expect(stranger).to_have_url(path(running, "models"))
        expect(stranger.locator(".whoami")).to_contain_text("Ada Lovelace")


def test_a_model_comes_from_mlflow(page: Page, running: RunningPlatform) -> None:
    with mlflow_server() as mlflow:
        mlflow.versions["reader", "3"] = "mlflow-artifacts:/1/reader"
        mlflow.artifacts["1/reader/MLmodel"] = b"flavors:\n  onnx:\n    data: model.onnx\n"
        mlflow.artifacts["1/reader/model.onnx"] = mlp((64, 32, 10))
        page.goto(path(running, "models", "add?from=mlflow"))

        page.get_by_label("Model in MLflow").fill("models:/reader/4")
        page.get_by_label("Address of MLflow").fill(mlflow.address)
        page.get_by_role("button", name="Add").click()
        expect(page.locator("#live h2 .badge").first).to_have_text("refused")
        expect(page.locator("#live .notice.bad").first).to_contain_text("reader")

        page.goto(path(running, "models", "add?from=mlflow"))
        page.get_by_label("Model in MLflow").fill("models:/reader/3")
        page.get_by_label("Address of MLflow").fill(mlflow.address)
        page.get_by_role("button", name="Add").click()
        expect(page).to_have_url(path(running, "models", "reader", "versions", "2"))
        expect(page.locator("#live h2 .badge").first).to_have_text("ready")


def test_models_are_found_while_somebody_types(page: Page, running: RunningPlatform) -> None:
    add(running, "letters", {"1/model.onnx": mlp((64, 24, 10))})
    page.goto(path(running, "models"))
    expect(page.locator("#list .name", has_text="letters")).to_be_visible()

    page.get_by_label("Find a model").press_sequentially("dig")

    expect(page.locator("#list .name")).to_have_text(["digits"])
    expect(page.locator("#list .count")).to_have_text("1 model")
    expect(page.get_by_label("Find a model")).to_be_focused()
    expect(page).to_have_url(re.compile(r"/models\?search=dig$"))
    page.get_by_label("Find a model").fill("nothing")
    expect(page.get_by_role("heading", name="Nothing found")).to_be_visible()


def test_a_version_is_tried_before_it_is_deployed(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "models", "digits"))

    page.get_by_role("button", name="Try version 1").click()
    expect(page).to_have_url(path(running, "models", "digits", "versions", "1", "try"))
    page.get_by_role("button", name="Run").click()

    expect(page.locator(".answer")).to_contain_text("FP32 1 \N{MULTIPLICATION SIGN} 10")
    page.get_by_role("button", name="Stop the server").click()
    expect(page.get_by_role("button", name="Start a server")).to_be_visible()


def test_a_version_whose_server_does_not_start_shows_its_log(page: Page, running: RunningPlatform) -> None:
    add(running, "broken", python("raise RuntimeError('there is no dictionary')"), runs_code=True)
    page.goto(path(running, "models", "broken", "versions", "1", "try"))

    page.get_by_role("button", name="Start a server").click()

    expect(page.get_by_role("alert")).to_contain_text("there is no dictionary")
    expect(page.locator("#log")).to_contain_text("there is no dictionary")
    expect(page.get_by_role("button", name="Start again")).to_be_visible()


def test_the_server_of_a_trial_is_given_up_while_it_starts(page: Page, running: RunningPlatform) -> None:
    add(running, "slow", python("time.sleep(300)"), runs_code=True)
    page.goto(path(running, "models", "slow", "versions", "1", "try"))

    page.get_by_role("button", name="Start a server").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()

    expect(page.get_by_role("button", name="Start a server")).to_be_visible()


def test_a_shadow_version_gets_copies_and_its_differences_are_shown(page: Page, running: RunningPlatform) -> None:
    add(running, "digits", {"1/model.onnx": mlp((64, 48, 10))})
    address = deploy(page, running, "digits")
    page.goto(path(running, "deployments", "digits", "change?model=digits&version=2"))
    page.get_by_label("New versions get").select_option("beside")
    page.get_by_role("button", name="Apply the change").click()
    expect(page).to_have_url(path(running, "deployments", "digits"))
    page.goto(path(running, "deployments", "digits", "traffic"))
    expect(page.locator("#versions thead")).to_contain_text("Version 2")

    page.get_by_text("Copies to shadow versions").click()
    page.get_by_label("Copied to version 2 (%)").fill("100")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator("#split .notice.good")).to_be_visible()
    expect(page.get_by_label("Copied to version 2 (%)")).to_have_value("100")
    row = page.get_by_role("row", name=re.compile("^Answers that differ"))
    expect(row).to_be_visible()
    assert infer(address, "digits", {"inputs": [tensor("input", 64)]})["model_version"] == "1"

    expect(row).to_contain_text("1 (100 %)")
    expect(page.get_by_role("row", name=re.compile("^Share of requests"))).to_contain_text("100 %")

    page.get_by_label("Copied to version 2 (%)").fill("150")
    expect(page.locator("#copies-2:invalid")).to_be_visible()


def test_a_deployment_is_measured_and_the_report_kept(
    page: Page, running: RunningPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_levels(monkeypatch, 600)
    page.goto(path(running, "deployments", "digits"))

    page.get_by_label("Requests in flight").fill("1")
    page.get_by_role("button", name="Measure").click()
    expect(page).to_have_url(re.compile("/jobs/"))
    moved = shift(page, page.url)
    assert moved[0] < SHIFT_MAX, moved[1]
    expect(page.locator("#live h2 .badge").first).to_have_text("done", timeout=120_000)

    expect(page.get_by_role("heading", name="Measurements")).to_be_visible()
    page.get_by_role("link", name="the report").click()
    expect(page.locator("body")).to_contain_text("digits")


def test_there_is_time_to_read_the_question_before_a_job_is_cancelled(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "deployments", "digits"))
    page.get_by_role("button", name="Measure").click()
    expect(page.locator("#live .progress")).to_contain_text("level 1 of 4: 1 in flight")

    go_to(page, page.get_by_role("button", name="Cancel"))
    page.wait_for_timeout(READ_MS)  # the page is brought up to date meanwhile
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Enter")
    page.wait_for_timeout(READ_MS)
    assert problems_of(page) == []
    sure(page)

    expect(page.locator("#live h2 .badge").first).to_have_text("cancelled")


def test_what_a_search_has_found_is_offered_where_the_model_is_deployed(
    page: Page, running: RunningPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_searches(monkeypatch)
    page.goto(path(running, "models", "digits", "versions", "1"))
    page.get_by_label("Minutes").fill("1")
    page.get_by_role("button", name="Search").click()
    expect(page).to_have_url(re.compile("/jobs/"))
    expect(page.locator("#live h2 .badge").first).to_have_text("done", timeout=180_000)
    expect(page.get_by_role("heading", name="Result")).to_be_visible()

    page.goto(path(running, "deployments", "new?model=digits"))
    expect(page.locator(".offer")).to_be_visible()
    expect(page.locator(".offer")).to_contain_text(re.compile(r"\."))  # a sentence
    assert problems_of(page) == []

    # What it has found depends on the machine, so that is not compared: here something is better.
    change = {"instances": {"min": 2}, "config": {"parameters": {"intra_op_thread_count": {"string_value": "1"}}}}
    with running.platform.database.transaction() as session:
        task = session.scalars(select(TaskRow).where(TaskRow.kind == "tune").order_by(TaskRow.id.desc())).first()
        assert task is not None
        task.result = {**task.result, "change": change}
    page.reload()
    page.get_by_label("Name", exact=True).fill("tuned")
    page.get_by_role("button", name="Use the result").click()

    expect(page.get_by_label("Instances at least")).to_have_value("2")
    expect(page.get_by_label("Other fields of its configuration")).to_have_value(re.compile("intra_op_thread_count"))
    expect(page.locator("#check .changes")).to_contain_text("instances as configured -> 2")


def test_a_revision_that_never_becomes_ready_fails_and_the_one_before_serves_on(
    page: Page, running: RunningPlatform
) -> None:
    add(running, "eager", python("pass"), runs_code=True)
    add(running, "eager", python("time.sleep(300)"), runs_code=True)
    address = deploy(page, running, "eager")
    page.goto(path(running, "deployments", "eager", "change?model=eager&version=2"))

    page.get_by_text("Replicas, time to get ready").click()
    page.get_by_label("Ready within (s)").fill("5")
    page.get_by_role("button", name="Apply the change").click()

    expect(page.locator("#notices .notice.bad")).to_contain_text(
        "Revision 2 has failed, revision 1 continues to serve."
    )
    expect(page.locator("#notices .notice.bad")).to_contain_text("not ready after 5 s")
    expect(page.locator("h1 .badge")).to_have_text("ready")
    assert page.request.get(f"{address}/v2/models/eager/versions/1/ready").ok
    page.goto(path(running, "deployments", "eager", "revisions"))
    expect(page.locator("#revisions > li").first.locator(".badge")).to_have_text("failed")
    expect(page.locator("#revisions > li").first.locator(".problem")).to_contain_text("not ready after 5 s")


def test_the_keyboard_alone_adds_deploys_and_rolls_back(page: Page, running: RunningPlatform, tmp_path: Path) -> None:
    file = tmp_path / "scans.onnx"
    file.write_bytes(mlp((64, 24, 10)))
    page.once("filechooser", lambda chooser: chooser.set_files(file))
    page.goto(path(running, "models"))

    go_to(page, page.get_by_role("link", name="Skip to the content"))
    page.keyboard.press("Enter")
    go_to(page, page.get_by_role("link", name="Add a model"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Add a model")).to_be_visible()
    go_to(page, page.locator("#pick-file"))
    page.keyboard.press("Enter")
    expect(page.locator("#chosen-text")).to_contain_text("scans.onnx")
    go_to(page, page.get_by_role("button", name="Upload"))
    page.keyboard.press("Enter")
    expect(page).to_have_url(path(running, "models", "scans", "versions", "1"))
    expect(page.locator("#live h2 .badge").first).to_have_text("ready")

    go_to(page, page.get_by_role("button", name="Deploy version 1"))
    page.keyboard.press("Enter")
    expect(page).to_have_url(path(running, "deployments", "scans"))
    expect(page.locator("h1 .badge")).to_have_text("ready")

    go_to(page, page.get_by_role("link", name="Edit", exact=True))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Edit scans")).to_be_visible()
    go_to(page, page.get_by_label("CPU cores"))
    page.keyboard.type("1")
    go_to(page, page.get_by_role("button", name="Apply the change"))
    page.keyboard.press("Enter")
    expect(page).to_have_url(path(running, "deployments", "scans"))
    go_to(page, page.get_by_role("link", name="Revisions"))
    page.keyboard.press("Enter")
    expect(page).to_have_url(path(running, "deployments", "scans", "revisions"))
    expect(page.locator("#revisions > li").first.locator(".badge")).to_have_text("serving")
    go_to(page, page.get_by_role("button", name="Roll back to revision 1", exact=True))
    page.keyboard.press("Enter")
    go_to(page, page.get_by_role("button", name="Roll back", exact=True))
    page.keyboard.press("Enter")
    expect(page.locator("#revisions > li").first).to_contain_text("back to revision 1")

    go_to(page, page.get_by_role("button", name="Stop"))
    page.keyboard.press("Enter")
    expect(page.locator("#sure")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#sure")).to_be_hidden()
    expect(page.get_by_role("button", name="Stop")).to_be_focused()


def test_a_deployment_that_starts_says_what_it_does(page: Page, running: RunningPlatform) -> None:
    add(running, "patient", python("time.sleep(300)"), runs_code=True)
    page.goto(path(running, "models", "patient"))

    page.get_by_role("button", name="Deploy version 1").click()
    expect(page.locator("#head .doing")).to_have_text("loading: patient:1")

    expect(page.locator("h1 .badge")).to_have_text("starting")
    expect(page.locator("#notices .notice")).to_have_count(0)
    expect(page.locator("#charts")).to_have_count(0)
    page.goto(path(running, "deployments"))
    expect(page.locator(".fleet")).to_contain_text("loading: patient:1")


def test_a_page_says_so_while_the_platform_does_not_answer(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "deployments", "digits"))
    expect(page.locator("#tiles")).to_be_visible()

    page.route(re.compile("."), lambda route: route.abort())
    expect(page.locator(".said")).to_contain_text("The platform cannot be reached.\nWhat is shown is from")
    page.unroute_all()

    expect(page.locator(".said")).to_have_count(0)


def test_a_page_of_what_was_removed_says_so(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "deployments", "patient"))

    running.platform.deployments.changes.remove(OWNER, "default", "patient")

    expect(page.locator(".said.bad")).to_contain_text("deployment 'patient' does not exist")


def test_what_the_api_refuses_is_said_in_the_form_and_what_it_takes_is_shown(
    page: Page, running: RunningPlatform
) -> None:
    page.goto(path(running, "alerts"))
    page.get_by_text("Create an alert").click()
    page.get_by_label("Name").fill("slow")
    page.get_by_label("Condition").select_option("p99_ms")
    page.get_by_label("Address of the webhook").fill("https://hooks.example.org/1")

    page.get_by_role("button", name="Create").click()
    expect(page.locator("#alerts").get_by_role("alert")).to_contain_text("threshold: expected a number above 0, got 0")
    page.get_by_label("Threshold").fill("2.5")
    page.get_by_role("button", name="Create").click()

    expect(page.locator("#alerts")).to_contain_text("The p99 latency of any deployment is above 2.5 ms for 60 s")
    page.goto(path(running, "people"))
    page.locator("#secret_name").fill("a-token")
    page.get_by_label("Value").fill("secret")
    page.get_by_role("button", name="Save the secret").click()
    expect(page.locator("#secrets .name")).to_have_text("a-token")


def test_who_was_signed_out_keeps_what_was_entered(browser: Browser, running: RunningPlatform) -> None:
    with browser.new_context() as context:
        visitor = context.new_page()
        visitor.goto(running.login_link())
        visitor.goto(path(running, "deployments", "digits", "change"))
        context.clear_cookies()

        visitor.get_by_label("Note on this revision").fill("a long note")
        visitor.get_by_role("button", name="Apply the change").click()

        expect(visitor.locator(".said.bad")).to_contain_text("You are signed out")
        expect(visitor.get_by_label("Note on this revision")).to_have_value("a long note")


WRONG = (
    *("deployments", "deployments/eager", "deployments/eager/revisions", "jobs", "models/reader/versions/1"),
    *("models/broken/versions/1/try", "models/nothing"),
)
"""Pages with something that has failed."""


@pytest.mark.parametrize("name", WRONG)
def test_axe_finds_nothing_where_something_has_failed(page: Page, running: RunningPlatform, name: str) -> None:
    page.goto(path(running, name))
    page.wait_for_load_state("networkidle")

    assert problems_of(page) == []


LIVE_PAGES = (
    *("deployments", "deployments/digits", "deployments/digits/traffic", "deployments/digits/revisions"),
    *("deployments/digits/try", "deployments/digits/log", "deployments/eager", "jobs", "models/digits"),
)


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_moves_while_pages_are_brought_up_to_date(page: Page, running: RunningPlatform, width: int) -> None:
    page.goto(path(running, "deployments", "digits"))
    address = page.locator(".address code").inner_text()

    with load(address, "digits"):
        found = shifts(page, [path(running, name) for name in LIVE_PAGES], width)

    assert {name: value for name, value in found.items() if value[0] >= SHIFT_MAX} == {}


def test_nothing_moves_while_a_trial_starts_and_a_deployment_becomes_ready(
    page: Page, running: RunningPlatform
) -> None:
    page.goto(path(running, "models", "slow", "versions", "1", "try"))
    page.get_by_role("button", name="Start a server").click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    moved = shift(page, page.url)
    assert moved[0] < SHIFT_MAX, moved[1]
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("button", name="Start a server")).to_be_visible()
    expect(page.locator("#live[hx-trigger]")).to_have_count(0)
    page.wait_for_load_state("networkidle")

    page.goto(path(running, "deployments", "scans"))
    page.get_by_role("button", name="Stop").click()
    sure(page)
    expect(page.locator("h1 .badge")).to_have_text("stopped")
    page.get_by_role("button", name="Start").click()
    expect(page.locator("h1 .badge")).not_to_have_text("stopped")
    page.wait_for_load_state("networkidle")
    moved = shift(page, page.url)
    assert moved[0] < SHIFT_MAX, moved[1]
    expect(page.locator("h1 .badge")).to_have_text("ready")


def test_charts_stay_where_they_are_while_the_rest_of_the_page_arrives(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "deployments", "digits"))
    place = """() => [...document.querySelectorAll(".chart")].map((chart) => {
        const { left, top, width } = chart.getBoundingClientRect();
        return [left, top, width];
    })"""
    whole = page.evaluate(place)
    assert len(whole) > 4

    for count in range(len(whole) - 1, 0, -1):
        page.evaluate("""() => [...document.querySelectorAll(".chart")].at(-1).remove()""")
        assert page.evaluate(place) == whole[:count]


def shift(page: Page, address: str) -> tuple[float, list[str]]:
    """Return how much of a page has moved while it was shown, as browsers measure it, and what."""
    page.goto(address)
    page.evaluate(WATCH)
    page.wait_for_timeout(WATCHED_MS)
    return moved_so_far(page)


def shifts(page: Page, addresses: Sequence[str], width: int) -> dict[str, tuple[float, list[str]]]:
    """Return the same for pages that are shown at the same time."""
    tabs = {address: page.context.new_page() for address in addresses}
    for address, tab in tabs.items():
        tab.set_viewport_size({"width": width, "height": 800})
        tab.goto(address)
        tab.evaluate(WATCH)
    page.wait_for_timeout(WATCHED_MS)
    found = {address: moved_so_far(tab) for address, tab in tabs.items()}
    for tab in tabs.values():
        tab.close()
    return found


def moved_so_far(page: Page) -> tuple[float, list[str]]:
    try:
        found = page.evaluate(WATCH)
    except Error:  # it is being loaded again, because it has changed as a whole
        page.wait_for_load_state("networkidle")
        found = page.evaluate(WATCH)
    return sum(value for value, _ in found), [f"{value:.3f} {text}" for value, text in found]
