"""The PyTorch backend: completes configurations from models, loads them, and warms up compiled ones.

A compiled model runs on zeros before it is ready: compiling takes seconds to minutes, and no request should wait for
it.
"""

import asyncio
import logging
import shlex
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from charonia.config.complete import Signature, check_signature, merge_signature
from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig
from charonia.config.parameters import bounds_of
from charonia.config.problems import Problem, check_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, ServingError, invalid
from charonia.core.request import InferRequest
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Tensor
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles, Placement
from charonia.server.backends.array_backend import PlannedBackend, SharingModel
from charonia.server.backends.block_pool import BlockPool
from charonia.server.backends.pytorch.archive import FileKind
from charonia.server.backends.pytorch.devices import ComputeDevice, CpuDevice, GpuDevice, check_gpu, gpu_count, pinned
from charonia.server.backends.pytorch.instance import PyTorchInstance
from charonia.server.backends.pytorch.openmp import in_passing_thread
from charonia.server.backends.pytorch.program import EAGER_RUNTIME, PARAMETERS, Program, RunPlan, read_plan
from charonia.server.backends.pytorch.source import Source, device_kind, find_source
from charonia.server.machine.memory import release_freed_memory
from charonia.server.metrics.devices import PinnedMemory

SIZES = (16, 24)
"""Sizes tried for variable dimensions: the second one makes PyTorch compile code for any size."""

_COMPILER_FAULTS = ("BackendCompilerFailed", "torch._dynamo", "Unsupported", "CppCompileError", "InductorError")

_log = logging.getLogger(__name__)


def warm_up(instance: PyTorchInstance, config: ModelConfig) -> None:
    """Run the model on zeros in the batch sizes and shapes that code is compiled for.

    Raises:
        ServingError: The model cannot be compiled. If it only refuses its inputs, this is logged: zeros are not valid
            for every model.
    """
    for request in requests(config):
        try:
            instance.execute([request])
        except ServingError as error:
            cause = error.__cause__
            kind = f"{type(cause).__module__}.{type(cause).__qualname__}"
            if error.code is Code.UNAVAILABLE or any(fault in kind for fault in _COMPILER_FAULTS):
                raise invalid(f"torch.compile: {error.message}", hint=error.hint) from error
            _log.warning("model '%s': its warm-up on zeros failed, so it is compiled later: %s", config.name, error)
            return


def requests(config: ModelConfig) -> Iterator[InferRequest]:
    """Yield a request of zeros for each batch size and size of variable dimensions."""
    largest = config.max_batch_size
    batches = sorted({largest, max(1, largest - 1), 1}, reverse=True) if largest > 0 else [0]
    has_variable = any(-1 in tensor.dims for tensor in config.input)
    for size in SIZES if has_variable else SIZES[:1]:
        for batch in batches:
            tensors = {}
            for tensor in config.input:
                shape = [batch] * bool(batch) + [size if dim == -1 else dim for dim in tensor.dims]
                datatype = tensor.data_type or DataType.FP32
                array = np.full(shape, b"", object) if datatype is DataType.BYTES else np.zeros(shape, datatype.numpy)
                tensors[tensor.name] = Tensor(tensor.name, datatype, array)
            yield InferRequest(config.name, tensors)


