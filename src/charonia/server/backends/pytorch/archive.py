"""Identifies the kind of a model file from its content, without PyTorch."""

import json
import pickle
import zipfile
from enum import Enum
from pathlib import Path

from charonia.archives import open_zip, read_entry
from charonia.core.errors import invalid
from charonia.server.backends.array_backend import broken_file_hint


class FileKind(Enum):
    """A kind of model file."""

    TORCHSCRIPT = "TorchScript"
    EXPORTED = "an exported program"
    AOT_INDUCTOR = "an AOTInductor package"
    CHECKPOINT = "a checkpoint of weights or of a pickled module"


JSON_BYTES_MAX = 16 * 1024 * 1024
"""Longest description in an archive."""

_AOT_FOLDER = "data/aotinductor/"
_PREFIX_BYTES = 64


def file_kind(path: Path) -> FileKind:
    """Return the kind of a model file. Raises ServingError: INVALID_ARG when it is not a model file."""
    names = archive_names(path)
    if names is None:
        raise invalid(
            f"{path.name} is not a PyTorch model: it is not a zip archive, but begins with {_beginning(path)}",
            hint=broken_file_hint(path)
            or "save it with torch.jit.save, torch.export.save or torch._inductor.aoti_compile_and_package",
        )
    if "constants.pkl" in names:
        return FileKind.TORCHSCRIPT
    if any(name.startswith(_AOT_FOLDER) for name in names):
        return FileKind.AOT_INDUCTOR
    if "serialized_exported_program.json" in names or any(name.startswith("models/") for name in names):
        return FileKind.EXPORTED
    if "data.pkl" in names:
        return FileKind.CHECKPOINT
    shown = ", ".join(sorted(names)[:5])
    raise invalid(f"{path.name} is not a PyTorch model: it is a zip archive of {shown}")


def archive_names(path: Path) -> set[str] | None:
    """Return the names of an archive's entries below its root folder, None if it is not an archive."""
    try:
        with open_zip(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return None
    root = names[0].split("/")[0] + "/" if names else ""
    # Only the oldest exported programs lie at the root of their archive.
    return {name.removeprefix(root) for name in names} if all(name.startswith(root) for name in names) else set(names)


def aot_metadata(path: Path) -> dict[str, str]:
    """Return what an AOTInductor package records of the machine that it was compiled for; may be empty."""
    with open_zip(path) as archive:
        for name in archive.namelist():
            if _AOT_FOLDER in name and name.endswith("_metadata.json"):
                try:
                    found = json.loads(read_entry(archive, name, JSON_BYTES_MAX))
                except ValueError:
                    continue
                if isinstance(found, dict) and "AOTI_DEVICE_KEY" in found:
                    return {str(key): str(value) for key, value in found.items()}
    return {}


def has_program(path: Path) -> bool:
    """Return whether an AOTInductor package also holds the program that it was compiled from."""
    return any(name.startswith("models/") for name in archive_names(path) or ())


def pickled_entries(path: Path) -> list[str]:
    """Return the entries of an exported program that PyTorch unpickles when it loads it."""
    found = []
    with open_zip(path) as archive:
        names = archive.namelist()
        for name in names:
            folder, _, file = name.rpartition("/")
            if name.endswith(".pt"):
                found.append(name)
            elif file.endswith("_config.json"):
                found += [
                    f"{folder}/{entry['path_name']}"
                    for entry in _payloads(read_entry(archive, name, JSON_BYTES_MAX))
                    if entry.get("use_pickle") and f"{folder}/{entry.get('path_name')}" in names
                ]
    return found


def _payloads(content: bytes) -> list[dict[str, object]]:
    try:
        config = json.loads(content)
        return [entry for entry in config["config"].values() if isinstance(entry, dict)]
    except (ValueError, KeyError, AttributeError, TypeError):
        return []


def _beginning(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(_PREFIX_BYTES)
    if start.startswith(b"\x80") and start[1:2] <= bytes([pickle.HIGHEST_PROTOCOL]):
        return "a pickle (a checkpoint in the format before PyTorch 1.6)"
    if start.startswith(b"PK\x03\x04"):
        return "the start of one: the file is incomplete"
    return repr(start[:16])
