"""The page in Chromium, on a running server with models of each kind."""

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, FilePayload, Locator, Page, Route, expect
from tests.support.browser import chromium, needed, new_tab, without_faults
from tests.support.page_models import write_page_models
from tests.support.process import ServeProcess

KEY = "a-key-of-some-length"

pytestmark = needed


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_page_models(folder)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServeProcess]:
    with ServeProcess(repository, "--exit-on-error=false") as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    """A tab for all tests: one for each would be half of what they compute."""
    opened = new_tab(browser)
    yield opened
    opened.context.close()


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    """The tab as if it were new. Its errors fail the test, refusals by the content security policy among them."""
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.emulate_media(color_scheme="light")
    with without_faults(tab):
        yield tab
        tab.evaluate("sessionStorage.clear()")
        tab.context.clear_permissions()
        tab.goto("about:blank")


def show(page: Page, server: ServeProcess, model: str) -> None:
    page.goto(f"http://{server.http}/#{model}")
    expect(page.locator("article h1")).to_contain_text(model)


def field(page: Page, name: str) -> Locator:
    return page.locator(".field").filter(has=page.locator(".name", has_text=re.compile(f"^{name}$")))


def output(page: Page, name: str) -> Locator:
    return page.locator(".output").filter(has=page.locator(".name", has_text=re.compile(f"^{name}$")))


def run(page: Page) -> None:
    page.get_by_role("button", name="Run").click()


def tile(page: Page, name: str) -> Locator:
    return page.locator(".tiles > div").filter(has=page.locator("dt", has_text=name)).locator("dd").first


def code(page: Page, language: str) -> Locator:
    page.locator(".code").get_by_role("button", name=language, exact=True).click()
    return page.locator(".code pre")


def upload(name: str, content: io.BytesIO) -> FilePayload:
    return {"name": name, "mimeType": "image/png" if name.endswith(".png") else "", "buffer": content.getvalue()}


# The models.


def test_models_are_listed_with_their_state(page: Page, server: ServeProcess) -> None:
    page.goto(f"http://{server.http}/")

    names = page.locator("nav .name")
    expect(names).to_have_text(["broken", "classes", "numbers", "picture", "steps", "story", "text"])
    expect(page.locator("nav a", has_text="broken").locator(".kind")).to_have_text("not available")
    expect(page.locator("nav a", has_text="story").locator(".kind")).to_have_text("python")
    expect(page.locator("#server")).to_contain_text("6 of 7 models ready")


def test_a_model_that_has_just_been_loaded_has_no_requests_so_far(page: Page, server: ServeProcess) -> None:
    def answer(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), "seconds": 0.0})

    page.route("**/explain", answer)
    show(page, server, "numbers")

    expect(page.locator(".live")).to_contain_text("0/s")
    expect(page.locator(".live")).to_contain_text("none so far")
    page.unroute("**/explain")


def test_a_model_that_is_not_available_says_why(page: Page, server: ServeProcess) -> None:
    show(page, server, "broken")

    expect(page.locator("article")).to_contain_text("must specify 'data_type'")
    expect(page.get_by_role("button", name="Run")).to_have_count(0)


def test_the_signature_has_names_datatypes_and_shapes(page: Page, server: ServeProcess) -> None:
    show(page, server, "text")

    rows = page.locator(".signature > div").first.locator("tr")
    expect(rows).to_have_text(["INPUT_TEXTBYTES1", "INPUT_COUNT optionalINT321"])


def test_a_click_shows_another_model(page: Page, server: ServeProcess) -> None:
    show(page, server, "text")
    page.locator("nav a", has_text="steps").click()

    expect(page.locator("article h1")).to_contain_text("steps")
    expect(page).to_have_title("steps · Charonia")


# Requests.


def test_the_request_is_filled_in_and_works(page: Page, server: ServeProcess) -> None:
    show(page, server, "text")
    run(page)

    expect(output(page, "OUTPUT_TEXT").locator("pre")).to_have_text("hello")
    expect(tile(page, "Latency")).to_have_text(re.compile(r"^[\d.]+ (µs|ms|s)$"))
    expect(tile(page, "Batch size")).to_have_text("1")


