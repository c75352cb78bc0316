"""Completes configurations from plans, loads them, and runs batches.

Source: CUDA driver API, "Memory Management", "Stream Management" and "Graph Management".
"""

import asyncio
import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np

from charonia.config.complete import check_signature, merge_signature
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.problems import Problem, check_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.dtypes import DataType
from charonia.core.errors import internal, invalid, unavailable, unsupported
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Array
from charonia.server.backends.api import BackendSettings, Completion, ModelFiles, Placement
from charonia.server.backends.array_backend import ArrayInstance, PlannedBackend, SharingModel, model_file
from charonia.server.backends.block_pool import Block, BlockPool, within_an_eighth
from charonia.server.backends.tensorrt.options import (
    PARAMETERS,
    GraphShapes,
    PlanOptions,
    Shape,
    graph_shapes,
    graph_specs,
    group_of,
    profiles_of,
    read_options,
    without_effect,
)
from charonia.server.backends.tensorrt.plan import LoadedPlan, Profile, check_gpu, library, read_plan
from charonia.server.channel.cuda_driver import CudaError, Driver, driver
from charonia.server.machine.gpus import visible_gpus
from charonia.server.metrics.devices import MemoryAccount, PinnedMemory

ALIGNMENT = 256
"""Of everything in a block, as TensorRT asks; memory of a GPU has it."""

_NON_BLOCKING = 1
_PORTABLE = 1
_THREAD_LOCAL = 1
_CAPABILITY = (75, 76)
"""Attributes of a GPU: major and minor number of its compute capability."""


class Gpus:
    """The pools of all GPUs, which the models of the backend share. Thread-safe.

    Args:
        pinned: Account of the pinned memory.
        limit_bytes: Limit of the memory of each GPU, 0 for all that it has.
        accounts: Where the account of the memory of each GPU that is used goes.
    """

    def __init__(self, pinned: MemoryAccount, limit_bytes: int, accounts: dict[int, MemoryAccount]) -> None:
        self._pinned = pinned
        self._limit_bytes = limit_bytes
        self._accounts = accounts
        self._pools: dict[int, tuple[BlockPool, BlockPool]] = {}
        self._lock = threading.Lock()

    def pools(self, device: int) -> tuple[BlockPool, BlockPool]:
        """Return pinned memory for a GPU, and the memory of the GPU. Raises CudaError."""
        with self._lock:
            if device not in self._pools:
                with driver().current(driver().context(device)):
                    account = MemoryAccount(self._limit_bytes or _memory_info()[1])
                self._accounts[device] = account
                self._pools[device] = (
                    BlockPool(self._pinned, partial(_pinned, device)),
                    BlockPool(account, partial(_Memory, device, ("cuMemAlloc_v2", "cuMemFree_v2")), within_an_eighth),
                )
            return self._pools[device]

    def trim(self, device: int) -> None:
        """Free the memory of a GPU that no batch uses, for a plan that is loaded or because one is unloaded."""
        if device in self._pools:
            self._pools[device][1].trim()


class _Memory:
    """Memory that the driver allocates, freed with its last reference."""

    def __init__(self, device: int, functions: tuple[str, str], size: int, *flags: int) -> None:
        found, address = driver(), ctypes.c_void_p()
        context = found.context(device)
        try:
            with found.current(context):
                found.call(functions[0], ctypes.byref(address), ctypes.c_size_t(size), *flags)
        except CudaError as error:
            raise RuntimeError(str(error)) from error
        self.address = address.value or 0
        weakref.finalize(self, _free, found, context, functions[1], address).atexit = False


def _pinned(device: int, size: int) -> Any:
    memory = _Memory(device, ("cuMemHostAlloc", "cuMemFreeHost"), size, _PORTABLE)
    array: Any = (ctypes.c_char * size).from_address(memory.address)
    array.memory = memory  # which lives as long
    return array


def _free(found: Driver, context: ctypes.c_void_p, function: str, address: object) -> None:
    with suppress(CudaError), found.current(context):  # a GPU that has failed has nothing to free
        found.call(function, address)


