"""Checks a version as `charonia config` and `charonia doctor` do.

Both run in separate processes, because a file that crashes its reader must not end the platform.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from charonia.config.backends import record_of
from charonia.config.json_form import to_json
from charonia.config.model import ModelConfig
from charonia.config.onnx_file import OnnxFile
from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError, invalid
from charonia.platform.artifacts.manifest import Manifest
from charonia.platform.artifacts.store import ArtifactStore
from charonia.platform.isolation.isolation import Isolation
from charonia.platform.models.child import CheckingPython, CheckOutput, CheckRun, charonia
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
from charonia.platform.models.load_trial import try_to_load
from charonia.platform.models.records import NeededPackageRecord, TensorRecord, VersionReport
from charonia.platform.tasks.runner import TaskRun

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
    needs = []
    if package is not None:
        is_here = importlib.util.find_spec(package.module) is not None
        needs.append(NeededPackageRecord(package.name, package.extra, is_here))
    return VersionReport(
        backend=backend,
        config=to_json(config) if CONFIG in files else {},
        needs=needs,
        requirements=dependencies(read, files),
        code=_code(name, files, config, store, read, trusted),
    )


def full_check(
    run: TaskRun, name: str, files: Manifest, store: ArtifactStore, python: CheckingPython, isolation: Isolation
) -> dict[str, Any]:
    """Return the fields of a `VersionReport` that a check finds.

    Raises:
        CancelledTaskError: If the task was cancelled.
    """
    with store.scratch() as repository, isolation.room(run.project_id) as room:
        check = CheckRun(run, python, isolation, room, repository)
        isolation.show(repository)
        store.materialise(files, repository / name, check=run.check)
        lines = charonia(check, ["config", "--json", str(repository / name)])
        config, notes = read_config(lines.output, str(repository / name))
        if config is None:
            raise _refusal(lines, name, str(repository / name))
        doctor = charonia(check, ["doctor", "--json", "--models-only", "--model-repository", str(repository)])
        warnings = read_warnings(doctor.output)
        load = try_to_load(check, config)
    if load.problem:
        warnings.append(load.problem)
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
        "load": load.text,
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


def _refusal(ran: CheckOutput, name: str, folder: str) -> ServingError:
    if ran.status < 0:
        return invalid(f"the process that read '{name}' was ended by signal {-ran.status}", hint="its file is damaged")
    text = [line.replace(f"{folder}/", "").replace(folder, name) for line in ran.output]
    start = max((number for number, line in enumerate(text) if line.startswith("charonia config:")), default=-1)
    problems = [line.removeprefix("  ") for line in text[start + 1 :] if line.strip()]
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