class PyTorchModel(SharingModel):
    """A loaded version: its memory is the weights of each instance, or of each device where instances share them."""

    def __init__(self, source: Source, config: ModelConfig, plan: RunPlan, pool: BlockPool) -> None:
        super().__init__()
        self._source = source
        self._config = config
        self._plan = plan
        self._pool = pool
        self._instances: list[PyTorchInstance] = []

    async def create_instance(self, placement: Placement) -> PyTorchInstance:
        if placement.kind is InstanceKind.KIND_GPU:
            await asyncio.to_thread(check_gpu, placement.name, placement.device_id)
        device = _device(placement)
        if not self._plan.shares_weights:
            program = await in_passing_thread(self._open, device, placement.name, 1)
        else:
            runners = self._sharing(placement)
            program = await self.shared(device, lambda: in_passing_thread(self._open, device, "", runners))
        signature = await self.shared("signature", lambda: in_passing_thread(self._exported_signature))
        check_problems(self._config.name, check_signature(self._config, signature) if signature is not None else [])
        return await in_passing_thread(self._make, placement, program, device)

    async def is_ready(self) -> bool:
        return not any(each.problem for each in self._instances if not each.is_closed)

    async def aclose(self) -> None:
        self._instances.clear()
        await super().aclose()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            await asyncio.to_thread(torch.cuda.empty_cache)

    def _open(self, device: torch.device | None, instance: str, runners: int) -> Program:
        program = self._source.open(device, self._plan, runners)
        kind, number = ("GPU", device.index or 0) if device is not None and device.type == "cuda" else ("CPU", 0)
        self.usage.append(MemoryUsage(kind, number, program.memory_bytes(), instance))
        release_freed_memory()
        return program

    def _make(self, placement: Placement, program: Program, device: torch.device | None) -> PyTorchInstance:
        is_gpu = placement.kind is InstanceKind.KIND_GPU and device is not None
        moves: ComputeDevice = GpuDevice(device, self._pool) if is_gpu and device is not None else CpuDevice()
        threads = self._plan.intra_op_threads or placement.threads
        instance = PyTorchInstance(placement.name, program, self._config, self._plan, moves, threads)
        if self._plan.compile_options is not None:
            warm_up(instance, self._config)
        self._instances = [*(each for each in self._instances if not each.is_closed), instance]
        return instance

    def _exported_signature(self) -> Signature | None:
        """Return the exported signature, with the names of the configuration; None where there is none."""
        inputs = [tensor.name for tensor in self._config.input]
        outputs = [tensor.name for tensor in self._config.output]
        found = self._source.signature(self._plan, inputs, outputs)
        return found.signature if found is not None else None

    def _sharing(self, placement: Placement) -> int:
        """Return the number of instances that share the weights of one device, at most."""
        groups = [g for g in self._config.instance_group if g.kind is placement.kind]
        if placement.kind is InstanceKind.KIND_GPU:
            groups = [g for g in groups if placement.device_id in g.gpus]
        bounds = bounds_of(self._config)
        return bounds.most if bounds is not None else max(1, sum(group.count for group in groups))


class PyTorchBackend(PlannedBackend[RunPlan, PyTorchModel]):
    """The `pytorch` backend."""

    name = "pytorch"
    parameters = PARAMETERS
    runs_on_gpus = True
    read_plan = staticmethod(read_plan)

    def __init__(self) -> None:
        self._inter_op_threads = 0
        self._pool: BlockPool | None = None

    def uses_gpus(self) -> bool:
        """Whether the installed PyTorch can use the GPUs of this machine."""
        return gpu_count() > 0

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        plan = self.plan(config, settings)
        source = await asyncio.to_thread(find_source, files, config)
        notes: list[str] = []
        if source.kind is not FileKind.AOT_INDUCTOR and config.platform == "torch_aoti":
            config = replace(config, platform="")
            notes.append(f"platform: none, as the file is {source.kind.value if source.kind else 'a module in Python'}")
        package = source.path if source.kind is FileKind.AOT_INDUCTOR else None
        if package is not None and not config.instance_group and device_kind(package) == "cpu":
            config = replace(config, instance_group=(InstanceGroup(kind=InstanceKind.KIND_CPU),))
            notes.append("instance_group: on the CPU, which the package was compiled for")
        if config.input and config.output:
            return Completion(config, tuple(notes))
        found = await in_passing_thread(source.inspect, config, plan)
        if found.signature is not None:
            size = settings.default_max_batch_size
            config, merged = merge_signature(config, found.signature, default_max_batch_size=size)
            notes += merged
        return Completion(config, (*notes, *found.notes))

    async def open(
        self, files: ModelFiles, config: ModelConfig, plan: RunPlan, settings: BackendSettings
    ) -> PyTorchModel:
        check_problems(config.name, _problems(config, plan))
        source = await asyncio.to_thread(find_source, files, config)
        if not config.input or not config.output:
            missing = "inputs" if not config.input else "outputs"
            found = await in_passing_thread(source.inspect, config, plan)
            reason = "; ".join(note for note in found.notes if note.startswith(missing))
            raise invalid(
                f"model '{config.name}' has no {missing}: they are not configured, and {missing} "
                f"{reason.removeprefix(f'{missing}: ') or 'could not be inferred'}",
                hint=_how_to_configure(config, source, found.guess),
            )
        self._set_process_options(config.name, plan)
        if self._pool is None:
            self._pool = BlockPool(settings.pinned or PinnedMemory(), pinned)
        return PyTorchModel(source, seen_by_model(config), plan, self._pool)

    def _set_process_options(self, model: str, plan: RunPlan) -> None:
        """Set PyTorch's options of the whole process; the first model that has them decides."""
        wanted = plan.inter_op_threads or self._inter_op_threads or 1
        if wanted != self._inter_op_threads and self._inter_op_threads == 0:
            try:
                torch.set_num_interop_threads(wanted)
            except RuntimeError:  # this process has used PyTorch before
                wanted = torch.get_num_interop_threads()
            self._inter_op_threads = wanted
        if plan.inter_op_threads not in (0, self._inter_op_threads):
            _log.warning(
                "model '%s': INTER_OP_THREAD_COUNT is set once for all models, and is %d already",
                model,
                self._inter_op_threads,
            )
        if not plan.uses_cudnn and torch.backends.cudnn.enabled:
            torch.backends.cudnn.enabled = False
            _log.warning("model '%s': DISABLE_CUDNN is in effect for all models of this server", model)