def test_a_model_shows_what_it_does_now(page: Page, server: ServeProcess) -> None:
    show(page, server, "story")
    run(page)

    expect(tile(page, "Requests")).to_have_text(re.compile(r"^0\.\d+/s$|^[1-9]\d*/s$"))
    expect(tile(page, "Time of a request")).to_have_text(re.compile(r"^[\d.]+ (µs|ms|s)$"))
    expect(tile(page, "Instances")).to_have_text("1")
    expect(tile(page, "Memory")).to_have_text(re.compile(r"^[\d.]+ MB$"))
    expect(page.locator("#metrics")).to_be_hidden()  # its port was chosen by the system


def test_numbers_of_every_datatype_arrive(page: Page, server: ServeProcess) -> None:
    values = {
        "BOOL": ["true", "false"],
        "UINT8": ["0", "255"],
        "UINT16": ["1", "65535"],
        "UINT32": ["1", "4294967295"],
        "UINT64": ["1", "18446744073709551615"],
        "INT8": ["-128", "127"],
        "INT16": ["-32768", "3"],
        "INT32": ["-2147483648", "3"],
        "INT64": ["-9223372036854775808", "9007199254740993"],
        "FP16": ["-0.00006103515625", "65504"],
        "FP32": ["1e-3", "3.5"],
        "FP64": ["0.1", "-2"],
        "BF16": ["0.15625", "-3"],
    }
    show(page, server, "numbers")
    for name, (one, other) in values.items():
        field(page, f"INPUT_{name}").locator("textarea").fill(f"{one}, {other}")

    # As the server read them.
    source = code(page, "Python")
    for name in ("BOOL", "UINT64", "INT64"):
        one, other = (word.capitalize() if name == "BOOL" else word for word in values[name])
        expect(source).to_contain_text(f'"INPUT_{name}": [[{one}, {other}]]')
    expect(source).to_contain_text("(np.array([[0.15625, -3.0]], np.float32), 'BF16')")
    expect(source).to_contain_text('"INPUT_FP16": [[-6.103515625e-05, 65504.0]]')
    run(page)

    # As they came back.
    expect(output(page, "OUTPUT_UINT64").locator("pre")).to_have_text("1  18446744073709551615")
    for name, expected in {"INT64": values["INT64"], "BF16": ["0.15625", "-3"], "FP64": ["0.1", "-2"]}.items():
        expect(output(page, f"OUTPUT_{name}").locator("pre")).to_have_text("  ".join(expected))


def test_nested_numbers_are_a_batch(page: Page, server: ServeProcess) -> None:
    show(page, server, "numbers")
    for each in page.locator(".field textarea").all():
        each.fill("[[1, 0], [0, 1], [1, 1]]")
    run(page)

    expect(tile(page, "Batch size")).to_have_text("3")
    expect(output(page, "OUTPUT_INT8").locator("pre")).to_have_text("1  0\n0  1\n1  1")


def test_what_does_not_fit_is_said_at_the_input(page: Page, server: ServeProcess) -> None:
    show(page, server, "numbers")
    for text, problem in (
        ("1, 2, 3", "3 elements do not fit n \u00d7 2"),
        ("[[1, 2], [3]]", "rows differ in length"),
        ("1, x", "expected a whole number, got x"),
        ("1, 128", "128 does not fit INT8: -128 to 127"),
        ("[1, 2", "a bracket is not closed"),
        ("", "enter a value"),
    ):
        field(page, "INPUT_INT8").locator("textarea").fill(text)
        run(page)

        expect(field(page, "INPUT_INT8").locator(".problem")).to_contain_text(problem)
        expect(page.locator(".answer")).to_contain_text("The answer appears here")


def test_an_optional_input_is_sent_on_demand(page: Page, server: ServeProcess) -> None:
    show(page, server, "text")
    field(page, "INPUT_COUNT").get_by_label("send").check()
    field(page, "INPUT_COUNT").locator("input[type=text]").fill("42")
    run(page)

    expect(output(page, "OUTPUT_COUNT")).to_contain_text("42")


