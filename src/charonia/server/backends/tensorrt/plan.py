"""Plans: the library, the engine of a plan on a GPU, its tensors and its optimization profiles.

Source: TensorRT's Python API, versions 10.3 and later.
"""

import ctypes
import importlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from charonia.config.complete import Signature, SignatureTensor
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid, unsupported
from charonia.install_hint import extra_hint
from charonia.server.backends.array_backend import broken_file_hint
from charonia.server.backends.tensorrt.options import PlanOptions, Shape
from charonia.server.channel.cuda_driver import CudaError, driver

_log = logging.getLogger(__name__)

VERSION_MIN = (10, 3)
"""The oldest TensorRT: before, memory for activations could not be given with its size."""

_TYPES = {
    "FLOAT": DataType.FP32,
    "HALF": DataType.FP16,
    "BF16": DataType.BF16,
    "INT8": DataType.INT8,
    "INT32": DataType.INT32,
    "INT64": DataType.INT64,
    "BOOL": DataType.BOOL,
    "UINT8": DataType.UINT8,
}
"""Datatype by TensorRT's name."""

_MESSAGES_MAX = 4
_TAG = b"ftrt"
_HEADER_BYTES = 28
_VERSION_AT = 24
_BUILD = "trtexec --onnx=net.onnx --saveEngine=model.plan builds one here"
_REBUILD = f"a plan fits one release of TensorRT: {_BUILD}"
_TRUSTED = (
    "--backend-config=tensorrt,version-compatible=true loads it; it brings code that runs in the server, so load only "
    "plans that you trust"
)
_HINTS = {
    "incompatible device": f"a plan fits one kind of GPU: {_BUILD}",
    "Version tag does not match": _REBUILD,
    "stdVersionRead": _REBUILD,
    "host code": _TRUSTED,
    "lean runtime": _TRUSTED,
    "getPluginCreator": "--backend-config=tensorrt,plugins=PATH;PATH loads libraries of plugins",
    "OutOfMemory": "the GPU has not enough free memory for the weights of this plan",
}
"""Hint by a part of TensorRT's message."""


def library() -> Any:
    """Return the module `tensorrt`.

    Raises:
        ServingError: UNSUPPORTED when it is not there, too old or does not start.
    """
    try:
        trt = importlib.import_module("tensorrt")
    except ModuleNotFoundError as error:
        raise unsupported(
            f"a TensorRT plan needs the package '{error.name}', which is not installed", hint=extra_hint("tensorrt")
        ) from error
    except (ImportError, OSError) as error:
        raise unsupported(
            f"the installed package tensorrt does not start: {error}",
            hint="it needs its libraries (tensorrt_libs, or libnvinfer of the system) and those of CUDA",
        ) from error
    version = tuple(int(part) for part in trt.__version__.split(".")[:2])
    if version < VERSION_MIN:
        expected = ".".join(map(str, VERSION_MIN))
        raise unsupported(
            f"TensorRT {trt.__version__} is installed, expected {expected} or newer", hint=extra_hint("tensorrt")
        )
    return trt


def check_gpu(device: int) -> None:
    """Check that this process can use a GPU. Raises ServingError: UNSUPPORTED with the reason."""
    try:
        count = driver().device_count()
    except CudaError as error:
        raise unsupported(
            f"a TensorRT plan needs an NVIDIA GPU: {error}", hint="`charonia doctor` shows what this machine offers"
        ) from error
    if device >= count:
        raise unsupported(
            f"a TensorRT plan needs GPU {device}: this process sees {count}", hint="`gpus`, or CUDA_VISIBLE_DEVICES"
        )


