"""Put faults into changed files, one at a time, and report those that no test detects.

    python tools/mutants.py                          a sample over the files of src/charonia changed since HEAD~1
    python tools/mutants.py --base main --count 60   ... changed since main, more of it
    python tools/mutants.py src/charonia/core/metadata.py --seed 7
    python tools/mutants.py --pure --count 400 --budget 20000     ... over the pure core

A fault changes a comparison, a bound, an operator, a constant or a returned value, negates a condition or drops a
statement. The tests that reach its line, as a run under coverage has shown, run against a copy of the sources that has
the fault: those of the file's folder, then the others. The sources themselves are never touched. An undetected fault is
printed as `file:line`, the original code and the changed code: it needs a test, or makes no difference. The same seed
and sources give the same sample.

mutmut first runs the whole suite to learn which test reaches which function, and cosmic-ray knows one test command for
all files and drops neither statements nor returned values; each brings some 30 packages.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src", "charonia")

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
UNTOUCHED_FIELDS = {"annotation", "returns", "decorator_list", "type_params"}
LIMIT_S = 300.0
"""Seconds after which tests with a fault are taken to hang."""


@dataclass(frozen=True)
class Fault:
    """A change of a file: `before` has become `after`, and `source` is the whole file with it."""

    path: Path
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


def faults_of(path: Path, source: str) -> list[Fault]:
    """Return every possible fault of a file."""
    starts = [0, *accumulate(len(line) for line in source.encode().splitlines(keepends=True))]
    found = []
    for node in _places(ast.parse(source)):
        for part, changed in _changes(node):
            text = ast.unparse(ast.fix_missing_locations(changed))
            put = f"({text})" if isinstance(changed, ast.expr) else text
            found.append(
                Fault(path, node.lineno, _first_line(node), text.split("\n")[0], _put(source, starts, part, put))
            )
    return found


def _put(source: str, starts: list[int], node: ast.expr | ast.stmt, text: str) -> str:
    """Return the source with another text in place of a node."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    data = source.encode()
    start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    return (data[:start] + text.encode() + data[end:]).decode()


