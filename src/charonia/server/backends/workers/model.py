"""A version of a model whose instances are worker processes."""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import orjson

from charonia.config.json_form import to_json
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig
from charonia.core.errors import ServingError, unsupported
from charonia.core.request import CallFrame, InferRequest
from charonia.core.statistics import MemoryUsage, WorkerState
from charonia.core.tensor import Tensor
from charonia.server.backends.api import AsyncInstance, BatchSink, ModelFiles, Outputs, Placement, Result
from charonia.server.backends.batch import TensorPlan, input_plans, output_plans
from charonia.server.backends.parameters import Param, Params
from charonia.server.backends.workers.instance import PythonInstance
from charonia.server.backends.workers.process import Environment, SharedProcess, SharedProcesses, Start, WorkerProcess
from charonia.server.backends.workers.services import ServerServices
from charonia.server.backends.workers.template import WorkerTemplate
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


def _state_beside(path: Path) -> tuple[tuple[str, int], ...]:
    """Return what changes when one of the Python files in a folder does."""
    return tuple((each.name, each.stat().st_mtime_ns) for each in sorted(path.parent.glob("*.py")) if each.exists())


def reshaped(instance: AsyncInstance, config: ModelConfig) -> AsyncInstance:
    """Return the instance, wrapped if the configuration has `reshape`."""
    has_any = any(given.reshape for given in config.input) or any(output.reshape for output in config.output)
    return ReshapedInstance(instance, config) if has_any else instance


class ReshapedInstance:
    """An instance with `reshape` around it."""

    def __init__(self, instance: AsyncInstance, config: ModelConfig) -> None:
        self._instance = instance
        self._is_batched = config.max_batch_size > 0
        self._inputs = {plan.name: plan for plan in input_plans(config) if plan.target is not None}
        self._outputs = {plan.name: plan for plan in output_plans(config) if plan.target is not None}
        self._sinks: dict[BatchSink, ReshapingSink] = {}  # of batches with open requests

    def start(self, requests: Sequence[InferRequest], sink: BatchSink) -> None:
        """Start a batch with its inputs in the model's shapes."""
        mine = self._sinks[sink] = ReshapingSink(self, sink, len(requests))
        self._instance.start([self._twin(request) for request in requests], mine)

    def cancel(self, sink: BatchSink, index: int) -> None:
        """Pass it on while the request is open."""
        mine = self._sinks.get(sink)
        if mine is not None:
            self._instance.cancel(mine, index)
            if sink.is_cancelled(index):
                mine.closed(index)

    def forget(self, sink: BatchSink) -> None:
        self._sinks.pop(sink, None)

    async def aclose(self) -> None:
        await self._instance.aclose()

    def answered(self, result: Result) -> Result:
        """Return an answer in the shapes of the configuration."""
        if isinstance(result, Outputs):
            tensors = []
            for tensor in result.tensors:
                plan = self._outputs.get(tensor.name)
                if plan is not None and not self._is_as_configured(plan, tensor.shape):
                    try:
                        array = plan.reshape(tensor.array, self._is_batched)
                    except ServingError as error:
                        return error
                    tensor = Tensor(tensor.name, tensor.datatype, array)
                tensors.append(tensor)
            result.tensors = tensors
        return result

    def _is_as_configured(self, plan: TensorPlan, shape: tuple[int, ...]) -> bool:
        shape, dims = shape[1 if self._is_batched else 0 :], plan.target or ()
        return len(shape) == len(dims) and all(dim in (-1, size) for dim, size in zip(dims, shape, strict=True))

    def _twin(self, request: InferRequest) -> InferRequest:
        twin = copy.copy(request)  # the front end still uses the request itself
        twin.inputs = {
            name: Tensor(name, tensor.datatype, self._inputs[name].reshape(tensor.array, self._is_batched))
            if name in self._inputs
            else tensor
            for name, tensor in request.inputs.items()
        }
        return twin


class ReshapingSink:
    """A sink that reshapes responses for another sink."""

    __slots__ = ("_has_finished", "_instance", "_open", "_sink")

    def __init__(self, instance: ReshapedInstance, sink: BatchSink, count: int) -> None:
        self._instance = instance
        self._sink = sink
        self._open = set(range(count))
        self._has_finished = False

    def respond(self, index: int, result: Result | None, final: bool) -> None:
        """Pass on an answer, reshaped."""
        if final:
            self.closed(index)
        self._sink.respond(index, None if result is None else self._instance.answered(result), final)

    def closed(self, index: int) -> None:
        """Note that a request has its last response, or that its caller has gone."""
        self._open.discard(index)
        self._forget_if_over()

    def finish(
        self, input_end_ns: int, output_start_ns: int, error: ServingError | None = None, *, leaves_open: bool = False
    ) -> None:
        """Pass on the end."""
        self._has_finished = True
        if not leaves_open:
            self._open.clear()
        self._forget_if_over()
        self._sink.finish(input_end_ns, output_start_ns, error, leaves_open=leaves_open)

    def is_cancelled(self, index: int) -> bool:
        return self._sink.is_cancelled(index)

    def frame(self) -> CallFrame:
        """Return the caller of the requests that the model makes while it runs the batch."""
        return self._sink.frame()

    def _forget_if_over(self) -> None:
        if self._has_finished and not self._open:
            self._instance.forget(self._sink)
