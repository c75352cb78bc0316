"""Makes the repository that serves files: a folder of links to them, with a configuration for each model."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from charonia.config.model import InstanceGroup, ModelConfig
from charonia.config.pbtxt import render
from charonia.core.errors import invalid
from charonia.server.backends.onnxruntime.model_file import external_names
from charonia.server.backends.python.backend import SERVICE_PATH
from charonia.server.files.forms import model_name
from charonia.server.files.given import Given
from charonia.server.files.options import FileOptions

WATCHED_MAX = 1000
"""Files beside a service file that are watched."""

Describe = Callable[[Path, ModelConfig], Awaitable[Mapping[str, ModelConfig]]]
"""Returns the models that a Python file defines, by name, given what their configurations begin with."""


async def make_repository(given: Given, options: FileOptions, folder: Path, describe: Describe) -> tuple[str, ...]:
    """Write the repository that serves files and folders of models, and return the names of its models.

    Args:
        given: What to serve.
        options: How.
        folder: The repository's folder, which is empty.
        describe: Asks Python files for their models.

    Raises:
        ServingError: Two models have one name, an option does not apply, or a Python file cannot be imported.
    """
    if options.name and len(given.files) != 1:
        raise invalid(f"--name: expected one file that it is the name of, got {len(given.files)}")
    start = ModelConfig(max_batch_size=options.max_batch_size)
    if options.workers:
        start = replace(start, instance_group=(InstanceGroup(count=options.workers),))
    names: list[str] = []
    for path in given.models:
        _claim(path.name, names)
        (folder / path.name).symlink_to(path)
    for path, form in given.files:
        name = options.name or model_name(path.name)
        if form.filename == "model.py":
            await _add_python(path, options, start, folder, names, describe)
            continue
        config = replace(start, name=_claim(name, names))
        if _has_weights_beside(path):
            # The whole folder: ONNX Runtime refuses weights that are links.
            version = _add(replace(config, default_model_filename=path.name), folder)
            version.rmdir()
            version.symlink_to(path.parent)
        else:
            (_add(config, folder) / form.filename).symlink_to(path)
    return tuple(names)


async def _add_python(
    path: Path, options: FileOptions, start: ModelConfig, folder: Path, names: list[str], describe: Describe
) -> None:
    """Add the models that a service file defines, or the one that it is."""
    start = replace(start, backend="python", parameters={SERVICE_PATH: str(path)})
    defined = list(await describe(path, replace(start, max_batch_size=0)))
    if defined and options.max_batch_size:
        raise invalid(
            f"--max-batch-size: {path.name} says it itself", hint="write @charonia.model(max_batch_size=...) there"
        )
    if options.name and len(defined) > 1:
        raise invalid(f"--name: {path.name} has {len(defined)} models, which have names: {', '.join(defined)}")
    if options.name or not defined:
        defined = [options.name or model_name(path.name)]
    for each in defined:
        version = _add(replace(start, name=_claim(each, names)), folder)
        # Only to be watched: the file is imported from where it is.
        for beside in islice(sorted(path.parent.glob("*.py")), WATCHED_MAX):
            (version / beside.name).symlink_to(beside)


def _add(config: ModelConfig, folder: Path) -> Path:
    """Add a model, and return the folder of its version."""
    version = folder / config.name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(render(config), encoding="utf-8")
    return version


def _claim(name: str, names: list[str]) -> str:
    if name in names:
        raise invalid(f"two models would be called '{name}'", hint="serve one of them alone with --name, or rename it")
    names.append(name)
    return name


def _has_weights_beside(path: Path) -> bool:
    """Return whether a file is an ONNX model whose weights are in files of their own."""
    if path.suffix.lower() != ".onnx":
        return False
    try:
        return bool(external_names(path))
    except (OSError, ValueError):
        return False  # the load of the model reports it
