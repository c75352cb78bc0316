"""Completes configurations from ONNX models, loads them, and runs batches.

ONNX Runtime maps external weights into memory for as long as the model is loaded. If the file is overwritten meanwhile
(`cp new.data model.data`), the served model changes its answers; if it is truncated, SIGBUS ends the whole process. A
copy in memory has neither problem, and its file may be a symbolic link that leads out of the folder.
"""

import asyncio
import ctypes
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, TypeVar

import numpy as np
import onnxruntime

from charonia.config.complete import Signature, SignatureTensor, check_signature, merge_signature
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.onnx_file import OnnxFile
from charonia.config.problems import Problem, check_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.dtypes import BY_NAME, DataType
from charonia.core.errors import Code, ServingError, invalid, unsupported
from charonia.core.request import InferRequest
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Array
from charonia.install_hint import package_hint
from charonia.server.backends import array_backend
from charonia.server.backends.api import BackendSettings, Completion, LoadedModel, ModelFiles, Placement
from charonia.server.backends.array_backend import (
    ArrayInstance,
    PlannedBackend,
    SharingModel,
    inputs_hint,
    model_file,
    weights_bytes,
)
from charonia.server.backends.batch import gather
from charonia.server.backends.onnxruntime.options import (
    CPU,
    CUDA,
    PARAMETERS,
    TENSORRT,
    Provider,
    SessionPlan,
    choose_providers,
    for_openvino,
    idle_accelerators,
    ineffective_parameters,
    read_plan,
)
from charonia.server.channel.datatypes import as_bytes
from charonia.server.machine.cores import bound_to
from charonia.server.machine.memory import release_freed_memory
from charonia.server.ragged.batch import compute_input, configured_form, gather_flat, ragged_plan, scatter_like

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
        inputs = {name: to_text(name, array) if name in texts else array for name, array in feed.items()}
        outputs = self.signature.outputs
        try:
            arrays = self._session.run([tensor.name for tensor in outputs], inputs)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            raise plain_error(f"the converted model fails on the samples ({shapes})", error) from error
        return {
            tensor.name: as_bytes(array) if tensor.datatype is DataType.BYTES else array
            for tensor, array in zip(outputs, arrays, strict=True)
        }


_BFLOAT16 = 16
"""ONNX's number of the type."""


class OnnxRuntimeInstance(ArrayInstance):
    """An instance. Instances may share a session, which is thread-safe.

    Args:
        run_entries: Run configuration entries, by name and value.
    """

    def __init__(self, session: Session, config: ModelConfig, run_entries: Sequence[tuple[str, str]]) -> None:
        super().__init__(config)
        self._ragged = ragged_plan(config)
        self._texts = {plan.name for plan in (*self.inputs, *self.outputs) if plan.datatype is DataType.BYTES}
        has_bfloat16 = any(plan.datatype is DataType.BF16 for plan in (*self.inputs, *self.outputs))
        self._run: Run = partial(_run_with_bfloat16, session) if has_bfloat16 else run_of(session)
        self._options: object = None
        if run_entries:
            options = onnxruntime.RunOptions()
            for key, value in run_entries:
                options.add_run_config_entry(key, value)
            self._options = options

    def run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        try:
            return self._run(names, feed, self._options)
        except Exception as error:  # ONNX Runtime's errors have no common base class
            failure = plain_error("ONNX Runtime failed", error)
            failure.hint = inputs_hint(feed) if failure.code is Code.INTERNAL else ""
            raise failure from error

    def feed(self, requests: Sequence[InferRequest]) -> dict[str, Array]:
        """Return the inputs, those that a batch computes or concatenates without a batch dimension among them."""
        feed = {}
        ragged = self._ragged
        for plan in self.inputs:
            is_flat = plan.name in ragged.inputs
            array = gather_flat(requests, plan.name) if is_flat else gather(requests, plan.name)
            if array is not None:
                feed[plan.name] = array if is_flat else plan.reshape(array, self.is_batched)
        for computed in ragged.computed:
            array = compute_input(computed.kind, self._shapes(requests, computed.source), computed.datatype)
            feed.update(dict.fromkeys(computed.names, array))
        for name in self._texts & feed.keys():
            feed[name] = to_text(name, feed[name])
        return feed

    def parts(self, name: str, array: Array, requests: Sequence[InferRequest]) -> list[Array]:
        """Return each request's part of an output, which may be as long as the request's part of an input."""
        if name in self._texts:
            array = as_bytes(array)
        source = self._ragged.scattered.get(name)
        if source is not None:
            return scatter_like(name, array, self._shapes(requests, source))
        return super().parts(name, array, requests)

    def _shapes(self, requests: Sequence[InferRequest], name: str) -> list[tuple[int, ...]]:
        """Return the shape of an input in each request, as the model sees it."""
        plan = next(plan for plan in self.inputs if plan.name == name)
        if name not in requests[0].inputs:
            raise invalid(f"input '{name}' cannot be left out: the shapes of others follow from its own")
        return [plan.reshape(request.inputs[name].array, True).shape for request in requests]


