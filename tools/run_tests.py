"""Run the tests of a tower, or all of them, and print one summary: results, and seconds by tower.

Usage: python tools/run_tests.py [--tower=TOWER] [ARGUMENTS OF PYTEST...]
Tests of large libraries run at the same time in separate processes, without these arguments; their output follows
at their end. All parts run, even when one fails; the exit status is 1 if any of them did.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

OUTCOMES = ("passed", "failed", "skipped")
FAILED = ("failure", "error")

TOWERS = {
    "server": "arch cli config core gpu interop mistakes process schema server simulation stores testing wire",
    "tools": "bench campaign export sim tools",
    "platform": "deploy examples platform ray",
    "client": "client openai_clients",
}
"""Folders of tests by tower; those of what all towers stand on are the server's."""

APART = {
    "libraries": (
        "server",
        [
            *("tests/gpu", "tests/server/convert"),
            *(f"tests/server/backends/{name}" for name in ("fil", "pytorch", "sklearn")),
            *(f"tests/server/backends/test_{name}.py" for name in ("mixed_pipelines", "openvino", "openvino_networks")),
            *(f"tests/server/backends/python/test_{name}.py" for name in ("service_files", "tables")),
            *(f"tests/process/test_{name}.py" for name in ("estimator_files", "forests_served")),
            *(f"tests/process/test_{name}_server.py" for name in ("openvino", "pytorch", "sklearn")),
        ],
    ),
    "Ray": ("platform", ["tests/ray", "tests/platform/targets/ray/test_ray_applications.py"]),
}
"""Tests whose modules import large libraries: their tower and their paths, by part.

Every process of pytest-xdist imports all modules of its tests, which takes 18 s of CPU with these libraries and 7 s
without.
"""


class Part(NamedTuple):
    """The result of one run of pytest.

    Attributes:
        seconds: What the tests took, by their folder. Processes side by side take more seconds than have passed.
    """

    name: str
    status: int
    counts: Counter[str]
    failed: list[str]
    seconds: dict[str, float]

    @property
    def is_fine(self) -> bool:
        """Whether all of its tests ran and none failed."""
        return self.status == 0 and bool(self.counts)


def run(name: str, arguments: Sequence[str], *, is_shown: bool) -> Part:
    """Run pytest; its output goes where this program's goes, immediately or at the end."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
        output = None if is_shown else subprocess.PIPE
        done = subprocess.run(command, stdout=output, stderr=output and subprocess.STDOUT, text=True)
        print(done.stdout or "", end="", flush=True)
        return read(name, done.returncode, report)


def read(name: str, status: int, report: Path) -> Part:
    """Return the part that a JUnit report describes; pytest writes no report when it cannot run."""
    outcomes: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for case in ET.parse(report).iter("testcase") if report.exists() else ():
        place = case.get("classname", "").split(".")
        test = f"{'/'.join(place)}.py::{case.get('name')}"
        kinds = {child.tag for child in case}
        is_failed = not kinds.isdisjoint(FAILED) or outcomes.get(test) == "failed"  # a test and its teardown are two
        outcomes[test] = "failed" if is_failed else "skipped" if "skipped" in kinds else "passed"
        folder = "".join(place[1:2])
        seconds[folder] = seconds.get(folder, 0) + float(case.get("time", 0))
    failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    return Part(name, status, Counter(outcomes.values()), failed, seconds)


def summary(parts: Sequence[Part]) -> str:
    """Return seconds by tower, counts and failed tests of each part; the last line has the totals."""
    lines = [f"{tower}: {took:.0f} s of tests" for tower, took in by_tower(parts).items()]
    lines += [f"{part.name}: {counted(part.counts)}{remark(part)}" for part in parts]
    lines += [f"FAILED {test}" for part in parts for test in part.failed]
    return "\n".join([*lines, counted(sum((part.counts for part in parts), Counter()))])


def by_tower(parts: Sequence[Part]) -> dict[str, float]:
    """Return the seconds of each tower that has run."""
    seconds: dict[str, float] = {}
    for tower, folders in TOWERS.items():
        took = [part.seconds[folder] for part in parts for folder in folders.split() if folder in part.seconds]
        if took:
            seconds[tower] = sum(took)
    return seconds


def counted(counts: Mapping[str, int]) -> str:
    """Return counts as pytest's last line has them."""
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome] or outcome == "passed")


def remark(part: Part) -> str:
    """Return why a part without failed tests is not fine either."""
    return "" if part.is_fine or part.failed else f" (pytest ended with status {part.status})"


def run_all(parts: Mapping[str, Sequence[str]]) -> int:
    """Run parts at the same time, each with its arguments of pytest, and return the exit status.

    The first one's output is shown immediately.
    """
    begin = time.monotonic()
    with ThreadPoolExecutor(len(parts)) as pool:
        started = [
            pool.submit(run, name, arguments, is_shown=not place)
            for place, (name, arguments) in enumerate(parts.items())
        ]
        ended = [part.result() for part in started]
    print(f"\n{summary(ended)} in {time.monotonic() - begin:.0f} s")
    return int(not all(part.is_fine for part in ended))


def main(arguments: Sequence[str]) -> int:
    """Run the tests and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tower", choices=TOWERS)
    given, rest = parser.parse_known_args(arguments)
    apart = {name: paths for name, (tower, paths) in APART.items() if given.tower in (None, tower)}
    elsewhere = [path for paths in apart.values() for path in paths]
    folders = [f"tests/{folder}" for folder in TOWERS[given.tower].split()] if given.tower else ["tests"]
    rest += [f"--ignore={path}" for path in elsewhere]
    parts = {"tests": [*(folder for folder in folders if folder not in elsewhere), *rest], **apart}
    return run_all(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
