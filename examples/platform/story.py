"""A team's day with the platform, in a browser: a pipeline from an object store, and a service with PyTorch from Git.

Everything else that it needs runs on this machine: a store that speaks S3 and refuses requests with the bucket in their
path, as Alibaba OSS does, a Git server that calls a webhook as GitLab does, and the receiver of alerts.

Usage: python -m examples.platform.story [--installed-packages] [--pictures FOLDER] [--data FOLDER]
"""

import argparse
import io
import json
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from tests.support.browser import chromium
from tests.support.git_server import GitServer, git_server
from tests.support.s3_server import S3, s3_server, virtual_hosts
from tests.support.wheels import SITE_PACKAGES, wheel

from charonia.client import Client

from ..demo.pictures import scanned_page
from ..ocr import make_repository as ocr
from .process import PROJECT, Platform, running_platform, until

SERVICES = Path(__file__).parent / "services"
SERVICE = "similar"
ENVIRONMENT = "torch"
PIPELINE = (
    *(ocr.ENSEMBLE, ocr.DETECTION_PREPROCESSING, ocr.TEXT_DETECTION, ocr.DETECTION_POSTPROCESSING),
    *(ocr.TEXT_RECOGNITION, ocr.RECOGNITION_POSTPROCESSING),
)
STORE = {"key_id": "team", "secret_key": "of the team", "endpoint": "http://oss.cloud.test"}
TOKEN = "glpat-0123456789"
HOOK = "0123456789-shared-with-gitlab"

WAIT_S = 120.0
SIZE = {"width": 1280, "height": 860}
QUOTA = 30
"""Requests a minute."""


class Story:
    """The browser, the platform, and what is around it."""

    def __init__(self, page: Page, platform: Platform, store: S3, remote: GitServer, pictures: Path | None) -> None:
        self.page, self.platform, self.store, self.remote = page, platform, store, remote
        self._pictures = pictures

    def open(self, *parts: str) -> None:
        self.page.goto("/".join([self.platform.url, "p", PROJECT, *parts]))

    def picture(self, name: str) -> None:
        """Keep a picture of what the browser shows, if pictures are wanted."""
        if self._pictures is not None:
            content = self.page.screenshot()
            Image.open(io.BytesIO(content)).save(self._pictures / f"story_{name}.webp", quality=80, method=6)

    def click(self, button: str) -> None:
        self.page.get_by_role("button", name=button, exact=True).click()

    def confirm(self) -> None:
        self.page.locator("#sure button[value=yes]").click()

    def is_shown(self, place: str, text: str) -> None:
        expect(self.page.locator(place).first).to_contain_text(text)

    def address(self, deployment: str) -> str:
        return str(self.platform.call("GET", "deployments", deployment)["http"])


def tell(story: Story, messages: Sequence[Mapping[str, Any]]) -> None:
    """Tell the story."""
    title("Six models from a bucket, deployed by one form")
    pipeline(story)
    title("A service with PyTorch from Git, in an environment that has it")
    service(story)
    title("A push, its webhook, and a canary")
    key = create_key(story, "web", 0)
    canary(story, key)
    title("A quota")
    quota(story)
    title("Version 2 has a fault: an alert, and a rollback")
    alert(story, key, messages)


def pipeline(story: Story) -> None:
    story.platform.call("PUT", "secrets", "store", body={"value": json.dumps(STORE)})
    with tempfile.TemporaryDirectory() as folder:
        ocr.build_ocr(Path(folder))
        for file in sorted(Path(folder).rglob("*")):
            path = file.relative_to(folder)
            if file.is_file() and path.parts[0] in PIPELINE:
                story.store.put(f"ocr-models/{path}", file.read_bytes())
    story.open("models", "add?from=store")
    story.page.get_by_label("Address").fill("oss://bucket/models/ocr-models")
    story.page.get_by_label("Credentials").fill("store")
    story.click("Add")
    names = until(lambda: ready_models(story) >= {*PIPELINE}, "all six models are ready", WAIT_S)
    assert names
    story.open("models")
    story.is_shown(".rows", ocr.RECOGNITION_POSTPROCESSING)
    print(f"    oss://bucket/models/ocr-models: {', '.join(sorted(PIPELINE))}")

    story.open("deployments", f"new?model={ocr.ENSEMBLE}")
    story.is_shown("#check .notice.good", "It fits")
    story.picture("form")
    story.click("Deploy")
    story.is_shown("h1 .badge", "ready")
    with Client(story.address(ocr.ENSEMBLE)) as client:
        read = client.infer(ocr.ENSEMBLE, {"IMAGE": np.array([scanned_page()], np.object_)})["TEXT"]
    print(f"    reads {len(read)} lines, the first: {read[0].decode()}")


