"""The command behind `make test`: every part runs, and one summary says what came of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import run_tests

TESTS = Path(__file__).parents[1]
TOOL = Path(__file__).parents[2] / "tools" / "run_tests.py"
FILES = {
    "test_good.py": "def test_works(): pass\n",
    "tests/wire/test_bytes.py": "def test_bytes(): pass\n",
    "tests/ray/test_calls.py": "def test_calls(): pass\n",
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
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    return tmp_path


def ran(folder: Path, parts: dict[str, list[str]]) -> tuple[int, list[str]]:
    program = f"import sys; import run_tests; sys.exit(run_tests.run_all({parts!r}))"
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(TOOL.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    return done.returncode, [re.sub(r"\d+ s\b", "N s", line) for line in done.stdout.splitlines()]


def test_a_part_that_fails_stops_no_other_and_the_summary_has_both_and_seconds_by_tower(folder: Path) -> None:
    status, lines = ran(folder, {"first": ["tests/wire", "tests/ray", "test_bad.py"], "second": ["test_good.py"]})

    assert status == 1
    assert "1 passed" in "\n".join(lines[:-7])  # what pytest says of the second part
    assert lines[-7:] == [
        "server: N s of tests",
        "platform: N s of tests",
        "first: 3 passed, 2 failed, 1 skipped",
        "second: 1 passed",
        "FAILED test_bad.py::test_compares[2]",
        "FAILED test_bad.py::test_cleans_up",
        "4 passed, 2 failed, 1 skipped in N s",
    ]


@pytest.mark.parametrize("arguments", [["no_such_file.py"], ["test_good.py", "-k", "nothing"]])
def test_a_part_whose_tests_do_not_run_fails(folder: Path, arguments: list[str]) -> None:
    status, lines = ran(folder, {"first": arguments, "second": ["test_good.py"]})

    assert status == 1
    assert lines[-3].startswith("first: 0 passed (pytest ended with status ")
    assert lines[-2:] == ["second: 1 passed", "1 passed in N s"]


def test_each_folder_of_tests_belongs_to_one_tower() -> None:
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}

    assert sorted(" ".join(run_tests.TOWERS.values()).split()) == sorted(folders)


def test_only_separate_parts_import_large_libraries() -> None:
    apart = [TESTS.parent / path for _, paths in run_tests.APART.values() for path in paths]
    large = re.compile(
        r"^(import|from) (lightgbm|openvino|pandas|ray|sklearn|torch|xgboost"
        r"|charonia\.ray|charonia\.server\.backends\.openvino)\b",
        re.MULTILINE,
    )
    importing = [path for path in TESTS.rglob("test_*.py") if large.search(path.read_text(encoding="utf-8"))]

    assert importing
    assert all(path.exists() for path in apart)
    assert [path for path in importing if not {path, *path.parents} & set(apart)] == []
