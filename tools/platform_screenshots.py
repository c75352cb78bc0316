"""Pictures of the platform's pages: tools/platform_screenshots.py FOLDER [--docs].

Starts a platform with models, deployments and traffic in a temporary folder, and writes a PNG of every page at three
widths in light and dark. With `--docs`, only the pictures of the documentation, as WebP.
"""

import argparse
import io
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.browser import chromium
from tests.support.models import add_sub, mlp
from tests.support.running_platform import OWNER, RunningPlatform, running_platform

WIDTHS = (390, 1280, 1920)
HEIGHT = 900
THEMES = ("light", "dark")
TRAFFIC_S = 60.0

PAGES = (
    *("deployments", "deployments/new?model=digits", "deployments/digits", "deployments/digits/change"),
    *("deployments/digits/try", "deployments/digits/traffic", "deployments/digits/revisions"),
    *("deployments/digits/revisions/1", "deployments/digits/explain", "deployments/digits/log", "deployments/words"),
    *("models", "models/digits", "models/greeter", "models/words", "models/add", "models/add?from=store"),
    *("models/digits/versions/2/try", "models/words/versions/1/try", "models/add?from=mlflow"),
    *("models/branches", "deployments/digits?range=24h", "alerts", "api"),
    *("environments", "environments/new", "jobs", "jobs/1", "audit", "people"),
)
DOCS = (
    ("deployments/digits", 1280, "light", "deployment"),
    ("deployments/digits/traffic", 1280, "dark", "traffic"),
    ("models/digits", 1280, "light", "model"),
    ("deployments/digits", 360, "dark", "phone"),
)
"""Page, width, theme, and name of the picture."""

FAILS = """class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("there is no dictionary")

    def execute(self, requests):
        return []
"""
GREETER = """import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        names = [pb_utils.get_input_tensor_by_name(request, "NAME") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("GREETING", name.as_numpy())]) for name in names]
"""
GREETER_CONFIG = """backend: "python"
max_batch_size: 8
input { name: "NAME" data_type: TYPE_STRING dims: 1 }
output { name: "GREETING" data_type: TYPE_STRING dims: 1 }
"""


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", action="store_true")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data, running_platform(Path(data) / "platform") as running:
        address = fill(running, Path(data) / "models")
        with traffic(address), chromium() as browser:
            watch(running)
            for name, width, theme, picture in DOCS if given.docs else every():
                content = shot(browser, running, name, width, theme, full=not given.docs)
                if given.docs:
                    Image.open(io.BytesIO(content)).save(given.folder / f"platform_{picture}.webp", quality=82)
                else:
                    (given.folder / f"{picture}.png").write_bytes(content)


def watch(running: RunningPlatform) -> None:
    """Ask for figures for a while: those that somebody looks at are collected more often."""
    end = time.monotonic() + TRAFFIC_S
    while time.monotonic() < end:
        running.platform.deployments.reads.figures(OWNER, "default", "digits")
        time.sleep(2)


def every() -> Iterator[tuple[str, int, str, str]]:
    """Yield every page at every width in both themes."""
    for name in PAGES:
        for width in WIDTHS:
            for theme in THEMES:
                yield name, width, theme, f"{name.replace('/', '_').replace('?', '_')}-{width}-{theme}"


_tabs: dict[str, Page] = {}


def shot(browser: Browser, running: RunningPlatform, name: str, width: int, theme: str, *, full: bool) -> bytes:
    """Return a picture of a page."""
    if not _tabs:
        _tabs["tab"] = browser.new_context(reduced_motion="reduce").new_page()
        _tabs["tab"].goto(running.login_link())
    tab = _tabs["tab"]
    tab.set_viewport_size({"width": width, "height": 1400 if width < 600 and not full else HEIGHT})
    tab.emulate_media(color_scheme="dark" if theme == "dark" else "light")
    tab.goto(f"{running.url}/p/default/{name}")
    tab.wait_for_timeout(700)
    return tab.screenshot(full_page=full)


