"""A model's folder: its configuration file, its versions, the version policy, and hints for a folder that lacks them.

A version is a folder with a number as its name.
"""

import codecs
import os
import re
from collections.abc import Iterator, Sequence
from hashlib import file_digest, sha256
from pathlib import Path, PurePosixPath

from charonia.config.backends import formats
from charonia.config.model import Latest, ModelConfig, VersionPolicy
from charonia.config.pbtxt import parse
from charonia.core.errors import ServingError, invalid
from charonia.server.lifecycle.repository.scan import CONFIG_FILE, DEPTH_MAX, NOT_CONTENT, ModelFolder, read_file

VERSION_MAX = 2**63 - 1
"""Versions are signed 64-bit integers in the configuration."""

DEFAULT_POLICY = VersionPolicy(latest=Latest(1))

VERSION_NAME = re.compile(r"[1-9][0-9]{0,18}", re.ASCII)
"""Names of folders that are versions."""

MODELS_LISTED_MAX = 10
"""Models that a hint lists, of a repository that was mistaken for a model."""

CONFIG_BYTES_MAX = 16 * 1024 * 1024
"""A configuration is text written by hand or by a tool; a larger file is something else."""

VARIANTS_FOLDER = "configs"
"""Folder of a model with configuration variants (`--model-config-name`)."""

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


def versions(folder: ModelFolder) -> tuple[int, ...]:
    """Return the version numbers in the model's folder, ascending. Blocks on the disk.

    Folders with other names, with a leading zero, and version 0 are not versions.

    Raises:
        ServingError: INVALID_ARG when the folder cannot be read.
    """
    try:
        with os.scandir(folder.path) as entries:
            numbers = [int(entry.name) for entry in entries if VERSION_NAME.fullmatch(entry.name) and entry.is_dir()]
    except OSError as error:
        raise unreadable(folder, error) from error
    return tuple(sorted(number for number in numbers if number <= VERSION_MAX))


def unreadable(folder: ModelFolder, error: OSError) -> ServingError:
    """Return the error for a model folder that does not exist or cannot be read."""
    reason = (error.strerror or str(error)).lower()
    return invalid(f"failed to load '{folder.name}', failed to poll from model repository: {folder.path}: {reason}")


def select(policy: VersionPolicy | None, available: Sequence[int], *, model_name: str) -> tuple[int, ...]:
    """Return the versions that the policy serves, ascending.

    Args:
        policy: None for the default, the highest version.
        available: The existing versions.
        model_name: For the error.

    Raises:
        ServingError: INVALID_ARG when it selects none of them.
    """
    policy = policy or DEFAULT_POLICY
    ascending = tuple(sorted(set(available)))
    if policy.specific is not None:
        wanted = set(policy.specific.versions)
        selected = tuple(version for version in ascending if version in wanted)
    elif policy.all is not None:
        selected = ascending
    else:
        count = (policy.latest or Latest(1)).num_versions
        selected = ascending[max(0, len(ascending) - count) :] if count > 0 else ()
    if not selected:
        raise none_selected(model_name, ascending, hint="`version_policy` of the configuration selects others")
    return selected


def none_selected(model_name: str, available: Sequence[int], *, hint: str) -> ServingError:
    """Return the error for a model without a version to serve."""
    found = f"version {', '.join(map(str, available))}" if available else "none"
    return invalid(
        f"at least one version must be available under the version policy of model '{model_name}', found {found}",
        hint=hint,
    )


def version_hint(folder: ModelFolder) -> str:
    """Return the hint for a model without a version. Blocks on the disk."""
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
        return f"'{name}' is a repository, not a model; its models are {listed}"
    return usual


def mistaken_config(folder: ModelFolder, version: int) -> str:
    """Return the file that is probably meant as the missing config.pbtxt, "" for none. Blocks on the disk."""
    if (folder.path / str(version) / CONFIG_FILE).is_file():
        return f"{version}/{CONFIG_FILE}"
    try:
        names = sorted(os.listdir(folder.path))
    except OSError:
        return ""
    return next((name for name in names if name.lower() in _LIKE_CONFIG), "")


