"""A version of a model whose instances are worker processes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import orjson

from charonia.config.json_form import to_json
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.core.errors import unsupported
from charonia.core.statistics import MemoryUsage, WorkerState
from charonia.server.backends.api import AsyncInstance, ModelFiles, Placement
from charonia.server.backends.batch import ModelShapes
from charonia.server.backends.parameters import Param, Params
from charonia.server.backends.workers.instance import PythonInstance
from charonia.server.backends.workers.process import Environment, SharedProcess, SharedProcesses, Start, WorkerProcess
from charonia.server.backends.workers.services import ServerServices
from charonia.server.channel.channel import Incoming
from charonia.server.channel.cuda_driver import is_usable

START_SECONDS = "INITIALIZE_TIMEOUT_SECONDS"
EXECUTE_SECONDS = "EXECUTE_TIMEOUT_SECONDS"
CPU_INPUTS = "FORCE_CPU_ONLY_INPUT_TENSORS"

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


class PythonModel:
    """A version of a Python model whose instances are worker processes.

    Args:
        arguments: Returns arguments of `initialize` for an instance, in addition to those of every model.
        closing: Releases what belongs to the version, once its instances are closed.
        processes: Processes for several models of a file, None where each instance has its own.
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
        closing: Callable[[], Awaitable[None]] | None = None,
        processes: SharedProcesses | None = None,
    ) -> None:
        self._closing = closing
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
        if self._environment.template is not None and placement.kind is InstanceKind.KIND_GPU:
            raise unsupported(
                f"model '{self._config.name}': parameter {SHARE_MEMORY} cannot be met on a GPU, which forks cannot use",
                hint="instances on CPUs (KIND_CPU), or leave it out",
            )
        processes = self._processes
        which = (placement.name.removeprefix(self._config.name), placement.kind, placement.device_id)
        key = (self._path, _sources_fingerprint(self._path), self._environment.python, which)

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

        *folders, arguments = what_to_load(self._files, self._config, self._path, placement)
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
            shapes=ModelShapes.of(self._config),
        )
        await instance.open()
        self._instances = [*(each for each in self._instances if not each.is_closed), instance]
        return instance

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
        return all(
            await asyncio.gather(*(i.is_ready() for i in self._instances if not (i.health.problem or i.is_closed)))
        )

    async def aclose(self) -> None:
        """Release what belongs to the version; its instances are closed."""
        self._instances.clear()
        if self._closing is not None:
            await self._closing()


def what_to_load(
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


def _sources_fingerprint(path: Path) -> tuple[tuple[str, int], ...]:
    """Return what changes when one of the Python files in a folder does."""
    return tuple((each.name, each.stat().st_mtime_ns) for each in sorted(path.parent.glob("*.py")) if each.exists())
