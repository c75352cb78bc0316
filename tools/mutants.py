"""Put faults into changed files, one at a time, and report those that no test detects.

    python tools/mutants.py                          a sample over the files of src/charonia changed since HEAD~1
    python tools/mutants.py --base main --count 60   ... changed since main, more of it
    python tools/mutants.py src/charonia/core/metadata.py --seed 7
    python tools/mutants.py --pure --count 400 --budget 20000     ... over the pure core

A fault changes a comparison, a bound, an operator, a constant or a returned value, negates a condition or drops a
statement. A process runs the fast files of tests that import a changed module, in the folder of its tests, one time
under coverage, to learn which lines each test reaches. Then it forks for each fault, puts it into the loaded function,
and runs the tests that reach its line, fast ones first; a fault outside of functions changes constants and defaults.
What they do not detect is tried a second time, with the other files of the folder, and those of other folders that
import the module or a module that imports it, slow ones last. A fault outside of functions that is left is put into a
copy of the sources, with which the fast files of tests that import the module are started. Tests that start servers in
other processes are left out. The sources themselves are never touched. An undetected fault is printed as `file:line`,
the original code and the changed code: it needs a test, or makes no difference. The same seed and sources give the
same sample.

mutmut first runs the whole suite to learn which test reaches which function, and cosmic-ray knows one test command for
all files and drops neither statements nor returned values; each brings some 30 packages.
"""

import argparse
import ast
import contextlib
import gc
import inspect
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain
from multiprocessing import get_context
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TextIO