def _places(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield everything that may be changed, top down."""
    for field, value in ast.iter_fields(node):
        if field in UNTOUCHED_FIELDS:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_for_readers(child):
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            yield from _places(child)


def _is_for_readers(node: ast.AST) -> bool:
    """Whether a statement is a docstring, an import or names that are only for type checkers."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.JoinedStr):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """Yield the part of a node that changes and what it becomes, for each of its faults."""
    if isinstance(node, ast.If | ast.While):
        if not isinstance(node.test, ast.Compare | ast.UnaryOp | ast.BoolOp | ast.Constant):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
    else:
        for changed in _variants(node):
            yield node, changed


def _variants(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    match node:
        case ast.Compare(left, ops, comparators):
            for index, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield ast.Compare(left, [*ops[:index], other(), *ops[index + 1 :]], comparators)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            yield ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Return(value) if value is not None and not (isinstance(value, ast.Constant) and value.value is None):
            yield ast.Return(ast.Constant(None))
        case ast.AugAssign(target, op, value):
            if type(op) in ARITHMETIC:
                yield ast.AugAssign(target, ARITHMETIC[type(op)](), value)
            yield ast.Pass()
        case ast.Expr(ast.Call() | ast.Await()) | ast.Raise() | ast.Break() | ast.Continue() | ast.Delete():
            yield ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def _first_line(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0]


def tests_of(path: Path) -> Path:
    """Return the folder of tests for a source file: that of its folder, or of the nearest folder above that has one."""
    parts = path.parent.relative_to(PACKAGE).parts
    ends = range(len(parts), 0, -1)
    return next((tests for end in ends if (ROOT / (tests := Path("tests", *parts[:end]))).is_dir()), Path("tests"))


def files_of(tests: Path) -> list[str]:
    """Return the files of tests in a folder."""
    return sorted(str(tests / file.name) for file in (ROOT / tests).glob("test_*.py"))


def pure_files() -> list[Path]:
    """Return the modules of the pure core."""
    sys.path.insert(0, str(ROOT))
    from tests.arch.test_imports import PURE

    return [path.relative_to(ROOT) for path in PURE]


def changed_files(base: str) -> list[Path]:
    """Return the modules that differ from `base`, with what is not committed."""
    command = ["git", "diff", "--name-only", "--diff-filter=d", base, "--", str(PACKAGE)]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [Path(name) for name in names if name.endswith(".py")]


def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Let coverage.py know which test runs. With its own `test_function`, a property test would be Hypothesis."""
    measuring = coverage.Coverage.current()
    assert measuring is not None
    measuring.switch_context(item.nodeid.partition("[")[0])


class Reach:
    """Which tests reach each line, by a run of the tests of some folders under coverage.

    Args:
        data: File of coverage.py with a context for each test; it is made where it is missing.
    """

    def __init__(self, folders: Sequence[Path], data: Path) -> None:
        if not data.exists():
            command = [sys.executable, "-m", "coverage", "run", "--rcfile=/dev/null", f"--data-file={data}"]
            files = [str(file) for folder in folders for file in files_of(folder)]
            command += [
                f"--source={PACKAGE}",
                "--append",
                "-m",
                "pytest",
                "-p",
                "tools.mutants",
                "-n",
                "0",
                "--timeout=0",
                *files,
            ]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode == 1:  # a test may need more time than a busy machine gives it under coverage
                done = subprocess.run([*command, "--last-failed"], cwd=ROOT, capture_output=True, text=True)
            if done.returncode != 0:
                data.unlink(missing_ok=True)
                raise SystemExit(f"the tests fail as they are:\n{done.stdout[-2000:]}")
        self._data = coverage.CoverageData(str(data))
        self._data.read()

    @cache  # noqa: B019  # there is one for a run
    def _lines(self, path: Path) -> dict[int, list[str]]:
        return self._data.contexts_by_lineno(str(ROOT / path))

    def tests(self, fault: Fault) -> tuple[list[str], list[str]]:
        """Return the tests that reach a fault: those of its own folder, and the others."""
        own = files_of(tests_of(fault.path))
        found = sorted(self._lines(fault.path).get(fault.line, []))
        if "" in found:  # it runs when the module is imported
            return own, []
        near = [each for each in found if each.split("::")[0] in own]
        return near, [each for each in found if each not in near]


def run_tests(tests: Sequence[str], fault: Fault, limit_s: float) -> int | None:
    """Run tests with a fault in the sources; return pytest's status, None after a timeout."""
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        shutil.copytree(ROOT / PACKAGE, Path(folder, PACKAGE), copy_function=os.link)
        changed = Path(folder, fault.path)
        changed.unlink()
        changed.write_text(fault.source, encoding="utf-8")
        paths = {"PYTHONPATH": str(Path(folder, "src")), "HYPOTHESIS_STORAGE_DIRECTORY": str(Path(folder, "examples"))}
        command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **paths},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Its process group has the servers and workers that its tests started.
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()


def survives(fault: Fault, reach: Reach, end_s: float) -> bool | None:
    """Whether no test detects a fault; None when the time is over."""
    if time.monotonic() > end_s:
        return None
    detected = any(tests and run_tests(tests, fault, LIMIT_S) != 0 for tests in reach.tests(fault))
    if not detected:
        print(fault, flush=True)
    return not detected


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a program; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="files under src/charonia, instead of the changed ones")
    parser.add_argument("--pure", action="store_true", help="the modules of the pure core, instead of the changed ones")
    parser.add_argument("--base", default="HEAD~1", help="commit to compare with (default: %(default)s)")
    parser.add_argument("--count", type=int, default=20, help="limit of faults to try (default: %(default)s)")
    parser.add_argument(
        "--budget", type=float, default=600, help="seconds after which no more faults are tried (default: %(default)s)"
    )
    parser.add_argument("--reach", type=Path, help="keep in this file which tests reach each line, for later runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="faults tried concurrently (default: %(default)s)")
    options = parser.parse_args(arguments)
    files = [path.resolve().relative_to(ROOT) for path in options.files]
    if options.pure:
        files = pure_files()
    files = files or changed_files(options.base)
    faults = [fault for path in files for fault in faults_of(path, (ROOT / path).read_text(encoding="utf-8"))]
    sample = random.Random(options.seed).sample(faults, min(options.count, len(faults)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        reach = Reach(sorted({tests_of(path) for path in files}), options.reach or Path(folder, "reach"))
        end_s = time.monotonic() + options.budget
        outcomes = list(pool.map(lambda fault: survives(fault, reach, end_s), sample))
    tried = sum(outcome is not None for outcome in outcomes)
    print(f"{tried} of {len(faults)} possible faults tried with seed {options.seed}: {outcomes.count(False)} detected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
