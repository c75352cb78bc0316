"""Makes the repository that serves files: a folder of links to them, with a configuration for each model."""

import asyncio
import importlib.util
import json
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from charonia.config.backends import HUGGING_FACE, PYTHON, Form, record_of
from charonia.config.forms import advice, model_name
from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig
from charonia.config.onnx_file import OnnxFile
from charonia.config.parameters import MOUNTED_APP, MOUNTED_AT, MOUNTED_SOCKET, TRY_EXAMPLE
from charonia.config.pbtxt import parse, render
from charonia.core.errors import ServingError, invalid, not_found
from charonia.server.backends.api import BackendSettings
from charonia.server.backends.python.backend import SERVICE_PATH, describe
from charonia.server.backends.sklearn.options import EXAMPLE_ROWS
from charonia.server.files.options import FileOptions, Mount
from charonia.server.files.served_files import CONFIG, ServedFiles, sort

_log = logging.getLogger(__name__)

ESTIMATORS = "sklearn"
"""Backend of files that go with example rows."""

GGUF = "llama_cpp"
"""Backend of files that go with context, threads, slots, a chat template and layers on GPUs."""

TEMPLATE_BYTES_MAX = 1024 * 1024
"""Largest file with a chat template."""

WATCHED_MAX = 1000
"""Files beside a service file that are watched."""

Describe = Callable[[Path, ModelConfig], Awaitable[Mapping[str, ModelConfig]]]
"""Returns the models that a Python file defines, by name, given what their configurations begin with."""


def file_repository(
    files: ServedFiles, options: FileOptions, folder: Path, backends: Mapping[str, Mapping[str, str]]
) -> "FileRepository":
    """Return the repository that serves files, whose Python files run as the settings of their backend say.

    Args:
        folder: The repository's folder, which is empty.
        backends: Settings of `--backend-config`, by backend.
    """
    settings = BackendSettings({**backends.get("", {}), **backends.get(PYTHON, {})})
    return FileRepository(files, options, folder, partial(describe, settings=settings))


