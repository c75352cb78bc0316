"""Completes configurations from ONNX models, loads them, and runs batches."""

import asyncio
import ctypes
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnxruntime

from charonia.config.complete import Signature, SignatureTensor, check_signature, merge_signature
from charonia.config.kinds import InstanceKind
from charonia.config.model import ModelConfig, ModelInput, ModelOutput
from charonia.config.problems import Problem, check_problems
from charonia.config.sequence_tensors import seen_by_model
from charonia.core.dtypes import DataType
from charonia.core.errors import Code, invalid, unsupported
from charonia.core.request import InferRequest
from charonia.core.statistics import MemoryUsage
from charonia.core.tensor import Array
from charonia.server.backends.api import BackendSettings, Completion, LoadedModel, ModelFiles, Placement
from charonia.server.backends.array_backend import ArrayInstance, PlannedBackend, inputs_hint, model_file, weights_bytes
from charonia.server.backends.batch import gather
from charonia.server.backends.onnxruntime.options import (
    CUDA,
    PARAMETERS,
    SessionPlan,
    choose_providers,
    for_openvino,
    idle_accelerators,
    ineffective_parameters,
    read_plan,
)
from charonia.server.backends.onnxruntime.session import (
    Run,
    Session,
    installed_providers,
    is_small,
    open_session,
    open_to_inspect,
    other_than_batch,
    plain_error,
    run_of,
    signature_of,
    start_global_pool,
    to_text,
    unsendable_hint,
    unsendable_outputs,
    without_shape,
)
from charonia.server.channel.datatypes import as_bytes
from charonia.server.machine.cores import bound_to
from charonia.server.machine.memory import release_freed_memory
from charonia.server.ragged.batch import compute_input, configured_form, gather_flat, ragged_plan, scatter_like

Convert = Callable[[Array], Array]

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


class OnnxRuntimeModel:
    """A loaded version, with the sessions of its instances.

    Args:
        verbose: Whether ONNX Runtime may write to stderr.
    """

    def __init__(self, path: Path, config: ModelConfig, plan: SessionPlan, *, verbose: bool) -> None:
        self._path = path
        self._config = config
        self._plan = plan
        self._verbose = verbose
        self._shared: dict[tuple[int, ...], asyncio.Task[Session]] = {}  # by the cores that instances are bound to
        self._memory: list[MemoryUsage] = []

    async def create_instance(self, placement: Placement) -> OnnxRuntimeInstance:
        """Make one more instance.

        Instances on the CPU share a session, unless they are bound to other cores; each one on a GPU has its own.
        """
        if placement.kind is InstanceKind.KIND_GPU:
            session = await asyncio.to_thread(self._open, placement)
        else:
            shared = self._shared.get(placement.cores)
            if shared is None:
                shared = self._shared[placement.cores] = asyncio.create_task(asyncio.to_thread(self._open, placement))
            session = await asyncio.shield(shared)
        return OnnxRuntimeInstance(session, self._config, self._plan.run_entries)

    def memory(self) -> list[MemoryUsage]:
        """Return the size of the weights for each session, which is that of their files."""
        return list(self._memory)

    async def aclose(self) -> None:
        self._shared.clear()
        await asyncio.to_thread(release_freed_memory)

    def _open(self, placement: Placement) -> Session:
        with bound_to(placement.cores):
            return self._opened(placement)

    def _opened(self, placement: Placement) -> Session:
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
        self._memory.append(MemoryUsage(kind, device, weights_bytes(self._path)))
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
        merged, notes = merge_signature(config, required, default_max_batch_size=batch_size, model_name=config.name)

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