def test_the_bytes_of_a_file_are_sent_and_a_picture_in_the_answer_is_shown(page: Page, server: ServeProcess) -> None:
    png = io.BytesIO()
    Image.new("RGB", (30, 20), (200, 10, 10)).save(png, "PNG")
    show(page, server, "text")
    field(page, "INPUT_TEXT").get_by_role("button", name="File").click()
    page.locator("input[type=file]").set_input_files(upload("a.png", png))
    expect(page.locator(".preview")).to_be_visible()
    run(page)

    picture = output(page, "OUTPUT_TEXT").locator("img")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])") == [30, 20]
    expect(code(page, "charonia infer")).to_contain_text("-i INPUT_TEXT=@a.png")


def test_a_picture_becomes_pixels(page: Page, server: ServeProcess) -> None:
    pixels = np.zeros((12, 16, 3), np.uint8)
    pixels[:, :8] = (255, 0, 51)
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    show(page, server, "picture")
    for name in ("INPUT_IMAGE", "INPUT_SCALED"):
        field(page, name).get_by_role("button", name="Picture").click()
        field(page, name).locator("input[type=file]").set_input_files(upload("a.png", png))
    run(page)

    # The pixels come back in their size, and are drawn.
    drawn = output(page, "OUTPUT_IMAGE").locator("canvas")
    data = drawn.evaluate("canvas => canvas.toDataURL()").partition(",")[2]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")), pixels)
    # Scaled to 8 x 8, colours first, from 0 to 1: of the first colour half is 1, of the third half is 0.2.
    expect(output(page, "OUTPUT_SCALED")).to_contain_text("192 elements · least 0 · mean 0.2 · largest 1")


def test_an_array_of_numpy_is_read(page: Page, server: ServeProcess) -> None:
    npy = io.BytesIO()
    np.save(npy, np.array([0.5, -1, 2.25, 4], "<f4"))
    show(page, server, "classes")
    page.get_by_label("The top 5 classes").uncheck()
    field(page, "INPUT_SCORES").get_by_role("button", name="File").click()
    page.locator("input[type=file]").set_input_files(upload("x.npy", npy))
    run(page)

    expect(output(page, "OUTPUT_SCORES").locator("pre")).to_have_text("0.5  -1  2.25  4")
    expect(code(page, "Python")).to_contain_text('np.load("x.npy")')


def test_classes_have_their_labels(page: Page, server: ServeProcess) -> None:
    show(page, server, "classes")
    field(page, "INPUT_SCORES").locator("textarea").fill("0.125 0 0.75 0.0625")
    run(page)

    expect(page.locator(".bars > div")).to_have_text(["ferry75.0 %", "cat12.5 %", "oar6.3 %", "dog0.0 %"])


def test_a_sequence_goes_on(page: Page, server: ServeProcess) -> None:
    show(page, server, "steps")
    page.get_by_label("last request").uncheck()
    run(page)
    expect(tile(page, "Batch size")).to_have_text("1")

    expect(page.get_by_label("first request")).not_to_be_checked()
    page.get_by_label("last request").check()
    expect(code(page, "Python")).to_contain_text("'sequence_start': False, 'sequence_end': True")
    expect(page.locator(".code").get_by_role("button", name="charonia infer")).to_have_count(0)
    page.locator(".answer").evaluate("answer => answer.replaceChildren()")
    run(page)
    expect(tile(page, "Batch size")).to_have_text("1")
    expect(page.get_by_label("first request")).to_be_checked()


def test_an_error_of_the_server_is_shown(page: Page, server: ServeProcess) -> None:
    show(page, server, "text")
    page.get_by_text("Request parameters").click()
    page.get_by_label("Request parameters").fill('{"priority": "high"}')
    run(page)

    expect(page.locator(".failed")).to_contain_text("status 400")
    expect(page.locator(".failed")).to_contain_text("parameter 'priority': expected a non-negative integer")


