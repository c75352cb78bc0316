"""Completes a configuration: from its own fields and file names, from the model itself, and with defaults.

The steps are `derive_backend`, which determines the backend; `merge_signature`, for backends whose models have a
signature; and `normalise`, which fills in the defaults. `check_signature` compares the result with the model. Source:
Triton's documentation of auto-generated model configuration, and its ONNX Runtime backend.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from charonia.config.backends import ENSEMBLE, OWN_NAMES, Form, backend_of_platform, formats, record_of
from charonia.config.kinds import InstanceKind
from charonia.config.model import (
    DynamicBatching,
    InstanceGroup,
    Latest,
    ModelConfig,
    ModelInput,
    ModelOutput,
    Optimization,
    PinnedMemoryBuffer,
    Reshape,
    VersionPolicy,
)
from charonia.config.parameters import least_of
from charonia.config.problems import Problem
from charonia.config.sequence_tensors import added_names
from charonia.core.dtypes import DataType
from charonia.core.errors import invalid

SEQUENCE_IDLE_US = 1_000_000
"""Default idle limit of a sequence."""


FILES_LISTED_MAX = 10
"""Limit of files of a version that a hint lists."""


@dataclass(frozen=True, slots=True)
class SignatureTensor:
    """An input or output of the model itself.

    Attributes:
        name: Tensor name.
        datatype: Its datatype.
        shape: Its full shape, with the batch dimension if there is one; -1 for a variable dimension.
        optional: Whether an input has a default and may be omitted.
        nullable: Whether requests may omit an input, which is a missing value.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    optional: bool = False
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model, and parameters that describe its inputs."""

    inputs: tuple[SignatureTensor, ...]
    outputs: tuple[SignatureTensor, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def fixed(self) -> tuple[SignatureTensor, ...]:
        """Tensors without a variable first dimension, which prevent batching. Optional ones do not."""
        tensors = (*(tensor for tensor in self.inputs if not tensor.optional), *self.outputs)
        return tuple(tensor for tensor in tensors if tensor.shape[:1] != (-1,))


def derive_backend(
    config: ModelConfig, model_name: str, file_names: Collection[str], installed: Collection[str] = ()
) -> tuple[ModelConfig, list[str]]:
    """Fill in platform, backend and file name from one another, and from a version's files where none is given.

    Args:
        config: The original configuration.
        model_name: Name of the model's folder.
        file_names: Names of the files and folders in the folder of a version.
        installed: Names of the backends that are there.

    Returns:
        The configuration and a sentence for each value that follows from the files.

    Raises:
        ServingError: INVALID_ARG when nothing identifies the backend, or the platform is unknown and no backend given.
    """
    if config.platform == ENSEMBLE:
        return config, []
    if config.ensemble_scheduling is not None and not config.backend and not config.platform:
        return replace(config, platform=ENSEMBLE), ["platform: ensemble, from ensemble_scheduling"]
    if config.platform and not config.backend and config.platform not in (platforms := backend_of_platform()):
        known = ", ".join([*platforms, ENSEMBLE])
        raise invalid(
            f"unexpected platform type '{config.platform}' for {model_name}",
            hint=f"known are {known}; or give 'backend'",
        )
    entry = _format(config, file_names)
    if entry is None:
        if config.backend and installed and config.backend not in installed:
            _point_at_model(model_name, config.backend, file_names, installed)
        return (config, []) if config.backend else _from_folder_name(config, model_name, file_names, installed)
    notes = []
    if not config.backend and not config.platform:
        source = config.default_model_filename or _file(entry, file_names)
        notes.append(f"backend: {entry.backend}, from the file '{source}'")
    filename = config.default_model_filename
    if not filename and not record_of(entry.backend).chooses_file:
        filename = _file(entry, file_names)
        if filename != entry.filename:
            notes.append(f"default_model_filename: '{filename}', the only {entry.suffix} file of the version")
    backend = config.backend or entry.backend
    is_of_another = bool(config.platform) and not config.backend and filename not in file_names
    if installed and (backend not in installed or (is_of_another and not config.default_model_filename)):
        _point_at_model(model_name, backend, file_names, installed)
    completed = replace(
        config,
        backend=backend,
        platform=config.platform or entry.platform,
        default_model_filename=filename,
    )
    return completed, notes


def _point_at_model(model_name: str, backend: str, file_names: Collection[str], installed: Collection[str]) -> None:
    """Refuse a backend that is missing or without a file, if the version holds a model of another backend.

    Raises:
        ServingError: INVALID_ARG with the file, and what to change.
    """
    fitting = (e for e in formats() if e.backend in installed and e.backend != backend and e.filename in file_names)
    entry = next(fitting, None)
    if entry is not None:
        lacking = f"a file for backend '{backend}'" if backend in installed else f"backend '{backend}'"
        raise invalid(
            f"unable to find {lacking} for model '{model_name}'",
            hint=f"the version's folder holds {entry.filename}: leave out platform and backend, or write "
            f'backend: "{entry.backend}"',
        )


def _format(config: ModelConfig, file_names: Collection[str]) -> Form | None:
    """Return the format that the given parts and the files agree on, or None if they identify none."""
    filename = config.default_model_filename
    fitting = [
        entry
        for entry in formats()
        if config.platform in ("", entry.platform)
        and config.backend in ("", entry.backend)
        and filename in ("", entry.filename, filename.removesuffix(PurePosixPath(filename).suffix) + entry.suffix)
    ]
    if not fitting and config.backend:
        # A backend has its platform even if the file name is unusual.
        fitting = [
            entry for entry in formats() if config.backend == entry.backend and config.platform in ("", entry.platform)
        ]
    present = [entry for entry in fitting if _file(entry, file_names) in file_names]
    if present:
        # Whatever packages a server has, a file that a backend of ours reads goes there: the platform counts on it.
        present = [entry for entry in present if entry.backend in OWN_NAMES] or present
        return next((entry for entry in present if entry.filename in file_names), present[0])
    return fitting[0] if fitting and (config.backend or config.platform or filename) else None


def _file(entry: Form, file_names: Collection[str]) -> str:
    """Return the format's file: the default name, unless another file is the only one with the format's suffix."""
    if entry.filename in file_names or entry.has_helpers:
        return entry.filename
    same = [name for name in file_names if PurePosixPath(name).suffix == entry.suffix]
    return same[0] if len(same) == 1 else entry.filename


def _from_folder_name(
    config: ModelConfig, model_name: str, file_names: Collection[str], installed: Collection[str]
) -> tuple[ModelConfig, list[str]]:
    """Take the backend from a folder `<name>.<backend>`: an installed one, or one with a file `model.<backend>`."""
    backend = PurePosixPath(model_name).suffix.removeprefix(".")
    filename = config.default_model_filename or f"model.{backend}"
    if not backend or (filename not in file_names and backend not in installed):
        raise invalid(
            f"Invalid model name: Could not determine backend for model '{model_name}' with no backend in model "
            "configuration. Expected model name of the form 'model.<backend_name>'.",
            hint=_file_hint(file_names),
        )
    if filename not in file_names:
        filename = config.default_model_filename
    completed = replace(config, backend=backend, default_model_filename=filename)
    return completed, [f"backend: {backend}, from the name of the model's folder"]


def _file_hint(file_names: Collection[str]) -> str:
    """Return a hint for a version whose files do not identify a backend."""
    own = [entry for entry in formats() if not entry.is_refused]
    known = ", ".join(dict.fromkeys(entry.filename for entry in own))
    if not file_names:
        return f"the version's folder is empty; the model belongs there, as one of {known}"
    suffixes = {entry.suffix for entry in own}
    models = sorted(name for name in file_names if PurePosixPath(name).suffix in suffixes)
    if len(models) > 1:
        return f"the version's folder holds {', '.join(models[:FILES_LISTED_MAX])}: `default_model_filename` says which"
    listed = ", ".join(sorted(file_names)[:FILES_LISTED_MAX])
    return f"the version's folder holds {listed}; expected one of {known}, or 'backend' in config.pbtxt"


ROWS_BATCH_SIZE = 1024
"""Completed `max_batch_size` of models of tables, whose rows are short."""


def rows_batch_size(default: int) -> int:
    """Return the completed `max_batch_size` of a model of tables, where that of others is `default`; 0 turns it off."""
    return default and max(default, ROWS_BATCH_SIZE)


def merge_signature(
    config: ModelConfig, signature: Signature, *, default_max_batch_size: int
) -> tuple[ModelConfig, list[str]]:
    """Fill in inputs, outputs and batching from the model, without changing values of the configuration.

    If inputs and outputs are both given, nothing is inferred. Otherwise a model can batch if the first dimension of
    every tensor is variable, and then `max_batch_size` is filled in, unless the given inputs or outputs already have as
    many dimensions as the model's own. Batches of more than 1 turn dynamic batching on if no other scheduler is given.

    Args:
        config: The configuration so far.
        signature: The model's tensors.
        default_max_batch_size: Batch size to fill in; 0 for none.

    Returns:
        The configuration, and a sentence for each value that was filled in.

    Raises:
        ServingError: INVALID_ARG when the configuration enables batching and the model cannot batch.
    """
    if config.input and config.output:
        return config, []
    notes: list[str] = []
    if config.max_batch_size > 0:
        _require_batching(signature, config.name)
    elif default_max_batch_size > 0 and _may_batch(config, signature):
        config = replace(config, max_batch_size=default_max_batch_size)
        notes.append(f"max_batch_size: {default_max_batch_size}, as the first dimension of every tensor is variable")
    if config.max_batch_size > 1 and config.dynamic_batching is None and config.sequence_batching is None:
        config = replace(config, dynamic_batching=DynamicBatching())
        notes.append("dynamic_batching: on, as the model batches and no other scheduler is given")
    batches = config.max_batch_size > 0
    added = added_names(config)
    if not config.input:
        required = [tensor for tensor in signature.inputs if not tensor.optional and tensor.name not in added]
        parameters = {**signature.parameters, **config.parameters}
        config = replace(config, input=tuple(_input(tensor, batches) for tensor in required), parameters=parameters)
        notes += [_note("input", tensor.name, tensor.datatype, _dims(tensor, batches)) for tensor in required]
    if not config.output:
        own = [tensor for tensor in signature.outputs if tensor.name not in added]
        config = replace(config, output=tuple(_output(tensor, batches) for tensor in own))
        notes += [_note("output", tensor.name, tensor.datatype, _dims(tensor, batches)) for tensor in own]
    return config, notes


def _require_batching(signature: Signature, model_name: str) -> None:
    if not signature.fixed:
        return
    shapes = ", ".join(f"'{tensor.name}' {list(tensor.shape)}" for tensor in signature.fixed)
    raise invalid(
        f"autofill failed for model '{model_name}': model does not support batching while non-zero max_batch_size is "
        f"specified; the first dimension is not variable in {shapes}",
        hint="set max_batch_size to 0, or export the model with a variable first dimension",
    )


def _may_batch(config: ModelConfig, signature: Signature) -> bool:
    if signature.fixed or not (signature.inputs or signature.outputs):
        return False
    ranks = {tensor.name: len(tensor.shape) for tensor in (*signature.inputs, *signature.outputs)}
    tensors: Sequence[ModelInput | ModelOutput] = config.input or config.output
    return all(len(tensor.inner_dims) != ranks.get(tensor.name) for tensor in tensors)


def _dims(tensor: SignatureTensor, batches: bool) -> tuple[int, ...]:
    return tensor.shape[1:] if batches else tensor.shape


def _input(tensor: SignatureTensor, batches: bool) -> ModelInput:
    dims = _dims(tensor, batches)
    # A configuration has no empty dims: a scalar is one reshaped element.
    reshape = None if dims else Reshape()
    return ModelInput(tensor.name, tensor.datatype, dims=dims or (1,), reshape=reshape, optional=tensor.nullable)


def _output(tensor: SignatureTensor, batches: bool) -> ModelOutput:
    dims = _dims(tensor, batches)
    return ModelOutput(tensor.name, tensor.datatype, dims=dims or (1,), reshape=None if dims else Reshape())


def _note(kind: str, name: str, datatype: DataType, dims: tuple[int, ...]) -> str:
    return f"{kind} '{name}': {datatype.wire} {list(dims)}, from the model"


def check_signature(config: ModelConfig, signature: Signature) -> list[Problem]:
    """Return all contradictions between a complete configuration and the model.

    Every required input of the model must be configured; outputs may be omitted.
    """
    problems: list[Problem] = []
    configured = {tensor.name for tensor in config.input}
    missing = [tensor.name for tensor in signature.inputs if not tensor.optional and tensor.name not in configured]
    names = {tensor.name for tensor in signature.inputs}
    if missing and (configured <= names or len(config.input) != len(signature.inputs)):
        message = (
            f"unable to load model '{config.name}', configuration expects {len(config.input)} inputs, model provides "
            f"{len(signature.inputs)}; not configured: {', '.join(missing)}"
        )
        problems.append(Problem("input", message))
    sides: dict[str, tuple[Sequence[ModelInput | ModelOutput], tuple[SignatureTensor, ...]]] = {
        "input": (config.input, signature.inputs),
        "output": (config.output, signature.outputs),
    }
    for kind, (tensors, own) in sides.items():
        by_name = {tensor.name: tensor for tensor in own}
        for index, tensor in enumerate(tensors):
            found = by_name.get(tensor.name)
            path = f"{kind}[{index}]"
            if found is None:
                message = f"unexpected inference {kind} '{tensor.name}', allowed {kind}s are: {', '.join(by_name)}"
                problems.append(Problem(f"{path}.name", message))
            else:
                problems += _tensor_problems(config, tensor, found, kind, path)
    return problems


def _tensor_problems(
    config: ModelConfig, tensor: ModelInput | ModelOutput, own: SignatureTensor, kind: str, path: str
) -> list[Problem]:
    problems = []
    batches = config.max_batch_size > 0
    if tensor.data_type is not own.datatype:
        given = tensor.data_type.config if tensor.data_type else "none"
        message = (
            f"configuration expects datatype {given} for {kind} '{tensor.name}', model provides {own.datatype.config}"
        )
        problems.append(Problem(f"{path}.data_type", message))
    shape = ((-1,) if batches else ()) + tensor.inner_dims
    # The model's variable dimensions accept any size; its fixed ones must match the configuration.
    fits = len(shape) == len(own.shape) and all(has in (-1, dim) for has, dim in zip(own.shape, shape, strict=True))
    if not fits:
        expected, specified = f"shape {list(own.shape)}", f"shape {list(shape)}"
        if len(shape) != len(own.shape):
            expected = f"{len(own.shape)} dimensions ({expected})"
            specified = f"{len(shape)} dimensions ({specified})"
        message = (
            f"model '{config.name}', tensor '{tensor.name}': the model expects {expected} but the model configuration "
            f"specifies {specified}{', where the first dimension is the batch' if batches else ''}"
        )
        problems.append(Problem(f"{path}.dims", message))
    if isinstance(tensor, ModelInput) and tensor.optional and not own.optional:
        message = f"input '{tensor.name}' is optional in the configuration, but the model has no default for it"
        problems.append(Problem(f"{path}.optional", message))
    if isinstance(tensor, ModelInput) and own.optional and batches:
        message = f"input '{tensor.name}' has a default in the model: clients can send it only if max_batch_size is 0"
        problems.append(Problem(f"{path}.name", message))
    return problems


def normalise(config: ModelConfig, *, name: str, gpu_count: int, default_instance_count: int) -> ModelConfig:
    """Return the configuration with all defaults filled in.

    Args:
        config: A configuration whose backend is known.
        name: Name for a configuration that has none.
        gpu_count: GPUs of this machine: KIND_AUTO means all of them, or the CPU if there are none.
        default_instance_count: Default count of a CPU group; for other groups it is 1. INSTANCES_MIN comes before both.
    """
    policy = config.version_policy
    if policy is None or policy == VersionPolicy():
        policy = VersionPolicy(latest=Latest(1))
    config = replace(config, name=config.name or name, version_policy=policy)
    if config.platform == ENSEMBLE:
        return config
    dynamic, sequence = config.dynamic_batching, config.sequence_batching
    if dynamic is not None and not dynamic.preferred_batch_size and config.max_batch_size > 0:
        dynamic = replace(dynamic, preferred_batch_size=(config.max_batch_size,))
    if sequence is not None and sequence.max_sequence_idle_microseconds == 0:
        sequence = replace(sequence, max_sequence_idle_microseconds=SEQUENCE_IDLE_US)
    if sequence is not None and sequence.oldest is not None and not sequence.oldest.preferred_batch_size:
        sizes = (config.max_batch_size,) if config.max_batch_size > 0 else ()
        sequence = replace(sequence, oldest=replace(sequence.oldest, preferred_batch_size=sizes))
    optimization = config.optimization or Optimization()
    least = least_of(config)
    groups = [
        _group(group, f"{config.name}_{index}", gpu_count, default_instance_count, least)
        for index, group in enumerate(config.instance_group)
    ]
    return replace(
        config,
        dynamic_batching=dynamic,
        sequence_batching=sequence,
        optimization=replace(
            optimization,
            input_pinned_memory=optimization.input_pinned_memory or PinnedMemoryBuffer(True),
            output_pinned_memory=optimization.output_pinned_memory or PinnedMemoryBuffer(True),
        ),
        instance_group=tuple(groups)
        or (_group(InstanceGroup(), config.name, gpu_count, default_instance_count, least),),
    )


def _group(group: InstanceGroup, name: str, gpu_count: int, default_count: int, least: int) -> InstanceGroup:
    kind = group.kind
    if kind is InstanceKind.KIND_AUTO:
        # A group that lists GPUs requires them: without any, report a problem rather than run on the CPU.
        kind = InstanceKind.KIND_GPU if gpu_count > 0 or group.gpus else InstanceKind.KIND_CPU
    gpus = group.gpus
    if kind is InstanceKind.KIND_GPU and not gpus:
        gpus = tuple(range(gpu_count))
    count = group.count or least or (default_count if kind is InstanceKind.KIND_CPU else 1)
    return replace(group, name=group.name or name, kind=kind, gpus=gpus, count=count)
