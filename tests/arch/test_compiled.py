"""What the compiler of the request path does not accept, or understands otherwise, and which form runs."""

import ast
import importlib
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import hatch_build
import pytest

from charonia import compiled

SOURCES = {name: hatch_build.ROOT / "src" / f"{name.replace('.', '/')}.py" for name in hatch_build.MODULES}

VARIED = {"CACHED_BYTES_MAX", "CACHED_MAX", "FORMS_MAX", "HEADER_BYTES_MAX", "HELD_RESPONSES_MAX", "REMEMBERED_MAX"}
VARIED |= {"TOGETHER_NS_MAX", "__all__", "__slots__"}
"""Constants that tests of both forms replace, or that Python reads."""

WAITS = (ast.Await, ast.AsyncWith, ast.AsyncFor, ast.Yield, ast.YieldFrom)


def own_handlers(function: ast.AST) -> Iterator[ast.ExceptHandler]:
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.ExceptHandler):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield from own_handlers(node)


def handles_and_waits(node: ast.Try | ast.AsyncWith) -> bool:
    """Return whether a coroutine may wait while it handles an exception.

    The compiled coroutines of a thread share one handled exception (`sys.exc_info()`). After such a wait it may be that
    of another coroutine: `raise` and the ends of `finally` and `async with` raise it, even after a body that succeeded.
    """
    if isinstance(node, ast.AsyncWith):
        return True
    parts = [*node.finalbody, *(each for handler in node.handlers for each in handler.body)]
    return any(isinstance(each, WAITS) for part in parts for each in ast.walk(part))


def looked_up(tree: ast.AST) -> Iterator[str]:
    """Yield constants whose values the compiled code would look up by name, in the module, at each use."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            is_final = isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation)
            names = {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
            is_type = isinstance(node.value, ast.Call) and "TypeVar" in ast.unparse(node.value)
            if not (is_final or is_type):
                yield from (f"{name} is not Final" for name in names - VARIED if name.isupper())


def problems(tree: ast.AST) -> Iterator[str]:
    yield from looked_up(tree)
    deletable = {name for node in ast.walk(tree) if "__deletable__" in ast.unparse(node) for name in strings(node)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            caught: dict[str, set[str]] = {}
            for handler in own_handlers(node):
                if handler.name and handler.type:
                    caught.setdefault(handler.name, set()).add(ast.unparse(handler.type))
            yield from (f"{node.name}: '{name}' is of several types" for name in caught if len(caught[name]) > 1)
        elif isinstance(node, (ast.Try, ast.AsyncWith)) and handles_and_waits(node):
            yield "waits while an exception is handled: see handles_and_waits"
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


@dataclass
class Classes:
    """The classes of a module.

    Attributes:
        meanings: Full names of classes and imports by their name in the module, and `X` for parameters of `type[X]`.
        bases: What the bases of its classes are called in it.
        closed: Classes without the decorator that permits subclasses which are not compiled.
    """

    meanings: dict[str, str] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)
    closed: set[str] = field(default_factory=set)


def classes_of(module: str, tree: ast.Module) -> Classes:
    found = Classes()
    for node in ast.walk(tree):
        bases: list[ast.expr] = []
        if isinstance(node, ast.ClassDef):
            found.meanings[node.name] = f"{module}.{node.name}"
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            if "mypyc_attr(allow_interpreted_subclasses=True)" not in map(ast.unparse, node.decorator_list):
                found.closed.add(f"{module}.{node.name}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type":
            bases = [base for each in node.args[1:2] if isinstance(each, ast.Tuple) for base in each.elts]
        elif isinstance(node, ast.Import):
            found.meanings.update((each.asname or each.name, each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*package, *([node.module] if node.module else [])])
            found.meanings.update((each.asname or each.name, f"{origin}.{each.name}") for each in node.names)
        elif isinstance(node, ast.arg) and isinstance(node.annotation, ast.Subscript):
            kind, _, argument = ast.unparse(node.annotation).rstrip("]").partition("[")
            found.meanings |= {node.arg: f"{module}.{argument}"} if kind == "type" else {}
        found.bases += map(ast.unparse, bases)
    return found


def full_name(known: Mapping[str, Classes], module: str, dotted: str) -> str:
    """Return the full name of what a module knows by a name, whichever modules import it for others."""
    head, rest = dotted, ""
    while head and head not in known[module].meanings:
        head, _, last = head.rpartition(".")
        rest = f".{last}{rest}"
    full = known[module].meanings.get(head, module) + rest
    place, name = full, ""
    while place and place not in known:
        place, _, last = place.rpartition(".")
        name = f"{last}.{name}".rstrip(".")
    if (place, name) == (module, dotted) or not place or not name:
        return full
    return full_name(known, place, name)


def closed(known: Mapping[str, Classes], compiled_modules: Collection[str]) -> Iterator[str]:
    """Yield the compiled classes that lack the decorator for their subclasses that are not compiled."""
    without = {name for module in compiled_modules for name in known[module].closed}
    for module in known.keys() - compiled_modules:
        bases = {full_name(known, module, base) for base in known[module].bases}
        yield from (f"{base} has a subclass in {module}" for base in bases & without)


def strings(node: ast.AST) -> Iterator[str]:
    return (each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str))


def is_constructor(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


@pytest.mark.parametrize("module", SOURCES)
def test_a_compiled_module_has_nothing_that_the_compiler_does_not_accept(module: str) -> None:
    assert list(problems(ast.parse(SOURCES[module].read_text(encoding="utf-8")))) == []


def test_what_the_compiler_does_not_accept_is_found() -> None:
    source = """
