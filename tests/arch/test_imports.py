"""Who may import whom: an allow list, because a deny list misses what it does not name. And what is pure."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "charonia"

# Room -> the rooms and modules of charonia that it may import directly. `server.http` stands for a room within the
# server, `server` for the modules that lie in `server/` itself.
INTERNAL = {
    "core": set(),
    "version": set(),
    "compiled": set(),
    "clock": set(),
    "busy_poll": {"clock"},
    "die_with_parent": set(),
    "python_command": set(),
    "http_call": set(),
    "install_hint": set(),
    "stores": {"core", "http_call", "install_hint"},
    "archives": {"core"},
    "schema": {"core"},
    "config": {"core", "schema"},
    "wire": {"core", "config", "schema"},
    "client": {"core", "wire"},
    # The public name of what lies beside the worker's script, because workers need it without this package.
    "service": {"server.backends.python.worker.service"},
    "export": {"core", "config"},
    "cli": {"version", "http_call", "install_hint", "core", "config", "wire", "client", "server", "tools"}
    | {"platform", "stores", "export"},
    "__main__": {"cli.main"},
    "ray": {
        "core",
        "config.model",
        "install_hint",
        "cli.serve",
        "server.access.rules",
        "server.app",
        "server.embedding",
        "server.model_options",
        "server.options",
    }
    | {"server.backends.api", "server.grpc", "server.http", "server.machine.memory", "wire"},
    # The first tower, from the bottom up.
    "server.channel": {"core", "wire"},
    "server.scheduling": {"core", "config"},
    "server.metrics": {"core", "config", "server.scheduling.api"},
    "server.machine": {"core", "config", "server.metrics"},
    "server.access": {"core"},
    "server.tracing": {"core", "config", "install_hint", "wire.trace_settings", "server.writer_thread"},
    "server.backends": {
        "core",
        "config",
        "wire.tensors",
        "wire.example_inputs",
        "archives",
        "die_with_parent",
        "install_hint",
        "python_command",
        "server.machine",
        "server.metrics",
    }
    | {"server.channel", "server.ragged.batch", "server.log_file"},
    "server.guard": {"core", "die_with_parent", "server.machine.memory", "server.metrics.processes"},
    "server.page": {"core", "config", "wire"},
    "server.explain": {"clock", "core", "config", "server.scheduling.api", "server.metrics", "server.execution"}
    | {
        "server.ensembles",
        "server.lifecycle.front_end_placement",
        "server.lifecycle.loader",
        "server.machine.gauges",
        "server.rate_limiter.limiter",
        "server.response_cache.runner",
        "wire.orca",
    },
    "server.rate_limiter": {"core", "config", "server.scheduling", "server.metrics", "server.backends.api"},
    "server.ragged": {"core", "config", "server.scheduling", "server.backends.api"},
    "server.execution": {
        "busy_poll",
        "clock",
        "core",
        "config",
        "server.scheduling",
        "server.metrics",
        "server.machine.cores",
        "server.closing",
    }
    | {"server.backends.api", "server.rate_limiter.limiter", "server.ragged", "server.sequences.api"},
    "server.scaling": {"clock", "core", "config", "server.execution", "server.machine.gauges"}
    | {"server.metrics.prometheus"},
    "server.sequences": {
        "busy_poll",
        "clock",
        "core",
        "config",
        "server.scheduling",
        "server.metrics",
        "server.backends.api",
    }
    | {"server.execution", "server.rate_limiter"},
    "server.ensembles": {"clock", "core", "config", "server.metrics", "server.execution", "server.backends.batch"},
    "server.response_cache": {
        "clock",
        "install_hint",
        "core",
        "config",
        "server.scheduling",
        "server.metrics",
        "server.execution",
        "wire.tensors",
    },
    "server.traffic": {
        "clock",
        "core",
        "config",
        "wire.json_text",
        "wire.traffic",
        "server.directory",
        "server.metrics",
        "server.execution",
        "server.sequences",
    },
    "server.lifecycle": {
        "busy_poll",
        "clock",
        "install_hint",
        "core",
        "config",
        "server.scheduling",
        "server.metrics",
        "server.machine",
        "server.backends",
    }
    | {"server.execution", "server.sequences", "server.ensembles", "server.ragged", "server.rate_limiter"}
    | {"server.response_cache", "server.model_options", "server.directory", "server.log_file", "wire.example_inputs"}
    | {"wire.plain_values", "server.closing"}
    | {"stores", "server.scaling", "server.traffic"},
    "server.shared_memory": {"core", "wire", "server.channel.cuda_driver"},
    "server.http": {"core", "config", "wire", "server", "server.access", "server.metrics", "server.tracing"}
    | {"server.shared_memory.registry", "server.page", "server.openai.routes", "server.machine.private_folder"},
    "server.openai": {"core", "config", "wire", "server", "install_hint", "server.http"},
    "server.grpc": {"core", "config", "wire", "server", "server.access", "server.metrics", "server.tracing"}
    | {"server.shared_memory.registry"},
    "server.front_ends": {
        "busy_poll",
        "clock",
        "version",
        "core",
        "python_command",
        "config",
        "wire",
        "server",
        "server.app",
        "server.endpoints",
        "server.guard",
    }
    | {"server.directory", "server.machine", "server.shared_memory.registry", "server.tracing.requests"}
    | {"server.channel"}
    # What runs the models that a front end has itself.
    | {"server.backends.registry", "server.ensembles", "server.execution", "server.lifecycle"}
    | {"server.metrics.key_usage", "server.metrics.model_metrics", "server.metrics.processes"},
    # Before there is a server: it writes the repository that the server then reads.
    "server.files": {"archives", "core", "config", "server.backends", "server.options"},
    # A command of its own: backends read the forms, and open what it writes.
    "server.convert": {"core", "config", "server.backends.conversion"},
    "server.doctor": {
        "version",
        "compiled",
        "install_hint",
        "core",
        "config",
        "server.options",
        "server.backends.registry",
    }
    | {"server.lifecycle", "server.machine"},
    "server": {"busy_poll", "clock", "version", "compiled", "core", "config", "wire", "stores", "server"},
    # The second tower.
    "tools.results": {"core"},
    "tools.report": {"core", "tools.results"},
    "tools.perf": {
        "clock",
        "version",
        "core",
        "config",
        "http_call",
        "install_hint",
        "wire",
        "client",
        "tools.results",
    }
    | {"python_command"},
    "tools.tune": {"version", "core", "config", "install_hint", "wire", "client", "die_with_parent", "tools.perf"}
    | {"python_command", "tools.report", "tools.results"},
    # The third, from the bottom up. What every room of the platform may know is `SHARED`.
    "platform.database": {"core"},
    "platform.people": {"core", "wire.browsers"},
    "platform.tasks": {"core", "die_with_parent"},
    "platform.artifacts": {"archives", "core", "install_hint", "python_command", "stores"},
    "platform.isolation": {"core", "die_with_parent"},
    "platform.models": {"archives", "core", "config", "http_call", "python_command", "stores", "platform.artifacts"},
    "platform.environments": {"compiled", "core", "config"},
    "platform.targets": {"core", "config", "export", "http_call", "install_hint", "platform.artifacts"}
    | {"platform.deployments.spec", "python_command", "wire.traffic"},
    "platform.deployments": {
        "core",
        "config",
        "http_call",
        "stores",
        "platform.artifacts",
        "platform.models",
        "platform.targets",
    }
    | {"platform.environments", "wire.traffic"},
    "platform.alerts": {"core", "http_call", "platform.deployments", "platform.models"},
    "platform.jobs": {"core", "config", "python_command", "platform.deployments", "platform.targets"},
    "platform.console": {"version", "core", "config", "http_call", "platform", "wire.traffic"},
    "platform": {
        "version",
        "core",
        "wire.browsers",
        "config",
        "die_with_parent",
        "http_call",
        "platform",
        "python_command",
        "stores",
        "install_hint",
    },
}

# What every room of the platform may know, but the database those below it only.
SHARED = {
    f"platform.{name}"
    for name in (
        "database",
        "people",
        "tasks",
        "isolation",
        "settings",
        "state",
        "data_folder",
        "values",
        "idempotency",
    )
}

# Modules of `server/` itself that front ends may know.
FACE = ("facade", "single_response", "listening", "access_log", "options")

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
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "email.message",
    "decimal",
    "difflib",
    "enum",
    "fnmatch",
    "fractions",
    "functools",
    "gzip",
    "hashlib",
    "heapq",
    "hmac",
    "io",
    "ipaddress",
    "itertools",
    "json",
    "keyword",
    "marshal",
    "math",
    "numbers",
    "operator",
    "pathlib.PurePosixPath",
    # Drawn at random by generators with a seed only: the functions of `random` itself share one without.
    "random.Random",
    "re",
    "shlex",
    "statistics",
    "string",
    "struct",
    "sys",
    "textwrap",
    "tomllib",
    "types",
    "typing",
    "urllib.parse",
    "zlib",
}

# Libraries that calculate and nothing else.
LIBRARIES = {
    "annotated_types",
    "mypy_extensions",
    "numpy",
    "google.protobuf",
    "orjson",
    "httptools",
    "importlib.metadata",
    "importlib.resources",
    "packaging",
    "pydantic",
}

# Rooms that are pure as a whole. Elsewhere a module that is pure says "Pure." in its docstring.
PURE_ROOMS = ("core", "config", "schema", "wire", "tools/results", "tools/tune/search")
PURE_WORD = re.compile(r"(?<![\w`])Pure\b")


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module
            if node.level:  # in a worker process, its folder is a package of another name, and so is what it shares
                shares = str(module).startswith({3: "language.worker.", 4: "channel"}.get(node.level, "\0"))
                assert path.parent.name in ("worker", "channel"), path
                assert node.level == 1 or shares, path
                package = ".".join(path.parents[node.level - 1].relative_to(SOURCE.parent).parts)
                module = f"{package}.{module}" if module else package
            found += (f"{module}.{alias.name}" for alias in node.names)
    return tuple(found)


def is_within(name: str, allowed: set[str]) -> bool:
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def sources(room: str) -> list[Path]:
    folder = SOURCE / room.replace(".", "/")
    if room in ("server", "platform"):
        return sorted(folder.glob("*.py"))
    return sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")]


def rooms() -> set[str]:
    """Return the rooms that there are: packages and modules of charonia, and the packages of the towers."""
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    for tower in ("server", "tools", "platform"):
        found |= {f"{tower}.{path.name}" for path in (SOURCE / tower).iterdir() if (path / "__init__.py").exists()}
    return found - {"__init__", "testing", "tools"}


def is_pure(path: Path) -> bool:
    relative = path.relative_to(SOURCE).as_posix()
    if relative.startswith(tuple(room + "/" for room in PURE_ROOMS)):
        return True
    text = path.read_text(encoding="utf-8")
    return bool(PURE_WORD.search(text) and PURE_WORD.search(ast.get_docstring(ast.parse(text)) or ""))


PURE = sorted(path for path in SOURCE.rglob("*.py") if is_pure(path))


def test_every_room_has_a_rule() -> None:
    assert rooms() == INTERNAL.keys()


@pytest.mark.parametrize("room", sorted(INTERNAL))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    entries = (
        INTERNAL[room] | {room} | (SHARED if room.startswith("platform.") and room != "platform.database" else set())
    )
    allowed = {f"charonia.{name}" for name in entries if name != "server" or room in ("cli", "server")}
    if "server" in entries:
        allowed |= {f"charonia.server.{name}" for name in FACE}

    found = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path in sources(room)
        for name in imported_names(path)
        if name.startswith("charonia.") and not is_within(name, allowed)
    ]

    assert found == []


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_a_pure_module_only_calculates(path: Path) -> None:
    outside = [
        name
        for name in imported_names(path)
        if not is_within(name, CALCULATION | LIBRARIES | {"charonia"}) and name != "charonia"
    ]

    assert outside == []


def test_a_pure_module_opens_no_file() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in PURE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
    ]

    assert found == []


def module_of(name: str) -> Path | None:
    """Return the file of charonia that an imported name lies in, None for a package or for what is not ours."""
    parts = name.split(".")[1:]
    while parts:
        path = SOURCE.joinpath(*parts).with_suffix(".py")
        if path.is_file():
            return path
        parts.pop()
    return None


def imports_by_module() -> dict[str, set[str]]:
    """Return which module of charonia imports which, whether for types only or within a function."""
    paths = {path for path in SOURCE.rglob("*.py") if path.name != "__init__.py"}
    graph: dict[str, set[str]] = {}
    for path in paths:
        targets = set()
        for name in imported_names(path):
            target = module_of(name) if name.startswith("charonia.") else None
            if target is not None and target != path:
                targets.add(str(target.relative_to(SOURCE)))
        graph[str(path.relative_to(SOURCE))] = targets
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = imports_by_module()
    while free := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in free:
            del graph[name]

    assert sorted(graph) == []  # what is on a circle, or imports what is