# Streams.


def test_a_stream_is_shown_as_it_comes(page: Page, server: ServeProcess, repository: Path) -> None:
    show(page, server, "story")
    page.locator("textarea").first.fill("wait")
    run(page)

    expect(output(page, "TEXT").locator("pre")).to_have_text("wait,")
    expect(tile(page, "Responses")).to_have_text("1")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    go = repository / "story" / "1" / "go"
    go.touch()
    expect(output(page, "TEXT").locator("pre")).to_have_text("wait, he said")
    go.unlink()
    expect(tile(page, "Responses")).to_have_text("2")
    expect(tile(page, "First response")).to_have_text(re.compile(r"^[\d.]+ (µs|ms|s)$"))
    expect(tile(page, "Batch size")).to_have_text("1")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()


def test_a_stream_can_be_stopped(page: Page, server: ServeProcess) -> None:
    show(page, server, "story")
    page.locator("textarea").first.fill("wait")
    run(page)
    page.get_by_role("button", name="Stop").click()

    expect(page.locator(".answer")).to_contain_text("Stopped")
    expect(output(page, "TEXT").locator("pre")).to_have_text("wait,")
    # The model has been told: it is free for the next request.
    page.locator("textarea").first.fill("go")
    run(page)
    expect(output(page, "TEXT").locator("pre")).to_have_text("go, he said")


def test_a_stream_that_fails_keeps_what_came(page: Page, server: ServeProcess) -> None:
    show(page, server, "story")
    page.locator("textarea").first.fill("fail")
    run(page)

    expect(page.locator(".failed")).to_contain_text("the story has no end")
    expect(page.locator(".failed .badge")).to_have_text("failed")
    expect(output(page, "TEXT").locator("pre")).to_have_text("fail,")


# Code.


def test_the_code_follows_the_form(page: Page, server: ServeProcess) -> None:
    show(page, server, "text")
    expect(code(page, "curl")).to_contain_text(f"curl http://{server.http}/v2/models/text/generate -d")
    page.locator("textarea").first.fill("it's me")

    expect(page.locator(".code pre")).to_contain_text("it'\"'\"'s me")
    expect(code(page, "Python")).to_contain_text(""""INPUT_TEXT": ["it's me"]""")
    expect(code(page, "charonia infer")).to_contain_text("charonia infer text")


def test_code_is_copied(page: Page, server: ServeProcess) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show(page, server, "text")
    shown = code(page, "Python").inner_text()
    page.get_by_role("button", name="Copy").click()

    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").strip() == shown.strip()


# Access, and how it looks.


