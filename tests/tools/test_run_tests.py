"""The command behind `make test`: every part runs, and one summary says what came of them."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "run_tests.py"
FILES = {
    "test_good.py": "def test_works(): pass\n",
    "test_bad.py": (
        "import pytest\n"
        "@pytest.mark.parametrize('value', [1, 2])\n"
        "def test_compares(value): assert value == 1\n"
        "def test_is_left_out(): pytest.skip('not here')\n"
        "@pytest.fixture\n"
        "def broken():\n"
        "    yield\n"
        "    raise ValueError\n"
        "def test_cleans_up(broken): pass\n"
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    return tmp_path


def ran(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, str(TOOL), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout.splitlines()


def test_a_part_that_fails_stops_no_other_and_the_summary_has_both(folder: Path) -> None:
    status, lines = ran(folder, "first", "test_bad.py", "--", "second", "test_good.py")

    assert status == 1
    assert lines[-5:] == [
        "first: 1 passed, 2 failed, 1 skipped",
        "second: 1 passed",
        "FAILED test_bad.py::test_compares[2]",
        "FAILED test_bad.py::test_cleans_up",
        "2 passed, 2 failed, 1 skipped",
    ]


@pytest.mark.parametrize("arguments", [("no_such_file.py",), ("test_good.py", "-k", "nothing")])
def test_a_part_whose_tests_do_not_run_fails(folder: Path, arguments: tuple[str, ...]) -> None:
    status, lines = ran(folder, "first", *arguments, "--", "second", "test_good.py")

    assert status == 1
    assert lines[-3].startswith("first: 0 passed (pytest ended with status ")
    assert lines[-2:] == ["second: 1 passed", "1 passed"]