def _run_with_bfloat16(
    session: Session, names: Sequence[str], feed: Mapping[str, Array], options: object
) -> list[Array]:
    """Run a model with BF16, which numpy lacks: the bit patterns are passed as `OrtValue`s."""
    kinds = {argument.name: argument.type for argument in session.get_inputs()}
    make = onnxruntime.OrtValue
    values = {
        name: make.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), _BFLOAT16)
        if kinds.get(name) == "tensor(bfloat16)"
        else make.ortvalue_from_numpy(array)
        for name, array in feed.items()
    }
    return [_to_numpy(value) for value in session.run_with_ort_values(names, values, options)]


def _to_numpy(value: onnxruntime.OrtValue) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        array: Array = value.numpy()
        return array
    size = value.tensor_size_in_bytes()
    content = ctypes.string_at(value.data_ptr(), size) if size else b""
    return np.frombuffer(content, np.uint16).reshape(value.shape())


DEFAULT_FILE = "model.onnx"

_ROUTED = (
    "execution accelerator openvino: the openvino backend runs the model, as the installed ONNX Runtime has no such "
    "provider"
)

_log = logging.getLogger(__name__)


class OnnxRuntimeModel(SharingModel):
    """A loaded version, with the sessions of its instances: its memory is the size of the weights for each session.

    Args:
        verbose: Whether ONNX Runtime may write to stderr.
    """

    def __init__(self, path: Path, config: ModelConfig, plan: SessionPlan, *, verbose: bool) -> None:
        super().__init__()
        self._path = path
        self._config = config
        self._plan = plan
        self._verbose = verbose

    async def create_instance(self, placement: Placement) -> OnnxRuntimeInstance:
        """Make one more instance.

        Instances on the CPU share a session, unless they are bound to other cores; each one on a GPU has its own.
        """
        if placement.kind is InstanceKind.KIND_GPU:
            session = await asyncio.to_thread(self._open, placement)
        else:
            session = await self.shared(placement.cores, lambda: asyncio.to_thread(self._open, placement))
        return OnnxRuntimeInstance(session, self._config, self._plan.run_entries)

    def _open(self, placement: Placement) -> Session:
        with bound_to(placement.cores):
            return self._open_here(placement)

    def _open_here(self, placement: Placement) -> Session:
        config, plan = self._config, self._plan
        providers = choose_providers(config, plan, placement, installed_providers())
        if plan.has_pattern is None:
            plan = replace(plan, has_pattern=all(-1 not in tensor.dims for tensor in config.input))
        threads = self._threads(placement)
        session = open_session(self._path, plan, threads=threads, providers=providers, verbose=self._verbose)
        signature, _ = signature_of(session, config.name)
        lacking = unsendable_outputs(session)
        check_problems(config.name, [*_unsendable(config, lacking), *signature_problems(config, signature, lacking)])
        on_cpu = placement.kind is not InstanceKind.KIND_GPU
        if on_cpu and threads > 1 and not plan.intra_op_threads and is_small(session, signature, config.max_batch_size):
            session = open_session(self._path, plan, threads=1, providers=providers, verbose=self._verbose)
        release_freed_memory()
        kind, device = ("CPU", 0) if on_cpu else ("GPU", placement.device_id)
        self.usage.append(MemoryUsage(kind, device, weights_bytes(self._path)))
        return session

    def _threads(self, placement: Placement) -> int:
        """Return the number of threads of the instance's session, which all instances that share it use together."""
        each = self._plan.intra_op_threads or placement.threads
        if placement.kind is InstanceKind.KIND_GPU:
            return each
        groups = self._config.instance_group
        sharing = sum(group.count for group in groups if group.kind is not InstanceKind.KIND_GPU)
        # Each instance brings its calling thread; the others belong to the pool.
        threads = max(1, sharing) * (each - 1) + 1
        return min(threads, len(placement.cores)) if placement.cores and not self._plan.intra_op_threads else threads