def _how_to_configure(config: ModelConfig, source: Source, guess: Signature | None) -> str:
    """Return how to write the configuration of a model: for a file that is served alone, lines for a shell."""
    name, missing = config.name, "input" if not config.input else "output"
    tensors = f'{missing} {{ name: "..." data_type: TYPE_FP32 dims: [ -1, 512 ] }}'
    if guess is not None:
        kinds = (("input", guess.inputs), ("output", guess.outputs))
        tensors = " ".join(
            f'{kind} {{ name: "{t.name}" data_type: {t.datatype.config} dims: [ {", ".join(map(str, t.shape))} ] }}'
            for kind, tensors in kinds
            for t in tensors
        )
    path = source.path
    if path is None or not path.is_symlink():
        return f"declare them in {name}/config.pbtxt, beside the version's folder {name}/1: {tensors}"
    folder = shlex.quote(f"models/{name}")
    file = "model.pt2" if path.suffix == ".pt2" else "model.pt"
    text = shlex.quote(f'backend: "pytorch" {tensors}')
    return (
        f"these lines serve it{', with dims that it took' if guess is not None else ''}:\n\n"
        f"mkdir -p {folder}/1\ncp {shlex.quote(str(path.resolve()))} {folder}/1/{file}\n"
        f"echo {text} > {folder}/config.pbtxt\ncharonia serve models\n"
    )


def _device(placement: Placement) -> torch.device | None:
    """Return the device of an instance, None where the model decides."""
    if placement.kind is InstanceKind.KIND_GPU:
        return torch.device("cuda", placement.device_id)
    return None if placement.kind is InstanceKind.KIND_MODEL else torch.device("cpu")


def _problems(config: ModelConfig, plan: RunPlan) -> Iterator[Problem]:
    """Yield what the configuration requests and PyTorch models do not support."""
    for index, tensor in enumerate(config.input):
        dims = tensor.inner_dims
        if tensor.data_type is DataType.BYTES and (
            len(dims) > 1 or (config.max_batch_size > 0 and dims not in ((), (1,)))
        ):
            yield Problem(
                f"input[{index}].dims",
                f"strings of '{tensor.name}' become one list: expected dims [ 1 ] with batches, one dimension without",
            )
    if config.cc_model_filenames:
        yield Problem("cc_model_filenames", "is not supported by the pytorch backend; set default_model_filename")
    if config.runtime != EAGER_RUNTIME and plan.class_name:
        yield Problem("parameters['MODULE_CLASS']", f"is for runtime '{EAGER_RUNTIME}' only")
