"""Decides which models are data and which are code, and finds the packages that they need. Pure.

An allow-list: a format, a parameter or a member of a configuration that is not in these tables makes a model code.
"""

import contextlib
import re
import tomllib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any

from charonia.config.complete import derive_backend
from charonia.config.forms import SERVED
from charonia.config.model import ModelConfig
from charonia.config.parameters import CUSTOM_BATCHING, LORA_ADAPTERS, PYTHON_STRATEGY, SERVER_PARAMETERS
from charonia.config.platforms import ENSEMBLE, FORMATS
from charonia.core.errors import ServingError

_CODE_SUFFIXES = {
    **dict.fromkeys((".py", ".pyc"), "Python code"),
    **dict.fromkeys((".pkl", ".pickle", ".joblib", ".cloudpickle"), "a pickle"),
    **dict.fromkeys((".so", ".dll", ".dylib"), "machine code"),
    **dict.fromkeys((".pt", ".pth", ".jit", ".torchscript"), "TorchScript, a program that can read and write files"),
    **dict.fromkeys((".plan", ".engine", ".trt"), "a TensorRT plan, which holds machine code"),
    **dict.fromkeys((".tl", ".model"), "a dump of memory, which its reader does not check"),
    ".pt2": "a program of PyTorch, which may hold machine code",
    ".pb": "a TensorFlow graph, a program that can read and write files",
    ".keras": "a Keras model, which may hold Python code",
    ".skops": "Python objects, which are created when it is loaded",
    ".whl": "a Python package",
}
"""Why files with these suffixes are not data."""

_DATA_SUFFIXES = frozenset(
    {".onnx", ".xml", ".bin", ".tflite", ".pdmodel", ".pdiparams", ".gguf", ".safetensors", ".ubj", ".txt", ".json"}
    | {".data", ".weights", ".onnx_data", ".csv", ".tsv", ".md", ".rst", ".yaml", ".yml", ".toml", ".pbtxt", ".jinja"}
    | {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".vocab", ".spm", ".bpe", ".labels", ".raw", ""}
)
"""Suffixes of harmless files beside a model: no backend for data runs them."""

_DATA_FOLDERS = ("warmup/", "initial_state/")
"""Folders with plain tensors, which the server itself reads."""

_DATA_FORMATS: Mapping[str, frozenset[str]] = {
    "armnn_tflite": frozenset({".tflite"}),
    "fil": frozenset({".json", ".ubj", ".txt"}),  # text, and JSON in either form: libraries parse and check them
    "identity": frozenset(),  # these two read no file
    "image": frozenset(),
    "llama_cpp": frozenset({".gguf"}),  # tensors and metadata; its template is rendered without access to Python
    "onnxruntime": frozenset({".onnx"}),  # standard operators only, none of which reaches a file or the network
    "openvino": frozenset({".xml", ".onnx", ".tflite", ".pdmodel"}),  # likewise, without a library of operators
    "tflite": frozenset({".tflite"}),  # likewise; operators of TensorFlow are not linked
    ENSEMBLE: frozenset(),
    "": frozenset(),  # no server loads it
}
"""Suffixes of the models that are data, by backend. The models of every other backend are programs."""