class OnnxRuntimeBackend(PlannedBackend[SessionPlan, LoadedModel]):
    """The `onnxruntime` backend."""

    name = "onnxruntime"
    parameters = PARAMETERS
    runs_on_gpus = True
    read_plan = staticmethod(read_plan)

    def __init__(self) -> None:
        self._has_global_pool = False

    def uses_gpus(self) -> bool:
        """Whether the installed ONNX Runtime has a provider for GPUs."""
        return CUDA in installed_providers()

    async def complete(self, files: ModelFiles, config: ModelConfig, settings: BackendSettings) -> Completion:
        routed = () if _for_openvino(config) is None else (_ROUTED,)
        if config.input and config.output:
            return Completion(config, routed)
        plan = self._prepared(files, self.plan(config, settings))
        path = model_file(files, config, DEFAULT_FILE)

        def inspect() -> tuple[Signature, list[str], str, frozenset[str]]:
            try:
                session = open_to_inspect(path, plan)
                signature, left_out = signature_of(session, config.name)
                # ONNX Runtime reports tensors without a shape like scalars, without dimensions.
                is_shapeless = any(not tensor.shape for tensor in (*signature.inputs, *signature.outputs))
                shapeless = without_shape(path) if is_shapeless else frozenset()
                return signature, left_out, other_than_batch(session), shapeless
            finally:
                release_freed_memory()

        signature, left_out, no_batch, shapeless = await asyncio.to_thread(inspect)
        remarks = [*left_out]
        # Clients do not have to send inputs with defaults unless the configuration names them.
        required = replace(signature, inputs=tuple(t for t in signature.inputs if not t.optional))
        batch_size = settings.default_max_batch_size
        if no_batch and batch_size > 0 and not config.max_batch_size and not required.fixed:
            batch_size = 0
            sentence = (
                f"max_batch_size: 0, as dimension '{no_batch}' is the first of one tensor and a later one of another"
            )
            remarks.append(sentence)
        merged, notes = merge_signature(config, required, default_max_batch_size=batch_size)

        def opened(tensor: _Port, kind: str, is_given: object) -> _Port:
            if is_given or tensor.name not in shapeless:
                return replace(tensor, dims=_without_zeros(tensor.dims))
            remarks.append(
                f"{kind} '{tensor.name}': dims [ -1 ], as the model file states no shape; "
                "for tensors of another rank, configure `dims`"
            )
            return replace(tensor, dims=(-1,), reshape=None)

        merged = replace(
            merged,
            input=tuple(opened(tensor, "input", config.input) for tensor in merged.input),
            output=tuple(opened(tensor, "output", config.output) for tensor in merged.output),
        )
        for remark in remarks:
            _log.info("model '%s': %s", config.name, remark)
        return Completion(merged, (*notes, *remarks, *routed))

    def remarks(self, config: ModelConfig, settings: Mapping[str, str]) -> Iterator[str]:
        yield from (*ineffective_parameters(config), *idle_accelerators(config))

    async def open(
        self, files: ModelFiles, config: ModelConfig, plan: SessionPlan, settings: BackendSettings
    ) -> LoadedModel:
        """Load a version; its first instance opens the session.

        A model with the accelerator `openvino` is loaded by the openvino backend if ONNX Runtime lacks that provider.
        """
        plan = self._prepared(files, plan)
        path = model_file(files, config, DEFAULT_FILE)
        if config.cc_model_filenames and any(g.kind is InstanceKind.KIND_GPU for g in config.instance_group):
            raise unsupported(
                f"model '{config.name}': cc_model_filenames is not supported by the onnxruntime backend",
                hint="set default_model_filename",
            )
        routed = _for_openvino(config)
        if routed is not None:
            from charonia.server.backends.openvino.backend import OpenVinoBackend  # only such models need the library

            _log.info("model '%s': %s", config.name, _ROUTED)
            named = replace(routed, default_model_filename=config.default_model_filename or DEFAULT_FILE)
            return await OpenVinoBackend().load(files, named, settings)
        return OnnxRuntimeModel(path, seen_by_model(config), plan, verbose=settings.verbose)

    def _prepared(self, files: ModelFiles, plan: SessionPlan) -> SessionPlan:
        if plan.uses_global_pool and not self._has_global_pool:
            start_global_pool(plan.intra_op_threads, plan.inter_op_threads)
            self._has_global_pool = True
        return replace(plan, op_libraries=tuple(_op_library(files, name) for name in plan.op_libraries))


