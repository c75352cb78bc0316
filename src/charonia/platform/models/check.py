"""Checks a version as `charonia config` and `charonia doctor` do, and loads it as a server does.

All run in separate, confined processes with limits: a file that crashes its reader must not end the platform.
"""

import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from charonia.config.backends import ENSEMBLE, record_of
from charonia.config.json_form import to_json
from charonia.config.model import ModelConfig
from charonia.config.onnx_file import OnnxFile
from charonia.config.pbtxt import parse
from charonia.core.errors import Code, ServingError, invalid
from charonia.platform.artifacts.manifest import Manifest
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.isolation.isolation import Isolation, PrivateFolders, SandboxAccess
from charonia.platform.models.code import (
    START_BYTES,
    backend_of,
    code_in,
    code_in_onnx,
    dependencies,
    examined_files,
    is_inert_start,
    needed_package,
)
from charonia.platform.models.layout import CONFIG
from charonia.platform.models.pipeline import SOURCE_CHARS_MAX, calls_of
from charonia.platform.models.records import NeededPackageRecord, TensorRecord, VersionReport
from charonia.platform.tasks.runner import TaskRun
from charonia.python_command import python_module

CHECK_S_MAX = 600.0
"""Time limit of a command."""

OUTPUT_LINES_MAX = 100_000
"""Lines of a command's output that are kept."""


@dataclass(frozen=True, slots=True)
class CheckingPython:
    """An interpreter for checks.

    Attributes:
        name: Name of its environment, "" for the platform's own.
    """

    name: str = ""
    path: Path = Path(sys.executable)


@dataclass(frozen=True, slots=True)
class CheckRun:
    """What all commands of a check share."""

    run: TaskRun
    python: CheckingPython
    isolation: Isolation
    room: PrivateFolders
    repository: Path


def charonia(
    check: CheckRun,
    arguments: Sequence[str],
    *,
    timeout_s: float = CHECK_S_MAX,
    memory_bytes: int = 0,
    enough: Callable[[str], bool] | None = None,
) -> tuple[int, list[str]]:
    """Run a command of Charonia, and return its exit status and its output.

    Args:
        memory_bytes: Memory limit of each process, 0 for none.
        enough: Returns whether to stop the command after a line.
    """
    output: list[str] = []

    def keep(line: str) -> None:
        if len(output) < OUTPUT_LINES_MAX:
            output.append(line.replace("\0", "\ufffd"))  # which PostgreSQL rejects

    command = python_module("charonia", *arguments, python=check.python.path)
    if memory_bytes:
        command = ["/bin/sh", "-c", 'ulimit -d "$0" && exec "$@"', str(memory_bytes >> 10), *command]
    check.run.log(f"$ charonia {' '.join(arguments)}")
    access = SandboxAccess(read=[check.repository], python=check.python.path, project=check.run.project_id)
    status = check.run.run(
        check.isolation.command(command, check.room, access),
        timeout_s=timeout_s,
        environment=check.isolation.environment(check.room),
        folder=check.room.home,
        on_line=keep,
        enough=enough,
    )
    return status, output


LOAD_S_MAX = 120.0
"""Time limit for loading a version."""

MEMORY_SHARE_MAX = 0.5
"""Share of the machine's memory that it may use."""

_READY = "Started HTTPService"
_ERROR = re.compile(r'[EF]\d{4} [^\]]*\] "(.*)"')
_LOGGED = re.compile(r"[A-Z]\d{4} \d\d:")
_SAYS = "charonia config: "
_PREFIX = re.compile(r"load failed for model '[^']*': version \d+ is at UNAVAILABLE state: ")


