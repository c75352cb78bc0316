"""A stand-in for the package `tensorrt` and for a GPU, for contract tests.

It has the published Python API as far as the server uses it, and refuses what the real one refuses. Plans are JSON
behind the header of a plan; the engine computes on memory that the pretended driver gave out. Work on a stream is done
when somebody waits for it, not before.
"""

import ctypes
import enum
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tests.support.pretended_cuda import LIBRARY, PretendedCuda

from charonia.core.tensor import Array
from charonia.server.channel import cuda_driver

VERSION = "10.9.0.34"
CAPABILITY = (9, 0)
ALIGNMENT = 256
OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
CAPTURE_INVALIDATED = 901

Work = Callable[[], None]


class StreamingCuda(PretendedCuda):
    """A driver with memory, streams and graphs.

    Attributes:
        allocations: How often memory of a GPU was allocated.
        given: The address of each block that a context was given for activations.
    """

    def __init__(self, folder: Path, gpus: Sequence[bytes]) -> None:
        super().__init__(folder, gpus)
        self.memory_bytes = 1 << 30
        self.allocations = 0
        self.launches = 0
        self.given: list[int] = []
        self.profiles: list[int] = []
        self._buffers: dict[int, Any] = {}
        self._device: dict[int, int] = {}  # size by address
        self.streams: dict[int, list[Work]] = {}
        self._captured: dict[int, list[Work]] = {}
        self._graphs: dict[int, list[Work]] = {}
        self._numbers = itertools.count(1000)

    def on_gpu(self, address: int, size: int) -> bool:
        blocks = list(self._device.items())  # at once: other threads allocate
        return any(start <= address and address + size <= start + length for start, length in blocks)

    def enqueue(self, stream: int, work: Work) -> int:
        """Put work on a stream, or into the graph that is captured there."""
        if stream not in self.streams or not self.depth():
            return ILLEGAL_ADDRESS
        self._captured.get(stream, self.streams[stream]).append(work)
        return 0

    def is_capturing(self, stream: int) -> bool:
        return stream in self._captured

    def drain(self, stream: int) -> None:
        work, self.streams[stream] = self.streams[stream], []
        for each in work:
            each()

    def left(self) -> int:
        """Return the number of streams, graphs and allocations on the GPU that are not released."""
        return len(self.streams) + len(self._graphs) + len(self._device)

    def device_bytes(self) -> int:
        """Return how much memory of the GPU is allocated."""
        return sum(list(self._device.values()))

    def _new(self) -> int:
        return next(self._numbers)

    def _allocate(self, size: int) -> int:
        buffer = (ctypes.c_char * (size + ALIGNMENT)).from_buffer(bytearray(size + ALIGNMENT))
        address = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % ALIGNMENT
        self._buffers[address] = buffer
        return address

    def _cuMemAlloc_v2(self, address: Any, size: Any) -> int:  # noqa: N802 - the driver's name, as all of these
        if size.value > self.memory_bytes - self.device_bytes():
            return OUT_OF_MEMORY
        address._obj.value = self._allocate(size.value)
        self.allocations += 1
        self._device[address._obj.value] = size.value
        ctypes.memset(address._obj.value, 0xEE, size.value)  # as memory that was used before
        return 0

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> int:  # noqa: N802
        free._obj.value, total._obj.value = self.memory_bytes - self.device_bytes(), self.memory_bytes
        return 0 if self.depth() else ILLEGAL_ADDRESS

    def _cuMemFree_v2(self, address: Any) -> None:  # noqa: N802
        del self._device[address.value], self._buffers[address.value]

    def _cuMemHostAlloc(self, address: Any, size: Any, flags: int) -> None:  # noqa: N802
        address._obj.value = self._allocate(size.value)

    def _cuMemFreeHost(self, address: Any) -> None:  # noqa: N802
        del self._buffers[address.value]

    def _cuMemsetD8Async(self, address: Any, value: Any, size: Any, stream: Any) -> int:  # noqa: N802
        if not self.on_gpu(address.value, size.value):
            return ILLEGAL_ADDRESS
        return self.enqueue(stream.value, lambda: _set(address.value, value.value, size.value))

    def _cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        return self._copy(target.value, source.value, size.value, stream.value, on_gpu=target.value)

    def _cuMemcpyDtoHAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        return self._copy(target.value, source.value, size.value, stream.value, on_gpu=source.value)

    def _copy(self, target: int, source: int, size: int, stream: int, *, on_gpu: int) -> int:
        if not self.on_gpu(on_gpu, size):
            return ILLEGAL_ADDRESS
        return self.enqueue(stream, lambda: _move(target, source, size))

    def _cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: int) -> None:  # noqa: N802
        stream._obj.value = self._new()
        self.streams[stream._obj.value] = []

    def _cuStreamSynchronize(self, stream: Any) -> int:  # noqa: N802
        if self.is_capturing(stream.value):
            return CAPTURE_INVALIDATED
        self.drain(stream.value)
        return 0

    def _cuStreamDestroy_v2(self, stream: Any) -> None:  # noqa: N802
        del self.streams[stream.value]

    def _cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> None:  # noqa: N802
        self._captured[stream.value] = []

    def _cuStreamEndCapture(self, stream: Any, graph: Any) -> None:  # noqa: N802
        graph._obj.value = self._new()
        self._graphs[graph._obj.value] = self._captured.pop(stream.value)

    def _cuGraphInstantiateWithFlags(self, ready: Any, graph: Any, flags: Any) -> None:  # noqa: N802
        ready._obj.value = self._new()
        self._graphs[ready._obj.value] = list(self._graphs[graph.value])

    def _cuGraphDestroy(self, graph: Any) -> None:  # noqa: N802
        del self._graphs[graph.value]

    def _cuGraphExecDestroy(self, graph: Any) -> None:  # noqa: N802
        del self._graphs[graph.value]

    def _cuGraphLaunch(self, graph: Any, stream: Any) -> int:  # noqa: N802
        self.launches += 1
        for work in self._graphs[graph.value]:
            self.enqueue(stream.value, work)
        return 0

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:  # noqa: N802
        value._obj.value = {75: CAPABILITY[0], 76: CAPABILITY[1]}.get(attribute, 0)