def ready_models(story: Story) -> set[str]:
    """Return the names of models whose latest version is ready."""
    found = story.platform.call("GET", "models", query={"limit": 50})
    return {each["name"] for each in found["models"] if (each["latest"] or {}).get("state") == "ready"}


def service(story: Story) -> None:
    story.platform.call("PUT", "secrets", "gitlab", body={"value": TOKEN})
    story.remote.commit({"similar.py": (SERVICES / "similar.py").read_bytes()})
    story.open("environments", "new")
    story.page.get_by_label("Name", exact=True).fill(ENVIRONMENT)
    story.page.get_by_label("Packages").fill("torch")
    story.click("Build")
    story.is_shown("#live h2 .badge", "ready")
    found = story.platform.call("GET", "environments", ENVIRONMENT)
    print(f"    environment '{ENVIRONMENT}': {len(found['packages'])} packages")

    story.open("models", "add?from=git")
    story.page.get_by_label("Repository").fill(f"{story.remote.address}@main#similar.py")
    story.page.get_by_label("Access").fill("gitlab")
    story.click("Add")
    story.is_shown("#live h2 .badge", "ready")

    story.open("deployments", f"new?model={SERVICE}")
    story.page.get_by_label("Environment", exact=True).select_option(ENVIRONMENT)
    story.page.get_by_label("Clients need an API key").check()
    story.is_shown("#check .notice.good", "It fits")
    story.click("Deploy")
    story.is_shown("h1 .badge", "ready")


def create_key(story: Story, client: str, per_minute: int) -> str:
    """Create an API key of the service in the browser, and return it."""
    story.open("deployments", SERVICE)
    story.page.get_by_label("Name of the client").fill(client)
    if per_minute:
        story.page.get_by_label("Requests a minute").fill(str(per_minute))
    story.click("Create a key")
    shown = story.page.locator("#keys .notice code")
    expect(shown).not_to_be_empty()
    key = shown.inner_text()
    until(lambda: ask(story.address(SERVICE), key, "a", "b")[0] == 200, "the server knows the key", WAIT_S)
    return key