def _memory_info() -> tuple[int, int]:
    """Return the free bytes of the current GPU, and all that it has. Raises CudaError."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    driver().call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def capability(device: int) -> str:
    """Return the compute capability of a GPU, such as "9.0". Raises CudaError."""
    found, handle, numbers = driver(), ctypes.c_int(), []
    found.call("cuDeviceGet", ctypes.byref(handle), device)
    for attribute in _CAPABILITY:
        number = ctypes.c_int()
        found.call("cuDeviceGetAttribute", ctypes.byref(number), attribute, handle)
        numbers.append(str(number.value))
    return ".".join(numbers)


class GpuStream:
    """A GPU and a stream of its own on it. Used by one thread at a time, within `current`.

    Args:
        memory: The memory of the GPU; that of a block has an `address`.
        priority: CUDA's priority of the stream.

    Raises:
        CudaError: The GPU fails.
    """

    def __init__(self, device: int, pinned: BlockPool, memory: BlockPool, priority: int = 0) -> None:
        self._device = device
        self._pinned = pinned
        self._memory = memory
        self._driver = driver()
        self._context = self._driver.context(device)
        self._busy: list[object] = []  # what the stream still reads or writes
        stream = ctypes.c_void_p()
        with self.current():
            self._driver.call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, priority)
        self.stream = stream.value or 0

    def current(self) -> AbstractContextManager[None]:
        """Make the GPU that of this thread."""
        return self._driver.current(self._context)

    def take(self, size: int) -> Block:
        """Return a block of the GPU's memory, which goes back by `release` after `wait`.

        Raises:
            ServingError: UNAVAILABLE when there is not enough, even without the idle blocks.
            CudaError: The GPU fails.
        """
        block = self._memory.take(size)
        if block is None:
            account = self._memory.account
            free = min(account.limit_bytes - account.used_bytes, _memory_info()[0])
            raise unavailable(
                f"GPU {self._device} has not enough memory: a batch needs {size} bytes, {free} are free",
                hint="fewer models or instances at a time, or a plan with smaller profiles; "
                f"the limit of all batches is {account.limit_bytes} (--backend-config=tensorrt,memory-pool-byte-size)",
            )
        return block

    def release(self, block: Block) -> None:
        """Give a block back that the stream no longer uses."""
        self._memory.release(block)

    def clear(self, address: int, size: int) -> None:
        """Begin to fill memory of the GPU with zeros. Raises CudaError."""
        target, stream = ctypes.c_uint64(address), ctypes.c_void_p(self.stream)
        self._driver.call("cuMemsetD8Async", target, ctypes.c_uint8(0), ctypes.c_size_t(size), stream)

    def put(self, array: Array, address: int) -> None:
        """Begin to copy an array to the GPU, through pinned memory where there is some."""
        source = self._host(array.nbytes)
        np.copyto(source.view(array.dtype).reshape(array.shape), array)
        self._copy("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), _address(source), array.nbytes)

    def get(self, address: int, shape: Sequence[int], datatype: DataType) -> Array:
        """Begin to copy a tensor from the GPU; return the array, which is complete after `wait`."""
        raw = self._host(prod(shape) * datatype.byte_size)
        self._copy("cuMemcpyDtoHAsync_v2", _address(raw), ctypes.c_uint64(address), raw.nbytes)
        return raw.view(datatype.numpy).reshape(tuple(shape))

    def wait(self) -> None:
        """Return when everything that was begun is done. Raises CudaError."""
        try:
            self._driver.call("cuStreamSynchronize", ctypes.c_void_p(self.stream))
        finally:
            self._busy.clear()

    def capture(self, work: Callable[[], None]) -> ctypes.c_void_p:
        """Return a graph of what the work puts on the stream, which it does not do yet. Raises CudaError."""
        stream, graph, ready = ctypes.c_void_p(self.stream), ctypes.c_void_p(), ctypes.c_void_p()
        self._driver.call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
        try:
            work()
        finally:
            self._driver.call("cuStreamEndCapture", stream, ctypes.byref(graph))
        try:
            self._driver.call("cuGraphInstantiateWithFlags", ctypes.byref(ready), graph, ctypes.c_uint64(0))
        finally:
            self._driver.call("cuGraphDestroy", graph)
        return ready

    def launch(self, graph: ctypes.c_void_p) -> None:
        """Begin what a graph holds. Raises CudaError."""
        self._driver.call("cuGraphLaunch", graph, ctypes.c_void_p(self.stream))

    def close(self, graphs: Sequence[ctypes.c_void_p]) -> None:
        """Release the stream, when it has done what was begun, and its graphs."""
        with suppress(CudaError):
            self.wait()
        for graph in graphs:
            with suppress(CudaError):
                self._driver.call("cuGraphExecDestroy", graph)
        with suppress(CudaError):
            self._driver.call("cuStreamDestroy_v2", ctypes.c_void_p(self.stream))

    def _host(self, size: int) -> Array:
        """Return memory of the CPU for a copy, pinned where there is some: free when the last view of it is gone."""
        block = self._pinned.take(size) if size else None
        if block is None:
            raw: Array = np.empty(size, np.uint8)
        else:
            raw = block.array(size)
            weakref.finalize(raw, self._pinned.release, block)
        self._busy.append(raw)
        return raw

    def _copy(self, function: str, target: object, source: object, size: int) -> None:
        if size:
            self._driver.call(function, target, source, ctypes.c_size_t(size), ctypes.c_void_p(self.stream))


def _address(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class _Graph(NamedTuple):
    """A captured graph, and the shapes of the outputs that it computes."""

    shapes: GraphShapes
    handle: Any
    outputs: Mapping[str, Shape]


class _Context:
    """A context of the engine in one profile."""

    def __init__(self, profile: Profile, native: Any) -> None:
        self.profile = profile
        self.native = native
        self.told: dict[str, Shape] = {}
        self.graphs: list[_Graph] = []
        self.address = 0


class PlanInstance(ArrayInstance):
    """An instance. To be made with the GPU current.

    A batch takes a block from the pool of the GPU: activations first, inputs and outputs behind them, each as large as
    the profiles allow. Captured graphs hold addresses, so an instance that has some keeps its block.

    Args:
        gpu: The GPU, with a stream of this instance's own, which it closes.
        profiles: The optimization profiles that it uses.
        has_graphs: Whether CUDA graphs are captured.

    Attributes:
        bytes: Memory of the GPU that a batch takes.

    Raises:
        ServingError: The GPU has not enough memory, or TensorRT refuses a profile or a shape.
        CudaError: The GPU fails.
    """

    def __init__(
        self, plan: LoadedPlan, config: ModelConfig, gpu: GpuStream, profiles: Sequence[Profile], *, has_graphs: bool
    ) -> None:
        super().__init__(config)
        self._plan = plan
        self._gpu = gpu
        self._on_gpu = {tensor.name: tensor for tensor in plan.tensors if not tensor.is_shape}
        self._values = {t.name: np.zeros(t.shape, t.datatype.numpy) for t in plan.tensors if t.is_shape}
        self._sizes = dict.fromkeys(self._on_gpu, 0)
        self._contexts: list[_Context] = []
        self._own: Block | None = None
        try:
            for profile in profiles:
                self._contexts.append(self._open(profile))
            has_unknown = [self._measure(context) for context in self._contexts]
            self._lay_out()
            self._keeps_block = has_graphs and not self._values and not any(has_unknown)
            if has_graphs and not self._keeps_block:
                _log.warning("model '%s': no CUDA graphs are captured, as shapes depend on values", config.name)
            with self._block() as block:  # also without graphs: if it does not fit, the load fails
                if self._keeps_block:
                    self._capture_all(config, block)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        with self._gpu.current():
            graphs = [graph.handle for context in self._contexts for graph in context.graphs]
            self._contexts.clear()
            self._gpu.close(graphs)
        own, self._own = self._own, None
        if own is not None:
            self._gpu.release(own)

    def run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        gpu = self._gpu
        try:
            with gpu.current(), self._block() as block:
                try:
                    arrays = self._run(names, feed, block)
                finally:
                    gpu.wait()
        except CudaError as error:
            raise internal(f"the GPU failed: {error}") from error
        rows = next(iter(feed.values())).shape[0] if self.is_batched else 0
        for name in names:
            if name not in arrays:
                values = self._values[name]
                arrays[name] = np.tile(values[1:], (rows, 1)) if self.is_batched else values.copy()
        return [arrays[name] for name in names]

    # Inside.

    @contextmanager
    def _block(self) -> Iterator[int]:
        """Lend a block for a batch, by its address."""
        block = self._own or self._gpu.take(self.bytes)
        try:
            yield block.memory.address
        finally:
            if self._keeps_block:
                self._own = block
            else:
                self._gpu.release(block)

    def _run(self, names: Sequence[str], feed: Mapping[str, Array], block: int) -> dict[str, Array]:
        """Begin everything; return the outputs that lie on the GPU."""
        shapes = {name: self._shape(name, array) for name, array in feed.items()}
        context = self._context_for(shapes)
        fitting = (graph for graph in context.graphs if graph.shapes.serves(shapes))
        graph = min(fitting, key=lambda graph: sum(map(prod, graph.shapes.upper.values())), default=None)
        for name, array in feed.items():
            if name in self._on_gpu:
                value = array if graph is None else _filled(array, graph.shapes.upper[name])
                self._gpu.put(value, block + self._offsets[name])
        if graph is not None:
            self._gpu.launch(graph.handle)
            found = graph.outputs
            if self.is_batched:  # rows that were not asked for stay there
                rows = next(iter(shapes.values()))[0]
                found = {name: (rows, *shape[1:]) for name, shape in found.items()}
        else:
            self._set_shapes(context, shapes)
            self._enqueue(context, block)
            found = self._output_shapes(context)
        return {
            name: self._gpu.get(block + self._offsets[name], found[name], self._on_gpu[name].datatype)
            for name in names
            if name in self._on_gpu
        }

    def _context_for(self, shapes: Mapping[str, Shape]) -> _Context:
        distances = {context: context.profile.distance(shapes) for context in self._contexts}
        fitting = {context: distance for context, distance in distances.items() if distance is not None}
        if not fitting:
            ranges = "; ".join(str(context.profile) for context in self._contexts)
            given = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            others = len(self._plan.profiles) > len(self._contexts)
            raise invalid(
                f"no optimization profile of the plan takes {given}; it has {ranges}",
                hint="`profile` of the instance group selects others" if others else "",
            )
        return min(fitting, key=fitting.__getitem__)

    def _shape(self, name: str, array: Array) -> Shape:
        """Return the shape of an input, or its values if those are shapes: a batch shares them after its size."""
        if name in self._on_gpu:
            return array.shape
        if not self.is_batched:
            return tuple(map(int, array.reshape(-1)))
        if (array != array[:1]).any():
            raise invalid(f"input '{name}': requests of one batch must have the same values, which are shapes")
        return (array.shape[0], *map(int, array[0]))

    def _open(self, profile: Profile) -> _Context:
        plan, gpu = self._plan, self._gpu
        native = plan.engine.create_execution_context(plan.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if native is None:
            raise unavailable(f"TensorRT makes no context for {profile}: {plan.logger.reasons()}")
        try:
            native.set_optimization_profile_async(profile.index, gpu.stream)
        except RuntimeError as error:
            raise invalid(f"TensorRT does not accept {profile}: {plan.logger.reasons()}") from error
        gpu.wait()
        for name, values in self._values.items():
            native.set_tensor_address(name, values.ctypes.data)
        return _Context(profile, native)

    def _measure(self, context: _Context) -> bool:
        """Find the size of each input and output on the GPU in the largest shapes of a profile."""
        native, has_unknown = context.native, False
        self._set_shapes(context, context.profile.largest())
        for name, tensor in self._on_gpu.items():
            shape = tuple(native.get_tensor_shape(name))
            size = prod(shape) * tensor.datatype.byte_size
            if not tensor.is_input:
                size = max(size, native.get_max_output_size(name))
                if -1 in shape:
                    has_unknown = native.set_output_allocator(name, self._plan.allocator(self._sizes, context.told))
            if size < 0:
                raise invalid(f"output '{name}' of the plan has no largest size: {list(shape)}")
            self._sizes[name] = max(self._sizes[name], size)
        return has_unknown

    def _lay_out(self) -> None:
        """Give everything on the GPU its place in a block."""
        profiles = (context.profile.index for context in self._contexts)
        self._activations = max(map(self._plan.engine.get_device_memory_size_for_profile_v2, profiles))
        self._offsets, self.bytes = {}, _aligned(self._activations)
        for name, size in self._sizes.items():
            self._offsets[name] = self.bytes
            self.bytes += _aligned(size)

    def _set_shapes(self, context: _Context, shapes: Mapping[str, Shape]) -> None:
        for name, shape in shapes.items():
            if name in self._values:
                self._values[name].reshape(-1)[:] = shape
            elif not context.native.set_input_shape(name, shape):
                raise invalid(f"the plan refuses input '{name}' {list(shape)}: {self._plan.logger.reasons()}")
        try:
            missing = context.native.infer_shapes()
        except RuntimeError as error:
            raise invalid(f"the plan refuses the shapes of its inputs: {self._plan.logger.reasons()}") from error
        if missing:
            raise invalid(f"inputs {', '.join(missing)} of the plan are missing")

    def _enqueue(self, context: _Context, block: int) -> None:
        """Begin to compute in a block; TensorRT is told its address if it was another one the last time."""
        native = context.native
        if context.address != block:
            native.set_device_memory(block, _aligned(self._activations))
            for name, offset in self._offsets.items():
                native.set_tensor_address(name, block + offset)
            context.address = block
        if not native.execute_async_v3(self._gpu.stream):
            raise internal(f"TensorRT failed: {self._plan.logger.reasons()}")

    def _output_shapes(self, context: _Context) -> dict[str, Shape]:
        return {
            name: context.told[name] if name in context.told else tuple(context.native.get_tensor_shape(name))
            for name, tensor in self._on_gpu.items()
            if not tensor.is_input
        }

    def _capture_all(self, config: ModelConfig, block: int) -> None:
        """Capture the graphs of each context; what `graph_spec` asks for must fit one of them."""
        self._gpu.clear(block, self.bytes)
        wanted = graph_shapes(config, self._contexts[0].profile.usual())
        missing = dict(enumerate(wanted)) if graph_specs(config) else {}
        for context in self._contexts:
            for index, shapes in enumerate(graph_shapes(config, context.profile.usual())):
                if context.profile.distance(shapes.upper) is not None:
                    context.graphs.append(self._capture(context, shapes, block))
                    missing.pop(index, None)
        for index, shapes in missing.items():
            raise invalid(f"optimization.cuda.graph_spec[{index}]: no profile takes {dict(shapes.upper)}")

    def _capture(self, context: _Context, shapes: GraphShapes, block: int) -> _Graph:
        self._set_shapes(context, shapes.upper)
        self._enqueue(context, block)  # what TensorRT sets up in the first run must not be in the graph
        self._gpu.wait()
        handle = self._gpu.capture(lambda: self._enqueue(context, block))
        return _Graph(shapes, handle, self._output_shapes(context))


def _aligned(size: int) -> int:
    """Return the room that something takes in a block, some also for what is empty: each thing has its own address."""
    return max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)


def _filled(value: Array, shape: Shape) -> Array:
    """Return the value in the shape of a graph, with zeros for what it lacks."""
    if value.shape == shape:
        return value
    return np.pad(value, [(0, to - size) for size, to in zip(value.shape, shape, strict=True)])


DEFAULT_FILE = "model.plan"

_log = logging.getLogger(__name__)

_Tensor = TypeVar("_Tensor", ModelInput, ModelOutput)


def open_plan(files: ModelFiles, config: ModelConfig, options: PlanOptions, device: int) -> LoadedPlan:
    """Load the plan of a model on a GPU: the file that the configuration names for the GPU's capability, if any."""
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