def fill(running: RunningPlatform, models: Path) -> str:
    """Add models and deployments, and return the address of one."""
    add(running, models, "digits", {"1/model.onnx": mlp((64, 128, 10))})
    add(running, models, "digits", {"1/model.onnx": mlp((64, 96, 10))}, notes="a third smaller, as accurate")
    add(running, models, "add_sub", {"1/model.onnx": add_sub()})
    add(running, models, "greeter", {"1/model.py": GREETER.encode(), "config.pbtxt": GREETER_CONFIG.encode()})
    add(running, models, "words", {"1/model.py": FAILS.encode(), "config.pbtxt": GREETER_CONFIG.encode()})
    about = {"owner": "Ada Lovelace", "description": "Handwritten digits of 8 by 8 pixels", "tags": ["vision", "demo"]}
    ask(running, "PATCH", "models/digits", about)
    for model in ("digits", "greeter"):
        versions = [1] if model == "digits" else "latest"
        ask(running, "POST", "deployments", {"name": model, "models": [{"name": model, "versions": versions}]})
        wait(running, model, 1)
    ask(running, "POST", "deployments", {"name": "words", "models": [{"name": "words", "versions": "latest"}]})
    both = {"name": "digits", "versions": [1, 2], "traffic": {"weights": {"1": 80, "2": 20}}}
    ask(running, "PUT", "deployments/digits", {"name": "digits", "models": [both]})
    address = wait(running, "digits", 2)
    shadow = {"weights": {"1": 80, "2": 20}, "shadow": {"2": {"share": 0.5}}}
    ask(running, "POST", "deployments/digits/traffic", {"model": "digits", **shadow})
    wait(running, "digits", 3)
    for model, version in (("digits", 2), ("words", 1)):
        running.platform.trials.start(OWNER, "default", model, version)
    plan = {"version": 2, "steps": [10, 50, 100], "step_seconds": 75, "samples_min": 100, "p99_ratio_max": None}
    ask(running, "POST", "deployments/digits/traffic", {"model": "digits", "canary": plan})
    return address


def add(running: RunningPlatform, models: Path, name: str, files: dict[str, bytes], notes: str = "") -> None:
    """Add a version of a model."""
    for path, content in files.items():
        (models / name / path).parent.mkdir(parents=True, exist_ok=True)
        (models / name / path).write_bytes(content)
    source = {"kind": "folder", "place": str(models / name)}
    added = ask(running, "POST", f"models/{name}/versions", {"source": source, "notes": notes})
    end = time.monotonic() + 60
    while ask(running, "GET", f"models/{name}/versions/{added['number']}")["state"] != "ready":
        assert time.monotonic() < end
        time.sleep(0.2)


def wait(running: RunningPlatform, name: str, revision: int) -> str:
    """Wait until a revision serves, and return its address."""
    end = time.monotonic() + 60
    while True:
        view = running.platform.deployments.reads.get(OWNER, "default", name)
        seen = running.platform.deployments.servers.observe(OWNER, "default", name)
        if view.serving == revision and view.state == "ready" and not seen.applying:
            return view.http
        assert time.monotonic() < end, view.latest_reason
        time.sleep(0.2)


def ask(running: RunningPlatform, method: str, path: str, body: Any = None) -> Any:
    """Call the API as the owner."""
    running.login_link()
    key = (running.platform.settings.data / "owner.key").read_text().strip()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{running.url}/api/v1/projects/default/{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


@contextmanager
def traffic(address: str) -> Iterator[None]:
    """Send requests to the digits for as long as it lasts."""
    is_over = threading.Event()

    def send() -> None:
        count = 0
        while not is_over.wait(0.004 + 0.004 * (count % 50 > 30)):
            rows = 1 + count % 4
            tensor = {"name": "input", "shape": [rows, 64], "datatype": "FP32", "data": [0.5] * 64 * rows}
            body = json.dumps({"inputs": [tensor]}).encode()
            urllib.request.urlopen(f"{address}/v2/models/digits/infer", body, timeout=30).read()
            count += 1

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


if __name__ == "__main__":
    main()
