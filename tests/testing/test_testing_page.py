"""The code on docs/testing.md and docs/backends.md runs: each block is the file that its first line names."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from charonia.config.backends import BackendRecord, Form

pytest_plugins = ["pytester"]

DOCS = Path(__file__).parents[2] / "docs"
FILE = re.compile(r"^```\w+\n(# (\S+)\n.*?)^```", re.DOTALL | re.MULTILINE)
BACKENDS = (DOCS / "backends.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "count", "outcomes"), [("testing", 3, {"passed"}), ("backends", 15, {"passed", "skipped"})]
)
def test_the_tests_on_the_page_pass(pytester: pytest.Pytester, page: str, count: int, outcomes: set[str]) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    files = {name: content for content, name in FILE.findall(text)}
    for name, content in files.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")

    found = pytester.runpytest_inprocess("-W", "error").parseoutcomes()

    assert found["passed"] >= count
    assert found.keys() == outcomes  # a suite skips what does not apply to the backend


def test_the_page_lists_every_field_of_a_record_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", BACKENDS, re.MULTILINE)
    words: dict[object, str] = {False: "no", True: "yes", None: "none", "": "none", (): "none", b"": "none"}
    for kind, hidden in ((BackendRecord, {"problem"}), (Form, {"backend", "lines"})):
        for field in fields(kind):
            if field.name not in hidden:
                assert (field.name, words.get(field.default, "required")) in rows