def try_to_load(check: CheckRun, config: Mapping[str, Any]) -> tuple[str, str]:
    """Load the model of a repository, without a GPU.

    Args:
        check: The check, whose repository has just this model.

    Returns:
        Whether it loads, or why it was not tried; and why it does not load, "" if it does.
    """
    reason = obstacle(config)
    if reason:
        return f"not tried: {reason}", ""
    memory = int(MEMORY_SHARE_MAX * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    arguments = ["serve", f"--model-repository={check.repository}", "--host=127.0.0.1", "--port=0"]
    arguments += ["--allow-grpc=false", "--allow-metrics=false"]
    started = time.monotonic()
    try:
        status, lines = charonia(
            check, arguments, timeout_s=LOAD_S_MAX, memory_bytes=memory, enough=lambda line: _READY in line
        )
    except ServingError as error:
        if error.code is not Code.INTERNAL:
            raise
        problem = f"it was not ready after {LOAD_S_MAX:.0f} s"
    else:
        if status == 0:
            return f"yes, in {time.monotonic() - started:.1f} s", ""
        problem = why_not_loaded(lines, status).replace(f"{check.repository}/", "")
    limits = f"{LOAD_S_MAX:.0f} s, {memory >> 20} MiB"
    return "no", f"it does not load on this machine (limits: {limits}): {problem[:PROBLEM_CHARS_MAX]}"


def obstacle(config: Mapping[str, Any]) -> str:
    """Return why a model cannot be loaded alone and without a GPU, "" if it can."""
    if config.get("platform") == ENSEMBLE or "ensemble_scheduling" in config:
        return "its steps are other models"
    kinds = {group.get("kind") for group in config.get("instance_group", ())}
    if record_of(config.get("backend") or "").needs_gpu or "KIND_GPU" in kinds:
        return "it asks for a GPU"
    return ""


def why_not_loaded(lines: Sequence[str], status: int) -> str:
    """Return why a server of one model has exited, from its output."""
    found: list[str] = []
    is_error = False
    for line in lines:
        if error := _ERROR.fullmatch(line):
            found.append(_PREFIX.sub("", error[1]))
            is_error = True
        elif _LOGGED.match(line):
            is_error = False
        elif is_error and line.startswith(" "):
            found.append(line.strip())
    if not found and status < 0:
        found.append(f"the process that loaded it was ended by signal {-status}")
    return "\n".join(dict.fromkeys(found)) or next((line for line in reversed(lines) if line.strip()), "it has ended")


TEXT_BYTES_MAX = 16 * 1024 * 1024
"""Longest file that is read as text: a configuration, requirements, a model in Python."""

PROBLEM_CHARS_MAX = 4000

_ABSENT = re.compile(r"ModuleNotFoundError: No module named '(\w+)")


def first_look(name: str, files: Manifest, store: ArtifactStore, trusted: Container[str] = ()) -> VersionReport:
    """Return the result of reading file names and the configuration, without running anything."""

    def read(path: str) -> str:
        blob = files[path]
        if blob.size > TEXT_BYTES_MAX:
            raise invalid(f"{path}: expected at most {TEXT_BYTES_MAX} bytes, got {blob.size}")
        return store.fetch(blob).read_text(encoding="utf-8", errors="replace").replace("\0", "\ufffd")

    config = parse(read(CONFIG)) if CONFIG in files else ModelConfig()
    if config.name not in ("", name):
        raise invalid(
            f"{CONFIG}: name: expected '{name}', which the model is called, got '{config.name}'",
            hint="leave `name` out of the configuration",
        )
    backend = backend_of(name, files, config)
    package = needed_package(backend)
    sources = [path for path in sorted(files) if path.endswith(".py") and files[path].size <= SOURCE_CHARS_MAX]
    needs = []
    if package is not None:
        is_here = importlib.util.find_spec(package.module) is not None
        needs.append(NeededPackageRecord(package.name, package.extra, is_here))
    return VersionReport(
        backend=backend,
        config=to_json(config) if CONFIG in files else {},
        needs=needs,
        requirements=dependencies(read, files),
        calls=calls_of(config, map(read, sources)),
        code=_code(name, files, config, store, read, trusted),
    )


def full_check(
    run: TaskRun, name: str, files: Manifest, store: ArtifactStore, python: CheckingPython, isolation: Isolation
) -> dict[str, Any]:
    """Return the fields of a `VersionReport` that a check finds."""
    with store.local.scratch() as repository, isolation.room(run.project_id) as room:
        check = CheckRun(run, python, isolation, room, repository)
        isolation.show(repository)
        store.materialise(files, repository / name, check=run.check)
        status, lines = charonia(check, ["config", "--json", str(repository / name)])
        config, notes = read_config(lines, str(repository / name))
        if config is None:
            raise _refusal(status, lines, name, str(repository / name))
        _, doctor = charonia(check, ["doctor", "--json", "--models-only", "--model-repository", str(repository)])
        warnings = read_warnings(doctor)
        load, problem = try_to_load(check, config)
    if problem:
        warnings.append(problem)
    return {
        "is_checked": True,
        "checked_with": python.name,
        "backend": config.get("backend") or config.get("platform", ""),
        "config": config,
        "inferred": list(notes),
        "inputs": _tensors(config.get("input", [])),
        "outputs": _tensors(config.get("output", [])),
        "max_batch_size": config.get("max_batch_size", 0),
        "warnings": warnings,
        "load": load,
    }


def absent_module(message: str) -> str:
    """Return the package that a refusal reports as missing, as package indexes write it; "" for none."""
    found = _ABSENT.search(message)
    return found[1].lower().replace("_", "-") if found is not None else ""


def read_config(lines: Sequence[str], folder: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the configuration printed by `charonia config --json`, and the notes about inferred values.

    Standard output and standard error come together: the configuration begins with a line "{" and ends with "}".

    Args:
        folder: Path of the model, which is removed from the notes.
    """
    if "{" not in lines or "}" not in lines:
        return None, []
    first = lines.index("{")
    last = first + lines[first:].index("}")
    notes = lines[lines.index("Inferred:") + 1 : first] if "Inferred:" in lines[:first] else []
    found = json.loads("\n".join(lines[first : last + 1]))
    return found, [note.strip().replace(f"{folder}/", "") for note in notes if note.startswith("  ")]


def read_warnings(lines: Sequence[str]) -> list[str]:
    """Return the objections of `charonia doctor --json` to a model."""
    text = "\n".join(lines)
    start = text.find("{\n")
    if start < 0:
        return []
    found, _ = json.JSONDecoder().raw_decode(text[start:])
    checks = [check for title in ("Models", "All models together") for check in found.get(title, [])]
    return [
        f"{check['problem']} (hint: {check['hint']})" if check.get("hint") else check["problem"]
        for check in checks
        if check.get("problem")
    ]


def _code(
    name: str,
    files: Manifest,
    config: ModelConfig,
    store: ArtifactStore,
    read: Callable[[str], str],
    trusted: Container[str],
) -> list[str]:
    """Return why a model is not known to be data, from its configuration and the content of its files."""
    found: list[str] = []
    weights: set[str] = set()
    for path in sorted(path for path in files if path.lower().endswith(".onnx")):
        try:
            with store.fetch(files[path]).open("rb") as file:
                named, operators = OnnxFile(file).examined()
        except ValueError as error:
            found.append(f"{path}: it cannot be examined ({error})")
            continue
        found += code_in_onnx(path, named, operators)
        weights |= {str(PurePosixPath(path).parent / each) for each in named}
    backend = backend_of(name, files, config)
    for path in examined_files(name, files, config):
        with store.fetch(files[path]).open("rb") as file:
            if not is_inert_start(backend, file.read(START_BYTES)):
                found.append(f"{path}: it does not begin like a file that the backend {backend} reads as data")
    parameter_file = f"1/{record_of(backend).parameter_file}"
    if parameter_file in files:
        try:
            members = dict(json.loads(read(parameter_file)))
        except (ValueError, TypeError) as error:
            found.append(f"{parameter_file}: expected a JSON object: {error}")
        else:
            texts = {key: str(value) for key, value in members.items()}
            config = replace(config, parameters={**texts, **config.parameters})
    return code_in(name, files, config, weights, trusted) + found


def _refusal(status: int, lines: Sequence[str], name: str, folder: str) -> ServingError:
    if status < 0:
        return invalid(f"the process that read '{name}' was ended by signal {-status}", hint="its file is damaged")
    text = [line.replace(f"{folder}/", "").replace(folder, name) for line in lines]
    start = max((number for number, line in enumerate(text) if line.startswith(_SAYS)), default=0)
    said = (line.removeprefix(_SAYS).removeprefix(f"{name}: ").removeprefix("  ") for line in text[start:])
    problems = [line for line in said if line.strip()]
    hints = [line.removeprefix("hint: ") for line in problems if line.startswith("hint: ")]
    message = "\n".join(line for line in problems if not line.startswith("hint: "))
    return invalid(message[:PROBLEM_CHARS_MAX] or f"'{name}' cannot be read", hint="\n".join(hints))


def _tensors(entries: Sequence[Mapping[str, Any]]) -> list[TensorRecord]:
    return [
        TensorRecord(
            name=entry["name"],
            data_type=str(entry["data_type"]).removeprefix("TYPE_"),
            shape=list(entry.get("dims", [])),
            is_optional=bool(entry.get("optional", False)),
        )
        for entry in entries
    ]
