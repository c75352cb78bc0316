"""The code on docs/testing.md runs: each block is the file that its first line names."""

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
FILE = re.compile(r"^```\w+\n(# (\S+)\n.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_tests_on_the_page_pass(pytester: pytest.Pytester) -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = {name: content for content, name in FILE.findall(text)}
    assert len(files) == text.count("```") / 2
    for name, content in files.items():
        path = pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")

    outcomes = pytester.runpytest_inprocess("-W", "error").parseoutcomes()

    assert outcomes["passed"] >= 20
    assert outcomes.keys() == {"passed", "skipped"}  # a suite skips what does not apply to the backend
