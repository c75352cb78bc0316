"""Completes a model configuration: from its own parts, from the names of files, from what a backend reads in the model.

Three steps, each pure: `derive_backend` (platform, backend and file name from one another), `merge_signature` (inputs,
outputs and batching from the model's own signature), `normalise` (defaults that every configuration gets). Each of the
first two also says in sentences what it inferred. Source: Triton's "Auto-Generated Model Configuration".
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from charonia.config.model import (
    DynamicBatching,
    InstanceGroup,
    InstanceKind,
    Latest,
    ModelConfig,
    ModelInput,
    ModelOutput,
    Optimization,
    PinnedMemoryBuffer,
    Reshape,
    VersionPolicy,
)
from charonia.config.platforms import ENSEMBLE, FORMATS, ModelFormat
from charonia.config.problems import Problem
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid

SEQUENCE_IDLE_US = 1_000_000
"""Idle time of a sequence where the configuration gives none, in us."""


@dataclass(frozen=True, slots=True)
class SignatureTensor:
    """An input or output as the model itself declares it.

    Attributes:
        name: Tensor name.
        datatype: Its datatype.
        shape: Its full shape, -1 for a variable dimension, with the batch dimension where there is one.
        optional: Whether an input may be left out.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs that the model itself declares."""

    inputs: tuple[SignatureTensor, ...]
    outputs: tuple[SignatureTensor, ...]

    @property
    def batches(self) -> bool:
        """Whether the first dimension of every tensor is variable, and so may be the batch."""
        tensors = (*self.inputs, *self.outputs)
        return bool(tensors) and all(t.shape and t.shape[0] == -1 for t in tensors)


def derive_backend(config: ModelConfig, model_name: str, file_names: Collection[str]) -> tuple[ModelConfig, list[str]]:
    """Fill in platform, backend and file name from one another, or from the files of a version.

    Args:
        config: The configuration as it was read.
        model_name: Name of the model's folder.
        file_names: Names in the folder of a version.

    Raises:
        ServingError: INVALID_ARG when nothing tells which backend is meant.
    """
    if config.platform == ENSEMBLE or config.ensemble_scheduling is not None:
        return config, []
    notes: list[str] = []
    known = _known_by_config(config)
    if not config.backend and not config.platform and known is None:
        known = next((entry for entry in FORMATS if entry.filename in file_names), None)
        if known is not None:
            notes.append(f"backend: {known.backend}, from the file {known.filename}")
        else:
            return _from_extension(config, model_name, file_names)
    if known is None:
        return config, notes
    if not config.backend:
        config = replace(config, backend=known.backend)
    if not config.platform:
        config = replace(config, platform=known.platform)
    if not config.default_model_filename:
        config = replace(config, default_model_filename=known.filename)
    return config, notes


def _known_by_config(config: ModelConfig) -> ModelFormat | None:
    for given, attribute in (
        (config.platform, "platform"),
        (config.backend, "backend"),
        (config.default_model_filename, "filename"),
    ):
        if given:
            return next((entry for entry in FORMATS if getattr(entry, attribute) == given), None)
    return None


def _from_extension(config: ModelConfig, model_name: str, file_names: Collection[str]) -> tuple[ModelConfig, list[str]]:
    """`name.backend` as the folder and `model.backend` as the file name any backend."""
    extension = model_name.rpartition(".")[2] if "." in model_name else ""
    file_name = f"model.{extension}"
    if not extension or file_name not in file_names:
        raise invalid(
            f"Invalid model name: Could not determine backend for model '{model_name}' with no backend in model "
            "configuration. Expected model name of the form 'model.<backend_name>'.",
            hint="set 'backend' in config.pbtxt, or put one of these into the version folder: "
            f"{', '.join(entry.filename for entry in FORMATS)}",
        )
    completed = replace(config, backend=extension, default_model_filename=config.default_model_filename or file_name)
    return completed, [f"backend: {extension}, from the name of the model's folder"]


def merge_signature(
    config: ModelConfig, signature: Signature, *, default_max_batch_size: int, model_name: str
) -> tuple[ModelConfig, list[str]]:
    """Fill in inputs, outputs and batching from the model's own signature; what the configuration says stays.

    Where both inputs and outputs are given, nothing is inferred. Otherwise a model is taken to batch when the first
    dimension of every tensor is variable; `max_batch_size` then becomes `default_max_batch_size` unless it is given,
    and a dynamic batcher is added where no scheduler is chosen and batches may be larger than 1.

    Raises:
        ServingError: INVALID_ARG when the configuration asks for batching that the model cannot do.
    """
    if config.input and config.output:
        return config, []
    notes: list[str] = []
    if config.max_batch_size > 0 and not signature.batches:
        raise invalid(
            f"autofill failed for model '{model_name}': model does not support batching while non-zero max_batch_size "
            "is specified",
            hint="set max_batch_size to 0, or export the model with a variable first dimension of every tensor",
        )
    if config.max_batch_size == 0 and signature.batches and not config.input and not config.output:
        config = replace(config, max_batch_size=default_max_batch_size)
        notes.append(
            f"max_batch_size: {default_max_batch_size}, since the first dimension of every tensor is variable "
            "(the default; raise it for more throughput)"
        )
    batches = config.max_batch_size > 0
    if not config.input:
        config = replace(config, input=tuple(_input(t, batches) for t in signature.inputs))
        notes += [_note("input", i.name, i.data_type, i.dims) for i in config.input]
    if not config.output:
        config = replace(config, output=tuple(_output(t, batches) for t in signature.outputs))
        notes += [_note("output", o.name, o.data_type, o.dims) for o in config.output]
    has_scheduler = config.dynamic_batching or config.sequence_batching or config.ensemble_scheduling
    if config.max_batch_size > 1 and not has_scheduler:
        config = replace(config, dynamic_batching=DynamicBatching())
        notes.append("dynamic_batching: on, since the model batches")
    return config, notes


def _note(kind: str, name: str, datatype: DataType | None, dims: tuple[int, ...]) -> str:
    return f"{kind} '{name}': {datatype.wire if datatype is not None else '?'} {list(dims)}, from the model"


def _dims(tensor: SignatureTensor, batches: bool) -> tuple[tuple[int, ...], Reshape | None]:
    """Return the dimensions of a tensor without the batch; one without any becomes [1] with an empty reshape."""
    shape = tensor.shape[1:] if batches else tensor.shape
    return (shape, None) if shape else ((1,), Reshape())


def _input(tensor: SignatureTensor, batches: bool) -> ModelInput:
    dims, reshape = _dims(tensor, batches)
    return ModelInput(tensor.name, tensor.datatype, dims=dims, reshape=reshape, optional=tensor.optional)


def _output(tensor: SignatureTensor, batches: bool) -> ModelOutput:
    dims, reshape = _dims(tensor, batches)
    return ModelOutput(tensor.name, tensor.datatype, dims, reshape)


def check_signature(config: ModelConfig, signature: Signature) -> list[Problem]:
    """Compare a complete configuration with the model's own signature; return every difference that matters."""
    problems: list[Problem] = []
    batches = config.max_batch_size > 0
    required = [t for t in signature.inputs if not t.optional]
    if not len(required) <= len(config.input) <= len(signature.inputs):
        problems.append(
            Problem(
                "input",
                f"unable to load model '{config.name}', configuration expects {len(config.input)} inputs, model "
                f"provides {len(signature.inputs)}",
            )
        )
    for kind, configured, declared in (
        ("input", config.input, signature.inputs),
        ("output", config.output, signature.outputs),
    ):
        by_name = {t.name: t for t in declared}
        tensors: tuple[ModelInput | ModelOutput, ...] = configured
        for index, tensor in enumerate(tensors):
            path = f"{kind}[{index}]"
            own = by_name.get(tensor.name)
            if own is None:
                allowed = ", ".join(by_name)
                problems.append(
                    Problem(
                        f"{path}.name",
                        f"unexpected inference {kind} '{tensor.name}', allowed {kind}s are: {allowed}",
                    )
                )
                continue
            if tensor.data_type is not own.datatype:
                given = tensor.data_type.config if tensor.data_type is not None else "none"
                problems.append(
                    Problem(
                        f"{path}.data_type",
                        f"configuration expects datatype {given} for {kind} '{tensor.name}', model provides "
                        f"{own.datatype.config}",
                    )
                )
            dims = tensor.reshape.shape if tensor.reshape is not None else tensor.dims
            full = (-1, *dims) if batches else dims
            if not _fits(full, own.shape):
                problems.append(
                    Problem(
                        f"{path}.dims",
                        f"model '{config.name}', tensor '{tensor.name}': the model expects {len(own.shape)} dimensions "
                        f"(shape {list(own.shape)}) but the model configuration specifies {len(full)} dimensions "
                        f"({'with the batch dimension, ' if batches else ''}shape {list(full)})",
                    )
                )
    return problems


