"""Completes configurations from plans, and loads them."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from charonia.config.complete import check_signature, merge_signature
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.problems import Problem, raise_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.errors import invalid, unsupported
from charonia.core.statistics import MemoryUsage
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles, Placement
from charonia.server.backends.model_file import model_file
from charonia.server.backends.tensorrt.gpu import Gpus, GpuStream, capability
from charonia.server.backends.tensorrt.instance import PlanInstance
from charonia.server.backends.tensorrt.options import PlanOptions, group_of, profiles_of, read_options, without_effect
from charonia.server.backends.tensorrt.plan import LoadedPlan, check_gpu, library, read_plan
from charonia.server.channel.cuda_driver import CudaError, driver
from charonia.server.machine.gpus import visible_gpus
from charonia.server.machine.memory import release_freed_memory
from charonia.server.metrics.devices import PinnedMemory

DEFAULT_FILE = "model.plan"

_log = logging.getLogger(__name__)

_Tensor = TypeVar("_Tensor", ModelInput, ModelOutput)


def open_plan(files: ModelFiles, config: ModelConfig, options: PlanOptions, device: int) -> LoadedPlan:
    """Load the plan of a model on a GPU: the file that the configuration names for the GPU's capability, if any.

    Raises:
        ServingError: There is no such GPU, or the plan cannot be loaded on it.
    """
    check_gpu(device)
    library()
    if config.cc_model_filenames:
        name = config.cc_model_filenames.get(capability(device), config.default_model_filename)
        config = replace(config, default_model_filename=name)
    path = model_file(files, config, DEFAULT_FILE)
    try:
        with driver().current(driver().context(device)):
            return read_plan(path, options)
    except CudaError as error:
        raise unsupported(f"GPU {device} cannot be used: {error}") from error


class TensorRtModel:
    """A loaded version, with an engine for each GPU that its instances run on.

    Args:
        files: Its folders.
        config: Its configuration.
        options: Its options.
        gpus: The memory of GPUs.
    """

    def __init__(self, files: ModelFiles, config: ModelConfig, options: PlanOptions, gpus: Gpus) -> None:
        self._files = files
        self._config = config
        self._options = options
        self._gpus = gpus
        self._plans: dict[int, LoadedPlan] = {}
        self._opening: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._memory: list[MemoryUsage] = []

    async def create_instance(self, placement: Placement) -> PlanInstance:
        """Make one more instance, with contexts of its own.

        Raises:
            ServingError: The plan cannot be loaded on the GPU, or contradicts the configuration.
        """
        device = placement.device_id
        async with self._opening[device]:
            if device not in self._plans:
                await asyncio.to_thread(self._gpus.trim, device)
                plan = await asyncio.to_thread(open_plan, self._files, self._config, self._options, device)
                self._plans[device] = plan
                self._memory.append(MemoryUsage("GPU", device, plan.size))
        numbers = profiles_of(group_of(self._config, placement.name))
        instance = await asyncio.to_thread(self._make, self._plans[device], placement, numbers)
        self._memory.append(MemoryUsage("GPU", device, instance.bytes, placement.name))
        return instance

    def memory(self) -> list[MemoryUsage]:
        """Return the size of each plan on a GPU, and what a batch of each instance takes besides."""
        return list(self._memory)

    async def aclose(self) -> None:
        """Release the engines, and the memory of their GPUs that no batch uses."""
        devices = list(self._plans)
        self._plans.clear()
        for device in devices:
            await asyncio.to_thread(self._gpus.trim, device)
        await asyncio.to_thread(release_freed_memory)

    def _make(self, plan: LoadedPlan, placement: Placement, numbers: Sequence[int]) -> PlanInstance:
        config, device = self._config, placement.device_id
        profiles = plan.selected(numbers)
        problems = check_signature(config, plan.signature(batched=config.max_batch_size > 0))
        largest = max(profile.batch_max() for profile in profiles)
        if config.max_batch_size > largest:
            message = f"the plan takes batches of up to {largest} in the profiles of '{placement.name}'"
            problems.append(Problem("max_batch_size", f"{message}, got {config.max_batch_size}"))
        if problems:
            raise_problems(config.name, problems)
        try:
            gpu = GpuStream(device, *self._gpus.pools(device), self._options.priority)
            with gpu.current():
                return PlanInstance(plan, config, gpu, profiles, has_graphs=self._options.has_graphs)
        except CudaError as error:
            raise unsupported(f"instance '{placement.name}' cannot use GPU {device}: {error}") from error


class TensorRtBackend:
    """The `tensorrt` backend."""

    name = "tensorrt"

    def __init__(self) -> None:
        self._gpus: Gpus | None = None

    def uses_gpus(self) -> bool:
        """Whether there are GPUs: a plan runs nowhere else."""
        return visible_gpus() > 0

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        """Fill in inputs, outputs and batching from the plan, unless inputs and outputs are given.

        Raises:
            ServingError: The plan cannot be read here, or contradicts the configuration.
        """
        if config.input and config.output:
            return Completion(config)
        group = config.instance_group[0] if config.instance_group else group_of(config, "")
        device = group.gpus[0] if group.gpus else 0
        if self._gpus is not None:
            await asyncio.to_thread(self._gpus.trim, device)
        plan = await asyncio.to_thread(open_plan, files, config, _options(config, settings), device)
        numbers = sorted({number for group in config.instance_group for number in profiles_of(group)}) or [0]
        largest = max(profile.batch_max() for profile in plan.selected(numbers))
        if config.max_batch_size > largest:
            raise invalid(
                f"autofill failed for model '{config.name}': configuration specified max-batch {config.max_batch_size} "
                f"but TensorRT engine only supports max-batch {largest}"
            )
        may_batch = all(tensor.is_shape or tensor.shape[:1] == (-1,) for tensor in plan.tensors)
        config, notes = merge_signature(
            config, plan.signature(batched=may_batch), default_max_batch_size=largest, model_name=config.name
        )
        shapes = {tensor.name for tensor in plan.tensors if tensor.is_shape}
        completed = replace(config, input=_marked(config.input, shapes), output=_marked(config.output, shapes))
        return Completion(completed, tuple(notes))

    async def load(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> TensorRtModel:
        """Load a version; its first instance on a GPU reads the plan.

        Raises:
            ServingError: A setting is wrong or not supported, the file is missing, or the library is.
        """
        options = _options(config, settings)
        await asyncio.to_thread(library)
        if not config.cc_model_filenames:
            model_file(files, config, DEFAULT_FILE)
        for sentence in without_effect(config, settings.values):
            _log.warning(sentence)
        if self._gpus is None:
            self._gpus = Gpus(settings.pinned or PinnedMemory(), options.pool_bytes, settings.gpu_pools)
        return TensorRtModel(files, seen_by_model(config), options, self._gpus)

    async def aclose(self) -> None:
        """Release the memory that no answer uses."""
        self._gpus = None


def _options(config: ModelConfig, settings: BackendSettings) -> PlanOptions:
    options, problems = read_options(config, settings.values)
    if problems:
        raise_problems(config.name, problems)
    return options


def _marked(tensors: tuple[_Tensor, ...], shapes: set[str]) -> tuple[_Tensor, ...]:
    return tuple(replace(tensor, is_shape_tensor=tensor.name in shapes) for tensor in tensors)
