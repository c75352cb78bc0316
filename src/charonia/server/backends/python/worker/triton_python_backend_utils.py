"""The module that Python models import, usually as `pb_utils`.

Names and meanings are those of Triton's Python backend, so that models run unchanged. A model gets a copy of it that
knows the host of the model: see `bound_to`.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from ....channel import datatypes
from ....channel.datatypes import TritonModelException
from .errors import ArgumentTypeError, TritonError, checked_text
from .host import Binding
from .metrics import Metric, MetricFamily
from .model_config import ModelConfig
from .requests import (
    FINAL,
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    PreferredMemory,
    ResponseIterator,
    send_together,
)
from .tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "send_together",
    "serialize_byte_tensor",
    "shared_memory",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

_FILE = "file:"

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RELEASE_RESCHEDULE
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2
TRITON_STRING_TO_NUMPY = datatypes.NUMPY_BY_TYPE

deserialize_bytes_tensor = datatypes.deserialize_bytes_tensor
numpy_to_triton_type = datatypes.numpy_to_triton_type
serialize_byte_tensor = datatypes.serialize_byte_tensor
triton_string_to_numpy = datatypes.triton_string_to_numpy
triton_to_numpy_type = datatypes.triton_to_numpy_type


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    """Return an input of a request, or None."""
    for tensor in request._inputs:
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    """Return an output of a response, or None."""
    for tensor in response._outputs:
        if tensor._name == name:
            return tensor
    return None


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return an input's configuration, or None."""
    return next((i for i in model_config.get("input", ()) if i["name"] == name), None)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return an output's configuration, or None."""
    return next((o for o in model_config.get("output", ()) if o["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Return whether the model is decoupled."""
    return bool((model_config.get("model_transaction_policy") or {}).get("decoupled", False))


class Logger:
    """Writes to the server's log."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3

    _binding: ClassVar[Binding] = Binding(None)
    """Of the model that the class is for; see `bound_to`."""

    @classmethod
    def log(cls, message: object, level: int = INFO) -> None:
        """Write a message of a level."""
        cls._log(message, level)

    @classmethod
    def log_info(cls, message: object) -> None:
        """Write an informational message."""
        cls._log(message, cls.INFO)

    @classmethod
    def log_warn(cls, message: object) -> None:
        """Write a warning."""
        cls._log(message, cls.WARNING)

    @classmethod
    def log_error(cls, message: object) -> None:
        """Write an error."""
        cls._log(message, cls.ERROR)

    @classmethod
    def log_verbose(cls, message: object) -> None:
        """Write a message that appears with verbose logging only."""
        cls._log(message, cls.VERBOSE)

    @classmethod
    def _log(cls, message: object, level: int) -> None:
        if level not in (cls.INFO, cls.WARNING, cls.ERROR, cls.VERBOSE):
            raise ArgumentTypeError(f"Logger: expected one of its levels, got {level!r}")
        caller = sys._getframe(2)
        host = cls._binding.host
        if host is not None:
            host.log(int(level), str(message), caller.f_code.co_filename, caller.f_lineno)


class _Functions:
    """The functions of the module that depend on the model."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding

    def get_model_dir(self) -> str:
        """Return the folder of the model version."""
        return self._binding.model_dir

    def load_model(self, model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
        """Load a model, or load it again; return when it is ready.

        Args:
            model_name: Model.
            config: Model configuration as JSON text, "" for the one in the repository.
            files: Contents by "file:<path within the model's folder>", instead of that folder.
        """
        contents: dict[str, bytes] = {}
        for path, content in (files or {}).items():
            name = checked_text("load_model", "the path of a file", path)
            if not name.startswith(_FILE):
                raise TritonModelException(f"load_model: expected 'file:<path>' as key of a file, got '{name}'")
            if not isinstance(content, (bytes, bytearray, memoryview)):
                raise TritonModelException(
                    f"load_model: expected bytes as content of '{name}', got {type(content).__name__}"
                )
            contents[name[len(_FILE) :]] = bytes(content)
        text = checked_text("load_model", "config", config)
        self._ask("load", model_name, {"config": text or None, "files": contents})

    def unload_model(self, model_name: str, unload_dependents: bool = False) -> None:
        """Begin to unload a model, with `unload_dependents` also those that it is made of."""
        self._ask("unload", model_name, {"unload_dependents": bool(unload_dependents)})

    def is_model_ready(self, model_name: str, model_version: str = "") -> bool:
        """Return whether a model is ready, in a version or any."""
        version = checked_text("is_model_ready", "model_version", model_version)
        return bool(self._ask("ready", model_name, {"version": version}))

    def _ask(self, action: str, model_name: object, options: dict[str, object]) -> object:
        name = checked_text(f"model control ({action})", "model_name", model_name)
        everything: dict[str, object] = {"config": None, "files": {}, "unload_dependents": False, "version": ""}
        everything.update(options)
        return self._binding.calling().control(action, name, everything)


class _SharedMemory:
    """Stands for the memory that Triton shares with a model. Here the machine is the limit."""

    def free_memory(self) -> int:
        """Return the free memory of the machine in bytes."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


shared_memory = _SharedMemory()

_unbound = _Functions(Binding(None))
get_model_dir = _unbound.get_model_dir
load_model = _unbound.load_model
unload_model = _unbound.unload_model
is_model_ready = _unbound.is_model_ready


def bound_to(binding: Binding) -> ModuleType:
    """Return a copy of this module for one model.

    Its functions, and those of its classes that talk to the host, know the binding; all others are shared.
    """
    functions = _Functions(binding)
    bound = ModuleType(__name__.rpartition(".")[2], __doc__)
    bound.__dict__.update({name: globals()[name] for name in __all__}, __file__=__file__, __all__=__all__)
    for base in (InferenceRequest, Logger, MetricFamily):
        body = {"_binding": binding, "__slots__": (), "__doc__": base.__doc__, "__module__": bound.__name__}
        setattr(bound, base.__name__, type(base.__name__, (base,), body))
    for name in ("get_model_dir", "load_model", "unload_model", "is_model_ready"):
        setattr(bound, name, getattr(functions, name))
    return bound