def _fits(configured: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    return len(configured) == len(declared) and all(
        -1 in (a, b) or a == b for a, b in zip(configured, declared, strict=True)
    )


def normalise(config: ModelConfig, *, name: str, gpu_count: int, default_instance_count: int) -> ModelConfig:
    """Return the configuration with every default written out.

    Args:
        config: A configuration with its backend.
        name: Model name where it has none.
        gpu_count: GPUs of this machine: KIND_AUTO means all of them, or the CPU where there is none.
        default_instance_count: Instances of a group that gives no count.
    """
    config = replace(
        config,
        name=config.name or name,
        version_policy=config.version_policy or VersionPolicy(latest=Latest(1)),
    )
    if config.platform == ENSEMBLE:
        return config
    dynamic = config.dynamic_batching
    if dynamic is not None and not dynamic.preferred_batch_size and config.max_batch_size > 0:
        config = replace(config, dynamic_batching=replace(dynamic, preferred_batch_size=(config.max_batch_size,)))
    sequence = config.sequence_batching
    if sequence is not None and sequence.max_sequence_idle_microseconds == 0:
        config = replace(config, sequence_batching=replace(sequence, max_sequence_idle_microseconds=SEQUENCE_IDLE_US))
    optimization = config.optimization or Optimization()
    groups = config.instance_group or (InstanceGroup(name=config.name),)
    return replace(
        config,
        optimization=replace(
            optimization,
            input_pinned_memory=optimization.input_pinned_memory or PinnedMemoryBuffer(True),
            output_pinned_memory=optimization.output_pinned_memory or PinnedMemoryBuffer(True),
        ),
        instance_group=tuple(
            _group(group, f"{config.name}_{index}", gpu_count, default_instance_count)
            for index, group in enumerate(groups)
        ),
    )


def _group(group: InstanceGroup, name: str, gpu_count: int, default_count: int) -> InstanceGroup:
    kind = group.kind
    if kind is InstanceKind.KIND_AUTO:
        kind = InstanceKind.KIND_GPU if gpu_count and (group.gpus or not group.profile) else InstanceKind.KIND_CPU
        if kind is InstanceKind.KIND_CPU and group.gpus:
            kind = InstanceKind.KIND_GPU
    gpus = group.gpus
    if kind is InstanceKind.KIND_GPU and not gpus:
        gpus = tuple(range(gpu_count))
    return replace(group, name=group.name or name, kind=kind, gpus=gpus, count=group.count or default_count)
