"""Faults put into sources, and whether tests detect them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools.mutants import faults_of

from tools import mutants

SOURCE = '''"""Doc."""
from typing import Final

LIMIT: Final = 3


def within(value: int, others: list[int]) -> bool:
    """Doc."""
    if value < 0 or not others:
        others.clear()
        raise ValueError(f"got {value + 1}")
    return value <= LIMIT
'''


def test_every_kind_of_fault_is_found_where_it_would_be() -> None:
    assert [str(fault).removeprefix("m.py:") for fault in faults_of(Path("m.py"), SOURCE)] == [
        "4: 3  ->  4",
        "4: 3  ->  2",
        "9: value < 0 or not others  ->  value < 0 and (not others)",
        "9: value < 0  ->  value <= 0",
        "9: value < 0  ->  value >= 0",
        "9: 0  ->  1",
        "9: 0  ->  -1",
        "9: not others  ->  others",
        "10: others.clear()  ->  pass",
        "11: raise ValueError(f'got {value + 1}')  ->  pass",
        "12: return value <= LIMIT  ->  return None",
        "12: value <= LIMIT  ->  value < LIMIT",
        "12: value <= LIMIT  ->  value > LIMIT",
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = a + b", ["a - b"]),
        ("x = a // b % c", ["a // b // c", "a * b"]),
        ("x = a << b & c", ["a << b | c", "a >> b"]),
        ("x = -a", ["a"]),
        ("x = True", ["False"]),
        ("x = 'text'", []),
        ("x = 1.5", ["2.5", "0.5"]),
        ("x += y", ["x -= y", "pass"]),
        ("x.y = z", ["pass"]),
        ("x[y] = z", ["pass"]),
        ("del x[y]", ["pass"]),
        ("assert x == y", []),
        ("x = a is b", ["a is not b"]),
        ("x = a not in b", ["a in b"]),
        ("x = a < b == c", ["a <= b == c", "a >= b == c", "a < b != c"]),
        ("if a:\n    b = c", ["if not a:"]),
        ("while a.b():\n    break", ["while not a.b():", "pass"]),
    ],
)
def test_a_piece_of_code_has_these_faults(before: str, after: list[str]) -> None:
    assert [fault.after for fault in faults_of(Path("m.py"), before)] == after


def test_a_fault_is_the_only_change_of_its_file() -> None:
    fault = faults_of(Path("m.py"), "a = 1\nb = x < y\n")[2]

    assert fault.source == "a = 1\nb = x <= y"


@pytest.mark.parametrize(
    ("folder", "source", "found"),
    [
        ("core", "core/metadata.py", "core"),
        ("core", "core/deeper/names.py", "core"),
        ("server/http", "server/http/routes.py", "server/http"),
        ("server", "server/http/routes.py", "server"),
        ("http", "server/http/routes.py", None),
        ("core", "sched/names.py", None),
        ("core", "names.py", None),
    ],
)
def test_the_tests_of_a_file_lie_in_the_folder_of_the_same_path(
    folder: str, source: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "tests" / folder).mkdir(parents=True)

    assert mutants.tests_of(mutants.PACKAGE / source) == (None if found is None else Path("tests", found))


def test_a_fault_that_no_test_detects_is_printed_and_the_sources_stay_as_they_are(tmp_path: Path) -> None:
    for folder in ("tools", "src/charonia/core", "tests/core"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(mutants.__file__, tmp_path / "tools")
    (tmp_path / "src/charonia/__init__.py").touch()
    source = tmp_path / "src/charonia/core/limit.py"
    source.write_text("def within(value):\n    return value < 3\n")
    test = "from charonia.core.limit import within\n\ndef test_it():\n    assert within(2) and not within(4)\n"
    (tmp_path / "tests/core/test_limit.py").write_text(test)
    command = [sys.executable, "tools/mutants.py", str(source), "--count", "99"]

    # The package of this test is empty but for one module, so it has no pytest plugin.
    environment = os.environ | {"PYTEST_ADDOPTS": "-p no:charonia"}

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[1:] == [
        "src/charonia/core/limit.py:2: 3  ->  4",
        "src/charonia/core/limit.py:2: value < 3  ->  value <= 3",
        "5 of 5 possible faults tried with seed 0: 3 detected",
    ]
    assert source.read_text() == "def within(value):\n    return value < 3\n"


def test_without_time_nothing_is_tried(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "seconds_of", lambda tests: 1.0)

    assert mutants.main([str(mutants.ROOT / "src/charonia/core/metadata.py"), "--budget", "0"]) == 0

    assert "0 of " in capsys.readouterr().out
