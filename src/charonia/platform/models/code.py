"""Which models run code of their own when they are loaded, and what they need. Pure."""

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from charonia.config.complete import derive_backend
from charonia.config.forms import SERVED
from charonia.config.model import ModelConfig
from charonia.config.platforms import ENSEMBLE
from charonia.core.errors import ServingError

PROGRAM = "a program of PyTorch, which may hold machine code"

_SUFFIXES = {
    ".py": "Python code",
    ".pyc": "Python code",
    ".pkl": "a pickle",
    ".pickle": "a pickle",
    ".joblib": "a pickle",
    ".cloudpickle": "a pickle",
    ".pt2": PROGRAM,
    ".so": "machine code",
    ".dll": "machine code",
    ".dylib": "machine code",
    ".whl": "a Python package",
}

_DATA_BACKENDS = frozenset(
    {"fil", "identity", "image", "llama_cpp", "onnxruntime", "openvino", "tensorflow", "tensorrt", "tflite"}
    | {"armnn_tflite", "pytorch", "sklearn"}
)
"""Backends that read data; of the last two, what their parameters do not make to code."""

_CODE_PARAMETERS = {
    "ALLOW_UNPICKLING": "files are unpickled",
    "BATCHING_STRATEGY": "it brings a batching strategy",
    "CPU_EXTENSION_PATH": "it brings a library",
    "EXECUTION_ENV_PATH": "it brings an environment of its own",
    "TRITON_BATCH_STRATEGY_PATH": "it brings a batching strategy",
    "TRUSTED": "its pickles are read",
    "TRUSTED_TYPES": "types of its file are made",
    "trt_extra_plugin_lib_paths": "it brings a library",
}
"""Parameters of a model, or of an accelerator that it asks for."""

_PROGRAM_ENTRIES = ("data/aotinductor/", "models/", "serialized_exported_program.json")

_DECIDING = frozenset({"backend", "platform", "runtime", "default_model_filename", "model_operations"})
"""Members of a configuration that decide what reads the files of a model."""

_DEPENDENCIES = re.compile(r"^# /// script\n((?:#(?: .*)?\n)*)# ///$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class NeededPackage:
    """A package without which a model cannot be loaded.

    Attributes:
        name: As package indexes have it.
        module: What is imported.
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
    """Return the backend of a model as a server finds it, "ensemble" for an ensemble, "" where nothing tells.

    Args:
        name: Its name: the end of a name may say it, too.
        paths: Files of the model's folder.
        config: Its configuration as written.
    """
    names = {path.split("/")[1] for path in paths if path.startswith("1/")}
    try:
        found, _ = derive_backend(config, name, names)
    except ServingError:  # the end of the name still counts, if a backend of that name is installed
        return PurePosixPath(name).suffix.removeprefix(".")
    return ENSEMBLE if found.platform == ENSEMBLE else found.backend


def code_in(name: str, paths: Iterable[str], config: ModelConfig) -> list[str]:
    """Return why loading a model runs code that it brings, a phrase each; none for a model that is data.

    Args:
        name: Its name.
        paths: Files of the model's folder.
        config: Its configuration, as written or completed, or as a deployment changes it.
    """
    listed = list(paths)
    found = [
        f"{path}: {_SUFFIXES[PurePosixPath(path).suffix.lower()]}"
        for path in sorted(listed)
        if PurePosixPath(path).suffix.lower() in _SUFFIXES
    ]
    backend = backend_of(name, listed, config)
    if backend not in _DATA_BACKENDS | {ENSEMBLE, ""} and not found:
        found.append(f"backend {backend}: its models are code")
    given = {key for parameters in _parameters(config) for key, text in parameters.items() if text}
    found += [f"parameter {key}: {why}" for key, why in _CODE_PARAMETERS.items() if key in given]
    if config.model_operations is not None and config.model_operations.op_library_filename:
        found.append("model_operations: it brings a library")
    return found


def may_make_code(changes: Mapping[str, Any]) -> bool:
    """Return whether a change of a configuration may make code of what was data.

    Args:
        changes: Members of the JSON form that are replaced.
    """
    return bool(_DECIDING & changes.keys() or _CODE_PARAMETERS.keys() & set(_members(changes)))


def is_program(names: Sequence[str]) -> bool:
    """Return whether an archive with these entries is a program that PyTorch loads, whatever the name of its file is.

    It may hold machine code. TorchScript is none of them: it is read as data.
    """
    root = names[0].partition("/")[0] + "/" if names else ""
    if all(name.startswith(root) for name in names):
        names = [name.removeprefix(root) for name in names]
    return "constants.pkl" not in names and any(name.startswith(_PROGRAM_ENTRIES) for name in names)


def needed_package(backend: str) -> NeededPackage | None:
    """Return the package that a backend needs, None for none."""
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
        return ""  # the check says so
    return "\n".join(map(str, listed_there)) if isinstance(listed_there, list) else ""


def _parameters(config: ModelConfig) -> Iterator[Mapping[str, str]]:
    """Yield the parameters of a model, and of the accelerators that it asks for."""
    yield config.parameters
    asked = config.optimization.execution_accelerators if config.optimization is not None else None
    if asked is not None:
        for accelerator in (*asked.gpu_execution_accelerator, *asked.cpu_execution_accelerator):
            yield accelerator.parameters


def _members(value: object) -> Iterator[str]:
    """Yield the names of all members of a JSON value, at any depth."""
    if isinstance(value, Mapping):
        yield from value
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _members(each)
