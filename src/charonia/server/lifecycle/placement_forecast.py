"""Whether models will run in front ends, as far as their files tell before any of them is loaded.

Only a measurement says whether a model computes in microseconds (`front_end_placement.py`). The files read here are a
necessary
condition: nothing in the configuration keeps the model in the engine, and its files are small.
"""

from collections.abc import Sequence
from pathlib import Path

from charonia.config.backends import ENSEMBLE
from charonia.config.complete import derive_backend, normalise
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError
from charonia.server.lifecycle.front_end_placement import BYTES_MAX, Choice, choice_of, front_end_problems, obstacle
from charonia.server.lifecycle.repository.model_folder import read_config, select, version_files, versions
from charonia.server.lifecycle.repository.scan import ModelFolder, scan
from charonia.stores.location import is_store

SMALL_BYTES = 2 * 2**20
"""Largest files of a model that may compute in 0.1 ms: one core reads about this many bytes of weights in that time."""


def reason_to_stay(repositories: Sequence[str], *, config_name: str = "", gpu_count: int = 0) -> str:
    """Return why a model of these repositories will run in the engine only, "" if every one may run in front ends.

    Blocks on the disk.

    Args:
        repositories: Their paths or URIs.
        config_name: Name of the configuration variant, "" for config.pbtxt.
        gpu_count: GPUs of this machine.
    """
    remote = next((path for path in repositories if is_store(path)), None)
    if remote is not None:
        return f"the models of '{remote}' are not known before they are fetched"
    try:
        folders = scan(repositories, fingerprints=False).folders
    except ServingError as error:
        return error.message
    for folder in folders:
        try:
            reason = _of_model(folder, config_name, gpu_count)
        except ServingError as error:
            reason = error.message
        if reason:
            return f"model '{folder.name}' will run in the engine only: {reason}"
    return "" if folders else "there are no models yet"


def largest_bytes(repositories: Sequence[str]) -> int:
    """Return the size of the files of the largest model version, 0 where that is not known. Blocks on the disk."""
    try:
        folders = scan([path for path in repositories if not is_store(path)], fingerprints=False).folders
        return max((_bytes(each.path / str(version)) for each in folders for version in versions(each)), default=0)
    except ServingError:
        return 0


def _of_model(folder: ModelFolder, config_name: str, gpu_count: int) -> str:
    """Return why a model stays in the engine. Raises ServingError for one that cannot be loaded."""
    config = read_config(folder, config_name=config_name)[0] or ModelConfig()
    selected = select(config.version_policy, versions(folder), model_name=folder.name)
    config, _ = derive_backend(config, folder.name, version_files(folder, selected[-1]))
    config = normalise(config, name=folder.name, gpu_count=gpu_count, default_instance_count=1)
    problem = next(front_end_problems(config), None)
    if problem is not None:
        return str(problem)
    reason = obstacle(config)
    if reason or config.platform == ENSEMBLE:
        return reason
    limit = BYTES_MAX if choice_of(config) is Choice.YES else SMALL_BYTES
    size = max(_bytes(folder.path / str(version)) for version in selected)
    return f"its files have {size / 2**20:.1f} MiB; the limit is {limit >> 20} MiB" if size > limit else ""


def _bytes(folder: Path) -> int:
    """Return the size of all files in a folder; 0 if it has been removed."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:
        return 0
