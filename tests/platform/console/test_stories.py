"""What people do with the platform, in Chromium, on a platform with servers that run."""

import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.support.browser import needed
from tests.support.console import infer, path, problems_of, sure, tensor
from tests.support.models import answering, mlp
from tests.support.running_platform import RunningPlatform, running_platform
from tests.support.s3_server import S3, s3_server
from tests.support.wheels import SITE_PACKAGES, wheel

from charonia.platform.environments import builder

pytestmark = [needed, pytest.mark.timeout(400)]

SOURCE = Path(__file__).parents[3] / "src"

WORD = "np.array([[tiny.WORD.encode()]], object)"
MODEL_WITH_A_PACKAGE = answering(WORD, "WORD", imports="import tiny")

CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "WORD" data_type: TYPE_STRING dims: 1 }
"""


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def store(monkeypatch_module: pytest.MonkeyPatch) -> Iterator[S3]:
    with s3_server(monkeypatch_module) as server:
        yield server


@pytest.fixture(scope="module")
def wheels() -> Iterator[Path]:
    """A folder of packages that environments may be built from, which the users of projects can read."""
    with tempfile.TemporaryDirectory(prefix="charonia-wheels-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def running(store: S3, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    with running_platform(tmp_path_factory.mktemp("platform"), readable=(str(wheels),)) as started:
        yield started


# The stories, in this order: each goes on from where the one before has ended.


def test_who_has_not_signed_in_comes_to_the_page_to_sign_in(browser: Browser, running: RunningPlatform) -> None:
    with browser.new_context() as context:
        stranger = context.new_page()
        stranger.goto(path(running, "models"))

        expect(stranger).to_have_url(re.compile(r"/login\?next="))
        expect(stranger.get_by_role("heading", name="Sign in")).to_be_visible()


def test_empty_lists_say_the_next_step(page: Page, running: RunningPlatform) -> None:
    page.goto(running.url)

    expect(page).to_have_url(path(running, "deployments"))
    page.get_by_role("main").get_by_role("link", name="Add a model").click()
    expect(page.get_by_role("heading", name="Add a model")).to_be_visible()


def test_a_model_comes_from_an_object_store(page: Page, running: RunningPlatform, store: S3) -> None:
    store.put("digits/1/model.onnx", mlp((64, 32, 10)))
    page.goto(path(running, "models", "add?from=store"))

    page.get_by_label("Address").fill(store.uri + "/digits")
    page.get_by_role("button", name="Add").click()

    expect(page).to_have_url(path(running, "models", "digits", "versions", "1"))
    expect(page.locator("#live h2 .badge").first).to_have_text("ready")
    expect(page.locator("#live .signature")).to_contain_text("batch \N{MULTIPLICATION SIGN} 64")


def test_an_address_that_is_none_is_said_at_the_field(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "models", "add?from=store"))

    page.get_by_label("Address").fill("s4://nowhere")
    page.get_by_role("button", name="Add").click()

    expect(page.locator("#source-problem")).to_contain_text("s4")
    expect(page.get_by_label("Address")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label("Address")).to_have_value("s4://nowhere")


def test_it_is_deployed_with_one_click(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "models", "digits"))

    page.get_by_role("button", name="Deploy version 1").click()

    expect(page).to_have_url(path(running, "deployments", "digits"))
    expect(page.locator("h1 .badge")).to_have_text("ready")
    page.goto(path(running, "deployments"))
    expect(page.locator(".rows")).to_contain_text("digits 1")


def test_a_request_is_sent_from_the_page(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "models", "digits"))
    page.get_by_role("link", name="Try it in digits").click()
    expect(page).to_have_url(path(running, "deployments", "digits", "try"))

    page.get_by_role("button", name="Run").click()

    expect(page.locator(".answer")).to_contain_text("FP32 1 \N{MULTIPLICATION SIGN} 10")
    expect(page.locator(".answer .tiles")).to_contain_text("Latency")
    expect(page.locator(".code pre")).to_contain_text("/v2/models/digits")


def test_clients_call_the_deployment_itself(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "deployments", "digits"))
    address = page.locator(".address code").inner_text()

    answer = infer(address, "digits", {"inputs": [tensor("input", 64)]})

    assert answer["model_version"] == "1"
    expect(page.locator("#charts canvas")).to_have_count(8)


def test_version_2_is_uploaded(page: Page, running: RunningPlatform, tmp_path: Path) -> None:
    file = tmp_path / "digits.onnx"
    file.write_bytes(mlp((64, 48, 10)))
    page.goto(path(running, "models", "digits"))

    page.get_by_role("link", name="New version").click()
    page.locator("#pick-file").set_input_files(file)
    expect(page.locator("#chosen-text")).to_contain_text("digits.onnx")
    page.get_by_role("button", name="Upload").click()

    expect(page).to_have_url(path(running, "models", "digits", "versions", "2"))
    expect(page.locator("#live h2 .badge").first).to_have_text("ready")


def test_an_upload_that_was_cut_off_goes_on(page: Page, running: RunningPlatform, tmp_path: Path) -> None:
    file = tmp_path / "large.onnx"
    file.write_bytes(mlp((2048, 1280, 10)))  # more than a piece
    page.goto(path(running, "models", "add"))
    page.route(re.compile(r"offset=[1-9]"), lambda route: route.abort())
    page.locator("#pick-file").set_input_files(file)
    page.get_by_role("button", name="Upload").click()
    expect(page.locator("#sent-text")).to_have_text("Connection lost: retrying")

    page.unroute_all()
    page.goto(path(running, "models", "add"))
    page.locator("#pick-file").set_input_files(file)
    expect(page.locator("#sent-text")).to_have_text("Part of it was uploaded before: the upload continues from there.")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "PUT" else None)
    page.get_by_role("button", name="Upload").click()

    expect(page).to_have_url(path(running, "models", "large", "versions", "1"))
    assert len(sent) == 1
    assert "offset=8388608" in sent[0]


def test_an_upload_is_paused_and_cancelled(page: Page, running: RunningPlatform, tmp_path: Path) -> None:
    file = tmp_path / "unwanted.onnx"
    file.write_bytes(mlp((2048, 1280, 10)))
    page.goto(path(running, "models", "add"))
    is_cut = False  # one route for the whole story: a request that is held goes on when its route is taken away
    page.route(re.compile(r"offset=[1-9]"), lambda route: route.abort() if is_cut else None)
    page.locator("#pick-file").set_input_files(file)
    page.get_by_role("button", name="Upload").click()
    expect(page.locator("#sent-text")).to_contain_text("8.39 MB of")

    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#sent-text")).to_have_text("Paused")
    is_cut = True
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#sent-text")).to_have_text("Connection lost: retrying")
    page.get_by_role("button", name="Cancel").click()

    page.wait_for_timeout(2_500)  # longer than until it would be tried again
    expect(page.locator("#sent-text")).to_have_text("Cancelled")
    expect(page.get_by_role("button", name="Upload")).to_be_visible()
    page.unroute_all()
    page.goto(path(running, "models", "add"))
    page.locator("#pick-file").set_input_files(file)
    expect(page.locator("#sent-text")).to_have_text("Ready to send")


def test_a_version_is_loaded_beside_version_1_and_gets_no_requests_yet(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "models", "digits", "versions", "2"))

    page.get_by_role("button", name="Deploy version 2").click()
    expect(page.get_by_role("heading", name="Edit digits")).to_be_visible()
    expect(page.locator("#check .changes")).to_contain_text("version 1 -> version 2")
    page.get_by_label("New versions get").select_option("beside")
    expect(page.locator("#check .changes")).to_contain_text("versions 1, 2")
    page.get_by_role("button", name="Apply the change").click()

    expect(page).to_have_url(path(running, "deployments", "digits"))
    page.goto(path(running, "deployments", "digits", "traffic"))
    expect(page.locator("#versions thead")).to_contain_text("Version 2")
    expect(page.get_by_label("Weight of version 2")).to_have_value("0")


def test_the_slider_splits_the_requests(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "deployments", "digits", "traffic"))

    page.get_by_role("slider").fill("20")
    expect(page.get_by_label("Weight of version 1")).to_have_value("80")
    page.get_by_role("button", name="Apply").click()

    expect(page.locator("#split .notice")).to_be_visible()
    expect(page.locator("#versions tbody tr").first).to_contain_text("20 %")


def test_a_canary_begins_is_promoted_and_says_what_it_did(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "deployments", "digits", "traffic"))

    page.get_by_role("button", name="Start the canary").click()
    expect(page.locator("#sure p")).to_have_text("Version 2 gets 1 % of the requests in place of 20 %.")
    sure(page)
    expect(page.locator("#canary h2 .badge")).to_have_text("running")
    expect(page.locator("#split")).to_contain_text("Promote or abort it to set them by hand")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#canary h2 .badge")).to_have_text("paused")
    page.get_by_role("button", name="Promote").click()
    sure(page)

    expect(page.locator("#canary h2 .badge")).to_have_text("finished")
    expect(page.locator("#history")).to_contain_text("version 2")


def test_a_rollback_says_what_it_changes_and_asks(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "deployments", "digits", "revisions"))
    newest = page.locator("#revisions > li").first
    expect(newest).to_contain_text("promoted")  # the canary's revision follows a moment after its end
    expect(newest.locator(".badge")).to_have_text("serving")

    page.get_by_role("button", name="Roll back to revision 1", exact=True).click()
    expect(page.locator("#sure p")).to_contain_text("versions 1, 2 -> version 1")
    sure(page)

    expect(newest).to_contain_text("back to revision 1")
    expect(newest.locator(".badge")).to_have_text("serving")
    page.goto(path(running, "deployments", "digits"))
    address = page.locator(".address code").inner_text()
    assert infer(address, "digits", {"inputs": [tensor("input", 64)]})["model_version"] == "1"


def test_of_two_who_change_a_deployment_the_second_sees_a_conflict(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "deployments", "digits", "change"))
    other = page.context.new_page()
    other.goto(path(running, "deployments", "digits", "change"))
    other.get_by_label("CPU cores").fill("1")
    other.get_by_role("button", name="Apply the change").click()
    expect(other.locator("h1")).to_contain_text("digits")
    other.wait_for_url(re.compile("/deployments/digits$"))
    other.close()

    page.get_by_label("Note on this revision").fill("mine")
    page.get_by_label("CPU cores").fill("2")
    page.get_by_role("button", name="Apply the change").click()

    expect(page.locator("#form .notice.bad").first).to_be_visible()
    expect(page.get_by_label("Note on this revision")).to_have_value("mine")
    expect(page.locator("#check .changes")).to_have_text("CPU cores 1 -> 2")
    expect(page.locator("#form .notice.bad a")).to_have_attribute("href", re.compile("/deployments/digits/revisions$"))
    page.get_by_role("button", name="Apply the change").click()
    expect(page).to_have_url(path(running, "deployments", "digits"))


def test_the_form_says_what_does_not_fit_before_anything_starts(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "deployments", "new?model=digits"))
    expect(page.locator("#check .notice.bad")).to_contain_text("Deployment 'digits' already exists.")

    page.get_by_label("Name", exact=True).fill("huge")
    page.get_by_label("CPU cores").fill("4000")

    expect(page.locator("#check .notice.bad")).to_contain_text("cores")
    page.get_by_label("CPU cores").fill("")
    expect(page.locator("#check .notice.good")).to_have_text("It fits.")


def test_a_deployment_is_stopped_and_started(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "deployments", "digits"))

    page.get_by_role("button", name="Stop").click()
    sure(page)
    expect(page.locator("h1 .badge")).to_have_text("stopped")
    page.get_by_role("button", name="Start").click()

    expect(page.locator("h1 .badge")).to_have_text("ready")


def test_a_key_is_shown_once_and_revoked(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "people"))

    page.get_by_text("Create a key", exact=True).click()
    page.locator("#keys #name").fill("ci")
    page.get_by_role("button", name="Create the key").click()
    expect(page.locator("#keys .notice code")).to_have_text(re.compile("^charonia_"))
    page.get_by_role("button", name="Revoke the key ci").click()
    sure(page)

    expect(page.get_by_role("button", name="Revoke the key ci")).to_have_count(0)
    page.goto(path(running, "audit"))
    expect(page.get_by_role("main")).to_contain_text("Key revoked ci")


def test_a_user_is_added_with_a_link(page: Page, running: RunningPlatform) -> None:
    page.goto(path(running, "people"))

    page.get_by_text("Add a user", exact=True).click()
    page.locator("#new-user").get_by_label("Name").fill("Ada")
    page.get_by_role("button", name="Add and create a link").click()

    expect(page.locator("#users .notice code")).to_have_text(re.compile("/login/link"))
    expect(page.get_by_role("button", name="Remove Ada")).to_be_visible()  # and on a phone, below


def test_a_build_that_hangs_is_cancelled(page: Page, running: RunningPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/charonia-1-py3-none-any.whl"
        monkeypatch.setattr(builder, "own_requirement", lambda *_: f"charonia @ {address}")
        page.goto(path(running, "environments"))

        page.get_by_role("button", name="Build ONNX Runtime").click()
        expect(page.locator("#live h2 .badge").first).to_have_text("building")
        page.get_by_role("button", name="Cancel").click()
        sure(page)

        expect(page.locator("#live h2 .badge").first).to_have_text("failed")
        expect(page.locator("#live .notice.bad")).to_have_text("it was cancelled")


def test_code_with_a_package_runs_in_an_environment_that_has_it(
    page: Page, running: RunningPlatform, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = wheel(wheels, "charonia", {"charonia_of_the_tests.pth": f"{SITE_PACKAGES}\n{SOURCE}\n"})
    monkeypatch.setattr(builder, "own_requirement", lambda *_: f"charonia @ {own.as_uri()}")
    tiny = wheel(wheels, "tiny", {"tiny.py": "WORD = 'tiny'\n"})
    model = tmp_path / "words"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(MODEL_WITH_A_PACKAGE)
    (model / "config.pbtxt").write_text(CONFIG)

    page.goto(path(running, "environments", "new"))
    page.get_by_label("Name", exact=True).fill("words")
    page.get_by_label("Packages").fill(f"tiny @ {tiny.as_uri()}")
    page.get_by_role("button", name="Build").click()
    expect(page).to_have_url(path(running, "environments", "words"))
    expect(page.locator("#live h2 .badge").first).to_have_text("ready")

    page.goto(path(running, "models", "add"))
    page.locator("#pick-folder").set_input_files(model)
    page.get_by_role("button", name="Upload").click()
    expect(page.locator("#live h2 .badge").first).to_have_text("ready")
    expect(page.locator("h1")).to_contain_text("runs code")

    page.goto(path(running, "deployments", "new?model=words"))
    page.get_by_label("Name", exact=True).fill("words")
    page.get_by_label("Environment").select_option("words")
    expect(page.locator("#check .notice.good")).to_be_visible()
    page.get_by_role("button", name="Deploy").click()
    expect(page).to_have_url(path(running, "deployments", "words"))
    expect(page.locator("h1 .badge")).to_have_text("ready")

    answer = infer(page.locator(".address code").inner_text(), "words", {"inputs": [tensor("X", 1)]})
    assert answer["outputs"][0]["data"] == ["tiny"]


PAGES = (
    "deployments",
    "deployments/new",
    "deployments/digits",
    "deployments/digits/change",
    "deployments/digits/try",
    "deployments/digits/traffic",
    "deployments/digits/revisions",
    "deployments/digits/revisions/1",
    "deployments/digits/explain",
    "deployments/digits/log",
    "models",
    "models/digits",
    "models/digits/versions/1/try",
    "models/add",
    "models/branches",
    "models/add?from=store",
    "models/add?from=folder",
    "models/add?from=mlflow",
    "environments",
    "environments/new",
    "environments/onnx",
    "environments/words",
    "models/words",
    "jobs",
    "jobs/1",
    "audit",
    "people",
    "alerts",
    "api",
)


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_and_nothing_is_wider_than_a_phone(page: Page, running: RunningPlatform, name: str) -> None:
    size = page.viewport_size
    assert size is not None
    page.set_viewport_size({"width": 360, "height": 740})
    answer = page.goto(path(running, name))
    page.wait_for_load_state("networkidle")

    assert answer is not None
    assert answer.status == 200
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    is_cut = "(it) => it.scrollWidth > it.clientWidth + 1"
    cut = page.evaluate(f"[...document.querySelectorAll('button, h3')].filter({is_cut}).map((it) => it.textContent)")
    assert cut == []
    page.set_viewport_size(size)
    assert problems_of(page) == []


def test_axe_finds_nothing_where_people_sign_in(browser: Browser, running: RunningPlatform) -> None:
    with browser.new_context() as context:
        stranger = context.new_page()
        stranger.goto(f"{running.url}/login?problem=link")

        assert problems_of(stranger) == []