def test_where_keys_are_on_the_page_asks_for_one(page: Page, repository: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text(f"me infer,read {KEY}\n", encoding="utf-8")
    with ServeProcess(repository, "--exit-on-error=false", f"--api-keys={keys}") as server:
        answer = page.goto(f"http://{server.http}/#text")
        assert answer is not None
        assert answer.status == 401
        expect(page.locator("#gatetitle")).to_have_text("This server needs an API key")
        expect(page.locator("nav")).to_be_hidden()

        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Open").click()
        expect(page.locator("#gatetext")).to_contain_text("The API key is not known to this server")

        page.get_by_label("API key").fill(KEY)
        page.get_by_role("button", name="Open").click()
        run(page)
        expect(output(page, "OUTPUT_TEXT").locator("pre")).to_have_text("hello")
        expect(code(page, "curl")).to_contain_text('-H "Authorization: Bearer $KEY"')
        with page.expect_download() as saved:  # a link alone would carry no key
            page.get_by_role("link", name="OpenAPI").click()
        assert b'"x-models"' in saved.value.path().read_bytes()
        page.reload()  # the key stays in this tab
        expect(page.locator("article h1")).to_contain_text("text")


def test_names_and_texts_of_models_are_text(page: Page, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    write_page_models(tmp_path)
    (tmp_path / "text").rename(tmp_path / name)
    with ServeProcess(tmp_path, "--exit-on-error=false") as server:
        page.goto(f"http://{server.http}/#{name}")
        expect(page.locator("article h1")).to_contain_text(name)
        page.locator("textarea").first.fill("<b>bold</b>")
        run(page)

        expect(output(page, "OUTPUT_TEXT").locator("pre")).to_have_text("<b>bold</b>")
        assert page.locator("img[src=x], .output b").count() == 0


def test_nothing_is_wider_than_the_screen(page: Page, server: ServeProcess) -> None:
    for model in ("numbers", "picture", "steps", "broken"):
        show(page, server, model)
        if model != "broken" and model != "picture":
            run(page)
            expect(page.locator(".output").first).to_be_visible()
        for width in (360, 800, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_phone_shows_the_list_or_a_model(page: Page, server: ServeProcess) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"http://{server.http}/")
    expect(page.locator("nav")).to_be_visible()
    expect(page.locator("article")).to_be_hidden()

    page.locator("nav a", has_text="text").click()
    expect(page.locator("nav")).to_be_hidden()
    run(page)
    expect(output(page, "OUTPUT_TEXT")).to_be_visible()
    page.get_by_role("link", name="Models").click()
    expect(page.locator("nav")).to_be_visible()


# Of text on its background; the least that WCAG 2 asks of text.
CONTRAST = 4.5
_CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) =>
      value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (!/, 0\\)$|transparent/.test(color)) return color;
    }
    return "white";
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!hasText || !node.checkVisibility() || node.closest(":disabled")) continue;
    const [one, other] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
    if ((one + 0.05) / (other + 0.05) < LIMIT) found.push(`${node.className || node.tagName}: ${node.textContent}`);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(page: Page, server: ServeProcess, scheme: str) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    backgrounds = set()
    for model in ("classes", "steps", "broken"):
        show(page, server, model)
        if model != "broken":
            run(page)
            expect(page.locator(".answer .tiles")).to_be_visible()
        assert page.evaluate(_CONTRAST.replace("LIMIT", str(CONTRAST))) == []
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert backgrounds == {"rgb(18, 20, 23)" if scheme == "dark" else "rgb(251, 251, 249)"}


def test_the_page_asks_only_its_own_server(page: Page, server: ServeProcess) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    show(page, server, "text")
    run(page)
    expect(output(page, "OUTPUT_TEXT")).to_be_visible()

    assert asked
    assert [url for url in asked if not url.startswith((f"http://{server.http}/", "data:", "blob:"))] == []


def test_models_are_loaded_and_unloaded_and_one_of_several_versions_answers(page: Page, tmp_path: Path) -> None:
    write_page_models(tmp_path)
    config = tmp_path / "text" / "config.pbtxt"
    config.write_text(config.read_text() + "\nversion_policy { all {} }\n")
    (tmp_path / "text" / "2").mkdir()

    with ServeProcess(tmp_path, "--model-control-mode=explicit") as server:
        show(page, server, "text")
        page.get_by_role("button", name="Load", exact=True).click()
        expect(page.locator("article h1")).to_contain_text("ready")

        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.get_by_label("Version").select_option("1")
        run(page)
        expect(output(page, "OUTPUT_TEXT")).to_be_visible()
        assert f"http://{server.http}/v2/models/text/versions/1/infer" in asked
        expect(code(page, "curl")).to_contain_text("/v2/models/text/versions/1/")

        config.write_text("max_batch_size: -1")
        page.get_by_role("button", name="Reload").click()
        expect(page.get_by_role("alert").first).to_contain_text("The server refused")
        expect(page.get_by_role("button", name="Reload")).to_be_enabled()

        page.get_by_role("button", name="Unload").click()
        page.get_by_role("button", name="Unload it now").click()
        expect(page.locator("article h1")).to_contain_text("not available")
        expect(page.locator("article")).to_contain_text("unloaded")


def test_models_that_the_server_does_not_control_have_no_buttons(page: Page, server: ServeProcess) -> None:
    show(page, server, "text")

    expect(page.locator(".controls")).to_have_count(0)
    expect(page.get_by_label("Version")).to_have_count(0)
