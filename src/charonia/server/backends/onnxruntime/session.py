"""Opens ONNX Runtime sessions, turns its errors into readable ones, and reads from files what it does not report.

ONNX Runtime maps external weights into memory for as long as the model is loaded. If the file is overwritten meanwhile
(`cp new.data model.data`), the served model changes its answers; if it is truncated, SIGBUS ends the whole process. A
copy in memory has neither problem, and its file may be a symbolic link that leads out of the folder.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np
import onnxruntime

from charonia.config.complete import Signature, SignatureTensor
from charonia.config.onnx_file import OnnxFile
from charonia.core.dtypes import BY_NAME, DataType
from charonia.core.errors import Code, ServingError, invalid, unsupported
from charonia.core.tensor import Array
from charonia.install_hint import package_hint
from charonia.server.backends import array_backend
from charonia.server.backends.onnxruntime.options import CPU, TENSORRT, Provider, SessionPlan
from charonia.server.channel.datatypes import as_bytes

COPIED_BYTES_MAX = 2 * 1024**3
"""Larger weights stay mapped: while a session is created, there are two copies."""


def read_external(path: Path) -> Mapping[str, bytes]:
    """Return the content of a model's files of external weights, by the names that the model has for them.

    Empty where the model has none, they are larger than `COPIED_BYTES_MAX`, or one cannot be read or lies outside the
    folder: ONNX Runtime then reports what is wrong. Blocks on disk I/O.
    """
    try:
        with path.open("rb") as file:
            names = OnnxFile(file).weight_files()
        if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in names):
            return {}
        if sum((path.parent / name).stat().st_size for name in names) > COPIED_BYTES_MAX:
            return {}
        return {name: (path.parent / name).read_bytes() for name in names}
    except (OSError, ValueError):
        return {}


def without_shape(path: Path) -> frozenset[str]:
    """Return the names of the inputs and outputs without a shape: not even their rank is known.

    Empty where the file cannot be read. Blocks on disk I/O.
    """
    try:
        with path.open("rb") as file:
            return OnnxFile(file).without_shape()
    except (OSError, ValueError):
        return frozenset()


SPIN_US = 20
"""How long a thread of the pool spins for more work before it sleeps."""

SMALL_RUN_NS = 200_000
"""A model whose runs take no longer than this gains nothing from a second thread."""

_TYPES = {**BY_NAME, "float": DataType.FP32, "double": DataType.FP64}
"""Datatype by the name within ONNX Runtime's "tensor(...)"."""

Run = Callable[[Sequence[str], Mapping[str, Array], object], list[Array]]
"""Computes the named outputs from inputs by name, with run options or None."""

_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ")
_SOURCE = re.compile(r"\S*onnxruntime_src/\S+ |\w+\.cc:\d+ \w+ |\S+::\S+\([^)]*\) (?:const )?")
_LOAD_HINTS = {
    "Protobuf parsing failed": "the file is not an ONNX model, or is incomplete",
    "Missing model IR version": "the file is not an ONNX model",
    "Unsupported model IR version": f"a newer onnxruntime reads it: {package_hint('-U', 'onnxruntime')}",
    "stamped with official released onnx opset": f"a newer onnxruntime reads it: {package_hint('-U', 'onnxruntime')}",
    "escapes model directory": "put the file of the weights beside the model, not a link to another folder",
    "External data path": "the weights are in a separate file, which belongs beside the model",
    "External initializer": "the file of the weights is incomplete, or a Git LFS pointer",
    "is not a registered function/op": (
        "`model_operations { op_library_filename: ... }` loads operators that ONNX Runtime does not have"
    ),
}
"""Hint by a part of ONNX Runtime's message."""


Session: TypeAlias = Any
"""An `onnxruntime.InferenceSession`, which is thread-safe."""


def installed_providers() -> list[str]:
    """Return the execution providers of the installed ONNX Runtime."""
    return list(onnxruntime.get_available_providers())


def start_global_pool(intra_op_threads: int, inter_op_threads: int) -> None:
    """Create the global thread pool, for sessions that use it; 0 threads means one per core.

    Raises:
        ServingError: There are sessions already.
    """
    try:
        onnxruntime.set_global_thread_pool_sizes(intra_op_threads, inter_op_threads)
    except Exception as error:  # ONNX Runtime's errors have no common base class
        raise plain_error("the global thread pool cannot be created", error) from error


