"""Who may import whom: an allow list, because a deny list misses what it does not name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "charonia"

# Package or module of charonia -> the packages or modules of charonia that it may import directly.
INTERNAL = {
    "core": set(),
    "tether": set(),
    "schema": {"core"},
    "config": {"core", "schema"},
    "sched": {"core"},
    "stats": {"core", "sched.api"},
    "protocol": {"core", "stats", "config", "schema"},
    "repository": {"core", "config"},
    "cache": {"core", "config", "stats"},
    "backends": {"core", "config", "stats", "protocol.tensors", "tether"},
    "engine": {"core", "config", "sched", "stats", "repository", "cache", "backends.api"},
    "tracing": {"core", "config.tracing"},
    # The driver of GPUs has one binding, which workers need without the package.
    "frontends": {"core", "config", "protocol", "stats", "engine.api", "backends.python.worker.charonia_cuda"},
    "server": {"__version__", "core", "config", "stats", "repository", "cache", "backends", "engine"}
    | {"frontends", "tracing"},
    "embedding": {"core", "config.server", "frontends.inproc", "server"},
    "results": {"core", "stats"},
    "client": {"core", "protocol", "schema"},
    "perf": {"__version__", "core", "config", "stats", "protocol", "results", "client"},
    "report": {"core", "stats", "results"},
    "tune": {"__version__", "core", "config", "stats", "results", "client", "perf", "report", "tether"},
    "tune/search": {"core", "results", "tune.api", "tune.objective", "tune.outlook", "tune.search", "tune.space"},
    "demo": {"core.errors", "tether"},
    "doctor": {"__version__", "core", "config", "repository", "backends.registry", "engine"},
    "cli": {"__version__", "core", "config", "stats", "repository", "backends", "engine", "server", "demo", "doctor"}
    | {"results", "client", "perf", "report", "tune"},
    "__main__": {"cli.main"},
}

# The standard library that calculates and nothing else.
CALCULATION = {
    "abc",
    "array",
    "ast",
    "base64",
    "binascii",
    "bisect",
    "codecs",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "decimal",
    "difflib",
    "enum",
    "fractions",
    "functools",
    "gzip",
    "hashlib",
    "heapq",
    "hmac",
    "io",
    "itertools",
    "json",
    "keyword",
    "math",
    "numbers",
    "operator",
    "pathlib.PurePosixPath",
    "re",
    "string",
    "struct",
    "sys",
    "textwrap",
    "types",
    "typing",
    "urllib.parse",
    "zlib",
}

# Pure package -> what it may import from outside beside `CALCULATION` and numpy.
PURE = {
    "core": set(),
    "config": {"google.protobuf", "orjson"},
    "protocol": {"google.protobuf", "orjson"},
    "schema": {"google.protobuf", "importlib.resources"},
    "sched": set(),
    "stats": set(),
    "results": set(),
    # Drawn at random by generators with a seed only: the functions of `random` itself share one without.
    "tune/search": {"random.Random", "optuna"},
    "tune/api": set(),
    "tune/decision": set(),
    "tune/objective": {"statistics.NormalDist"},
    "tune/outlook": {"statistics.NormalDist"},
    "tune/space": set(),
}


def imported_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def is_within(name: str, allowed: set[str]) -> bool:
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def sources(package: str) -> list[Path]:
    return sorted((SOURCE / package).rglob("*.py")) or [SOURCE / f"{package}.py"]


def test_every_package_has_a_rule() -> None:
    packages = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}

    assert packages - {"__init__", "testing"} <= INTERNAL.keys()


@pytest.mark.parametrize("package", sorted(INTERNAL))
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    allowed = {f"charonia.{name}" for name in INTERNAL[package] | {package}}

    found = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path in sources(package)
        for name in imported_names(path)
        if name.startswith("charonia.") and not is_within(name, allowed)
    ]

    assert found == []


@pytest.mark.parametrize("package", sorted(PURE))
def test_a_pure_package_only_calculates(package: str) -> None:
    allowed = CALCULATION | PURE[package] | {"charonia", "numpy"}

    found = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path in sources(package)
        for name in imported_names(path)
        if not is_within(name, allowed)
    ]

    assert found == []


@pytest.mark.parametrize("package", sorted(PURE))
def test_a_pure_package_opens_no_file(package: str) -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sources(package)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
    ]

    assert found == []
