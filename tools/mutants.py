"""Put faults into changed files, one at a time, and report those that no test detects.

    python tools/mutants.py                          a sample over the files of src/charonia changed since HEAD~1
    python tools/mutants.py --base main --count 60   ... changed since main, more of it
    python tools/mutants.py src/charonia/core/metadata.py --seed 7

A fault changes a comparison, a bound, an operator, a constant or a returned value, negates a condition or drops a
statement. The tests of the file's folder run against a copy of the sources that has the fault; the sources themselves
are never touched. An undetected fault is printed as `file:line`, the original code and the changed code: it needs a
test, or makes no difference. The same seed and sources give the same sample.

mutmut first runs the whole suite to learn which test reaches which function, and cosmic-ray knows one test command for
all files and drops neither statements nor returned values; each brings some 30 packages.
"""

import argparse
import ast
import copy
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
from pathlib import Path

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
TIMES_LONGER_MAX, SECONDS_MORE = 3, 20.0


@dataclass(frozen=True)
class Fault:
    """A file with one change in it: `before` has become `after`, and `source` is the whole file with it."""

    path: Path
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


def faults_of(path: Path, source: str) -> list[Fault]:
    """Return every possible fault of a file."""
    tree = ast.parse(source)
    found = []
    for parent, field, index, node in list(_places(tree)):
        for changed in _changes(node):
            _put(parent, field, index, changed)
            text = ast.unparse(ast.fix_missing_locations(tree))
            found.append(Fault(path, node.lineno, _first_line(node), _first_line(changed), text))
        _put(parent, field, index, node)
    return found


def _places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.expr | ast.stmt]]:
    """Yield parent, field, index in the field and node of everything that may be changed, top down."""
    for field, value in ast.iter_fields(node):
        if field in UNTOUCHED_FIELDS:
            continue
        children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for index, child in children:
            if not isinstance(child, ast.AST) or _is_for_readers(child):
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield node, field, index, child
            yield from _places(child)


def _is_for_readers(node: ast.AST) -> bool:
    """Whether a statement is a docstring, an import or names that are only for type checkers."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.JoinedStr):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes(node: ast.expr | ast.stmt) -> Iterator[ast.expr | ast.stmt]:
    """Yield the faulty variants of a node."""
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
        case ast.If() | ast.While() if not isinstance(node.test, ast.Compare | ast.UnaryOp | ast.BoolOp | ast.Constant):
            changed = copy.copy(node)
            changed.test = ast.UnaryOp(ast.Not(), node.test)
            yield changed
        case ast.AugAssign(target, op, value):
            if type(op) in ARITHMETIC:
                yield ast.AugAssign(target, ARITHMETIC[type(op)](), value)
            yield ast.Pass()
        case ast.Expr(ast.Call() | ast.Await()) | ast.Raise() | ast.Break() | ast.Continue() | ast.Delete():
            yield ast.Pass()
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    siblings = getattr(parent, field)
    setattr(parent, field, node if index is None else [*siblings[:index], node, *siblings[index + 1 :]])


def _first_line(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).splitlines()[0]


def tests_of(path: Path) -> Path | None:
    """Return the folder of tests for a source file: that of its folder, or of the nearest folder above that has one."""
    parts = path.parent.relative_to(PACKAGE).parts
    for end in range(len(parts), 0, -1):
        tests = Path("tests", *parts[:end])
        if (ROOT / tests).is_dir():
            return tests
    return None


def changed_files(base: str) -> list[Path]:
    """Return the modules that differ from `base`, with what is not committed."""
    command = ["git", "diff", "--name-only", "--diff-filter=d", base, "--", str(PACKAGE)]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [Path(name) for name in names if name.endswith(".py")]


def run_tests(tests: Path, fault: Fault | None, limit_s: float | None) -> int | None:
    """Run a folder of tests, with a fault in the sources; return pytest's status, None after a timeout."""
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        shutil.copytree(ROOT / PACKAGE, Path(folder, PACKAGE))
        if fault is not None:
            Path(folder, fault.path).write_text(fault.source, encoding="utf-8")
        paths = {"PYTHONPATH": str(Path(folder, "src")), "HYPOTHESIS_STORAGE_DIRECTORY": str(Path(folder, "examples"))}
        command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", str(tests)]
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


@cache
def seconds_of(tests: Path) -> float:
    """Return how long a folder of tests takes without a fault; exit if they fail."""
    begin = time.monotonic()
    if run_tests(tests, None, None) != 0:
        raise SystemExit(f"{tests} fails as it is")
    return time.monotonic() - begin


def survives(fault: Fault, end_s: float) -> bool | None:
    """Whether no test detects a fault; None when the time is over."""
    tests = tests_of(fault.path)
    if tests is None or time.monotonic() > end_s:
        return None
    return run_tests(tests, fault, seconds_of(tests) * TIMES_LONGER_MAX + SECONDS_MORE) == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a program; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="files under src/charonia, instead of the changed ones")
    parser.add_argument("--base", default="HEAD~1", help="commit to compare with (default: %(default)s)")
    parser.add_argument("--count", type=int, default=20, help="limit of faults to try (default: %(default)s)")
    parser.add_argument(
        "--budget", type=float, default=600, help="seconds after which no more faults are tried (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="faults tried concurrently (default: %(default)s)")
    options = parser.parse_args(arguments)
    end_s = time.monotonic() + options.budget
    files = [path.resolve().relative_to(ROOT) for path in options.files] or changed_files(options.base)
    tested = [path for path in files if tests_of(path) is not None]
    for path in sorted(set(files) - set(tested)):
        print(f"{path}: no folder of tests corresponds to its folder")
    faults = [fault for path in tested for fault in faults_of(path, (ROOT / path).read_text(encoding="utf-8"))]
    sample = random.Random(options.seed).sample(faults, min(options.count, len(faults)))
    for tests in sorted({str(tests_of(fault.path)) for fault in sample}):
        print(f"{tests}: {seconds_of(Path(tests)):.0f} s as it is")
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(lambda fault: survives(fault, end_s), sample))
    for fault, outcome in zip(sample, outcomes, strict=True):
        if outcome:
            print(fault)
    tried = sum(outcome is not None for outcome in outcomes)
    print(f"{tried} of {len(faults)} possible faults tried with seed {options.seed}: {outcomes.count(False)} detected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