def open_session(
    path: Path, plan: SessionPlan, *, threads: int, providers: Sequence[Provider], verbose: bool = False
) -> Session:
    """Load a model.

    Args:
        threads: Threads within one operator, including the caller's.
        providers: Execution providers, best first.
        verbose: Whether ONNX Runtime may write to stderr.
    """
    options = _session_options(plan, threads, verbose)
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, plan.graph_level)
    options.enable_cpu_mem_arena = plan.has_arena
    options.enable_mem_pattern = plan.has_pattern is not False
    return _open(path, options, plan, providers)


def open_to_inspect(path: Path, plan: SessionPlan) -> Session:
    """Load a model only to read its signature, quickly and with little memory. Raises like `open_session`."""
    options = _session_options(plan, threads=1, verbose=False)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    return _open(path, options, plan, [(CPU, {})])


def _session_options(plan: SessionPlan, threads: int, verbose: bool) -> Any:
    options = onnxruntime.SessionOptions()
    # Errors are exceptions, which are reported; ONNX Runtime would also write each to stderr.
    options.log_severity_level = 2 if verbose else 4
    if plan.uses_global_pool:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = plan.inter_op_threads
    if plan.is_parallel:
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    # For versions without the entry above.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    for key, value in plan.entries:
        options.add_session_config_entry(key, value)
    return options


def _open(path: Path, options: Any, plan: SessionPlan, providers: Sequence[Provider]) -> Session:
    try:
        for library in plan.op_libraries:
            options.register_custom_ops_library(library)
        named = [(name, _prepared(name, values)) for name, values in providers]
        # Other providers read the files themselves; older versions lack the method.
        give = getattr(options, "add_external_initializers_from_files_in_memory", None)
        external = read_external(path) if give is not None and all(name == CPU for name, _ in providers) else {}
        if give is not None and external:
            give(list(external), list(external.values()), [len(content) for content in external.values()])
        session = onnxruntime.InferenceSession(path, options, providers=named, enable_fallback=0)
    except Exception as error:  # ONNX Runtime's errors have no common base class
        raise array_backend.load_error(path, error, _LOAD_HINTS, _PREFIX, _SOURCE) from error
    running = session.get_providers()
    for name, _ in providers:
        if name not in running:
            raise invalid(
                f"cannot load {path.name}: {name} is installed but does not start",
                hint="check that its libraries (CUDA, cuDNN, TensorRT) have the versions that ONNX Runtime needs",
            )
    return session


