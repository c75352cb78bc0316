"""The output repository: a model folder for each tried configuration, ready to serve.

A list in the repository names the folders that this tool made; it never writes to or removes any other. The first
folder of a model is a copy of the model's folder, and the others link to its version folders. If the model's files are
not on this machine, as with a remote server, a folder contains only config.pbtxt.
"""

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, internal, invalid
from charonia.tools.report.run_files import write_whole
from charonia.tools.tune.variants import serving_text

LIST = ".charonia-tune.json"
"""File that lists the folders that this tool made."""

CONFIG_FILE = "config.pbtxt"
_OURS = re.compile(r".+_config_(?:default|\d+)")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", CONFIG_FILE, ".*")


class OutputRepository:
    """Where variants are written.

    Args:
        path: The folder; made where it does not exist.
        source: The model repository, None for a remote one.
        override: Whether our folders of an earlier run are replaced.
    """

    def __init__(self, path: Path, source: Path | None, *, override: bool) -> None:
        self.path = path
        self._source = source
        self._override = override
        self._listed: dict[str, str] = {}
        self._scope = ""
        self._written: dict[str, list[str]] = {}

    def open(self, models: Iterable[str], scope: str) -> None:
        """Prepare the folder for the variants of some models.

        Args:
            scope: Digest of the run: without override, folders of the same scope are continued.

        Raises:
            ServingError: INVALID_ARG when it has other content, is inside the model repository, or cannot be written.
        """
        if self._source is not None and self.path.resolve().is_relative_to(self._source.resolve()):
            raise invalid(
                f"output model repository {self.path}: expected a folder outside the model repository, which would "
                "serve the variants as models"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            listed = self._read_list() | self._listed
            names = tuple(models)
            written = {name for folders in self._written.values() for name in folders}
            for folder in sorted(self.path.iterdir()):
                is_of_them = any(
                    re.fullmatch(rf"{re.escape(name)}_config_(default|\d+)", folder.name) for name in names
                )
                if not is_of_them or folder.name in written:
                    continue
                if folder.name not in listed:
                    raise invalid(
                        f"output model repository {self.path}: '{folder.name}' was not made by charonia tune",
                        hint="move it away, or name another folder with --output-model-repository-path",
                    )
                if self._override:
                    _remove(folder)
                    del listed[folder.name]
                elif listed[folder.name] != scope:
                    raise invalid(
                        f"output model repository {self.path}: '{folder.name}' is of another run",
                        hint="--override-output-model-repository replaces it",
                    )
            self._listed, self._scope = listed, scope
            self._write_list()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write(self, model: str, name: str, config: ModelConfig, variants: dict[str, str] | None = None) -> Path:
        """Write a configuration of a model as a folder and return the folder; an existing one is overwritten.

        Args:
            variants: Name of the variant by model, for the steps of an ensemble.
        """
        folder = self.path / name
        if not _OURS.fullmatch(name):
            raise internal(f"'{name}' is not the name of a variant")
        try:
            if name not in self._listed:
                folder.mkdir()
                self._listed[name] = self._scope
                self._write_list()
            text = serving_text(_renamed(config, variants or {}))
            (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
            written = self._written.setdefault(model, [])
            if name not in written:
                self._add_files(model, folder, written)
                written.append(name)
        except OSError as error:
            raise _unwritable(folder, error) from error
        return folder

    def discard(self, models: Iterable[str]) -> None:
        """Remove the folders that this run wrote for some models."""
        for model in models:
            for name in self._written.pop(model, []):
                _remove(self.path / name)
                del self._listed[name]
        self._write_list()

    def _add_files(self, model: str, folder: Path, written: list[str]) -> None:
        source = self._source / model if self._source is not None else None
        if source is None or not source.is_dir():
            return
        if not written:
            shutil.copytree(source, folder, ignore=_LEFT_OUT, dirs_exist_ok=True)
            return
        first = self.path / written[0]
        for entry in sorted(first.iterdir()):
            target = folder / entry.name
            if entry.name == CONFIG_FILE or target.exists() or target.is_symlink():
                continue
            try:
                target.symlink_to(Path("..") / first.name / entry.name, target_is_directory=entry.is_dir())
            except OSError:  # a file system without links
                copy = shutil.copytree if entry.is_dir() else shutil.copy2
                copy(entry, target)

    def _read_list(self) -> dict[str, str]:
        """Return the digest of each folder that this tool made, by the folder's name."""
        try:
            document = json.loads((self.path / LIST).read_text(encoding="utf-8"))
            return {str(name): str(scope) for name, scope in document["folders"].items()}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise invalid(f"{self.path / LIST}: not the list of variants that charonia tune writes") from None

    def _write_list(self) -> None:
        text = json.dumps({"folders": self._listed}, indent=1, sort_keys=True)
        write_whole(self.path / LIST, f"{text}\n".encode())


def _renamed(config: ModelConfig, variants: dict[str, str]) -> ModelConfig:
    """Return an ensemble whose steps are the variants beside it."""
    scheduling = config.ensemble_scheduling
    if scheduling is None or not variants:
        return config
    steps = tuple(replace(step, model_name=variants.get(step.model_name, step.model_name)) for step in scheduling.step)
    return replace(config, ensemble_scheduling=replace(scheduling, step=steps))


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _unwritable(path: Path, error: OSError) -> ServingError:
    reason = (error.strerror or str(error)).lower()
    return invalid(f"output model repository: '{error.filename or path}' cannot be written: {reason}")
