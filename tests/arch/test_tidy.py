"""Limits of size, names that say nothing, and words that do not belong into the project."""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for path in (ROOT / "src").rglob("*.py") if "migrations" not in path.parts)  # those are generated

MODULE_LINES_MAX = 1000
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 8
METHODS_MAX = 45

SHARED_NAMES = {
    *("Cancel", "Finish", "Submit", "Tick"),  # events and commands of several state machines
    *("GrpcCall", "Http2Error"),  # the server's end, and the client's
    *("Metric", "ModelConfig", "Tensor"),  # names of the interface for Python models
    *("Engine", "QueuedRequest", "Request", "Signature"),  # the same of several things
    "TritonPythonModel",  # what a worker runs for a backend
}

# Written in pieces so that this file passes its own test.
EMPTY_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "base"}
FOREIGN_WORDS = re.compile(
    "|".join(
        [
            "/wo" + "rk/",
            "/ro" + "ot/",
            r"/ho" + r"me/\w+/",
            r"\.\./sha" + "red",
            "clau" + "de",
            "anthro" + "pic",
            "TO" + "DO",
            "FIX" + "ME",
        ]
    )
)
TEXT = {".cfg", ".csv", ".json", ".md", ".pbtxt", ".proto", ".py", ".sh", ".toml", ".txt", ".yml", ".yaml", ""}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A function, with its parameters, or a class, with its methods."""

    place: str
    name: str
    is_class: bool
    lines: int
    members: int


class Contents(NamedTuple):
    """What the tests need of a module; its tree is too large to keep.

    Attributes:
        documented: Names of functions with docstrings.
        undocumented: Public functions without, and where.
    """

    definitions: list[Definition]
    documented: set[str]
    undocumented: list[tuple[str, str]]


def contents(path: Path) -> Contents:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    place = path.relative_to(ROOT)
    nodes = [node for node in ast.walk(tree) if isinstance(node, Function | ast.ClassDef)]
    return Contents(
        [
            Definition(
                f"{place}:{node.lineno} {node.name}",
                node.name,
                isinstance(node, ast.ClassDef),
                (node.end_lineno or node.lineno) - node.lineno + 1,
                method_count(node) if isinstance(node, ast.ClassDef) else parameter_count(node),
            )
            for node in nodes
        ],
        {node.name for node in nodes if isinstance(node, Function) and ast.get_docstring(node)},
        [(f"{place}:{node.lineno} {node.name}", node.name) for node in without_docstring(tree)],
    )


@cache
def modules() -> dict[Path, Contents]:
    return {path: contents(path) for path in MODULES}


def definitions() -> list[Definition]:
    return [each for module in modules().values() for each in module.definitions]


def parameter_count(node: Function) -> int:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in arguments if argument.arg not in ("self", "cls")])


def method_count(node: ast.ClassDef) -> int:
    return sum(isinstance(member, Function) for member in node.body)


def test_no_module_grows_without_bound() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}

    assert {name: length for name, length in lengths.items() if length > MODULE_LINES_MAX} == {}


def test_a_function_fits_on_a_screen() -> None:
    found = [each for each in definitions() if not each.is_class and each.lines > FUNCTION_LINES_MAX]

    assert found == []


def test_a_function_takes_few_parameters() -> None:
    # The parameters of a constructor are the fields of a record: as many as the thing has.
    functions = [each for each in definitions() if not each.is_class and each.name != "__init__"]

    assert [each for each in functions if each.members > PARAMETERS_MAX] == []


def test_a_class_has_few_methods() -> None:
    found = [each for each in definitions() if each.is_class and each.members > METHODS_MAX]

    assert found == []


def test_the_name_of_a_class_means_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for each in definitions():
        if each.is_class and not each.name.startswith("_"):
            places.setdefault(each.name, []).append(each.place)

    assert {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED_NAMES} == {}


def test_names_of_modules_say_what_is_inside() -> None:
    found = [path for path in MODULES if EMPTY_NAMES & {path.stem.strip("_"), path.parent.name}]

    assert found == []


def without_docstring(node: ast.AST) -> Iterator[Function]:
    """Yield the public functions of a module, or of a class, that are longer than one statement and have none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from without_docstring(child)
        elif isinstance(child, Function) and not child.name.startswith(("_", "test_")) and len(child.body) > 1:
            yield from () if ast.get_docstring(child) else (child,)


def test_public_functions_longer_than_one_statement_have_docstrings() -> None:
    described = [module for path, module in modules().items() if "worker" not in path.parts]
    documented = {name for module in described for name in module.documented}

    # What implements an interface (a method, the `run` of a command) has its documentation.
    found = [place for module in described for place, name in module.undocumented if name not in documented]

    assert found == []


def commands_of_an_interpreter(source: str) -> list[int]:
    """Return the lines with `[python, "-m", …]` or `[python, "-c", …]`: without a flag that leaves out the folder."""
    if re.search("-[mc][\"']", source) is None:
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.expr)
        for elements in (
            [*getattr(node, "elts", ())],
            [*getattr(node, "args", ())] if isinstance(node, ast.Call) else [],
        )
        for before, element in pairwise(elements)
        if isinstance(element, ast.Constant) and element.value in ("-m", "-c") and not isinstance(before, ast.Constant)
    ]


def test_no_interpreter_is_started_that_imports_from_the_current_folder() -> None:
    assert commands_of_an_interpreter('run([sys.executable, "-m", "charonia", *arguments])') == [1]
    assert commands_of_an_interpreter('execv(python, "-c", code); run([python, "-P", "-m", "charonia"])') == [1]

    found = {
        str(path.relative_to(ROOT)): lines
        for path in MODULES
        if path.stem != "python_command" and (lines := commands_of_an_interpreter(path.read_text(encoding="utf-8")))
    }

    assert found == {}


def test_the_project_speaks_of_itself_only() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name]

    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in tracked
        if path.suffix in TEXT and path.is_file()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FOREIGN_WORDS.search(line)
    ]

    assert found == []


def test_the_server_reads_the_time_where_the_simulation_replaces_it() -> None:
    """`tests.simulation` replaces functions of the module `time`; these calls read the system's clock."""
    other = re.compile(
        r"\b(datetime\.(now|utcnow|today)|date\.today|threading\.Timer)\(|time\.(gmtime|localtime|ctime)\(\)"
    )
    server = ROOT / "src" / "charonia" / "server"
    found = [str(path) for path in MODULES if path.is_relative_to(server) and other.search(path.read_text())]

    assert not found
