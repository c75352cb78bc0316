"""Run the parts of the test suite one after the other, all of them even when one fails, and print one summary.

Usage: python tools/run_tests.py NAME ARGUMENTS... [-- NAME ARGUMENTS...]...
Each part is a name and the arguments of its pytest. The exit status is 1 if any part failed.
"""

import itertools
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import NamedTuple

OUTCOMES = ("passed", "failed", "skipped")
FAILED = ("failure", "error")


class Part(NamedTuple):
    """What came of one run of pytest."""

    name: str
    status: int
    counts: Counter[str]
    failed: list[str]

    @property
    def is_fine(self) -> bool:
        """Whether all of its tests ran and none failed."""
        return self.status == 0 and bool(self.counts)


def run(name: str, arguments: list[str]) -> Part:
    """Run pytest; its output goes where this program's goes."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]).returncode
        return read(name, status, report)


def read(name: str, status: int, report: Path) -> Part:
    """Return the part that a JUnit report describes; pytest writes no report when it cannot run."""
    outcomes: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        kinds = {child.tag for child in case}
        is_failed = not kinds.isdisjoint(FAILED) or outcomes.get(test) == "failed"  # a test and its teardown are two
        outcomes[test] = "failed" if is_failed else "skipped" if "skipped" in kinds else "passed"
    failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    return Part(name, status, Counter(outcomes.values()), failed)


def summary(parts: list[Part]) -> str:
    """Return counts and failed tests of each part; the last line has the totals."""
    lines = [f"{part.name}: {counted(part.counts)}{remark(part)}" for part in parts]
    lines += [f"FAILED {test}" for part in parts for test in part.failed]
    return "\n".join([*lines, counted(sum((part.counts for part in parts), Counter()))])


def counted(counts: Counter[str]) -> str:
    """Return counts as pytest's last line has them."""
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome] or outcome == "passed")


def remark(part: Part) -> str:
    """Return why a part without failed tests is not fine either."""
    return "" if part.is_fine or part.failed else f" (pytest ended with status {part.status})"


def main(arguments: list[str]) -> int:
    """Run the parts and return the exit status."""
    groups = [list(group) for is_end, group in itertools.groupby(arguments, lambda each: each == "--") if not is_end]
    if not groups:
        sys.exit(__doc__)
    parts = [run(name, rest) for name, *rest in groups]
    print(f"\n{summary(parts)}")
    return int(not all(part.is_fine for part in parts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
