"""The `python` backend: completes configurations and loads models, in worker processes or threads."""

import asyncio
import contextlib
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import orjson

from charonia.config.json_form import from_json, to_json
from charonia.config.model import ModelConfig
from charonia.config.parameters import JSON_SCHEMA, MOUNTED_APP
from charonia.core.errors import invalid, unsupported
from charonia.core.statistics import MemoryUsage
from charonia.server.backends.api import AsyncInstance, BackendSettings, Completion, ModelFiles, Placement
from charonia.server.backends.batch import ModelShapes
from charonia.server.backends.python.environment import (
    BUILDER,
    ENVIRONMENT,
    REQUIREMENTS,
    environment_of,
    environment_of_file,
    read_inline,
    requirements_of,
)
from charonia.server.backends.python.thread import ThreadInstance
from charonia.server.backends.workers.model import (
    CPU_INPUTS,
    EXECUTE_SECONDS,
    MODE,
    PARAMETERS,
    PROCESS,
    SHARE_MEMORY,
    START_SECONDS,
    THREAD,
    PythonModel,
    what_to_load,
)
from charonia.server.backends.workers.process import SERVER_ENVIRONMENT, Environment, SharedProcesses, ask_worker
from charonia.server.backends.workers.reaper import reaper
from charonia.server.backends.workers.services import ServerServices
from charonia.server.backends.workers.template import WorkerTemplate
from charonia.server.channel.cuda_driver import is_usable

_log = logging.getLogger(__name__)

DEFAULT_FILE = "model.py"

SERVICE_PATH = "SERVICE_PATH"
"""Model parameter: file to use in place of `model.py` in the version's folder."""

SHARED = "SHARED_PROCESS"
"""Model parameter: "true" if the model runs in one process with the others of its file that have it."""

DESCRIBED_MAX = 64
"""Files whose descriptions are kept."""

_State = tuple[int, int]

_described: dict[Path, tuple[_State, ModelConfig, dict[str, ModelConfig]]] = {}
"""State of a file, the configuration that its models began with, and complete configurations by name: a file that is
served right after it was described is not imported again for every one of its models."""


class PythonBackend:
    """Runs `TritonPythonModel` classes, each instance in a worker process or in a thread of the server."""

    def __init__(self, folder: Path | None = None) -> None:
        """Make the backend of models that bring their own `model.py`, or one that is written in Python itself.

        Args:
            folder: Holds the `model.py` of all models of the backend, whose name is the folder's.
        """
        self._folder = folder
        self._processes = SharedProcesses()
        self.name = folder.name if folder is not None else "python"

    def uses_gpus(self) -> bool:
        return True

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        """Ask the model's `auto_complete_config`, where it has one, in a worker that ends afterwards."""
        path = self._model_path(files, config)
        if MOUNTED_APP in config.parameters:
            return Completion(config)
        environment = await _environment(files, config, settings, path, self._folder)
        result = described(path, config)
        if result is None:
            text = orjson.dumps(to_json(config)).decode()
            completed = await ask_worker(
                f"{config.name} (auto-complete)",
                environment or SERVER_ENVIRONMENT,
                ("complete", str(path), str(files.version_dir), str(files.model_dir), text),
                failed=f"model '{config.name}'",
                lost=f"model '{config.name}' cannot be imported",
                late=f"auto_complete_config of model '{config.name}' did not finish",
            )
            result = from_json(completed) if completed else config
        notes = [] if result == config else [f"completed by auto_complete_config in {path.name}"]
        if not (result.input or result.output):
            notes.append(
                f"no input and no output: config.pbtxt, or auto_complete_config in {path.name}, must define them"
            )
        return Completion(result, tuple(notes))

    async def load(
        self, files: ModelFiles, config: ModelConfig, settings: BackendSettings
    ) -> "PythonModel | ThreadedPythonModel":
        """Check the settings and prepare the environment; the model itself is imported by each instance."""
        path = self._model_path(files, config)
        environment = await _environment(files, config, settings, path, self._folder)
        if not config.input and not config.parameters.keys() & {JSON_SCHEMA, MOUNTED_APP}:
            _log.warning(
                "model '%s' has no inputs%s: config.pbtxt, or auto_complete_config in %s, must define them",
                config.name,
                "" if config.output else " and no outputs",
                path.name,
            )
        server = ServerServices.of(config.name, files.version, settings)
        if environment is None:
            return ThreadedPythonModel(files, config, path, server)
        await asyncio.to_thread(is_usable)  # starting the driver takes a while; the result is cached
        if PARAMETERS.checked(config)[SHARE_MEMORY]:
            template = await _template(files, config, path, environment)
            forked = replace(environment, template=template)
            return PythonModel(files, config, path, forked, server, closing=template.aclose)
        shared = self._processes if config.parameters.get(SHARED) == "true" and sys.platform == "linux" else None
        return PythonModel(files, config, path, environment, server, processes=shared)

    async def aclose(self) -> None:
        """End the reaper process."""
        pid = reaper.end()
        if pid:
            with contextlib.suppress(ChildProcessError):  # it was waited for elsewhere
                await asyncio.to_thread(os.waitpid, pid, 0)

    def _model_path(self, files: ModelFiles, config: ModelConfig) -> Path:
        if self._folder is not None:
            return self._folder / DEFAULT_FILE
        if SERVICE_PATH in config.parameters:
            return _service_path(files, config)
        path = files.version_dir / (config.default_model_filename or DEFAULT_FILE)
        if not path.is_file():
            raise invalid(f"model '{config.name}': there is no file '{path.name}' in version {files.version}")
        return path