def _instead_of_version(name: str, entry: Path) -> str:
    """Return the hint for an entry of a model's folder that is probably meant as a version or belongs into one."""
    if VERSION_NAME.fullmatch(entry.name):
        if entry.is_symlink() and not entry.exists():
            return f"{name}/{entry.name} is a link to '{os.readlink(entry)}', which is not there"
        return f"{name}/{entry.name} is a file; a version is a folder that holds the model"
    if entry.is_dir():
        if entry.name == "0":
            return f"versions begin with 1: rename {name}/0 to {name}/1"
        like = _LIKE_A_VERSION.fullmatch(entry.name)
        return f"a version's name is its number alone: rename {name}/{entry.name} to {name}/{like[1]}" if like else ""
    if PurePosixPath(entry.name).suffix.lower() in {form.suffix for form in formats()}:
        return f"a model lies in the folder of its version: move {name}/{entry.name} to {name}/1/{entry.name}"
    return ""


def _has_version(folder: Path) -> bool:
    try:
        return any(VERSION_NAME.fullmatch(entry.name) and entry.is_dir() for entry in folder.iterdir())
    except OSError:
        return False


def read_config(folder: ModelFolder, *, config_name: str = "") -> tuple[ModelConfig | None, Path | None]:
    """Return the model's configuration as written and its file. Blocks on the disk.

    Args:
        folder: The model's folder.
        config_name: `configs/<config_name>.pbtxt` is used where it exists, else `config.pbtxt`.

    Returns:
        Configuration and file, or None and None where the model has no file.

    Raises:
        ServingError: INVALID_ARG, beginning with the path of the file, when it cannot be read or parsed.
    """
    for path in _candidates(folder, config_name):
        content = _read(path)
        if content is None:
            continue
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise invalid(f"{path}: expected UTF-8, got UTF-16", hint="save it as UTF-8 in the editor")
        try:
            return parse(content.decode(errors="surrogateescape")), path
        except ServingError as error:
            # The parser, which does not know the path, begins with the usual name.
            message = error.message.removeprefix(CONFIG_FILE)
            where = str(path) if message != error.message else f"{path}: "
            raise ServingError(error.code, where + message, hint=error.hint) from error
    return None, None


def check_name(folder: ModelFolder, config: ModelConfig) -> None:
    """Check that a configuration has the name of its folder, or none.

    Raises:
        ServingError: INVALID_ARG when the names differ.
    """
    if config.name and config.name != folder.name:
        raise invalid(
            f"unexpected directory name '{folder.name}' for model '{config.name}', "
            "directory name must equal model name",
            hint="leave `name` out of the configuration and the folder's is used",
        )


def version_files(folder: ModelFolder, version: int) -> tuple[str, ...]:
    """Return the names of files and folders in a version's folder, sorted, without hidden ones. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG when the folder cannot be read.
    """
    try:
        return tuple(sorted(name for name in os.listdir(folder.path / str(version)) if not name.startswith(".")))
    except OSError as error:
        raise unreadable(folder, error) from error


def _candidates(folder: ModelFolder, config_name: str) -> list[Path]:
    default = folder.path / CONFIG_FILE
    return [folder.path / VARIANTS_FOLDER / f"{config_name}.pbtxt", default] if config_name else [default]


def _read(path: Path) -> bytes | None:
    """Return the file's content, or None where there is no such file."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:  # of which reading it says more
        pass
    return read_file(path, CONFIG_BYTES_MAX, path)


def content_digest(folder: ModelFolder, version: int) -> bytes:
    """Return a digest of the files in a model's folder, without its other versions. Blocks on the disk.

    Raises:
        ServingError: INVALID_ARG when a file cannot be read.
    """
    digest = sha256()
    try:
        for name, path in sorted(_files(folder.path, version)):
            with path.open("rb") as file:
                content = file_digest(file, "sha256").digest()
            digest.update(b"%d:%s" % (len(name), name.encode(errors="surrogateescape")) + content)
    except OSError as error:
        raise invalid(f"{error.filename}: {(error.strerror or str(error)).lower()}") from error
    return digest.digest()


def _files(folder: Path, version: int) -> Iterator[tuple[str, Path]]:
    for parent, folders, files in os.walk(folder, followlinks=True):
        depth = len(Path(parent).relative_to(folder).parts)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in NOT_CONTENT
            and depth < DEPTH_MAX
            and not (depth == 0 and name.isdigit() and name != str(version))
        ]
        for name in files:
            if not name.startswith("."):
                path = Path(parent) / name
                yield str(path.relative_to(folder)), path
