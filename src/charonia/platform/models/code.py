"""Decides which models are data and which are code, and finds the packages that they need. Pure.

An allow-list: a model is code if it has a format, a parameter or a member of a configuration that is neither in these
tables nor in `inert` of its backend's record. Records of other packages count only if the administrator trusts their
backend.
"""

import contextlib
import re
import tomllib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import PurePosixPath
from typing import Any

from charonia.config.backends import ENSEMBLE, OWN, OWN_NAMES, Inert, Package, record_of, served
from charonia.config.complete import derive_backend
from charonia.config.model import ModelConfig
from charonia.config.parameters import CUSTOM_BATCHING, LORA_ADAPTERS, PYTHON_STRATEGY, SERVER_PARAMETERS
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

_OWN_INERT = [record.inert for record in OWN if record.inert is not None]

_DATA_PARAMETERS = frozenset[str](
    (SERVER_PARAMETERS - {CUSTOM_BATCHING, LORA_ADAPTERS, PYTHON_STRATEGY}).union(*(i.parameters for i in _OWN_INERT))
).difference(*(i.values for i in _OWN_INERT))
"""Parameters of a model, or of an accelerator that it asks for, that name no file, library or program.

A parameter of which only some values are harmless is harmless for its own backend only.
"""

_ENGINE = "EPContext"
"""Operator that is an engine of an accelerator."""

_NO_FILE_NAME = frozenset("*\\\0")
"""Characters that no file of weights has: ONNX Runtime reads `*/_ORT_MEM_ADDR_/*` as an address in memory."""

START_BYTES = 4096
"""Bytes of a file that tell whether it is data."""

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


def backend_of(name: str, paths: Iterable[str], config: ModelConfig) -> str:
    """Return the backend of a model as a server finds it, "ensemble" for an ensemble, "" if it cannot be determined.

    Args:
        name: Its name, whose suffix may name the backend.
    """
    names = {path.split("/")[1] for path in paths if path.startswith("1/")}
    try:
        found, _ = derive_backend(config, name, names)
    except ServingError:  # the end of the name still counts, if a backend of that name is installed
        return config.platform or PurePosixPath(name).suffix.removeprefix(".")
    return ENSEMBLE if found.platform == ENSEMBLE else found.backend


def inert_of(backend: str, trusted: Container[str] = ()) -> Inert | None:
    """Return the allow-list of a backend or an ensemble, None if all of its models are code; "" reads no files.

    Args:
        trusted: Backends of other packages that the administrator trusts.
    """
    if backend in (ENSEMBLE, ""):
        return Inert()
    return record_of(backend).inert if backend in OWN_NAMES or backend in trusted else None


def code_in(
    name: str, paths: Iterable[str], config: ModelConfig, weights: Container[str] = (), trusted: Container[str] = ()
) -> list[str]:
    """Return the reasons why a model is code rather than data, a phrase each.

    Args:
        config: Its configuration, as written or completed.
        weights: Files with weights, whose suffixes need not be known.
        trusted: Backends of other packages that the administrator trusts.
    """
    listed = sorted(paths)
    backend = backend_of(name, listed, config)
    inert = inert_of(backend, trusted)
    suffixes = inert.suffixes if inert is not None else frozenset()
    found = [f"{path}: {reason}" for path in listed if (reason := _reason_of_file(path, path in weights, suffixes))]
    if not backend and any(path.startswith("1/") for path in listed):  # a package on the server may read them
        found = found or ["no backend here reads its files"]
    elif inert is None:
        if not found:
            found.append(f"backend {backend}: its models are code")
    else:
        main = main_file(name, listed, config)
        if main and not found and PurePosixPath(main).suffix.lower() not in inert.suffixes:
            found.append(f"{main}: not a file that the backend {backend} reads as data")
    given = {key: text for parameters in _parameters(config) for key, text in parameters.items() if text}
    harmless = _DATA_PARAMETERS | (inert.parameters if inert is not None else set())
    found += [
        f"parameter {key}: {_PARAMETER_REASONS.get(key, _UNKNOWN_PARAMETER)}"
        for key, text in given.items()
        if key not in harmless and not (key == "mmproj" and f"1/{text}" in listed)
    ]
    for key, values in (inert.values if inert is not None else {}).items():
        if given.get(key, "") not in ("", *values):
            found.append(f"parameter {key}: {given[key]} is {_CODE_SUFFIXES['.tl']}")
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
        and parameters.keys() <= _DATA_PARAMETERS
    )


def main_file(name: str, paths: Iterable[str], config: ModelConfig) -> str:
    """Return the file that the backend of a model reads first, "" where it has none or chooses among those it knows."""
    names = {path.split("/")[1] for path in paths if path.startswith("1/")}
    with contextlib.suppress(ServingError):
        config, _ = derive_backend(config, name, names)
    return f"1/{config.default_model_filename}" if config.default_model_filename else ""


def examined_files(name: str, paths: Iterable[str], config: ModelConfig) -> list[str]:
    """Return the files whose beginning tells whether they are data, which `is_inert_start` decides."""
    listed = set(paths)
    record = record_of(backend_of(name, listed, config))
    if record.inert is None or not record.inert.starts:
        return []
    return sorted(listed & {main_file(name, listed, config), *(f"1/{form.filename}" for form in record.forms)})


def is_inert_start(backend: str, start: bytes) -> bool:
    """Return whether a file of a backend that begins like this is data."""
    inert = record_of(backend).inert
    return inert is not None and start.lstrip().startswith(inert.starts)


def needed_package(backend: str) -> Package | None:
    """Return the package that a backend needs besides those that Charonia always has, None for none."""
    return next((each for each in record_of(backend).packages if each.extra and not each.optional), None)


def trusting(paths: Iterable[str]) -> ModelConfig | None:
    """Return the configuration with which files that can run code are read, None where there are none."""
    names = {path.removeprefix("1/") for path in paths if path.startswith("1/")}
    form = next((form for form in served() if form.is_pickle and form.filename in names), None)
    if form is None:
        return None
    return ModelConfig(backend=form.backend, parameters={record_of(form.backend).trust_parameter: "true"})


def dependencies(read: Callable[[str], str], paths: Iterable[str]) -> str:
    """Return the Python packages that a model says it needs, a requirement a line; "" for none.

    Args:
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
        files: Names of the files with its tensors.
    """
    found = [
        f"{path}: weights outside of the model's folder: '{file}'"
        for file in sorted(files)
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or set(file) & _NO_FILE_NAME
    ]
    return found + [f"{path}: {_ENGINE} holds machine code"] * (_ENGINE in operators)


def _reason_of_file(path: str, is_weights: bool, inert: Container[str]) -> str:
    """Return why a file is not known to be data, "" if it is."""
    suffix = PurePosixPath(path).suffix.lower()
    is_tensor = is_weights or path.startswith(_DATA_FOLDERS)
    if suffix in _DATA_SUFFIXES or suffix in inert or (is_tensor and suffix not in _CODE_SUFFIXES):
        return ""
    return _CODE_SUFFIXES.get(suffix, "a file of an unknown kind")


def _parameters(config: ModelConfig) -> Iterator[Mapping[str, str]]:
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