class TensorRtModel(SharingModel):
    """A loaded version, with an engine for each GPU that its instances run on.

    Its memory is the size of each plan on a GPU, plus the memory of a batch for each instance.
    """

    def __init__(self, files: ModelFiles, config: ModelConfig, options: PlanOptions, gpus: Gpus) -> None:
        super().__init__()
        self._files = files
        self._config = config
        self._options = options
        self._gpus = gpus
        self._devices: set[int] = set()

    async def create_instance(self, placement: Placement) -> PlanInstance:
        device = placement.device_id
        self._devices.add(device)
        plan = await self.shared(device, lambda: asyncio.to_thread(self._open, device))
        numbers = profiles_of(group_of(self._config, placement.name))
        instance = await asyncio.to_thread(self._make, plan, placement, numbers)
        self.usage.append(MemoryUsage("GPU", device, instance.bytes, placement.name))
        return instance

    async def aclose(self) -> None:
        await super().aclose()
        for device in self._devices:
            await asyncio.to_thread(self._gpus.trim, device)

    def _open(self, device: int) -> LoadedPlan:
        self._gpus.trim(device)
        plan = open_plan(self._files, self._config, self._options, device)
        self.usage.append(MemoryUsage("GPU", device, plan.size))
        return plan

    def _make(self, plan: LoadedPlan, placement: Placement, numbers: Sequence[int]) -> PlanInstance:
        config, device = self._config, placement.device_id
        profiles = plan.selected(numbers)
        problems = check_signature(config, plan.signature(batched=config.max_batch_size > 0))
        largest = max(profile.batch_max() for profile in profiles)
        if config.max_batch_size > largest:
            message = f"the plan takes batches of up to {largest} in the profiles of '{placement.name}'"
            problems.append(Problem("max_batch_size", f"{message}, got {config.max_batch_size}"))
        check_problems(config.name, problems)
        try:
            gpu = GpuStream(device, *self._gpus.pools(device), self._options.priority)
            with gpu.current():
                return PlanInstance(plan, config, gpu, profiles, has_graphs=self._options.has_graphs)
        except CudaError as error:
            raise unsupported(f"instance '{placement.name}' cannot use GPU {device}: {error}") from error