def ask(address: str, key: str, first: str, second: str) -> tuple[int, Message, Any]:
    """Send a request to the service, and return the status, the headers and the answer."""
    body = json.dumps({"first": first, "second": second}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v2/models/{SERVICE}/generate", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


def canary(story: Story, key: str) -> None:
    status, _, answer = ask(story.address(SERVICE), key, "the first line", "the first lines")
    print(f"    version {answer['model_version']} answers {status}: {answer['output']:.2f}")
    story.platform.call("PUT", "secrets", "hook", body={"value": HOOK})
    wanted = {"secret": "gitlab", "hook": "hook", "deployment": SERVICE}
    place = f"{story.remote.address}@main#similar.py"
    path = story.platform.call("PUT", "models", SERVICE, "follow", body={"place": place, **wanted})["path"]

    commit = story.remote.commit({"similar.py": (SERVICES / "similar_2.py").read_bytes()})
    push(story.platform.url + path, commit)
    story.open("deployments", SERVICE, "traffic")
    story.is_shown("#canary h2 .badge", "running")
    with load(story.address(SERVICE), key, ["the first line", "a line of text"], 0.01) as answers:  # 1 % of many
        until(lambda: answers["2"] >= 5, "version 2 answers its share", WAIT_S)
        story.is_shown("#versions tbody", "1 %")
        story.picture("canary")
        story.click("Promote")
        story.confirm()
        story.is_shown("#canary h2 .badge", "finished")
    print(f"    commit {commit[:10]}: {answers['1']} requests to version 1, {answers['2']} to version 2")


def push(address: str, commit: str) -> None:
    """Call the platform as GitLab does after a push."""
    body = json.dumps({"object_kind": "push", "ref": "refs/heads/main", "after": commit}).encode()
    headers = {"X-Gitlab-Event": "Push Hook", "X-Gitlab-Token": HOOK, "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=60) as answer:
        print(f"    the webhook answers {answer.status}")


def quota(story: Story) -> None:
    key = create_key(story, "batch", QUOTA)
    for count in range(1, 2 * QUOTA):
        status, headers, answer = ask(story.address(SERVICE), key, "a line", "another line")
        if status == 429:
            print(f"    request {count} of key 'batch': 429, Retry-After {headers['Retry-After']}, {answer['error']}")
            break
    else:
        raise AssertionError(f"no request of {count} was refused")
    story.open("deployments", SERVICE)
    story.is_shown("#keys", f"of {QUOTA} requests a minute")
    story.page.locator("#keys").scroll_into_view_if_needed()
    story.picture("quota")


def alert(story: Story, key: str, messages: Sequence[Mapping[str, Any]]) -> None:
    url = f"http://127.0.0.1:{messages.port}/alerts"  # type: ignore[attr-defined]
    story.open("alerts")
    story.page.get_by_text("Create an alert", exact=True).click()
    for label, text in {
        "Name": "errors",
        "Threshold": "5",
        "For at least (seconds)": "1",
        "Deployment": SERVICE,
        "Address of the webhook": url,
    }.items():
        story.page.get_by_label(label, exact=True).fill(text)
    story.click("Create")
    story.is_shown("#alerts", "More than 5 %")
    with load(story.address(SERVICE), key, ["a line of text", ""], 0.1) as answers:
        until(lambda: states(messages) == ["firing"], "the alert", WAIT_S)
        print(f"    received: {messages[0]['message']}")
        story.open("alerts")
        story.is_shown("#alerts", "firing")
        story.picture("alert")

        story.open("deployments", SERVICE, "revisions")
        story.click("Roll back to revision 1")
        story.is_shown("#sure p", "version 1")
        story.picture("rollback")
        story.confirm()
        until(lambda: states(messages) == ["firing", "resolved"], "the alert is resolved", WAIT_S)
    print(f"    received: {messages[1]['state']}; {answers['errors']} requests had failed")
    story.open("deployments", SERVICE)
    story.is_shown("h1 .badge", "ready")


def states(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [each["state"] for each in messages]


@contextmanager
def load(address: str, key: str, texts: Sequence[str], pause_s: float) -> Iterator[Counter[str]]:
    """Send pairs of texts with pauses while it is entered, and count the answers by version, and `errors`."""
    answers: Counter[str] = Counter()
    is_over = threading.Event()

    def send() -> None:
        number = 0
        while not is_over.wait(pause_s):
            status, _, answer = ask(address, key, texts[number % len(texts)], texts[-1 - number % len(texts)])
            answers[answer["model_version"] if status == 200 else "errors"] += 1
            number += 1

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        thread.join()


class Messages(list[Mapping[str, Any]]):
    """The alerts that were received.

    Attributes:
        port: Where they are received.
    """

    port = 0


@contextmanager
def receiver() -> Iterator[Messages]:
    """Receive alerts."""
    messages = Messages()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    messages.port = server.server_port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield messages
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use_installed_packages(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let environments be built of the packages that are installed here, each as a wheel that leads to them."""
    folder.chmod(0o755)
    for each in distributions(path=[SITE_PACKAGES]):
        name = each.metadata["Name"].replace("-", "_")
        if name != "charonia":
            wheel(folder, name, {f"{name}_of_this_machine.pth": SITE_PACKAGES + "\n"}, each.version)
    (folder / "uv.toml").write_text(f'no-index = true\nfind-links = ["{folder}"]\n')
    patch.setenv("UV_CONFIG_FILE", str(folder / "uv.toml"))


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run(data: Path, pictures: Path | None, *, installed_packages: bool) -> None:
    """Start everything, tell the story, and stop what it has started."""
    start = time.monotonic()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        store = stack.enter_context(s3_server(patch))
        stack.enter_context(virtual_hosts(patch, store))
        remote = stack.enter_context(git_server(Path(stack.enter_context(tempfile.TemporaryDirectory())), patch))
        remote.authorization = "Basic b2F1dGgyOmdscGF0LTAxMjM0NTY3ODk="  # oauth2 and the token
        wheels = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="charonia-wheels-")))
        if installed_packages:
            use_installed_packages(wheels, patch)
        messages = stack.enter_context(receiver())
        platform = stack.enter_context(running_platform(data, 0, f"--readable={wheels}"))
        stack.callback(remove_all, platform)
        browser: Browser = stack.enter_context(chromium())
        page = browser.new_context(viewport=SIZE, reduced_motion="reduce").new_page()  # type: ignore[arg-type]
        page.set_default_timeout(WAIT_S * 1e3)
        expect.set_options(timeout=WAIT_S * 1e3)
        page.goto(platform.link)
        tell(Story(page, platform, store, remote, pictures), messages)
    print(f"\nThe story took {time.monotonic() - start:.0f} s.")


def remove_all(platform: Platform) -> None:
    for name in (SERVICE, ocr.ENSEMBLE):
        platform.remove(name)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--installed-packages",
        action="store_true",
        help="build the environment of packages that are installed here, not of an index",
    )
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the pages")
    parser.add_argument("--data", type=Path, help="the platform's data folder, by default a temporary one")
    given = parser.parse_args(arguments)
    if given.pictures is not None:
        given.pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run((given.data or Path(folder)).resolve(), given.pictures, installed_packages=given.installed_packages)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