LIMIT = 1
T = TypeVar("T")
class Kind(Enum):
    a = b = 1
    def __init__(self): ...
@runtime_checkable
class P(Protocol): ...
def f(self):
    try: del self.x, self._thread
    except A as error: ...
    except B as error: ...
async def g():
    try: ...
    finally: await h()
    try: ...
    except A: await h()
    async with h(): ...
"""

    assert len(list(problems(ast.parse(source)))) == 10


def test_compiled_classes_permit_the_subclasses_that_are_not_compiled() -> None:
    source = hatch_build.ROOT / "src"
    names = {path: ".".join(path.relative_to(source).with_suffix("").parts) for path in source.rglob("*.py")}
    known = {
        name.removesuffix(".__init__"): classes_of(name, ast.parse(path.read_text(encoding="utf-8")))
        for path, name in names.items()
    }

    assert sorted(closed(known, SOURCES.keys())) == []


@pytest.mark.parametrize(
    "subclass",
    [
        "from a import Base\nclass C(Base): ...",
        "from a import Base as Other\ndef f():\n    class C(Other[int], Protocol): ...",
        "import a\nclass C(a.Base): ...",
        "import p.b\nclass C(p.b.Base): ...",
        "from p import b\nclass C(b.Base): ...",
        "from p.b import Base\nclass C(Base): ...",
        "from .b import Base\nclass C(Base): ...",
        "from a import Base\ndef f(kind: type[Base]): return type('C', (Mixin, kind), {})",
    ],
)
def test_a_compiled_class_that_does_not_permit_its_subclass_is_found(subclass: str) -> None:
    base, again = "class Base: ...\nclass Inner(Base): ...", "from a import Base"
    decorator = "@mypyc_attr(allow_interpreted_subclasses=True)\n"

    without, permitted = (
        {name: classes_of(name, ast.parse(text)) for name, text in texts.items()}
        for texts in (
            {"a": base, "p.b": again, "p.c": subclass},
            {"a": decorator + base, "p.b": again, "p.c": subclass},
        )
    )

    assert list(closed(without, {"a"})) == ["a.Base has a subclass in p.c"]
    assert list(closed(permitted, {"a"})) == []


@pytest.mark.parametrize(
    ("known", "pure", "form"),
    [
        ("same", "", "compiled"),
        ("same", "0", "compiled"),
        ("same", "1", "pure"),
        ("other", "", "pure"),
        ("removed", "", "pure"),
        ("", "", "pure"),
    ],
)
def test_the_compiled_form_runs_if_it_fits_the_source(
    known: str, pure: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "charonia.removed" if known == "removed" else "charonia.compiled"
    if known:
        real = compiled.hash_of(compiled.__file__)
        (tmp_path / compiled.HASHES).write_text(f"{module} {real if known == 'same' else '00'}\n")
    for name, value in {"FOLDER": str(tmp_path), "form": "pure", "problem": ""}.items():
        monkeypatch.setattr(compiled, name, value)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv(compiled.PURE, pure)

    compiled.install()

    assert compiled.form == form
    assert (f"{module} has changed" in compiled.problem) == (known in ("other", "removed"))
    spec = sys.meta_path[0].find_spec("charonia.compiled", None)
    assert str(spec and spec.origin).startswith(str(tmp_path)) == (form == "compiled")


def test_all_modules_of_the_list_run_in_the_form_that_is_said() -> None:
    names = [name for name in SOURCES if str(importlib.import_module(name).__file__).endswith(".py")]

    assert names == ([] if compiled.form == "compiled" else list(SOURCES))