class TensorRtBackend(PlannedBackend[PlanOptions, TensorRtModel]):
    """The `tensorrt` backend."""

    name = "tensorrt"
    parameters = PARAMETERS
    runs_on_gpus = True
    read_plan = staticmethod(read_options)
    remarks = staticmethod(without_effect)

    def __init__(self) -> None:
        self._gpus: Gpus | None = None

    def uses_gpus(self) -> bool:
        """Whether there are GPUs: a plan runs nowhere else."""
        return visible_gpus() > 0

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        if config.input and config.output:
            return Completion(config)
        group = config.instance_group[0] if config.instance_group else group_of(config, "")
        device = group.gpus[0] if group.gpus else 0
        if self._gpus is not None:
            await asyncio.to_thread(self._gpus.trim, device)
        plan = await asyncio.to_thread(open_plan, files, config, self.plan(config, settings), device)
        numbers = sorted({number for group in config.instance_group for number in profiles_of(group)}) or [0]
        largest = max(profile.batch_max() for profile in plan.selected(numbers))
        if config.max_batch_size > largest:
            raise invalid(
                f"autofill failed for model '{config.name}': configuration specified max-batch {config.max_batch_size} "
                f"but TensorRT engine only supports max-batch {largest}"
            )
        may_batch = all(tensor.is_shape or tensor.shape[:1] == (-1,) for tensor in plan.tensors)
        config, notes = merge_signature(config, plan.signature(batched=may_batch), default_max_batch_size=largest)
        shapes = {tensor.name for tensor in plan.tensors if tensor.is_shape}
        completed = replace(config, input=_marked(config.input, shapes), output=_marked(config.output, shapes))
        return Completion(completed, tuple(notes))

    async def open(
        self, files: ModelFiles, config: ModelConfig, plan: PlanOptions, settings: BackendSettings
    ) -> TensorRtModel:
        await asyncio.to_thread(library)
        if not config.cc_model_filenames:
            model_file(files, config, DEFAULT_FILE)
        if self._gpus is None:
            self._gpus = Gpus(settings.pinned or PinnedMemory(), plan.pool_bytes, settings.gpu_pools)
        return TensorRtModel(files, seen_by_model(config), plan, self._gpus)

    async def aclose(self) -> None:
        """Release the memory that no answer uses."""
        self._gpus = None


def _marked(tensors: tuple[_Tensor, ...], shapes: set[str]) -> tuple[_Tensor, ...]:
    return tuple(replace(tensor, is_shape_tensor=tensor.name in shapes) for tensor in tensors)