_THREADS = ("cpu_nthread", "intra_op_thread_count", "inter_op_thread_count", "num_threads", "threads")
_DATA_PARAMETERS = (
    SERVER_PARAMETERS - {CUSTOM_BATCHING, LORA_ADAPTERS, PYTHON_STRATEGY}
    | {*_THREADS, "num_of_threads", "num_streams", "device_type", "tflite_num_threads", "SIGNATURE"}
    # onnxruntime, and its accelerators
    | {"execution_mode", "enable_mem_arena", "enable_mem_pattern", "memory.enable_memory_arena_shrinkage"}
    | {"arena_extend_strategy", "cudnn_conv_algo_search", "do_copy_in_default_stream", "gpu_mem_limit"}
    | {"precision_mode", "max_workspace_size_bytes", "trt_fp16_enable", "trt_engine_cache_enable"}
    | {f"session.{name}" for name in ("set_denormal_as_zero", "disable_prepacking", "intra_op.allow_spinning")}
    | {f"session.{name}" for name in ("inter_op.allow_spinning", "dynamic_block_base", "use_env_allocators")}
    | {f"session.{name}" for name in ("intra_op.spin_duration_us", "force_spinning_stop", "disable_quant_qdq")}
    | {"optimization.enable_gelu_approximation", "optimization.enable_cast_chain_elimination"}
    # openvino
    | {"TARGET_DEVICE", "HINT_BF16", "SKIP_OV_DYNAMIC_BATCHSIZE", "ENABLE_BATCH_PADDING", "RESHAPE_IO_LAYERS"}
    | {"INFERENCE_NUM_THREADS", "NUM_STREAMS", "PERFORMANCE_HINT", "PERFORMANCE_HINT_NUM_REQUESTS"}
    | {"INFERENCE_PRECISION_HINT", "EXECUTION_MODE_HINT", "COMPILATION_NUM_THREADS", "ENABLE_CPU_PINNING"}
    | {"ENABLE_HYPER_THREADING", "SCHEDULING_CORE_TYPE", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE"}
    # fil
    | {"algo", "blocks_per_sm", "chunk_size", "is_classifier", "layout", "model_type", "output_class", "predict_proba"}
    | {"predictor", "storage_type", "threads_per_tree", "threshold", "transfer_threshold"}
    | {"use_experimental_optimizations", "xgboost_allow_unknown_field"}
    # identity
    | {"creation_delay_sec", "enable_custom_tracing", "execute_delay_ms", "instance_wise_delay_multiplier"}
    | {"response_parameters"}
    # image
    | {"antialias", "background", "color", "crop", "exact", "exif_orientation", "filter", "max_bytes", "max_pixels"}
    | {"mean", "padding_position", "padding_value", "resize", "scale", "scaled_decode", "size", "std"}
    # llama_cpp
    | {"cache_prompt", "cache_ram_mib", "cache_type_k", "cache_type_v", "check_tensors", "ctx_shift", "embd_normalize"}
    | {"embedding", "fit_params", "flash_attn_type", "kv_unified", "load_mode", "main_gpu", "n_batch", "n_cache_reuse"}
    | {"n_ctx", "n_gpu_layers", "n_parallel", "n_predict", "n_threads", "n_threads_batch", "n_ubatch", "no_kv_offload"}
    | {"pooling_type", "reasoning_format", "rope_freq_base", "rope_freq_scale", "rope_scaling_type", "split_mode"}
    | {"swa_full", "use_jinja", "verbosity", "warmup", "INITIALIZE_TIMEOUT_SECONDS"}
)
"""Parameters of a model, or of an accelerator that it asks for, that name no file, library or program."""

_ENGINE = "EPContext"
"""Operator that is an engine of an accelerator."""

_NO_FILE_NAME = frozenset("*\\\0")
"""Characters that no file of weights has: ONNX Runtime reads `*/_ORT_MEM_ADDR_/*` as an address in memory."""

FOREST_START_BYTES = 4096

_FOREST_TYPES = ("xgboost_json", "xgboost_ubj", "lightgbm")

_PARAMETER_REASONS = {
    "ALLOW_UNPICKLING": "files are unpickled",
    "CACHE_DIR": "it names a folder to write",
    "CPU_EXTENSION_PATH": "it names a library",
    "EXECUTION_ENV_PATH": "it names an environment",
    "TRUSTED": "its pickles are read",
    "TRUSTED_TYPES": "Python objects are created",
    "trt_extra_plugin_lib_paths": "it names a library",
    **dict.fromkeys((CUSTOM_BATCHING, PYTHON_STRATEGY), "it names a batching strategy"),
}
_UNKNOWN_PARAMETER = "not on the list of harmless parameters"

_PLAIN_MEMBERS = frozenset(
    {"name", "version_policy", "max_batch_size", "input", "output", "batch_input", "batch_output", "dynamic_batching"}
    | {"sequence_batching", "ensemble_scheduling", "instance_group", "metric_tags", "model_warmup"}
    | {"model_transaction_policy", "response_cache", "model_metrics"}
)
"""Members of a configuration that do not affect what reads the files of a model."""

_EXAMINED_MEMBERS = frozenset(
    {"platform", "backend", "runtime", "optimization", "default_model_filename", "parameters", "model_operations"}
    | {"model_repository_agents"}
)
_PLAIN_OPTIMIZATION = frozenset(
    {"graph", "priority", "cuda", "input_pinned_memory", "output_pinned_memory", "gather_kernel_buffer_threshold"}
    | {"eager_batching"}
)

_DEPENDENCIES = re.compile(r"^# /// script\n((?:#(?: .*)?\n)*)# ///$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class NeededPackage:
    """A package without which a model cannot be loaded.

    Attributes:
        name: As package indexes have it.
        module: Name of its module.
        extra: Extra of Charonia that installs it.
    """

    name: str
    module: str
    extra: str


_NEEDS = {
    "fil": NeededPackage("treelite", "treelite", "fil"),
    "image": NeededPackage("pillow", "PIL", "image"),
    "llama_cpp": NeededPackage("xllamacpp", "xllamacpp", "llama"),
    "openvino": NeededPackage("openvino", "openvino", "openvino"),
    "pytorch": NeededPackage("torch", "torch", "torch"),
    "sklearn": NeededPackage("scikit-learn", "sklearn", "sklearn"),
    "tensorflow": NeededPackage("tensorflow", "tensorflow", "tensorflow"),
    "tensorrt": NeededPackage("tensorrt", "tensorrt", "tensorrt"),
    "tflite": NeededPackage("ai-edge-litert", "ai_edge_litert", "tflite"),
    "vllm": NeededPackage("vllm", "vllm", "vllm"),
}


def backend_of(name: str, paths: Iterable[str], config: ModelConfig) -> str:
    """Return the backend of a model as a server finds it, "ensemble" for an ensemble, "" if it cannot be determined.

    Args:
        name: Its name, whose suffix may name the backend.
        paths: Files of the model's folder.
        config: Its configuration as written.
    """
    names = {path.split("/")[1] for path in paths if path.startswith("1/")}
    try:
        found, _ = derive_backend(config, name, names)
    except ServingError:  # the end of the name still counts, if a backend of that name is installed
        return PurePosixPath(name).suffix.removeprefix(".")
    return ENSEMBLE if found.platform == ENSEMBLE else found.backend


def code_in(name: str, paths: Iterable[str], config: ModelConfig, weights: Container[str] = ()) -> list[str]:
    """Return the reasons why a model is code rather than data, a phrase each.

    Args:
        name: Its name.
        paths: Files of the model's folder.
        config: Its configuration, as written or completed.
        weights: Files with weights, whose suffixes need not be known.
    """
    listed = sorted(paths)
    found = [f"{path}: {reason}" for path in listed if (reason := _reason_of_file(path, path in weights))]
    backend = backend_of(name, listed, config)
    if backend not in _DATA_FORMATS:
        if not found:
            found.append(f"backend {backend}: its models are code")
    else:
        main = main_file(name, listed, config)
        if main and not found and PurePosixPath(main).suffix.lower() not in _DATA_FORMATS[backend]:
            found.append(f"{main}: not a file that the backend {backend} reads as data")
    given = {key: text for parameters in _parameters(config) for key, text in parameters.items() if text}
    found += [
        f"parameter {key}: {_PARAMETER_REASONS.get(key, _UNKNOWN_PARAMETER)}"
        for key, text in given.items()
        if key not in _DATA_PARAMETERS and not (key == "mmproj" and f"1/{text}" in listed)
    ]
    if given.get("model_type", "") not in ("", *_FOREST_TYPES):
        found.append(f"parameter model_type: {given['model_type']} is {_CODE_SUFFIXES['.tl']}")
    return found + list(_members_with_code(config, backend))


def may_make_code(changes: Mapping[str, Any]) -> bool:
    """Return whether a change of a configuration can turn data into code.

    Args:
        changes: Members of the JSON form that are replaced.
    """
    optimization, parameters = (changes.get(name) or {} for name in ("optimization", "parameters"))
    return not (
        changes.keys() <= _PLAIN_MEMBERS | {"optimization", "parameters"}
        and isinstance(optimization, Mapping)
        and optimization.keys() <= _PLAIN_OPTIMIZATION
        and isinstance(parameters, Mapping)
        and parameters.keys() <= _DATA_PARAMETERS - {"model_type"}
    )


def main_file(name: str, paths: Iterable[str], config: ModelConfig) -> str:
    """Return the file that the backend of a model reads first, "" where it has none or chooses among those it knows."""
    names = {path.split("/")[1] for path in paths if path.startswith("1/")}
    with contextlib.suppress(ServingError):
        config, _ = derive_backend(config, name, names)
    return f"1/{config.default_model_filename}" if config.default_model_filename else ""


def forest_files(name: str, paths: Iterable[str], config: ModelConfig) -> list[str]:
    """Return the files that may be the forest of a model of the backend `fil`; none for other models."""
    listed = set(paths)
    if backend_of(name, listed, config) != "fil":
        return []
    names = [main_file(name, listed, config), *(f"1/{entry.filename}" for entry in FORMATS if entry.backend == "fil")]
    return sorted(listed & set(names))


def is_forest_text(start: bytes) -> bool:
    """Return whether a file that begins like this is a forest in JSON, UBJSON or LightGBM's text."""
    return start.lstrip()[:1] == b"{" or start.startswith((b"tree\n", b"tree\r"))


def needed_package(backend: str) -> NeededPackage | None:
    return _NEEDS.get(backend)


def is_pickled_estimator(paths: Iterable[str]) -> bool:
    """Return whether a model is an estimator in a pickle, which is read only if its configuration says so."""
    pickles = {form.filename for form in SERVED if form.title == "an estimator" and ".skops" not in form.suffixes}
    return any(path.removeprefix("1/") in pickles for path in paths if path.startswith("1/"))


def dependencies(read: Callable[[str], str], paths: Iterable[str]) -> str:
    """Return the Python packages that a model says it needs, a requirement a line; "" for none.

    Args:
        read: Returns the text of a file.
        paths: Files of the model's folder: requirements.txt of MLflow, 1/model.py with a header as in PEP 723.
    """
    listed = set(paths)
    if "requirements.txt" in listed:
        return read("requirements.txt").strip()
    header = _DEPENDENCIES.search(read("1/model.py")) if "1/model.py" in listed else None
    if header is None:
        return ""
    try:
        listed_there = tomllib.loads("".join(line[2:] + "\n" for line in header[1].splitlines())).get(
            "dependencies", []
        )
    except tomllib.TOMLDecodeError:
        return ""  # the check reports it
    return "\n".join(map(str, listed_there)) if isinstance(listed_there, list) else ""


def code_in_onnx(path: str, files: Iterable[str], operators: Container[str]) -> list[str]:
    """Return why an ONNX file is not data, a phrase each.

    Args:
        path: The file.
        files: Names of the files with its tensors.
        operators: Names of its operators.
    """
    found = [
        f"{path}: weights outside of the model's folder: '{file}'"
        for file in sorted(files)
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or set(file) & _NO_FILE_NAME
    ]
    return found + [f"{path}: {_ENGINE} holds machine code"] * (_ENGINE in operators)


def _reason_of_file(path: str, is_weights: bool) -> str:
    """Return why a file is not known to be data, "" if it is."""
    suffix = PurePosixPath(path).suffix.lower()
    is_tensor = is_weights or path.startswith(_DATA_FOLDERS)
    if suffix in _DATA_SUFFIXES or (is_tensor and suffix not in _CODE_SUFFIXES):
        return ""
    return _CODE_SUFFIXES.get(suffix, "a file of an unknown kind")


def _parameters(config: ModelConfig) -> Iterator[Mapping[str, str]]:
    """Yield the parameters of a model, and of the accelerators that it requests."""
    yield config.parameters
    asked = config.optimization.execution_accelerators if config.optimization is not None else None
    if asked is not None:
        for accelerator in (*asked.gpu_execution_accelerator, *asked.cpu_execution_accelerator):
            yield accelerator.parameters


def _members_with_code(config: ModelConfig, backend: str) -> Iterator[str]:
    """Yield the other members of a configuration that can introduce code."""
    if config.model_operations is not None and config.model_operations.op_library_filename:
        yield "model_operations: it names a library"
    agents = config.model_repository_agents.agents if config.model_repository_agents is not None else ()
    if any(agent.name != "checksum" for agent in agents):
        yield "model_repository_agents: agents other than checksum are programs"
    if config.runtime not in ("", f"libtriton_{backend}.so"):
        yield "runtime: it names a library"
    unset = ModelConfig()
    for field in fields(config):
        if field.name not in _PLAIN_MEMBERS | _EXAMINED_MEMBERS and getattr(config, field.name) != getattr(
            unset, field.name
        ):
            yield f"{field.name}: not on the list of harmless members"
    if any(PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts for file in _named_files(config)):
        yield "configuration: a file outside of the model's folder"


def _named_files(config: ModelConfig) -> Iterator[str]:
    """Yield the files that a configuration names."""
    yield config.default_model_filename
    yield from (output.label_filename for output in config.output)
    yield from (each.input_data_file or "" for sample in config.model_warmup for each in sample.inputs.values())
    states = config.sequence_batching.state if config.sequence_batching is not None else ()
    yield from (value.data_file or "" for state in states for value in state.initial_state)