class ThreadedPythonModel:
    """A version of a Python model whose instances are threads of the server."""

    def __init__(self, files: ModelFiles, config: ModelConfig, path: Path, server: ServerServices) -> None:
        self._files = files
        self._config = config
        self._path = path
        self._server = server
        self._values = PARAMETERS.checked(config)
        self._instances: list[ThreadInstance] = []

    async def create_instance(self, placement: Placement) -> AsyncInstance:
        instance = ThreadInstance(
            placement.name,
            what_to_load(self._files, self._config, self._path, placement),
            output_names=tuple(o.name for o in self._config.output),
            start_s_max=self._values[START_SECONDS],
            server=self._server,
            is_decoupled=self._config.is_decoupled,
            cores=placement.cores,
            takes_gpu=not self._values[CPU_INPUTS],
            shapes=ModelShapes.of(self._config),
        )
        await instance.open()
        self._instances = [*(each for each in self._instances if not each.is_closed), instance]
        return instance

    def memory(self) -> list[MemoryUsage]:
        """Return nothing: the model's memory is part of the server's."""
        return []

    async def is_ready(self) -> bool:
        return all(await asyncio.gather(*(i.is_ready() for i in self._instances if not i.is_closed)))

    async def aclose(self) -> None:
        self._instances.clear()


def _service_path(files: ModelFiles, config: ModelConfig) -> Path:
    path = files.model_dir / config.parameters[SERVICE_PATH]
    if not path.is_file():
        raise invalid(
            f"model '{config.name}': parameter {SERVICE_PATH}: there is no file '{path}'",
            hint="relative paths begin at the model's folder",
        )
    return path


async def _template(files: ModelFiles, config: ModelConfig, path: Path, environment: Environment) -> WorkerTemplate:
    """Start the process that the instances of a model are forked from.

    Raises:
        ServingError: The model cannot be imported, or forked afterwards.
    """
    if not WorkerTemplate.is_possible():
        raise unsupported(f"model '{config.name}': parameter {SHARE_MEMORY} needs Linux 5.3 or newer")
    template = WorkerTemplate(
        f"model '{config.name}'",
        (),
        {"PYTHONUNBUFFERED": "1"},
        model=(str(path), str(files.version_dir), str(files.model_dir), config.name),
        python=(environment.python, *environment.flags),
        inherited=environment.variables(os.environ),
    )
    try:
        await template.acquire()
    except BaseException:
        await template.aclose()
        raise
    return template


async def _environment(
    files: ModelFiles, config: ModelConfig, settings: BackendSettings, source: Path, backend_dir: Path | None
) -> Environment | None:
    """Return the environment of a model's processes, None where it runs in threads of the server."""
    if PARAMETERS.checked(config)[MODE] == PROCESS:
        return await environment_of(files, config, settings, backend_dir, source)
    given = [each for each in (ENVIRONMENT, EXECUTE_SECONDS, SHARE_MEMORY) if each in config.parameters]
    lacks = [f"parameter {each}" for each in given]
    if settings.values.get(BUILDER) != "none":
        inline = await asyncio.to_thread(read_inline, source)
        lacks += [REQUIREMENTS] if requirements_of(files, backend_dir) is not None else []
        lacks += [f"the dependencies in {source.name}"] if inline is not None and inline.packages else []
    if lacks:
        raise unsupported(
            f"model '{config.name}': {lacks[0]} cannot be met with {MODE} {THREAD}: a thread has the packages and the "
            "memory of the server, and cannot be ended",
            hint=f"leave one of the two out, or add packages to the server's Python; {MODE} {PROCESS} is the default",
        )
    return None


async def describe(path: Path, start: ModelConfig, settings: BackendSettings) -> dict[str, ModelConfig]:
    """Return the complete configurations of the models that a service file defines, by name; none if it defines none.

    Raises:
        ServingError: INVALID_ARG with the reason why it cannot be imported, or its environment not built.
    """
    environment = await environment_of_file(path, settings)
    state = _state(path)
    text = await ask_worker(
        path.name,
        environment,
        ("describe", str(path), orjson.dumps(to_json(start)).decode()),
        failed=f"'{path.name}' cannot be served",
        lost=f"'{path.name}' cannot be imported",
        late=f"the import of '{path.name}' did not finish",
    )
    configs = {name: from_json(orjson.dumps(config).decode()) for name, config in orjson.loads(text).items()}
    if len(_described) >= DESCRIBED_MAX:
        _described.clear()
    _described[path] = (state, start, configs)
    return configs


def described(path: Path, config: ModelConfig) -> ModelConfig | None:
    """Return the complete configuration of a model whose file has just been described, None otherwise."""
    state, start, configs = _described.get(path, ((0, 0), config, {}))
    known = configs.get(config.name)
    beginning = replace(start, name=config.name, default_model_filename=config.default_model_filename)
    if known is None or beginning != config or _state(path) != state:
        return None
    return replace(known, default_model_filename=config.default_model_filename)


def _state(path: Path) -> _State:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
