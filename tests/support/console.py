"""What tests of the platform's pages do in a browser."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Page
from tests.support.running_platform import RunningPlatform

AXE = Path(__file__).parent / "axe" / "axe-4.14.1.min.js"


def path(running: RunningPlatform, *parts: str) -> str:
    return "/".join([running.url, "p", "default", *parts])


def sure(page: Page) -> None:
    """Say yes to the question that has come up."""
    page.locator("#sure button[value=yes]").click()


def infer(address: str, model: str, body: dict[str, object]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    with urllib.request.urlopen(f"{address}/v2/models/{model}/infer", data, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def problems_of(page: Page) -> list[str]:
    """Return what axe finds: the rule, and the elements."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")
    return [f"{rule['id']}: {[node['html'][:200] for node in rule['nodes']]}" for rule in found["violations"]]


def tensor(name: str, size: int) -> dict[str, object]:
    return {"name": name, "shape": [1, size], "datatype": "FP32", "data": [0.5] * size}
