"""What tests of the platform's pages do in a browser."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Page
from tests.support.running_platform import RunningPlatform

AXE = Path(__file__).parent / "axe" / "axe-4.14.1.min.js"
RULES_OF_COLOURS = ["color-contrast", "link-in-text-block"]
"""What a theme can break: the style sheets of both differ in colours only."""


def path(running: RunningPlatform, *parts: str) -> str:
    return "/".join([running.url, "p", "default", *parts])


def sure(page: Page) -> None:
    """Say yes to the question that has come up."""
    page.locator("#sure button[value=yes]").click()


def infer(address: str, model: str, body: dict[str, object]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    with urllib.request.urlopen(f"{address}/v2/models/{model}/infer", data, timeout=200) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def problems_of(page: Page) -> list[str]:
    """Return what axe finds in the light theme, and of colours in the dark one: the rule, and the elements."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate("rules => axe.run({runOnly: {type: 'rule', values: rules}})", RULES_OF_COLOURS)
    page.emulate_media(color_scheme="light")
    assert dark["passes"] or dark["violations"], "axe found no text"
    found += dark["violations"]
    return [f"{rule['id']}: {[node['html'][:200] for node in rule['nodes']]}" for rule in found]


def tensor(name: str, size: int) -> dict[str, object]:
    return {"name": name, "shape": [1, size], "datatype": "FP32", "data": [0.5] * size}
