"""What the compiler of the request path does not accept, or understands otherwise, and which form runs."""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import hatch_build
import pytest

from charonia import compiled

SOURCES = {name: hatch_build.ROOT / "src" / f"{name.replace('.', '/')}.py" for name in hatch_build.MODULES}


def own_handlers(function: ast.AST) -> Iterator[ast.ExceptHandler]:
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.ExceptHandler):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from own_handlers(node)


def problems(tree: ast.AST) -> Iterator[str]:
    deletable = {name for node in ast.walk(tree) if "__deletable__" in ast.unparse(node) for name in strings(node)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            caught: dict[str, set[str]] = {}
            for handler in own_handlers(node):
                if handler.name and handler.type:
                    caught.setdefault(handler.name, set()).add(ast.unparse(handler.type))
            yield from (f"{node.name}: '{name}' is of several types" for name in caught if len(caught[name]) > 1)
        elif isinstance(node, ast.Name) and node.id == "runtime_checkable":
            yield "protocols with runtime_checkable belong into a module that is not compiled"
        elif isinstance(node, ast.Attribute) and node.attr == "_thread":
            yield "'_thread' becomes a keyword of C"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Del) and node.attr not in deletable:
            yield f"'{node.attr}' is deleted and not in __deletable__"
        elif isinstance(node, ast.ClassDef):
            yield from (f"{node.name}: several targets" for each in node.body if len(getattr(each, "targets", "1")) > 1)
            if any("Enum" in ast.unparse(base) for base in node.bases):
                yield from (f"{node.name}: an Enum with a constructor" for each in node.body if is_constructor(each))


def strings(node: ast.AST) -> Iterator[str]:
    return (each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str))


def is_constructor(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


@pytest.mark.parametrize("module", SOURCES)
def test_a_compiled_module_has_nothing_that_the_compiler_does_not_accept(module: str) -> None:
    assert list(problems(ast.parse(SOURCES[module].read_text(encoding="utf-8")))) == []


def test_what_the_compiler_does_not_accept_is_found() -> None:
    source = """
class Kind(Enum):
    a = b = 1
    def __init__(self): ...
@runtime_checkable
class P(Protocol): ...
def f(self):
    try: del self.x, self._thread
    except A as error: ...
    except B as error: ...
"""

    assert len(list(problems(ast.parse(source)))) == 6


@pytest.mark.parametrize(
    ("known", "pure", "form"),
    [
        ("same", "", "compiled"),
        ("same", "0", "compiled"),
        ("same", "1", "pure"),
        ("other", "", "pure"),
        ("", "", "pure"),
    ],
)
def test_the_compiled_form_runs_if_it_fits_the_source(
    known: str, pure: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if known:
        real = compiled.hash_of(compiled.__file__)
        (tmp_path / compiled.HASHES).write_text(f"charonia.compiled {real if known == 'same' else '00'}\n")
    for name, value in {"FOLDER": str(tmp_path), "form": "pure", "problem": ""}.items():
        monkeypatch.setattr(compiled, name, value)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv(compiled.PURE, pure)

    compiled.install()

    assert compiled.form == form
    assert ("charonia.compiled has changed" in compiled.problem) == (known == "other")
    spec = sys.meta_path[0].find_spec("charonia.compiled", None)
    assert str(spec and spec.origin).startswith(str(tmp_path)) == (form == "compiled")


def test_all_modules_of_the_list_run_in_the_form_that_is_said() -> None:
    names = [name for name in SOURCES if str(importlib.import_module(name).__file__).endswith(".py")]

    assert names == ([] if compiled.form == "compiled" else list(SOURCES))