import coverage
import pytest
from _pytest.runner import runtestprotocol

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
LARGE = 1000
"""From here on, a constant is a limit or a factor of units, for which 1 more is as good: it becomes twice or half."""
LIMIT_S = 300.0
"""Seconds after which tests with a copy of the sources are given up; a test that hangs fails before."""
LEARNING_SHARE = 0.5
"""Share of the seconds left in which a process learns what tests reach."""
OTHER_PROCESSES = {
    "bench",
    "campaign",
    "deploy",
    "examples",
    "gpu",
    "interop",
    "openai_clients",
    "process",
    "simulation",
}
"""Folders whose tests start servers in other processes, where a fault in this one is not seen."""


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
        case ast.Constant(int(value) | float(value)) if abs(value) >= LARGE:
            yield ast.Constant(value * 2)
            yield ast.Constant(value // 2)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):  # it has faults itself
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


@cache
def slow_files() -> frozenset[str]:
    """Return the names of the files of tests that tests/conftest.py lists because they take long."""
    return frozenset(re.findall(r'"(test_\w+\.py)"', (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")))


def near_files(changed: Path, also: Sequence[Path] = ()) -> list[str]:
    """Return the fast files of a module's tests that import it, and all fast ones of more folders."""
    name, tests = module_name(changed), ROOT / tests_of(changed)
    found = [file for file in tests.glob("test_*.py") if name in _with_support(file)]
    found += [file for folder in also for file in (ROOT / folder).glob("test_*.py")]
    return sorted({str(file.relative_to(ROOT)) for file in found if file.name not in slow_files()})


def other_files(changed: Path, tried: Collection[str]) -> list[str]:
    """Return other files of tests that may reach a module, the nearest and fastest first.

    They are in the folder of its tests, or import it, or a module that imports it.
    """
    name = module_name(changed)
    importers = {module_name(path) for path in (ROOT / PACKAGE).rglob("*.py") if name in imports_of(path)}
    found: list[tuple[bool, int, str]] = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        file, imported = path.relative_to(ROOT), _with_support(path)
        if str(file) in tried or file.parts[1] in OTHER_PROCESSES:
            continue
        order = (file.parent == tests_of(changed), name in imported, bool(importers & imported))
        if any(order):
            found.append((path.name in slow_files(), order.index(True), str(file)))
    return [file for _, _, file in sorted(found)]


def module_name(path: Path) -> str:
    """Return the name by which a file of the package is imported."""
    parts = (ROOT / path).relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return the names of modules that a file imports, and of what it imports from them."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    return frozenset(names)


@cache
def _with_support(path: Path) -> frozenset[str]:
    """Return what a file of tests imports, itself or by a file that tests share."""
    shared = {ROOT / (name.replace(".", "/") + ".py") for name in imports_of(path) if name.startswith("tests.")}
    return imports_of(path).union(*(_with_support(file) for file in shared if file.exists()))


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


def functions_of(source: str, path: str) -> list[CodeType]:
    """Return the functions, methods and lambdas of a module in order, without those within others."""

    def within(code: CodeType) -> Iterator[CodeType]:
        for each in code.co_consts:
            if isinstance(each, CodeType):
                if not each.co_flags & inspect.CO_NEWLOCALS:  # a class
                    yield from within(each)
                elif each.co_name == "<lambda>" or not each.co_name.startswith("<"):
                    yield each

    return list(within(compile(source, path, "exec")))


def changed_function(fault: Fault) -> tuple[CodeType, CodeType] | None:
    """Return the function that a fault changes and what it becomes; None for a fault outside of functions."""
    path = str(ROOT / fault.path)
    pairs = zip(
        functions_of((ROOT / fault.path).read_text("utf-8"), path), functions_of(fault.source, path), strict=True
    )
    changed = [(one, other) for one, other in pairs if not _is_same(one, other)]
    fits = len(changed) == 1 and len(changed[0][0].co_freevars) == len(changed[0][1].co_freevars)
    return changed[0] if fits else None


def _is_same(one: object, other: object) -> bool:
    """Whether two functions, or constants in them, differ by no more than their lines."""
    if not isinstance(one, CodeType) or not isinstance(other, CodeType):
        return type(one) is type(other) and repr(one) == repr(other)
    return (
        (one.co_code, one.co_names, len(one.co_consts)) == (other.co_code, other.co_names, len(other.co_consts))
        and one.co_exceptiontable == other.co_exceptiontable
        and all(map(_is_same, one.co_consts, other.co_consts))
    )


class Forks:
    """A plugin of pytest that tries faults of functions in forks of the process that has collected the tests."""

    def __init__(self, faults: Sequence[Fault], end_s: float, output: TextIO) -> None:
        self._faults, self._end_s, self._output = faults, end_s, output
        self._learned_s = time.monotonic() + LEARNING_SHARE * (end_s - time.monotonic())
        self.detected: list[bool] = []

    def pytest_collection(self) -> None:
        """Let property tests end with the first example that fails."""
        from hypothesis import HealthCheck, Phase, settings  # not before pytest's import hook is there

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("faults", deadline=None, suppress_health_check=list(HealthCheck), phases=phases)
        settings.load_profile("faults")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Learn which lines the tests reach, then try the faults."""
        paths = {str(ROOT / fault.path) for fault in self._faults}
        measuring = coverage.Coverage(data_file=None, include=list(paths), config_file=False)
        gc.unfreeze()
        caches = [
            each
            for each in gc.get_objects()
            if type(each) is type(cache(len)) and inspect.unwrap(each).__code__.co_filename in paths
        ]
        seconds: dict[pytest.Item, float] = {}
        with measuring.collect():
            for item in session.items:
                if time.monotonic() > self._learned_s:
                    self._tell(f"no time for tests from {item.nodeid}")
                    break
                for each in caches:  # what is in them would keep tests from reaching a fault
                    each.cache_clear()
                start_s = time.perf_counter()
                measuring.switch_context(item.nodeid)
                if _fails(item):
                    self._tell(f"left out, as it fails without a fault: {item.nodeid}")
                else:
                    seconds[item] = time.perf_counter() - start_s
        lines = {path: measuring.get_data().contexts_by_lineno(path) for path in paths}
        functions = [each for each in gc.get_objects() if type(each) is FunctionType]
        for each in caches:
            each.cache_clear()
        works: dict[pytest.Item, bool] = {}  # in a fork, without a fault
        is_sound: dict[Path, bool] = {}  # whether tests pass with a module's own constants
        for fault in self._faults:
            change, reached = changed_function(fault), lines[str(ROOT / fault.path)]
            names = set(reached.get(fault.line, ()) if change else chain.from_iterable(reached.values()))
            tests = sorted((item for item in seconds if item.nodeid in names), key=seconds.__getitem__)
            for item in tests:
                if item not in works:
                    works[item] = not _fork_fails([item], 60 + 5 * seconds[item])
                    if not works[item]:
                        self._tell(f"left out, as it fails in a fork without a fault: {item.nodeid}")
            tests = [item for item in tests if works[item]]
            limit_s = 20 + 5 * sum(map(seconds.__getitem__, tests))
            if change is None and fault.path not in is_sound:
                own = partial(put_constants, fault.path, (ROOT / fault.path).read_text("utf-8"))
                is_sound[fault.path] = not _fork_fails(tests, limit_s, own)
            if time.monotonic() > self._end_s:
                break
            if change is None:
                put = partial(put_constants, fault.path, fault.source) if is_sound[fault.path] else None
            else:
                loaded = [each for each in functions if each.__code__ == change[0]]
                put = partial(put_code, loaded, change[1]) if loaded else None
            self.detected.append(bool(tests and put) and _fork_fails(tests, limit_s, put))
        return True

    def _tell(self, line: str) -> None:
        print(line, file=self._output, flush=True)


def _fails(item: pytest.Item) -> bool:
    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def put_code(functions: Sequence[FunctionType], code: CodeType) -> None:
    for function in functions:
        function.__code__ = code


def put_constants(path: Path, source: str) -> None:
    """Let a loaded module have the plain values and the defaults of arguments of a changed source.

    What was computed from them elsewhere, and values of other types, stay.
    """
    module = sys.modules[module_name(path)]
    changed = ModuleType(module.__name__)
    vars(changed).update(__file__=module.__file__, __package__=module.__package__)
    exec(compile(source, str(module.__file__), "exec"), vars(changed))
    ours = [each for each in list(sys.modules.values()) if str(getattr(each, "__file__", "")).startswith(f"{ROOT}/")]
    for name, value in vars(changed).items():
        old = vars(module).get(name)
        if isinstance(value, type) and isinstance(old, type) and value.__module__ == module.__name__:
            for key, each in vars(value).items():
                _put_defaults(vars(old).get(key), each)
        elif _is_plain(value) and _is_plain(old) and repr(value) != repr(old):
            setattr(module, name, value)
            for each in ours:
                if vars(each).get(name) is old and f"{module.__name__}.{name}" in imports_of(Path(str(each.__file__))):
                    setattr(each, name, value)
        else:
            _put_defaults(old, value)


def _put_defaults(old: object, new: object) -> None:
    if isinstance(old, FunctionType) and isinstance(new, FunctionType):
        if all(map(_is_plain, new.__defaults__ or ())):
            old.__defaults__ = new.__defaults__
        if all(map(_is_plain, (new.__kwdefaults__ or {}).values())):
            old.__kwdefaults__ = new.__kwdefaults__


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, chain(value.keys(), value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return type(value) in (bool, int, float, str, bytes, type(None))


def _fork_fails(tests: Sequence[pytest.Item], limit_s: float, change: Callable[[], None] | None = None) -> bool:
    """Whether one of the tests fails, or they take too long, in a fork that has been changed."""
    child = os.fork()
    if child == 0:
        failed = True
        try:
            os.setpgid(0, 0)
            if change is not None:
                change()
            failed = any(map(_fails, tests))
        finally:
            os._exit(failed)
    end_s, pause_s = time.monotonic() + limit_s, 0.001
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end_s:
        time.sleep(pause_s)
        pause_s = min(0.05, pause_s * 1.5)
    with contextlib.suppress(ProcessLookupError):  # the servers and workers that its tests started are in its group
        os.killpg(child, signal.SIGKILL)
    return (done if done[0] else os.waitpid(child, 0))[1] != 0


def try_in_forks(files: Sequence[str], faults: Sequence[Fault], end_s: float) -> list[bool]:
    """Return which faults the tests of some files detect, of the first ones if there is no time for all."""
    forks = Forks(faults, end_s, open(os.dup(1), "w", encoding="utf-8"))  # noqa: SIM115 - to the end of the process
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    pytest.main(["-n", "0", "-p", "no:cacheprovider", "--timeout=0", *files], plugins=[forks])
    return forks.detected


def survives_outside(fault: Fault, files: Sequence[str]) -> bool | None:
    """Whether files of tests pass with a fault outside of functions in a copy of the sources; None if time is up."""
    if not files:
        return True
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        shutil.copytree(ROOT / PACKAGE, Path(folder, PACKAGE), copy_function=os.link)
        changed = Path(folder, fault.path)
        changed.unlink()
        changed.write_text(fault.source, encoding="utf-8")
        paths = {"PYTHONPATH": str(Path(folder, "src")), "HYPOTHESIS_STORAGE_DIRECTORY": str(Path(folder, "examples"))}
        command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [*command, *files],
            cwd=ROOT,
            env={**os.environ, **paths},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        try:
            return process.wait(LIMIT_S) == 0
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Its process group has the servers and workers that its tests started.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def outcomes_in_forks(sample: Sequence[Fault], tests: Mapping[Path, Sequence[str]], end_s: float) -> dict[Fault, bool]:
    """Return which faults the files of tests for their modules detect; without those for which there is no time."""
    names = list(dict.fromkeys(name for fault in sample for name in tests[fault.path]))
    if not names:
        return dict.fromkeys(sample, False)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return dict(zip(sample, pool.submit(try_in_forks, names, sample, end_s).result(), strict=False))


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--also",
        nargs="+",
        type=Path,
        default=[],
        metavar="FOLDER",
        help="more folders with tests that may detect faults",
    )
    options = parser.parse_args(arguments)
    files = [path.resolve().relative_to(ROOT) for path in options.files]
    if options.pure:
        files = pure_files()
    files = files or changed_files(options.base)
    faults = [fault for path in files for fault in faults_of(path, (ROOT / path).read_text(encoding="utf-8"))]
    sample = random.Random(options.seed).sample(faults, min(options.count, len(faults)))
    end_s = time.monotonic() + options.budget
    near = {path: near_files(path, options.also) for path in files}
    outcomes = outcomes_in_forks(sample, near, end_s)
    left = [fault for fault, is_detected in outcomes.items() if not is_detected]
    others = {path: other_files(path, near[path]) for path in {fault.path for fault in left}}
    outcomes |= outcomes_in_forks(left, others, end_s)
    for fault in left:
        if not outcomes[fault] and not changed_function(fault):
            survives = survives_outside(fault, near[fault.path]) if time.monotonic() < end_s else None
            if survives is None:
                del outcomes[fault]
            else:
                outcomes[fault] = not survives
    for fault, is_detected in outcomes.items():
        if not is_detected:
            print(fault)
    print(
        f"{len(outcomes)} of {len(faults)} possible faults tried with seed {options.seed}: "
        f"{sum(outcomes.values())} detected, {len(left)} not by the fast tests of the modules"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