def make_logger(trt: Any) -> Any:
    """Return a logger of the library that keeps the last errors in `messages`."""

    class PlanLogger(trt.ILogger):  # type: ignore[misc] # the library has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: deque[str] = deque(maxlen=_MESSAGES_MAX)

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self.messages.append(msg)
            else:
                _log.log(logging.WARNING if severity == trt.ILogger.Severity.WARNING else logging.DEBUG, "%s", msg)

        def reasons(self) -> str:
            """Return the errors since the last call."""
            reasons = " ".join(" ".join(self.messages).split())
            self.messages.clear()
            return reasons or "TensorRT gives no reason"

    return PlanLogger()


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """An input or output of an engine.

    Attributes:
        shape: Its shape; -1 for variable dimensions.
        is_shape: Whether its values are shapes, which lie in the memory of the CPU.
    """

    name: str
    datatype: DataType
    shape: Shape
    is_input: bool
    is_shape: bool


Range = tuple[Shape, Shape, Shape]
"""Minimum, optimum and maximum."""


@dataclass(frozen=True, slots=True)
class Profile:
    """An optimization profile.

    Attributes:
        ranges: Range of the shape of each input, or of its values where those are shapes.
    """

    index: int
    ranges: Mapping[str, Range]

    def distance(self, shapes: Mapping[str, Shape]) -> int | None:
        """Return how far inputs are from what the profile was optimised for, None if they are out of its range."""
        total = 0
        for name, sizes in shapes.items():
            low, best, high = self.ranges[name]
            if len(sizes) != len(low) or any(not a <= n <= b for a, n, b in zip(low, sizes, high, strict=True)):
                return None
            total += sum(abs(n - b) for n, b in zip(sizes, best, strict=True))
        return total

    def usual(self) -> dict[str, Shape]:
        return {name: best for name, (_, best, _) in self.ranges.items()}

    def largest(self) -> dict[str, Shape]:
        return {name: high for name, (_, _, high) in self.ranges.items()}

    def batch_max(self) -> int:
        """Return the largest batch; 0 without inputs that have one."""
        return min((high[0] for high in self.largest().values() if high), default=0)

    def __str__(self) -> str:
        parts = (f"{name} {list(low)} to {list(high)}" for name, (low, _, high) in self.ranges.items())
        return f"profile {self.index}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """A plan on a GPU. Its engine may be used by several threads, each with contexts of its own.

    Attributes:
        engine: The engine, which keeps what it was made with.
        logger: The logger of the engine: `reasons()`.
    """

    trt: Any
    engine: Any
    logger: Any
    tensors: tuple[PlanTensor, ...]
    profiles: tuple[Profile, ...]
    size: int

    def selected(self, numbers: Sequence[int]) -> list[Profile]:
        """Return the profiles with these numbers.

        Raises:
            ServingError: INVALID_ARG when the plan has no such profile.
        """
        for number in numbers:
            if number >= len(self.profiles):
                raise invalid(
                    f"instance_group.profile: the plan has {len(self.profiles)} optimization profiles, from 0 on; got "
                    f"{number}"
                )
        return [self.profiles[number] for number in numbers]

    def signature(self, *, batched: bool) -> Signature:
        """Return inputs and outputs as clients see them.

        Args:
            batched: Whether requests are batched. Values that are shapes then begin with the batch size, which the
                server fills in: a tensor of n values is n - 1 for each element of the batch.
        """

        def seen(tensor: PlanTensor) -> SignatureTensor:
            shape = (-1, tensor.shape[0] - 1) if batched and tensor.is_shape and tensor.shape else tensor.shape
            return SignatureTensor(tensor.name, tensor.datatype, shape)

        return Signature(
            tuple(seen(tensor) for tensor in self.tensors if tensor.is_input),
            tuple(seen(tensor) for tensor in self.tensors if not tensor.is_input),
        )

    def allocator(self, sizes: Mapping[str, int], told: dict[str, Shape]) -> Any:
        """Return what TensorRT asks for the place of an output: where it is, if its size allows; notes its shape."""
        base = self.trt.IOutputAllocator

        class Allocator(base):  # type: ignore[misc,valid-type] # the library has no types
            def __init__(self) -> None:
                base.__init__(self)

            def reallocate_output(self, tensor_name: str, memory: int, size: int, alignment: int) -> int:
                return memory if size <= sizes[tensor_name] else 0

            def notify_shape(self, tensor_name: str, shape: Any) -> None:
                told[tensor_name] = tuple(shape)

        return Allocator()


def read_plan(path: Path, options: PlanOptions) -> LoadedPlan:
    """Load a plan on the GPU of this thread. Raises ServingError: UNSUPPORTED or INVALID_ARG with the reason."""
    trt = library()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise invalid(f"cannot read {path.name}: {error.strerror}") from error
    broken = broken_file_hint(path)
    if broken:
        raise invalid(f"cannot load {path.name}", hint=broken)
    logger = make_logger(trt)
    _load_plugins(trt, logger, options.plugins)
    runtime = started(trt.Runtime, logger)
    if options.runs_host_code:
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        reasons = logger.reasons()
        raise invalid(
            f"cannot load {path.name}: {reasons} ({built_with(content)}, installed is {trt.__version__})",
            hint=next((hint for text, hint in _HINTS.items() if text in reasons), _other_file_hint(content)),
        )
    tensors = tuple(_tensor(trt, engine, engine.get_tensor_name(i)) for i in range(engine.num_io_tensors))
    profiles = tuple(_profile(engine, tensors, index) for index in range(engine.num_optimization_profiles))
    return LoadedPlan(trt, engine, logger, tensors, profiles, len(content))


def started(make: Any, logger: Any) -> Any:
    """Return a `Runtime` or a `Builder`. Raises ServingError: UNSUPPORTED when TensorRT does not start."""
    try:
        return make(logger)
    except TypeError as error:  # as the binding says it
        raise unsupported(
            f"TensorRT does not start: {logger.reasons()}", hint="is the driver new enough for its CUDA? `nvidia-smi`"
        ) from error


def built_with(content: bytes) -> str:
    """Return which TensorRT has built a plan, as far as its header says."""
    if not content.startswith(_TAG) or len(content) < _HEADER_BYTES or content[4:8] != bytes(4):
        return "its header is not one of a plan"
    return f"built with TensorRT {'.'.join(map(str, content[_VERSION_AT:_HEADER_BYTES]))}"


def _other_file_hint(content: bytes) -> str:
    if content[4:5] == b"{" and int.from_bytes(content[:4], "little") < len(content):
        return "the plan is behind metadata of Ultralytics: the first 4 bytes hold its length; remove both"
    return "the file may be incomplete" if content.startswith(_TAG) else f"is the file a plan? {_BUILD}"


def _load_plugins(trt: Any, logger: Any, paths: Sequence[str]) -> None:
    for path in paths:
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise invalid(f"--backend-config tensorrt,plugins: cannot load '{path}': {error}") from error
    trt.init_libnvinfer_plugins(logger, "")


def _tensor(trt: Any, engine: Any, name: str) -> PlanTensor:
    datatype = _TYPES.get(engine.get_tensor_dtype(name).name)
    if datatype is None:
        raise unsupported(f"tensor '{name}' of the plan is {engine.get_tensor_dtype(name).name}, which cannot be sent")
    if engine.get_tensor_format(name) != trt.TensorFormat.LINEAR:
        raise unsupported(
            f"tensor '{name}' of the plan is in the format {engine.get_tensor_format_desc(name)}",
            hint="tensors are served in the linear format: build without --inputIOFormats and --outputIOFormats",
        )
    is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
    shape = tuple(engine.get_tensor_shape(name))
    return PlanTensor(name, datatype, shape, is_input, bool(engine.is_shape_inference_io(name)))


def _profile(engine: Any, tensors: Sequence[PlanTensor], index: int) -> Profile:
    def range_of(tensor: PlanTensor) -> Range:
        if tensor.is_shape:  # the binding takes the number first, whatever its documentation says
            found = engine.get_tensor_profile_values(index, tensor.name)
        else:
            found = engine.get_tensor_profile_shape(tensor.name, index)
        low, best, high = map(tuple, found)
        return low, best, high

    return Profile(index, {tensor.name: range_of(tensor) for tensor in tensors if tensor.is_input})