def _prepared(provider: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a provider; for TensorRT, load the libraries of its package and make the cache's folder."""
    prepared = dict(options)
    if provider == TENSORRT:
        with suppress(ImportError, OSError):  # the libraries may be those of the system
            import_module("tensorrt_libs")
        cache = prepared.get("trt_engine_cache_path")
        if cache is not None:
            prepared["trt_engine_cache_path"] = str(folder := Path(cache).expanduser())
            folder.mkdir(parents=True, exist_ok=True)
    return prepared


def signature_of(session: Session, model_name: str) -> tuple[Signature, list[str]]:
    """Return a model's inputs and outputs, and a sentence for each output that cannot be served.

    Inputs with a default are optional.

    Raises:
        ServingError: UNSUPPORTED for an input whose type the protocol lacks, or if all outputs are of such types.
    """
    inputs = []
    outputs = []
    for argument in session.get_inputs():
        datatype = _datatype(argument)
        if datatype is None:
            raise unsupported(f"model '{model_name}': input '{argument.name}' is {argument.type}, which cannot be sent")
        inputs.append(SignatureTensor(argument.name, datatype, _shape(argument)))
    for argument in session.get_overridable_initializers():
        datatype = _datatype(argument)
        if datatype is not None:
            inputs.append(SignatureTensor(argument.name, datatype, _shape(argument), optional=True))
    for argument in session.get_outputs():
        datatype = _datatype(argument)
        if datatype is not None:
            outputs.append(SignatureTensor(argument.name, datatype, _shape(argument)))
    notes = [
        f"output '{name}': left out, as {kind} cannot be sent" for name, kind in unsendable_outputs(session).items()
    ]
    if not outputs and (lacking := unsendable_outputs(session)):
        listed = ", ".join(f"'{name}' is {kind}" for name, kind in lacking.items())
        raise unsupported(
            f"model '{model_name}' has no output that can be sent: {listed}", hint=unsendable_hint(listed)
        )
    datatypes = {tensor.datatype for tensor in (*inputs, *outputs)}
    if DataType.BF16 in datatypes and DataType.BYTES in datatypes:
        raise unsupported(f"model '{model_name}' has tensors of both BF16 and BYTES, which ONNX Runtime's Python lacks")
    return Signature(tuple(inputs), tuple(outputs)), notes


def unsendable_outputs(session: Session) -> dict[str, str]:
    return {argument.name: argument.type for argument in session.get_outputs() if _datatype(argument) is None}


def unsendable_hint(kinds: str) -> str:
    """Return a hint for outputs of such types, "" for none."""
    return "scikit-learn converters write the probabilities as a tensor with zipmap=False" if "map(" in kinds else ""


def other_than_batch(session: Session) -> str:
    """Return the name of a first dimension that is not the batch, "" where there is none.

    It is the first dimension of one tensor and a later one of another, as in a matrix and its transpose. Other tensors
    must have another first dimension: some exporters give all variable dimensions one name, which proves nothing.
    """
    shapes = [argument.shape for argument in (*session.get_inputs(), *session.get_outputs())]
    first = {shape[0] for shape in shapes if shape and isinstance(shape[0], str)}
    later = {size for shape in shapes for size in shape[1:] if isinstance(size, str)}
    return min(first & later, default="") if len(first) > 1 else ""


def run_of(session: Session) -> Run:
    """Return the function that computes: on the CPU, the native call beneath `run` of the session.

    `run` checks names again, and can fall back to another provider: 1.5 us for a model that takes 10 us, and several
    where the caches are cold.
    """
    beneath = getattr(session, "_sess", None)
    run: Run = session.run if beneath is None or session.get_providers() != [CPU] else beneath.run
    return run


def is_small(session: Session, signature: Signature, batch_size: int) -> bool:
    """Whether a full batch is so fast that one thread is best, measured on zeros.

    False where zeros cannot replace real inputs: variable dimensions, strings, a model that refuses them.
    """
    inputs = [tensor for tensor in signature.inputs if not tensor.optional]
    if any(t.datatype in (DataType.BYTES, DataType.BF16) or -1 in t.shape[1:] for t in inputs):
        return False
    names = [tensor.name for tensor in signature.outputs]
    for size in (1, max(1, batch_size)):
        feed = {t.name: np.zeros([size if d == -1 else d for d in t.shape], t.datatype.numpy) for t in inputs}
        times = []
        for _ in range(4):
            start = time.monotonic_ns()
            try:
                session.run(names, feed)
            except Exception:  # zeros are not valid inputs of every model
                return False
            times.append(time.monotonic_ns() - start)
            # The first run fills caches, and other programs interrupt runs: two this slow decide, or a very slow one.
            if min(times[-2:]) > 20 * SMALL_RUN_NS and (len(times) > 1 or times[0] > 1000 * SMALL_RUN_NS):
                return False
        if min(times) > SMALL_RUN_NS:
            return False
    return True


def plain_error(what: str, error: Exception) -> ServingError:
    """Return an error of ONNX Runtime without source locations and line breaks; it may blame the inputs."""
    code = Code.INVALID_ARG if type(error).__name__ == "InvalidArgument" else Code.INTERNAL
    return array_backend.plain_error(what, error, code, _PREFIX, _SOURCE)


def _datatype(argument: Any) -> DataType | None:
    return _TYPES.get(argument.type.removeprefix("tensor(").removesuffix(")")) if "tensor(" in argument.type else None


def _shape(argument: Any) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) and d >= 0 else -1 for d in argument.shape)


def to_text(name: str, array: Array) -> Array:
    """Decode bytes to strings: ONNX Runtime's Python API takes only those."""
    texts = np.empty(array.shape, object)
    texts.reshape(-1)[:] = array_backend.decoded(name, array, "ONNX Runtime")
    return texts


class ConvertedOnnx:
    """A model that `charonia convert` has written, opened on the CPU to be checked."""

    def __init__(self, path: Path) -> None:
        self._session = open_session(path, SessionPlan(), threads=1, providers=[(CPU, {})])
        self.signature, _ = signature_of(self._session, path.stem)

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        texts = {tensor.name for tensor in self.signature.inputs if tensor.datatype is DataType.BYTES}
        given = {name: to_text(name, array) if name in texts else array for name, array in feed.items()}
        outputs = self.signature.outputs
        try:
            arrays = self._session.run([tensor.name for tensor in outputs], given)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            raise plain_error(f"the converted model fails on the samples ({shapes})", error) from error
        return {
            tensor.name: as_bytes(array) if tensor.datatype is DataType.BYTES else array
            for tensor, array in zip(outputs, arrays, strict=True)
        }
