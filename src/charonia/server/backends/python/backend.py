"""The `python` backend: completes configurations and loads models, in worker processes or threads."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import orjson

from charonia.config.json_form import from_json, to_json
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.config.parameters import MOUNTED_APP
from charonia.core.errors import invalid, unsupported
from charonia.core.request import CallFrame
from charonia.core.statistics import MemoryUsage, WorkerState
from charonia.server.backends.api import AsyncInstance, BackendSettings, Completion, ModelFiles, Placement
from charonia.server.backends.parameters import Param, Params
from charonia.server.backends.python.describe import ask_worker, described
from charonia.server.backends.python.environment import (
    BUILDER,
    ENVIRONMENT,
    REQUIREMENTS,
    SERVER_ENVIRONMENT,
    Environment,
    environment_of,
    read_inline,
    requirements_of,
)
from charonia.server.backends.python.instance import PythonInstance
from charonia.server.backends.python.process import WorkerProcess
from charonia.server.backends.python.reaper import reaper
from charonia.server.backends.python.reshape import reshaped
from charonia.server.backends.python.services import ServerServices
from charonia.server.backends.python.shared_process import SharedProcess, SharedProcesses, Start
from charonia.server.backends.python.template import WorkerTemplate
from charonia.server.backends.python.thread import ThreadInstance
from charonia.server.channel.channel import Incoming
from charonia.server.channel.cuda_driver import is_usable
from charonia.server.metrics.custom import CustomMetrics

_log = logging.getLogger(__name__)

DEFAULT_FILE = "model.py"

START_SECONDS = "INITIALIZE_TIMEOUT_SECONDS"
EXECUTE_SECONDS = "EXECUTE_TIMEOUT_SECONDS"
CPU_INPUTS = "FORCE_CPU_ONLY_INPUT_TENSORS"

SERVICE_PATH = "SERVICE_PATH"
"""Model parameter: file to use in place of `model.py` in the version's folder."""

SHARED = "SHARED_PROCESS"
"""Model parameter: "true" if the model runs in one process with the others of its file that have it."""

SHARE_MEMORY = "SHARE_MEMORY"

MODE = "EXECUTION_MODE"
PROCESS = "process"
THREAD = "thread"

# fmt: off
PARAMETERS = Params(
    "python",
    Param(EXECUTE_SECONDS, "time after which the process of a batch counts as hung and is replaced", float, 0.0, "none",
          ge=0),
    Param(START_SECONDS, "time limit of `initialize`", float, 600.0, "600", ge=0),
    Param(MODE, "`thread`: instances are threads of the server, see below", {PROCESS: PROCESS, THREAD: THREAD},
          PROCESS),
    Param(SHARE_MEMORY, "`true`: instances are forked from a process with the imported file, see below", bool, False,
          "`false`"),
    Param(CPU_INPUTS, "`no`: inputs in GPU memory stay there, see below", bool, True, "`yes`"),
)
# fmt: on

_KIND = {InstanceKind.KIND_GPU: "GPU", InstanceKind.KIND_MODEL: "MODEL"}


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
        if not config.input and MOUNTED_APP not in config.parameters:
            _log.warning(
                "model '%s' has no inputs%s: config.pbtxt, or auto_complete_config in %s, must define them",
                config.name,
                "" if config.output else " and no outputs",
                path.name,
            )
        metrics = settings.metrics if settings.metrics is not None else CustomMetrics()
        server = ServerServices(
            CallFrame(config.name, str(files.version)), settings.models, metrics, settings.busy_poll
        )
        if environment is None:
            return ThreadedPythonModel(files, config, path, server)
        await asyncio.to_thread(is_usable)  # starting the driver takes a while; the result is cached
        if PARAMETERS.checked(config)[SHARE_MEMORY]:
            template = await _template(files, config, path, environment)
            return PythonModel(files, config, path, replace(environment, template=template), server, template=template)
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


