"""Limits of size, names that say nothing, and words that do not belong into the project."""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "src").rglob("*.py"))

MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 8
METHODS_MAX = 25

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


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(parsed(path)) if isinstance(node, Function))


def place(path: Path, node: Function | ast.ClassDef) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def parameter_count(node: Function) -> int:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in arguments if argument.arg not in ("self", "cls")])


def test_a_module_has_one_job_that_fits_into_a_few_screens() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}

    assert {name: length for name, length in lengths.items() if length > MODULE_LINES_MAX} == {}


def test_a_function_fits_on_a_screen() -> None:
    lengths = {
        place(path, node): (node.end_lineno or node.lineno) - node.lineno + 1
        for path in MODULES
        for node in functions(path)
    }

    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES_MAX} == {}


def test_a_function_takes_few_parameters() -> None:
    # The parameters of a constructor are the fields of a record: as many as the thing has.
    counts = {
        place(path, node): parameter_count(node)
        for path in MODULES
        for node in functions(path)
        if node.name != "__init__"
    }

    assert {name: count for name, count in counts.items() if count > PARAMETERS_MAX} == {}


def test_a_class_has_few_methods() -> None:
    counts = {
        place(path, node): sum(isinstance(member, Function) for member in node.body)
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    }

    assert {name: count for name, count in counts.items() if count > METHODS_MAX} == {}


def test_names_of_modules_say_what_is_inside() -> None:
    found = [path for path in MODULES if EMPTY_NAMES & {path.stem.strip("_"), path.parent.name}]

    assert found == []


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