async def with_files(
    paths: Sequence[str], folder: Path, backends: Mapping[str, Mapping[str, str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return repositories for paths as `charonia serve` takes them, and the names of the models in files among them.

    Args:
        paths: Repositories, folders of models and files.
        folder: Empty folder for the repository of the files.
        backends: Settings of `--backend-config`, by backend.

    Raises:
        ServingError: A path cannot be served.
    """
    files = await asyncio.to_thread(sort, paths)
    if not files.needs_repository:
        return files.repositories, ()
    names = await file_repository(files, FileOptions(), folder, backends).make()
    return (*files.repositories, str(folder)), names


class FileRepository:
    """The repository that serves files and folders of models.

    Args:
        folder: The repository's folder, which is empty.
    """

    def __init__(self, files: ServedFiles, options: FileOptions, folder: Path, describe: Describe) -> None:
        self._given = files
        self._options = options
        self._folder = folder
        self._describe = describe
        self._start = ModelConfig(max_batch_size=options.max_batch_size)
        if options.workers:
            self._start = replace(self._start, instance_group=(InstanceGroup(count=options.workers),))
        self._names: list[str] = []
        self._services: dict[Path, _Service] = {}

    @property
    def _name(self) -> str:
        return self._options.name or self._options.model_name

    @property
    def has_services(self) -> bool:
        return bool(self._services)

    async def make(self) -> tuple[str, ...]:
        """Write the repository, and return the names of its models.

        Raises:
            ServingError: Two models have one name, an option does not apply, or a Python file cannot be imported.
        """
        options = self._options
        if options.name and len(self._given.files) != 1:
            raise invalid(f"--name: expected one file that it is the name of, got {len(self._given.files)}")
        if options.example and not any(form.backend == ESTIMATORS for _, form in self._given.files):
            raise invalid("--example: expected the file of an estimator, such as model.joblib, to go with the rows")
        if options.example and not Path(options.example).is_file():
            raise not_found(f"--example: there is no file '{options.example}'")
        if options.gguf and not any(form.backend == GGUF for _, form in self._given.files):
            raise invalid(f"{', '.join(options.gguf)}: expected a GGUF file, such as model.gguf")
        if options.model_name and self._given.model_count != 1:
            raise invalid(f"--model_name: expected one model that it is the name of, got {self._given.model_count}")
        for path in self._given.models:
            name = options.model_name or self._given.names.get(path) or path.name
            self._claim(name)
            _link(path, self._folder / name)
        for path in self._given.loose:
            name = options.model_name or self._given.names[path]
            self._claim(name)
            (self._folder / name).mkdir()
            _link_config(path / CONFIG, self._folder / name)
            (self._folder / name / "1").symlink_to(path)
        for path, form in self._given.files:
            if form.filename == "model.py":
                name = options.name or self._given.names.get(path, "")
                if form.service:
                    name = name or self._name_of(path)
                    path = self._write_service(path, form, name)
                state = _state(path)
                self._services[path] = _Service(state, state, name, await self._defined(path, name))
                for model in self._services[path].models:
                    self._claim(model)
                    self._add_service(path, model)
                continue
            name = self._name_of(path)
            self._claim(name)
            trust = record_of(form.backend).trust_parameter if options.trust else ""
            rows = Path(options.example).absolute() if options.example and form.backend == ESTIMATORS else None
            parameters = {TRY_EXAMPLE: "true"} | ({trust: "true"} if trust else {})
            if rows is not None:
                parameters[EXAMPLE_ROWS] = rows.name
            if form.backend == GGUF:
                parameters |= _gguf_parameters(options)
            config = replace(self._start, name=name, backend=form.backend, parameters=parameters)
            if form == HUGGING_FACE:
                version = _add(config, self._folder / name)
                (version / form.filename).write_text(json.dumps({"model": str(path)}), encoding="utf-8")
                continue
            # Under its own name, which is the one in messages.
            version = _add(replace(config, default_model_filename=path.name), self._folder / name)
            if _has_weights_beside(path, form):
                # The whole folder: ONNX Runtime refuses weights that are links.
                version.rmdir()
                version.symlink_to(path.parent)
            else:
                (version / path.name).symlink_to(path)
            if rows is not None:
                (version / rows.name).symlink_to(rows)
        names = tuple(self._names)
        for mount in options.mounts:
            self._claim(mount.name)
            self._add_mount(mount)
        return names

    async def follow(self, interval_s: float) -> None:
        """Add the models that a Python file defines after a change, and remove those that it no longer does.

        Returns never. A model whose function changes is reloaded by the server, which watches the files themselves.
        """
        while True:
            await asyncio.sleep(interval_s)
            for path, service in self._services.items():
                state = await asyncio.to_thread(_state, path)
                is_settled, service.last = state == service.last, state
                if state is None or not is_settled or state == service.acted:
                    continue
                service.acted = state
                try:
                    self._change(path, service, await self._defined(path, service.name))
                except ServingError as error:
                    _log.error("'%s' has changed, but its models stay as they are: %s", path.name, error)
                except Exception:  # a bug: it must not end the others
                    _log.exception("'%s' has changed, but its models stay as they are", path.name)

    def _change(self, path: Path, service: "_Service", models: tuple[str, ...]) -> None:
        others = [name for name in self._names if name not in service.models]
        for name in models:
            _check_free(name, others)
        for name in set(service.models) - set(models):
            hidden = (self._folder / name).rename(self._folder / f".{name}")
            shutil.rmtree(hidden)
        for name in models:
            if name not in service.models:
                self._add_service(path, name)
        service.models = models
        self._names = [*others, *models]

    async def _defined(self, path: Path, name: str) -> tuple[str, ...]:
        """Return the names of the models that a Python file defines, or of the one that it is."""
        options = self._options
        defined = tuple(await self._describe(path, replace(self._python(path), max_batch_size=0)))
        if defined and options.max_batch_size:
            raise invalid(
                f"--max-batch-size: {path.name} says it itself", hint="write @charonia.model(max_batch_size=...) there"
            )
        if name and len(defined) > 1:
            raise invalid(
                f"'{name}': a name is for one model, and {path.name} has {len(defined)}: {', '.join(defined)}"
            )
        return defined if defined and not name else (self._name_of(path),)

    def _name_of(self, path: Path) -> str:
        return self._name or self._given.names.get(path) or model_name(path.name)

    def _write_service(self, path: Path, form: Form, name: str) -> Path:
        """Write the service file of a form that has one, in place of what it serves."""
        file = self._folder / f".{name}.service" / f"{name}.py"
        file.parent.mkdir()
        is_installed = importlib.util.find_spec(form.package.replace("-", "_")) is not None
        header = "" if is_installed else f'# /// script\n# dependencies = ["{form.package}"]\n# ///\n'
        file.write_text(header + advice(form, str(path)), encoding="utf-8")
        return file

    def _python(self, path: Path) -> ModelConfig:
        return replace(self._start, backend=PYTHON, parameters={SERVICE_PATH: str(path)})

    def _add_service(self, path: Path, name: str) -> None:
        self._add_python(self._python(path), path, name)

    def _add_python(self, config: ModelConfig, path: Path, name: str) -> None:
        hidden = self._folder / f".{name}"  # until it is complete
        version = _add(replace(config, name=name), hidden)
        # Only to be watched: the file is imported from where it is.
        for beside in islice(sorted(path.parent.glob("*.py")), WATCHED_MAX):
            (version / beside.name).symlink_to(beside)
        hidden.rename(self._folder / name)

    def _add_mount(self, mount: Mount) -> None:
        path = Path(mount.file).absolute() if mount.file else next(iter(self._services), None)
        if path is None or (not mount.file and len(self._services) > 1) or not path.is_file():
            raise invalid(
                f"--mount: expected a Python file with '{mount.app}', got {mount.file or len(self._services)}",
                hint=f"--mount FILE.py:{mount.app}:{mount.path}",
            )
        parameters = {
            SERVICE_PATH: str(path),
            MOUNTED_APP: mount.app,
            MOUNTED_AT: mount.path,
            MOUNTED_SOCKET: mount.socket(str(self._folder)),
        }
        only = (InstanceGroup(kind=InstanceKind.KIND_CPU, count=1),)
        self._add_python(ModelConfig(backend=PYTHON, parameters=parameters, instance_group=only), path, mount.name)

    def _claim(self, name: str) -> None:
        _check_free(name, self._names)
        self._names.append(name)


@dataclass(slots=True)
class _Service:
    """A Python file that is served."""

    acted: "_State | None"
    last: "_State | None"
    name: str
    models: tuple[str, ...]


_State = tuple[int, int, int]


def _state(path: Path) -> _State | None:
    """Return what changes when a file does, None for one that is missing. Blocks on the disk."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _add(config: ModelConfig, folder: Path) -> Path:
    """Make a model's folder, and return that of its version."""
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(render(config), encoding="utf-8")
    return version


def _gguf_parameters(options: FileOptions) -> dict[str, str]:
    """Return the parameters of the model in a GGUF file; a chat template may be in a file. Blocks on the disk."""
    parameters = dict(options.gguf.values())
    template = options.chat_template
    if template and "{" not in template:
        try:
            with Path(template).open(encoding="utf-8") as file:
                parameters["chat_template"] = file.read(TEMPLATE_BYTES_MAX)
        except (OSError, UnicodeDecodeError) as error:
            raise invalid(f"--chat-template: expected a template or a file with one: {error}") from None
    return parameters


def _link(path: Path, folder: Path) -> None:
    """Make a model's folder that stands for another one, perhaps with another name."""
    if path.name == folder.name:
        folder.symlink_to(path)
        return
    folder.mkdir()
    for entry in path.iterdir():
        if entry.name == CONFIG:
            _link_config(entry, folder)
        else:
            (folder / entry.name).symlink_to(entry)


def _link_config(path: Path, folder: Path) -> None:
    """Give a folder the configuration of a model, which may have another name there."""
    try:
        config = parse(path.read_bytes().decode(errors="surrogateescape"))
    except ServingError:
        config = ModelConfig()  # the load of the model reports it
    if config.name in ("", folder.name):
        (folder / CONFIG).symlink_to(path)
    else:
        (folder / CONFIG).write_text(render(replace(config, name=folder.name)), encoding="utf-8")


def _check_free(name: str, names: Sequence[str]) -> None:
    if name in names:
        raise invalid(f"two models would be called '{name}'", hint="serve one of them alone with --name, or rename it")


def _has_weights_beside(path: Path, form: Form) -> bool:
    """Return whether the weights of a model are in files of their own."""
    if form.weights:
        return path.with_suffix(form.weights).is_file()
    if path.suffix.lower() != ".onnx":
        return False
    try:
        with path.open("rb") as file:
            return bool(OnnxFile(file).weight_files())
    except (OSError, ValueError):
        return False  # the load of the model reports it