def _move(target: int, source: int, size: int) -> None:
    ctypes.memmove(target, source, size)


def _set(address: int, value: int, size: int) -> None:
    ctypes.memset(address, value, size)


class DataType(enum.Enum):
    FLOAT, HALF, BF16, INT8, INT32, INT64, BOOL, UINT8, FP8, INT4 = range(10)


_NUMPY = {"FLOAT": "<f4", "HALF": "<f2", "BF16": "<u2", "INT8": "i1", "INT32": "<i4", "INT64": "<i8", "BOOL": "?"}

TensorIOMode = enum.Enum("TensorIOMode", ["NONE", "INPUT", "OUTPUT"])
TensorFormat = enum.Enum("TensorFormat", ["LINEAR", "CHW32"])
ExecutionContextAllocationStrategy = enum.Enum(
    "ExecutionContextAllocationStrategy", ["STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"]
)


class ILogger:
    """Base of loggers, which must call its `__init__`."""

    Severity = enum.Enum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"])

    def __init__(self) -> None:
        self.is_made = True

    def log(self, severity: Any, msg: str) -> None:
        raise NotImplementedError


class IOutputAllocator:
    """Base of allocators of outputs, which must call its `__init__`."""

    def __init__(self) -> None:
        self.is_made = True


class Dims(Sequence[int]):
    """A shape: a sequence, but no tuple."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: Any) -> Any:
        return self._sizes[index]


class Program:
    """What an engine computes: outputs from inputs, and the shapes of outputs as far as they can be foreseen."""

    def __init__(
        self,
        compute: Callable[[Mapping[str, Array]], Mapping[str, Array]],
        shapes: Callable[[Mapping[str, Sequence[int]], Mapping[str, Array]], Mapping[str, Sequence[int]]],
    ) -> None:
        self.compute = compute
        self.shapes = shapes


def _fill(given: Mapping[str, Array]) -> dict[str, Array]:
    """Repeat the sum of each row of `x` as often as the last value of `size` says."""
    rows = given["x"].sum(axis=1, keepdims=True)
    return {"y": np.broadcast_to(rows, (len(rows), int(given["size"][-1]))), "n": given["size"]}


PROGRAMS = {
    "scale": Program(lambda i: {"y": (2 * i["x"] + 1).astype(i["x"].dtype)}, lambda s, _: {"y": s["x"]}),
    "fill": Program(_fill, lambda s, v: {"y": (s["x"][0], int(v["size"][-1])), "n": v["size"].shape}),
    "positive": Program(lambda i: {"y": i["x"][np.greater(i["x"], 0)]}, lambda s, _: {"y": (-1,)}),
}


def plan_bytes(
    program: str = "scale",
    *,
    tensors: Mapping[str, Any] | None = None,
    profiles: Sequence[Mapping[str, Any]] | None = None,
    version: str = VERSION,
    **more: Any,
) -> bytes:
    """Return a plan.

    Args:
        tensors: By name: mode, datatype, shape, then "shape" for values that are shapes, or "CHW32" for that format.
        profiles: By name: minimum, optimum and maximum of shape, or values, of each input.
        more: `capability`, `host_code`, `plugin`, `memory` (bytes of activations by profile) and `weights` (bytes that
            must be free when it is loaded).
    """
    tensors = tensors or {"x": ("INPUT", "FLOAT", (-1, 4)), "y": ("OUTPUT", "FLOAT", (-1, 4))}
    profiles = profiles or [{"x": ((1, 4), (4, 4), (8, 4))}]
    content = {"program": program, "tensors": tensors, "profiles": profiles, "version": version, **more}
    header = b"ftrt" + bytes(20) + bytes(int(part) for part in version.split("."))
    return header + json.dumps(content).encode()


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        assert logger.is_made
        self.logger = logger
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine | None":
        """Return the engine of a plan, None with a message where that is refused."""
        reason = self._refusal(bytes(serialized_engine))
        if reason:
            self.logger.log(ILogger.Severity.ERROR, f"IRuntime::deserializeCudaEngine: {reason}")
            return None
        self.logger.log(ILogger.Severity.INFO, "Loaded engine size: 0 MiB")
        self.logger.log(ILogger.Severity.WARNING, "Using default stream")
        return ICudaEngine(json.loads(serialized_engine[28:]), self.logger)

    def _refusal(self, data: bytes) -> str:
        serialization = "Error Code 1: Serialization (Serialization assertion"
        if not data.startswith(b"ftrt"):
            return f"{serialization} magicTagRead == kMAGIC_TAG failed.Magic tag does not match)"
        try:
            content = json.loads(data[28:])
        except ValueError:
            return f"{serialization} size <= length failed.Invalid size)"
        if content.get("host_code") and not self.engine_host_code_allowed:
            return "Error Code 3: API Usage Error (the plan has host code, which this runtime may not deserialize)"
        if content["version"] != VERSION and not content.get("host_code"):
            return (
                f"{serialization} stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match. Note: "
                "Current Version: 239, Serialized Engine Version: 237)"
            )
        if content.get("weights", 0) > _cuda().memory_bytes - _cuda().device_bytes():
            return f"Error Code 2: OutOfMemory (Requested size was {content['weights']} bytes.)"
        capability = content.get("capability", "9.0")
        if capability != "9.0":
            return (
                "Error Code 6: API Usage Error (The engine plan file is generated on an incompatible device, expecting "
                f"compute 9.0 got compute {capability}, please rebuild.)"
            )
        if content.get("plugin"):
            return f"Error Code 4: Internal Error (getPluginCreator could not find plugin {content['plugin']})"
        return ""


def init_libnvinfer_plugins(logger: ILogger, namespace: str) -> bool:
    return True


class ICudaEngine:
    def __init__(self, content: Any, logger: ILogger) -> None:
        self.content = content
        self.logger = logger
        self.names = list(content["tensors"])
        self.num_io_tensors = len(self.names)
        self.num_optimization_profiles = len(content["profiles"])

    def get_tensor_name(self, index: int) -> str:
        return str(self.names[index])

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode[self.content["tensors"][name][0]]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.content["tensors"][name][1]]

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(self.content["tensors"][name][2])

    def get_tensor_format(self, name: str) -> Any:
        return TensorFormat.CHW32 if "CHW32" in self.content["tensors"][name] else TensorFormat.LINEAR

    def get_tensor_format_desc(self, name: str) -> str:
        return "Thirty-two wide channel vectorized row major FP32 format"

    def is_shape_inference_io(self, name: str) -> bool:
        return "shape" in self.content["tensors"][name]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        """Return minimum, optimum and maximum of the shape of an input."""
        assert not self.is_shape_inference_io(name)
        return [Dims(shape) for shape in self.content["profiles"][profile_index][name]]

    def get_tensor_profile_values(self, name: Any, profile_index: Any) -> list[list[int]]:
        """Return minimum, optimum and maximum of values. As in the real one, the number is the first argument."""
        if not isinstance(name, int) or not isinstance(profile_index, str):
            raise TypeError("incompatible function arguments")
        return [list(values) for values in self.content["profiles"][name][profile_index]]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        sizes: list[int] = self.content.get("memory") or [1024] * self.num_optimization_profiles
        return sizes[profile_index]

    def create_execution_context(self, strategy: Any = ExecutionContextAllocationStrategy.STATIC) -> Any:
        return IExecutionContext(self, strategy)


_DRIVERS: list[StreamingCuda] = []


def _cuda() -> StreamingCuda:
    return _DRIVERS[-1]


class IExecutionContext:
    def __init__(self, engine: ICudaEngine, strategy: Any) -> None:
        self.engine = engine
        self._is_managed = strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        self._memory = (0, 0)
        self._profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """Select a profile, which forgets the shapes."""
        if not profile_index < self.engine.num_optimization_profiles:
            raise RuntimeError("Error in set optimization profile async.")
        assert _cuda().depth() > 0
        self._profile = profile_index
        self._shapes.clear()
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % ALIGNMENT == 0
        assert _cuda().on_gpu(memory, size)
        self._memory = (memory, size)
        _cuda().given.append(memory)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        """Set the shape of an input; False outside of the profile."""
        assert isinstance(shape, (tuple, list, Dims))
        if self.engine.get_tensor_mode(name) is not TensorIOMode.INPUT or self.engine.is_shape_inference_io(name):
            return self._refuse(f"setInputShape: {name} has no shape to set")
        low, _, high = self.engine.content["profiles"][self._profile][name]
        if len(shape) != len(low) or any(not a <= n <= b for a, n, b in zip(low, shape, high, strict=True)):
            return self._refuse(f"setInputShape: {name} {tuple(shape)} is not in {low} to {high}")
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self.engine.names:
            return self._refuse(f"setTensorAddress: no {name}")
        assert isinstance(memory, int)
        self._addresses[name] = memory
        return True

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        assert isinstance(output_allocator, IOutputAllocator)
        assert output_allocator.is_made
        self._allocators[name] = output_allocator
        return True

    def infer_shapes(self) -> list[str]:
        """Return the inputs whose shape or values are missing."""
        return [name for name in self._inputs() if name not in (*self._shapes, *self._given_values())]

    def get_tensor_shape(self, name: str) -> Dims:
        """Return a shape, -1 where it is not known."""
        if name in self._shapes:
            return Dims(self._shapes[name])
        if self.engine.get_tensor_mode(name) is TensorIOMode.INPUT or self.infer_shapes():
            return self.engine.get_tensor_shape(name)
        return Dims(self._program().shapes(self._shapes, self._given_values())[name])

    def get_max_output_size(self, name: str) -> int:
        if self.infer_shapes():
            return -1
        shape = tuple(self.get_tensor_shape(name))
        if -1 in shape:
            shape = tuple(self.engine.content["profiles"][self._profile]["x"][2])
        return int(np.prod(shape)) * self._numpy(name).itemsize

    def execute_async_v3(self, stream_handle: int) -> bool:
        cuda = _cuda()
        needed = self.engine.get_device_memory_size_for_profile_v2(self._profile)
        if self.infer_shapes() or set(self._addresses) != set(self.engine.names) or not cuda.depth():
            return self._refuse("enqueueV3: shapes or addresses are missing")
        if not self._is_managed or self._memory[1] < needed:
            return self._refuse(f"enqueueV3: activations need {needed} bytes, got {self._memory[1]}")
        shapes, values, places = dict(self._shapes), self._given_values(), dict(self._addresses)
        for name in self.engine.names:
            is_on_gpu = cuda.on_gpu(places[name], 1)
            assert is_on_gpu != self.engine.is_shape_inference_io(name), f"{name} is in the wrong memory"
        if self._allocators:
            if cuda.is_capturing(stream_handle):
                return self._refuse("enqueueV3: an output whose shape depends on data cannot be captured")
            cuda.drain(stream_handle)
            for name, allocator in self._allocators.items():
                found = self._computed(shapes, values, places)[name]
                place = allocator.reallocate_output(name, places[name], found.nbytes, ALIGNMENT)
                if not place:
                    return self._refuse("enqueueV3: no memory for an output")
                allocator.notify_shape(name, Dims(found.shape))

        def compute() -> None:
            for name, array in self._computed(shapes, values, places).items():
                array = np.ascontiguousarray(array, self._numpy(name))
                ctypes.memmove(places[name], array.ctypes.data, array.nbytes)

        cuda.profiles.append(self._profile)
        return cuda.enqueue(stream_handle, compute) == 0

    def _computed(self, shapes: Any, values: Any, places: Mapping[str, int]) -> Mapping[str, Array]:
        read = {name: self._read(name, places[name], shape) for name, shape in shapes.items()}
        return self._program().compute({**read, **values})

    def _read(self, name: str, address: int, shape: Sequence[int]) -> Array:
        size = int(np.prod(shape)) * self._numpy(name).itemsize
        return np.frombuffer(ctypes.string_at(address, size), self._numpy(name)).reshape(shape)

    def _given_values(self) -> dict[str, Array]:
        found = {}
        for name in self._inputs():
            if self.engine.is_shape_inference_io(name) and name in self._addresses:
                found[name] = self._read(name, self._addresses[name], tuple(self.engine.get_tensor_shape(name)))
        return found

    def _inputs(self) -> list[str]:
        return [name for name in self.engine.names if self.engine.get_tensor_mode(name) is TensorIOMode.INPUT]

    def _numpy(self, name: str) -> "np.dtype[np.generic]":
        return np.dtype(_NUMPY[self.engine.get_tensor_dtype(name).name])

    def _program(self) -> Program:
        return PROGRAMS[self.engine.content["program"]]

    def _refuse(self, message: str) -> bool:
        self.engine.logger.log(ILogger.Severity.ERROR, message)
        return False


@contextmanager
def pretended(folder: Path, gpus: int = 1) -> Iterator[StreamingCuda]:
    """Let this process have the package and some GPUs; yield the driver."""
    module = sys.modules[__name__]
    cuda = StreamingCuda(folder, [f"GPU-{number}".encode().ljust(16, b".") for number in range(gpus)])
    load, had = ctypes.CDLL, sys.modules.get("tensorrt")

    def found(name: Any, *arguments: Any, **options: Any) -> Any:
        return cuda if name == LIBRARY else load(name, *arguments, **options)

    library = ModuleType("tensorrt")
    library.__dict__.update({name: getattr(module, name) for name in dir(module) if not name.startswith("_")})
    library.__version__ = VERSION  # type: ignore[attr-defined]
    _DRIVERS.append(cuda)
    cuda_driver.driver.cache_clear()
    ctypes.CDLL = found  # type: ignore[misc,assignment] # until the test is over
    sys.modules["tensorrt"] = library
    try:
        yield cuda
    finally:
        ctypes.CDLL = load  # type: ignore[misc]
        cuda_driver.driver.cache_clear()
        _DRIVERS.remove(cuda)
        del sys.modules["tensorrt"]
        if had is not None:
            sys.modules["tensorrt"] = had
