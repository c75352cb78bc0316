"""The gate against the original's suites: what it makes of a run. The suites themselves need a checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools.triton_suites import Result, outcomes_of, prepare, run, table

from tools import triton_suites


def noted(*outcomes: tuple[str, str]) -> list[str]:
    return [json.dumps({"test": test, "outcome": outcome}) for test, outcome in outcomes]


def test_a_method_that_fails_once_counts_as_failed() -> None:
    lines = noted(("A.x", "passed"), ("A.x", "failed"), ("A.x", "passed"), ("A.y", "skipped"), ("A.y", "passed"))

    assert outcomes_of(lines) == {"A.x": "failed", "A.y": "passed"}


def test_the_table_has_counts_and_says_which_failures_are_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_suites, "KNOWN", {"L0_one A.z": "texts of errors"})
    results = [Result("L0_one", 1, {"A.z": "failed", "A.x": "passed"}), Result("L0_other", None, {"B.y": "failed"})]

    lines = table(results).splitlines()

    assert lines[2:] == [
        "| L0_one | status 1 | 1 | 1 | 1 | 0 |",
        "| L0_other | timed out | 0 | 1 | 0 | 0 |",
        "L0_one A.z: documented, texts of errors",
        "L0_other B.y",
        "1 passed, 2 failed",
    ]
    assert [each.unexplained() for each in results] == [[], ["B.y"]]


SUITE = """
set -e
test "$(ip -o link | wc -l)" = 1
test -x /opt/tritonserver/bin/tritonserver
test -d /data
set +e
python suite_test.py Suite.test_good >log 2>&1
python suite_test.py Suite.test_bad >log 2>&1
python3 -m pytest suite_test.py -k good >log 2>&1
"""
METHODS = """
import unittest

class Suite(unittest.TestCase):
    def test_good(self):
        pass

    def test_bad(self):
        self.assertEqual(1, 2)

if __name__ == "__main__":
    unittest.main()
"""


def can_unshare() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "true"]
    return sys.platform == "linux" and shutil.which("ip") is not None and subprocess.run(command).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs Linux with user namespaces, and iproute2")
def test_a_suite_runs_unchanged_in_private_namespaces_and_its_methods_are_noted(tmp_path: Path) -> None:
    folder = tmp_path / "checkout" / "qa" / "L0_small"
    folder.mkdir(parents=True)
    (folder / "test.sh").write_text(SUITE)
    (folder / "suite_test.py").write_text(METHODS)
    work = tmp_path / "work"
    prepare(tmp_path / "checkout", work)
    (work / "data").mkdir()

    result = run(work, "L0_small", 110)

    log = (work / "L0_small.log").read_text()
    assert result.outcomes == {"Suite.test_good": "passed", "Suite.test_bad": "failed"}, log
    assert result.status == 0, log
    assert not os.path.exists("/opt/tritonserver/qa/L0_small")
