"""What may be wrong with a model's folder that lacks a version or a configuration: looks at the disk, for hints."""

import os
import re
from pathlib import Path, PurePosixPath

from charonia.config.platforms import FORMATS
from charonia.repository.scan import CONFIG_FILE, ModelFolder
from charonia.repository.versions import VERSION_NAME

MODELS_LISTED_MAX = 10
"""Models of a repository that is taken for a model, in a hint."""

_LIKE_A_VERSION = re.compile(r"(?:v|version)?[-_. ]?0*([1-9][0-9]{0,18})(?:\.0+)*", re.ASCII | re.IGNORECASE)
_LIKE_CONFIG = frozenset(
    {
        "config.json",
        "config.pb",
        "config.pb.txt",
        "config.pbtext",
        "config.pbtx",
        "config.pbtxt.txt",
        "config.prototxt",
        "config.txt",
        "model.pbtxt",
    }
)
_SUFFIXES = frozenset(entry.suffix for entry in FORMATS)


def version_hint(folder: ModelFolder) -> str:
    """Return what to do about a model without a version. Blocks on the disk."""
    name = folder.name
    if name.isdecimal():
        return f"if '{name}' is a version itself, the repository is one folder further up; else it needs one, {name}/1"
    usual = f"versions are folders with a number for a name, such as {name}/1"
    try:
        entries = sorted(folder.path.iterdir())
    except OSError:
        return usual
    for entry in entries:
        if sentence := _instead_of_version(name, entry):
            return sentence
    models = [entry.name for entry in entries if not entry.name.startswith(".") and _has_version(entry)]
    if models:
        listed = ", ".join(f"{name}/{model}" for model in models[:MODELS_LISTED_MAX])
        return f"'{name}' is no model but a repository; its models are {listed}"
    return usual


def mistaken_config(folder: ModelFolder, version: int) -> str:
    """Return the file of a model without config.pbtxt that may be meant to be it, "" for none. Blocks on the disk."""
    if (folder.path / str(version) / CONFIG_FILE).is_file():
        return f"{version}/{CONFIG_FILE}"
    try:
        names = sorted(os.listdir(folder.path))
    except OSError:
        return ""
    return next((name for name in names if name.lower() in _LIKE_CONFIG), "")


def _instead_of_version(name: str, entry: Path) -> str:
    """Return what to do about an entry of a model's folder that may be meant as a version, or lies beside it."""
    if VERSION_NAME.fullmatch(entry.name):
        if entry.is_symlink() and not entry.exists():
            return f"{name}/{entry.name} is a link to '{os.readlink(entry)}', which is not there"
        return f"{name}/{entry.name} is a file; a version is a folder that holds the model"
    if entry.is_dir():
        if entry.name == "0":
            return f"versions begin with 1: rename {name}/0 to {name}/1"
        like = _LIKE_A_VERSION.fullmatch(entry.name)
        return f"a version's name is its number alone: rename {name}/{entry.name} to {name}/{like[1]}" if like else ""
    if PurePosixPath(entry.name).suffix.lower() in _SUFFIXES:
        return f"a model lies in the folder of its version: move {name}/{entry.name} to {name}/1/{entry.name}"
    return ""


def _has_version(folder: Path) -> bool:
    try:
        return any(VERSION_NAME.fullmatch(entry.name) and entry.is_dir() for entry in folder.iterdir())
    except OSError:
        return False
