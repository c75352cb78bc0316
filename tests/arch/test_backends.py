"""A backend is its folder and its record: what lies outside asks the record, and does not know the name."""

import ast
from pathlib import Path

from charonia.config.backends import OWN, PYTHON
from charonia.server.convert.convert import SOURCES

SOURCE = Path(__file__).parents[2] / "src" / "charonia"
NAMES = {name for record in OWN for name in record.names}
OTHER_MEANINGS = {"python", "identity", "image"}
"""Names that are also words: an interpreter, no compression, a container's image. Only as a backend are they found."""

HOMES = ("server/backends/", "config/backends.py")
EXCEPTIONS = {
    "server/convert/": "its tables name what each backend has for conversions",
    "server/doctor/machine.py": "shows the devices of the frameworks that are installed, by the name of their module",
    "server/files/repository.py": "a Python file is a model, or a module with several",
    "server/notebook.py": "an object of a notebook is a Python model in a thread",
    "service.py": "the public name of what lies beside the worker's script",
}
"""Files and folders that may know a backend, and why."""


def outside() -> list[Path]:
    return [
        path
        for path in sorted(SOURCE.rglob("*.py"))
        if not path.relative_to(SOURCE).as_posix().startswith((*HOMES, *EXCEPTIONS))
    ]


def is_about_backends(node: ast.AST) -> bool:
    words = (getattr(each, "attr", getattr(each, "id", "")) for each in ast.walk(node))
    return any("backend" in word.lower() for word in words if isinstance(word, str))


def names_in(tree: ast.AST) -> list[int]:
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.expr | ast.stmt | ast.keyword):
            continue
        text = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and text in NAMES - OTHER_MEANINGS:
            found.append(node.lineno)
        is_other = isinstance(node, ast.Compare) and is_about_backends(node.left)
        is_other |= isinstance(node, ast.keyword) and node.arg == "backend"
        if is_other and any(getattr(each, "value", None) in OTHER_MEANINGS for each in ast.walk(node)):
            found.append(node.lineno)
        module = node.module if isinstance(node, ast.ImportFrom) else None
        if module and module.startswith("charonia.server.backends.") and module.split(".")[3] in (*NAMES, "language"):
            found.append(node.lineno)
    return found


def test_names_are_found() -> None:
    for source in (
        'x = "onnxruntime"',
        'config.backend == "python"',
        'ModelConfig(backend="identity")',
        "from charonia.server.backends.fil.options import read_plan",
    ):
        assert names_in(ast.parse(source)) == [1]
    assert names_in(ast.parse('x = {"python": 1, b"identity": 2}')) == []


def test_nobody_but_its_folder_and_its_record_knows_the_name_of_a_backend() -> None:
    found = {
        path.relative_to(SOURCE).as_posix(): lines
        for path in outside()
        if (lines := names_in(ast.parse(path.read_text(encoding="utf-8"))))
    }

    assert found == {}


def test_every_exception_is_needed() -> None:
    for name in EXCEPTIONS:
        paths = [SOURCE / name] if name.endswith(".py") else sorted((SOURCE / name).rglob("*.py"))
        assert any(names_in(ast.parse(path.read_text(encoding="utf-8"))) for path in paths), name


def test_every_backend_has_a_folder_or_a_module() -> None:
    homes = {path.stem for path in (SOURCE / "server" / "backends").iterdir()}

    assert PYTHON in homes
    assert {record.name for record in OWN} <= homes


def test_what_records_and_conversions_name_exists() -> None:
    """The libraries of some need not be installed, so the modules are read, not imported."""
    named = {text for record in OWN for text in (record.factory, record.check) if text}
    named |= {f"charonia.server.backends.{form.original}" for form in SOURCES}
    missing = []
    for text in sorted(named):
        module, _, attribute = text.partition(":")
        path = SOURCE.parent.joinpath(*module.split(".")).with_suffix(".py")
        path = path if path.exists() else path.with_suffix("") / "__init__.py"
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])
        if attribute not in {getattr(node, "name", None) for node in tree.body}:
            missing.append(text)

    assert not missing
