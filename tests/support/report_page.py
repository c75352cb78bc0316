"""A page of a report as its elements, text and scripts, and what holds for each such page."""

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(2)>"'&<!--"""


class Page(HTMLParser):
    """Elements with their attributes, the text, and the text of each script."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])

    @property
    def ids(self) -> set[str]:
        return {str(attributes["id"]) for _, attributes in self.elements if "id" in attributes}


def check_hostile(harmless: Page, hostile: Page) -> None:
    """Check that a page in which every name is `HOSTILE` shows it as text."""
    assert len(hostile.scripts) == len(harmless.scripts) == 2
    assert hostile.scripts[1] == harmless.scripts[1]
    assert "img" not in {tag for tag, _ in hostile.elements}
    assert not any(name.startswith("on") for _, attributes in hostile.elements for name in attributes)
    assert HOSTILE in hostile.text
    assert "<" not in hostile.scripts[0]


def check_closed(content: bytes) -> Page:
    """Check that a page loads nothing, runs only its own script, and makes no markup of text; return it."""
    page = Page(content)
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    digest = b64encode(sha256(page.scripts[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not any("src" in attributes for _, attributes in page.elements)
    assert not re.search(rb"https?://|@import|url\(", content.replace(b"http://www.w3.org/2000/svg", b""))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", page.scripts[1])
    return page