class PythonModel:
    """A version of a Python model whose instances are worker processes.

    Args:
        files: Folders of the version.
        config: The complete configuration.
        path: File of the model.
        environment: Where its workers run.
        server: Services of the server.
        arguments: Returns arguments of `initialize` for an instance, in addition to those of every model.
        processes: Processes for several models of a file, None where each instance has its own.
        template: The process that its instances are forked from, which ends with it; None for none of its own.
    """

    def __init__(
        self,
        files: ModelFiles,
        config: ModelConfig,
        path: Path,
        environment: Environment,
        server: ServerServices,
        arguments: Callable[[Placement], Mapping[str, str]] = lambda _: {},
        *,
        processes: SharedProcesses | None = None,
        template: WorkerTemplate | None = None,
    ) -> None:
        self._template = template
        self._processes = processes
        self._arguments = arguments
        self._files = files
        self._server = server
        self._config = config
        self._path = path
        self._environment = environment
        self._values = PARAMETERS.checked(config)
        self._instances: list[PythonInstance] = []

    async def create_instance(self, placement: Placement) -> AsyncInstance:
        """Start a worker and initialize the model in it."""
        if self._template is not None and placement.kind is InstanceKind.KIND_GPU:
            raise unsupported(
                f"model '{self._config.name}': parameter {SHARE_MEMORY} cannot be met on a GPU, which forks cannot use",
                hint="instances on CPUs (KIND_CPU), or leave it out",
            )
        processes = self._processes
        which = (placement.name.removeprefix(self._config.name), placement.kind, placement.device_id)
        key = (self._path, _state_beside(self._path), self._environment.python, which)

        def shared(start: Start) -> SharedProcess:
            assert processes is not None
            return processes.of(key, self._config.name, start)

        def make_process(message: Callable[[Incoming], None], end: Callable[[str], None]) -> WorkerProcess:
            return WorkerProcess(
                placement.name,
                environment=self._environment,
                threads=placement.threads,
                cores=placement.cores,
                takes_gpu=not self._values[CPU_INPUTS],
                shared=shared if processes is not None else None,
                on_message=message,
                on_end=end,
            )

        *folders, arguments = _what_to_load(self._files, self._config, self._path, placement)
        instance = PythonInstance(
            placement.name,
            make_process,
            (
                "initialize",
                *folders,
                {**arguments, **self._arguments(placement)},
                placement.name,
                {"decoupled": self._config.is_decoupled, "gpu": is_usable()},
            ),
            output_names=tuple(o.name for o in self._config.output),
            start_s_max=self._values[START_SECONDS],
            execute_s_max=self._values[EXECUTE_SECONDS],
            server=self._server,
            is_decoupled=self._config.is_decoupled,
        )
        await instance.open()
        self._instances = [*(each for each in self._instances if not each.is_closed), instance]
        return reshaped(instance, self._config)

    def memory(self) -> list[MemoryUsage]:
        return [MemoryUsage("CPU", 0, sum(i.resident_bytes() for i in self._instances))]

    def workers(self) -> list[WorkerState]:
        return [
            WorkerState(i.name, i.resident_bytes(), i.health.restarts, i.health.problem, i.cpu_seconds())
            for i in self._instances
            if not i.is_closed
        ]

    def is_failing(self) -> bool:
        """Return whether every worker has failed to start several times in a row."""
        health = [instance.health for instance in self._instances if not instance.is_closed]
        return bool(health) and all(each.is_failing for each in health)

    async def is_ready(self) -> bool:
        """Return whether the models of all running workers report that they are ready."""
        return all(await asyncio.gather(*(i.is_ready() for i in self._instances if not (i.problem or i.is_closed))))

    async def aclose(self) -> None:
        """End the process that instances were forked from; they are closed."""
        self._instances.clear()
        if self._template is not None:
            self._template.release()
            await self._template.aclose()


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
        """Start a thread and initialize the model in it."""
        instance = ThreadInstance(
            placement.name,
            _what_to_load(self._files, self._config, self._path, placement),
            output_names=tuple(o.name for o in self._config.output),
            start_s_max=self._values[START_SECONDS],
            server=self._server,
            is_decoupled=self._config.is_decoupled,
            cores=placement.cores,
            takes_gpu=not self._values[CPU_INPUTS],
        )
        await instance.open()
        self._instances = [*(each for each in self._instances if not each.is_closed), instance]
        return reshaped(instance, self._config)

    def memory(self) -> list[MemoryUsage]:
        """Return nothing: the model's memory is part of the server's."""
        return []

    async def is_ready(self) -> bool:
        return all(await asyncio.gather(*(i.is_ready() for i in self._instances if not i.is_closed)))

    async def aclose(self) -> None:
        self._instances.clear()


def _what_to_load(
    files: ModelFiles, config: ModelConfig, path: Path, placement: Placement
) -> tuple[str, str, str, dict[str, str]]:
    """Return the model's file, the folders of version and model, and the arguments of `initialize`."""
    arguments = {
        "model_config": orjson.dumps(to_json(config)).decode(),
        "model_instance_kind": _KIND.get(placement.kind, "CPU"),
        "model_instance_name": placement.name,
        "model_instance_device_id": str(placement.device_id),
        "model_repository": str(files.model_dir),
        "model_version": str(files.version),
        "model_name": config.name,
    }
    return str(path), str(files.version_dir), str(files.model_dir), arguments


def _state_beside(path: Path) -> tuple[tuple[str, int], ...]:
    """Return what changes when one of the Python files in a folder does."""
    return tuple((each.name, each.stat().st_mtime_ns) for each in sorted(path.parent.glob("*.py")) if each.exists())


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
    """Return the environment of a model's processes, None where it runs in threads of the server.

    Raises:
        ServingError: It is not available, or the model has an option that threads do not support.
    """
    if PARAMETERS.checked(config)[MODE] == PROCESS:
        return await environment_of(files, config, settings, backend_dir, source)
    for parameter, reason in (
        (ENVIRONMENT, "a thread of the server has the server's packages"),
        (EXECUTE_SECONDS, "a thread that hangs cannot be ended"),
        (SHARE_MEMORY, "threads share it anyway"),
    ):
        if parameter in config.parameters:
            raise unsupported(
                f"model '{config.name}': parameter {parameter} cannot be met with {MODE} {THREAD}: {reason}",
                hint=f"leave one of the two out; {MODE} {PROCESS} is the default",
            )
    if settings.values.get(BUILDER) != "none" and requirements_of(files, backend_dir) is not None:
        raise unsupported(
            f"model '{config.name}': {REQUIREMENTS} cannot be met with {MODE} {THREAD}: a thread of the server has the "
            "server's packages",
            hint=f"install them where the server runs and remove the file, or set {MODE} to {PROCESS}",
        )
    inline = await asyncio.to_thread(read_inline, source)
    if settings.values.get(BUILDER) != "none" and inline is not None and inline.dependencies:
        raise unsupported(
            f"model '{config.name}': the dependencies in {source.name} cannot be met with {MODE} {THREAD}: a thread of "
            "the server has the server's packages",
            hint=f"install them where the server runs and remove the block, or set {MODE} to {PROCESS}",
        )
    return None