_Port = TypeVar("_Port", ModelInput, ModelOutput)


def _for_openvino(config: ModelConfig) -> ModelConfig | None:
    """Return the configuration for the openvino backend of a model that it runs, None for others."""
    routed = for_openvino(config, installed_providers())
    return routed if routed is None or find_spec("openvino") is not None else None


def signature_problems(
    config: ModelConfig, signature: Signature, passed_over: Collection[str] = ()
) -> Iterator[Problem]:
    """Yield each difference between a configuration and a model that matters, except in the outputs `passed_over`."""
    signature, problems = configured_form(ragged_plan(config), config, signature)
    yield from problems
    if not config.output:
        message = f"none is configured; the model provides {', '.join(tensor.name for tensor in signature.outputs)}"
        yield Problem("output", message)
    config = replace(config, output=tuple(output for output in config.output if output.name not in passed_over))
    # ONNX Runtime reports an unknown rank like a scalar, without dimensions: the configuration decides then.
    inputs = {i.name: i.inner_dims for i in config.input}
    outputs = {o.name: o.inner_dims for o in config.output}
    lead = (-1,) if config.max_batch_size > 0 else ()

    def known(tensor: SignatureTensor, dims: dict[str, tuple[int, ...]]) -> SignatureTensor:
        if not tensor.shape and tensor.name in dims:
            return replace(tensor, shape=(*lead, *dims[tensor.name]))
        batch = len(lead)
        return replace(tensor, shape=(*tensor.shape[:batch], *_without_zeros(tensor.shape[batch:])))

    def answered(tensor: SignatureTensor) -> SignatureTensor:
        # The optimiser infers more about an output than the file says: what the configuration leaves open agrees.
        dims, own = outputs.get(tensor.name, ()), tensor.shape[len(lead) :]
        if not tensor.shape or len(dims) != len(own):
            return known(tensor, outputs)
        opened = (-1 if asked == -1 else has for asked, has in zip(dims, own, strict=True))
        return replace(tensor, shape=(*tensor.shape[: len(lead)], *opened))

    yield from check_signature(
        config,
        Signature(
            tuple(known(tensor, inputs) for tensor in signature.inputs),
            tuple(answered(tensor) for tensor in signature.outputs),
        ),
    )
    own = {tensor.name: tensor.shape for tensor in (*signature.inputs, *signature.outputs)}
    short = [name for name, dims in (inputs | outputs).items() if own.get(name) == (-1, *dims)]
    if short and config.max_batch_size == 0:
        message = f"it is 0, and the dims of {', '.join(short)} have no batch dimension: set it to the largest batch"
        yield Problem("max_batch_size", message)
    required = {tensor.name for tensor in signature.inputs if not tensor.optional}
    for index, tensor in enumerate(config.input):
        if tensor.optional and tensor.name in required:
            message = f"input '{tensor.name}' has no default in the model, so it cannot be optional"
            yield Problem(f"input[{index}].optional", message)


def _unsendable(config: ModelConfig, lacking: Mapping[str, str]) -> Iterator[Problem]:
    for index, tensor in enumerate(config.output):
        if tensor.name in lacking:
            hint = unsendable_hint(lacking[tensor.name])
            message = f"output '{tensor.name}' is {lacking[tensor.name]}, which cannot be sent"
            yield Problem(f"output[{index}].name", f"{message}; {hint}" if hint else message)


def _without_zeros(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return dims for a configuration, which cannot have 0; a variable dimension may be 0."""
    return tuple(dim or -1 for dim in dims)


def _op_library(files: ModelFiles, name: str) -> str:
    """Return the path of an operator library in the model's folders, else its name, for the system's search path."""
    for folder in (files.version_dir, files.model_dir):
        if (folder / name).is_file():
            return os.fspath((folder / name).resolve())
    return name
